"""Ahead-of-time compilation of the paged kernels, and what Inductor reads from them."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_pass.launch as dense_launch
from fusion_pass import lowering
from fusion_pass.launch import Launch, Limits, Operand, choose
from fusion_pass.paged import launch
from fusion_pass.paged.operands import PagedModes, PagedOperands
from tests.test_aot import (
    POINTERS,
    TARGETS,
    _driver,  # noqa: F401  (a fixture)
    check_source,
    compile_for,
    written_by,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {**POINTERS, torch.int32: "*i32", torch.int64: "*i64"}
CASES: dict[str, dict[str, Any]] = {
    "page of 16": {"page_size": 16},
    "page of 1": {"page_size": 1},
    "table": {"page_size": 64, "heads": 32, "kv_heads": 8, "head_dim": 128, "table": True},
    "verify": {
        "page_size": 16,
        "dtype": FP16,
        "head_dim": 96,
        "heads": 24,
        "kv_heads": 2,
        "tokens": 16,
        "sinks": True,
        "window": 1024,
        "numerics": "eager",
    },
    "un-gated": {"page_size": 16, "heads": 32, "kv_heads": 8, "head_dim": 128, "numerics": "none"},
    "wide": {"page_size": 16, "requests": 150},
    # Triton makes constants of sizes and strides that are one.
    "least": {"page_size": 1, "requests": 1, "tokens": 2, "length": 1, "window": 1},
    "single": {"page_size": 3, "dtype": FP32, "head_dim": 64, "heads": 2},
}
# What is special about the other cases depends on no target: they are compiled for two.
COMPILED = [
    *((target, "page of 16") for target in TARGETS),
    *((target, case) for case in CASES for target in ("sm_90", "gfx942") if case != "page of 16"),
]


def build(
    limits: Limits,
    page_size: int,
    dtype: torch.dtype = BF16,
    head_dim: int = 256,
    heads: int = 16,
    kv_heads: int = 2,
    requests: int = 8,
    length: int = 4096,
    tokens: int = 1,
    window: int = 0,
    numerics: str = "compiled",
    table: bool = False,
    sinks: bool = False,
) -> tuple[Launch, Launch]:
    def operand(dtype: torch.dtype, *size: int) -> Operand:
        return Operand(NAMES[dtype], size, torch.empty(size, device="meta").stride(), dtype)

    pages, total = length // page_size, requests * tokens
    cache = operand(dtype, requests * pages, page_size, kv_heads, head_dim)
    indices = (requests, pages) if table else (requests * pages,)
    operands = PagedOperands(
        query=operand(dtype, total, heads, head_dim),
        k_cache=cache,
        v_cache=cache,
        kv_indices=operand(torch.int32, *indices),
        kv_indptr=None if table else operand(torch.int32, requests + 1),
        kv_lengths=operand(torch.int64, requests),
        query_indptr=operand(torch.int32, requests + 1) if tokens > 1 else None,
        sinks=operand(BF16, heads) if sinks else None,
        gate=None if numerics == "none" else operand(dtype, total, heads, head_dim),
    )
    modes = PagedModes(head_dim**-0.5, tokens, window, numerics)
    return launch.launches(
        choose(launch.problem_of(operands, modes), limits),
        operands,
        modes,
        output=NAMES[dtype],
        accumulator="*fp32",
        statistics="*fp32",
    )


@pytest.mark.parametrize(("target", "case"), COMPILED)
def test_compiles_within_the_shared_memory(target: str, case: str) -> None:
    limits = TARGETS[target]
    for step in build(limits, **CASES[case]):
        assert set(step.arguments) == set(step.kernel.arg_names)
        compiled = compile_for(limits, step)
        assert compiled.metadata.shared <= limits.shared_memory
        if target == "sm_90":
            assert ".local" not in compiled.asm["ptx"], "a register is spilled"


@pytest.mark.parametrize("case", ["page of 1", "page of 16", "wide", "table"])
def test_keys_are_loaded_ahead_and_their_pages_before_them(case: str) -> None:
    split, _ = build(TARGETS["sm_90"], **CASES[case])
    text = compile_for(TARGETS["sm_90"], split).asm["ttgir"]
    loop = text[text.rindex("scf.for") :]
    body = loop[: loop.index("scf.yield")]
    copies = re.findall(r"ttg\.async_copy_global_to_local %(\w+)", body)
    assert len(copies) == 2
    (page_load,) = re.findall(r"%(\w+) = tt\.load", body)
    # Used by the next iteration alone, so that nothing in this one waits for it.
    uses = [line for line in body.splitlines() if re.search(rf"%{page_load}\b", line)]
    assert len(uses) == 1
    assert re.search(rf"%{page_load}\b", loop[loop.index("scf.yield") :].splitlines()[0])


def test_a_page_of_whole_tiles_is_looked_up_once_a_tile() -> None:
    loads = {}
    for case in ("page of 1", "table"):
        split, _ = build(TARGETS["sm_90"], **CASES[case])
        assert split.arguments["BLOCK_N"] == 32
        text = compile_for(TARGETS["sm_90"], split).asm["ttgir"]
        loads[case] = re.search(r"tt\.load.* : (.*)", text[text.rindex("scf.for") :])[1]
    assert loads["page of 1"].startswith("tensor<32x")
    assert loads["table"].startswith("!tt.ptr<i32>")


@pytest.mark.usefixtures("_driver")
@pytest.mark.parametrize("case", CASES)
def test_inductor_sees_that_only_scratch_and_output_are_written(case: str) -> None:
    written = [written_by(step, NAMES) for step in build(TARGETS["sm_90"], **CASES[case])]
    assert written == [{"accumulator", "statistics"}, {"output"}]


def test_inductor_carries_every_helper_into_its_source() -> None:
    for step in build(TARGETS["sm_90"], **CASES["verify"]):
        check_source(step)


@pytest.mark.usefixtures("_driver")
@pytest.mark.parametrize("gated", [False, True])
def test_the_lowering_makes_two_launches(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_launch, "device_limits", lambda device: TARGETS["sm_90"])
    lowering.register()

    def attend(query: Tensor, k: Tensor, v: Tensor, offsets: Tensor, pages: Tensor) -> Tensor:
        operators = torch.ops.fusion_pass
        if not gated:
            return operators.paged_decode_attention(query + 1, k, v, offsets, pages, scale=0.1)
        gate = query * 2
        return operators.gated_paged_decode_attention(query, k, v, offsets, pages, gate, scale=0.1)

    with FakeTensorMode() as mode:

        def empty(*size: int, dtype: torch.dtype = BF16) -> Tensor:
            return torch.empty(size, device="cuda", dtype=dtype)

        head_major = empty(100, 2, 16, 128).transpose(1, 2)
        indices = (empty(5, dtype=torch.int32), empty(60, dtype=torch.int64))
        inputs = (empty(4, 16, 128), head_major, empty(100, 16, 2, 128), *indices)
        graph = GraphLowering(make_fx(attend)(*inputs), example_inputs=inputs)
        with V.set_graph_handler(graph), V.set_fake_mode(mode):
            graph.run(*inputs)
    split, reduce = (
        step for step in graph.operations if isinstance(step, ir.UserDefinedTritonKernel)
    )
    assert (split.grid[0][0], reduce.grid[0][0]) == (4 * 2, 4 * 16)
    assert not any(isinstance(step, ir.FallbackKernel) for step in graph.operations)
    written = [{buffer.get_name() for buffer in step.mutable_args} for step in (split, reduce)]
    assert [len(buffers) for buffers in written] == [2, 1]
    # The caches are read where they lie.
    assert {"k_1", "v_1", "offsets_1", "pages_1"} <= {read.name for read in split.get_reads()}
    assert written[0] <= {read.name for read in reduce.get_reads()}


def test_launches_take_symbolic_sizes() -> None:
    requests, room, pages, tokens = sympy.symbols("r m p t", integer=True, positive=True)

    def operand(dtype: torch.dtype, *size: Any) -> Operand:
        strides = [math.prod(size[dim + 1 :]) for dim in range(len(size))]
        return Operand(NAMES[dtype], size, tuple(strides), dtype)

    cache = operand(BF16, pages, 16, 2, 128)
    operands = PagedOperands(
        query=operand(BF16, tokens, 16, 128),
        k_cache=cache,
        v_cache=cache,
        kv_indices=operand(torch.int32, room),
        kv_indptr=operand(torch.int32, requests + 1),
        query_indptr=operand(torch.int32, requests + 1),
    )
    modes = PagedModes(0.1, 4)
    config = choose(launch.problem_of(operands, modes), TARGETS["sm_90"])
    split, reduce = launch.launches(
        config, operands, modes, output="o", accumulator="a", statistics="s"
    )
    assert split.grid == (2 * requests, config.num_splits, 1)
    assert reduce.grid[0] == 16 * tokens
    assert (split.arguments["capacity"], reduce.arguments["requests"]) == (room, requests)
    sizes = launch.scratch_sizes(config, operands)
    assert sizes["accumulator"] == (tokens, 16, config.num_splits, 128)


def test_splits_follow_the_room_that_a_request_has() -> None:
    def splits(**shape: Any) -> int:
        split, _ = build(TARGETS["sm_90"], page_size=16, **shape)
        return int(split.grid[1])

    assert splits(requests=1, length=512) == 512 // 16
    assert splits(requests=8) == splits(requests=8, table=True) == 2 * 132 // 16
    assert splits(requests=150) == 1


def test_constants_are_finite_numbers() -> None:
    for step in build(TARGETS["sm_90"], **CASES["verify"]):
        constants = [value for value in step.arguments.values() if isinstance(value, float)]
        assert all(map(math.isfinite, constants))
