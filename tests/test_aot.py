"""Ahead-of-time compilation for every supported GPU, and what Inductor reads from the kernels."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fusion_pass import launch
from fusion_pass.launch import Launch, Limits, Operand

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.bool: "*i1",
}
KIB = 1024
TARGETS = {
    "sm_80": Limits("cuda", 80, 108, 163 * KIB),
    "sm_86": Limits("cuda", 86, 84, 99 * KIB),
    "sm_89": Limits("cuda", 89, 128, 99 * KIB),
    "sm_90": Limits("cuda", 90, 132, 227 * KIB),
    "sm_100": Limits("cuda", 100, 148, 227 * KIB),
    "sm_120": Limits("cuda", 120, 188, 99 * KIB),
    "gfx942": Limits("hip", "gfx942", 304, 64 * KIB),
    "gfx950": Limits("hip", "gfx950", 256, 160 * KIB),
    "gfx1201": Limits("hip", "gfx1201", 64, 64 * KIB),
}
CASES = {
    "qwen": {"dtype": torch.bfloat16, "head_dim": 256, "mask": torch.bool},
    "plain": {"dtype": torch.bfloat16, "head_dim": 128, "heads": 32, "kv_heads": 8},
    "verify": {
        "dtype": torch.float16,
        "head_dim": 96,
        "tokens": 16,
        "heads": 64,
        "kv_heads": 1,
        "mask": torch.float32,
        "numerics": "eager",
    },
    "filled": {"dtype": torch.bfloat16, "head_dim": 256, "batch": 150},
    "replaced": {
        "dtype": torch.bfloat16,
        "head_dim": 128,
        "mask": torch.bool,
        "masked_row": "mean",
    },
    "single": {"dtype": torch.bfloat16, "head_dim": 128, "batch": 32, "heads": 32, "kv_heads": 8},
    "several": {"dtype": torch.bfloat16, "head_dim": 256, "tokens": 4},
    "sinks": {"dtype": torch.float16, "head_dim": 64, "heads": 64, "sinks": True},
    "widest": {"dtype": torch.float32, "head_dim": 512, "heads": 2},
}


def _operand(dtype: torch.dtype, *size: int) -> Operand:
    stride = torch.empty(size, device="meta").stride()
    return Operand(POINTERS[dtype], size, stride, dtype)


def build(
    limits: Limits,
    dtype: torch.dtype,
    head_dim: int,
    mask: torch.dtype | None = None,
    heads: int = 16,
    kv_heads: int = 2,
    tokens: int = 1,
    numerics: str = "compiled",
    sinks: bool = False,
    batch: int = 8,
    masked_row: str = "zero",
) -> tuple[Launch, ...]:
    length = 4096
    query = _operand(dtype, batch, heads, tokens, head_dim)
    key = _operand(dtype, batch, kv_heads, length, head_dim)
    masking = None if mask is None else _operand(mask, batch, 1, tokens, length)
    config = launch.choose(launch.problem_of(query, key, key, masking), limits)
    return launch.launches(
        config,
        query=query,
        key=key,
        value=key,
        gate=_operand(dtype, batch, tokens, heads, head_dim),
        mask=masking,
        output=POINTERS[dtype],
        accumulator="*fp32",
        statistics="*fp32",
        scale=head_dim**-0.5,
        mask_fill=-65536.0,
        masked_row=masked_row,
        numerics=numerics,
        sinks=Operand("*bf16", (heads,), (1,), torch.bfloat16) if sinks else None,
    )


def compile_for(limits: Limits, step: Launch) -> Any:
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(step.kernel.params):
        argument = step.arguments[parameter.name]
        if parameter.is_constexpr or argument is None or argument == 1:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = argument
            continue
        signature[parameter.name] = argument if isinstance(argument, str) else "i32"
        if isinstance(argument, str) or argument % 16 == 0:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(step.kernel, signature, constants, attributes)
    warp_size = 64 if limits.arch in ("gfx942", "gfx950") else 32
    target = GPUTarget(limits.kind, limits.arch, warp_size)
    return triton.compile(source, target=target, options=step.options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_within_the_shared_memory(target: str, case: str) -> None:
    if case not in ("qwen", "plain", "widest") and target not in ("sm_86", "sm_90", "gfx942"):
        pytest.skip("what is special about it depends on no target: compiled for three")
    limits = TARGETS[target]
    for step in build(limits, **CASES[case]):
        assert set(step.arguments) == set(step.kernel.arg_names)
        compiled = compile_for(limits, step)
        assert compiled.metadata.shared <= limits.shared_memory
        assert compiled.metadata.name == step.label


@pytest.mark.parametrize("case", ["qwen", "plain", "filled"])
def test_key_and_value_loads_are_pipelined(case: str) -> None:
    split = build(TARGETS["sm_90"], **CASES[case])[0]
    text = compile_for(TARGETS["sm_90"], split).asm["ttgir"]
    loop = text[text.rindex("scf.for") :]
    assert len(re.findall(r"ttg\.async_copy_global_to_local .*tensor<\d+x\d+x!tt", loop)) >= 2


@pytest.mark.parametrize("case", ["qwen", "filled", "single", "several"])
def test_no_register_is_spilled_for_wide_heads(case: str) -> None:
    split = build(TARGETS["sm_90"], **CASES[case])[0]
    assert ".local" not in compile_for(TARGETS["sm_90"], split).asm["ptx"]


def test_eager_sigmoid_uses_ieee_division() -> None:
    last = build(TARGETS["sm_90"], **CASES["verify"])[-1]
    assert "div.rn.f32" in compile_for(TARGETS["sm_90"], last).asm["ptx"]


@pytest.fixture
def _driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that only knows its target, for analyses that ask for the active GPU."""

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(), raising=False)


@pytest.mark.usefixtures("_driver")
@pytest.mark.parametrize("case", CASES)
def test_inductor_sees_that_only_scratch_and_output_are_written(case: str) -> None:
    """Otherwise it would assume that K, V and everything else is mutated, and copy them."""
    written = [written_by(step, POINTERS) for step in build(TARGETS["sm_90"], **CASES[case])]
    assert written == [{"accumulator", "statistics"}, {"output"}][-len(written) :]


def written_by(step: Launch, pointers: dict[torch.dtype, str]) -> set[str]:
    """The arguments that Inductor sees a launch write; `pointers` are their types in Triton."""
    from torch._higher_order_ops import triton_kernel_wrap

    dtypes = {name: dtype for dtype, name in pointers.items()}
    arguments = {
        name: torch.empty(16, dtype=dtypes[value]) if value in dtypes else value
        for name, value in step.arguments.items()
    }
    if hasattr(triton_kernel_wrap, "identify_mutated_tensors"):  # torch 2.11
        return set(triton_kernel_wrap.identify_mutated_tensors(step.kernel, arguments, {}))
    accesses = triton_kernel_wrap.identify_accessed_tensors(step.kernel, arguments, {})
    return {dependency.name for dependency in accesses.read_writes.writes}


def test_inductor_carries_every_helper_into_its_source() -> None:
    for step in build(TARGETS["sm_90"], **CASES["verify"]):
        check_source(step)


def check_source(step: Launch) -> None:
    """What Inductor copies of a kernel defines everything that it calls."""
    from torch._inductor.codegen.wrapper import (
        user_defined_triton_kernel_transitive_closure_source_code as closure,
    )

    source = closure(step.kernel)
    compile(source, "generated", "exec")
    called = set(re.findall(r"(?<![\w.])([a-z_]\w+)\(", re.sub(r"#.*", "", source)))
    defined = set(re.findall(r"def (\w+)\(", source)) | set(re.findall(r"as (\w+)", source))
    assert called <= defined | {"range", "float"}
    assert "LOG2_E = tl.constexpr(" in source
