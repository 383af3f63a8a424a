"""The code that Inductor generates for a GPU, on a machine without one, on every torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch._inductor.scheduler
from torch import Tensor
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor import lowering as inductor_lowering
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import FixedLayout
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode

from fusion_pass import launch, lowering
from fusion_pass.launch import Limits
from fusion_pass.lowering import _labelled_kernel
from tests.graphs import fake_mode, symbolic, trace

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402

PAGED_OPERATOR = torch.ops.fusion_pass.gated_paged_decode_attention.default
KERNELS = ["gated_decode_split", "gated_decode_reduce"]


@pytest.fixture(autouse=True)
def h200_for_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor and the launcher ask of a GPU is answered as by an H200."""

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    properties = DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=132,
        cc=90,
        major=9,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        warp_size=32,
    )
    limits = Limits("cuda", 90, 132, 232448)
    gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(), raising=False)
    monkeypatch.setattr(DeviceProperties, "create", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: gpu)
    monkeypatch.setattr(torch._inductor.scheduler, "has_triton", lambda *device: True)
    monkeypatch.setattr(launch, "device_limits", lambda device: limits)


def decode(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, mask: Tensor) -> Tensor:
    return lowering.OPERATOR(
        query,
        key,
        value,
        gate,
        mask,
        scale=1 / 16,
        mask_fill=-math.inf,
        masked_row="zero",
        numerics="compiled",
    )


def operands(mode: FakeTensorMode, dynamic: bool = False, batch: int = 2) -> list[Tensor]:
    """Query, K, V, gate and mask of Qwen3.5's geometry; `dynamic` makes the length a symbol."""
    length: Any = symbolic(mode, torch.empty(4096), (4096,)).shape[0] if dynamic else 4096
    stored = (batch, 2, length, 256)
    sizes = (batch, 16, 1, 256), stored, stored, (batch, 1, 16, 256)
    with mode:
        made = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes]
        return [*made, torch.empty(batch, 1, 1, length, dtype=torch.bool, device="cuda")]


def paged_decode(
    query: Tensor, cache: Tensor, indptr: Tensor, indices: Tensor, gate: Tensor
) -> Tensor:
    return PAGED_OPERATOR(query, cache, cache, indptr, indices, gate, scale=1 / 16)


def paged_operands(mode: FakeTensorMode) -> list[Tensor]:
    """Query, cache, bounds, page numbers and gate of two requests."""
    sizes = (2, 16, 256), (64, 16, 2, 256), (2, 16, 256)
    with mode:
        query, cache, gate = (
            torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes
        )
        indptr, indices = (torch.empty(size, dtype=torch.int32, device="cuda") for size in (3, 64))
    return [query, cache, indptr, indices, gate]


@contextmanager
def lowered(
    function: Callable[..., Tensor], inputs: list[Tensor], mode: FakeTensorMode
) -> Iterator[GraphLowering]:
    """The function's graph in Inductor's terms, on these inputs."""
    lowering.register()
    module = trace(function, *inputs)
    graph = GraphLowering(
        module, example_inputs=inputs, shape_env=mode.shape_env, is_inference=True
    )
    with (
        V.set_debug_handler(DebugContext()),
        V.set_graph_handler(graph),
        V.set_fake_mode(mode),
        V.set_real_inputs(inputs),
    ):
        graph.run(*inputs)
        yield graph


def generated(
    inputs: list[Tensor], mode: FakeTensorMode, model: Callable[..., Tensor] = decode
) -> str:
    """The wrapper that Inductor writes for the operator, or `model`, on these inputs."""
    with lowered(model, inputs, mode) as graph:
        code: Any = graph.codegen()[0]
    return getattr(code, "value", code)


def launched(code: str) -> list[str]:
    return re.findall(r"(\w+?)_\d+\.run\(", code)


@pytest.mark.parametrize("length", ["static", "dynamic"])
def test_it_launches_the_kernels_itself(length: str) -> None:
    mode = fake_mode(symbolic=True)
    code = generated(operands(mode, dynamic=length == "dynamic"), mode)
    compile(code, "generated", "exec")
    assert launched(code) == KERNELS
    # Under these names a profile shows them.
    for kernel in KERNELS:
        label = f"{kernel}_d256_bf16"
        assert f"async_compile.triton('{label}'" in code
        assert f"def {label}(" in code
    assert "torch.ops.fusion_pass" not in code
    # K and V are read where they are: what is allocated is the output and float32 scratch.
    allocated = re.findall(r"empty_strided_cuda\(\((.*?)\), .*?(torch\.\w+)\)", code)
    rest = [size for size, dtype in allocated if dtype != "torch.float32"]
    assert rest == ["2, 1, 16, 256"]


def of_counted_rows(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, mask: Tensor
) -> Tensor:
    """How many rows there are is known once the GPU has counted them."""
    rows = torch.ops.prims.convert_element_type.default(query.sum(), torch.int64).item()
    torch._check(rows >= 2)
    torch._check(rows <= 8)
    return decode(*(x.narrow(0, 0, rows) for x in (query, key, value, gate, mask)))


@pytest.mark.parametrize("case", ["static", "dynamic", "unbacked"])
@pytest.mark.parametrize("graphs", [False, True])
def test_buffers_are_those_of_empty_strided(
    case: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_lowering(size: Any, dtype: torch.dtype, device: torch.device) -> Any:
        return inductor_lowering.empty_strided(list(size), None, dtype=dtype, device=device)

    model = of_counted_rows if case == "unbacked" else decode
    settings = {"graph_partition": graphs, "triton.cudagraphs": graphs}
    codes = []
    for _ in range(2):
        mode = fake_mode(symbolic=True)
        inputs = operands(mode, dynamic=case == "dynamic", batch=8)
        with torch._inductor.config.patch(settings):
            codes.append(generated(inputs, mode, model))
        monkeypatch.setattr(lowering, "_empty", by_lowering)
    # The name of a symbol is anew in every trace.
    ours, theirs = (re.sub(r"\bs\d+\b", "length", code) for code in codes)
    assert ours == theirs


@pytest.mark.parametrize("padding", [False, True])
def test_an_operand_is_read_with_the_strides_that_it_gets(padding: bool) -> None:
    """As Inductor orders them, whether it would have padded them or not."""

    def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, mask: Tensor) -> Tensor:
        value = value.permute(0, 2, 1, 3).sin().permute(0, 2, 1, 3)
        return decode(query, key.sin(), value, gate, mask)

    # 777 * 40 elements a head are no multiple of the 64 that Inductor pads to.
    sizes = (2, 16, 1, 40), (2, 2, 777, 40), (2, 2, 777, 40), (2, 1, 16, 40)
    mode = fake_mode(symbolic=True)
    with mode:
        inputs = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes]
        inputs.append(torch.empty(2, 1, 1, 777, dtype=torch.bool, device="cuda"))
    with (
        torch._inductor.config.patch(comprehensive_padding=padding),
        lowered(model, inputs, mode) as graph,
    ):
        split, _ = (op.launch for op in graph.operations if isinstance(op, _labelled_kernel()))
        for operand, axes in (("key", "bhnd"), ("value", "bnhd")):
            layout = graph.get_buffer(split.arguments[operand].get_name()).get_layout()
            assert isinstance(layout, FixedLayout)
            given = [split.arguments[f"stride_{operand[0]}{axis}"] for axis in axes]
            assert list(layout.stride) == given


def test_warps_and_launches_are_as_chosen() -> None:
    mode = fake_mode(symbolic=True)
    code = generated(operands(mode), mode)
    # Inductor drops warps and stages that are not an autotuner's configuration.
    configs = re.findall(r"configs=\[(.*?)\],\n", code)
    assert len(configs) == 2
    assert all("'num_warps'" in config and "'num_stages'" in config for config in configs)
    asked = [code[: match.start()] for match in re.finditer("'launch_pdl': True", code)]
    assert len(asked) == 1
    assert asked[0].count("async_compile.triton(") == 2


@pytest.mark.parametrize("case", ["split", "single", "paged"])
def test_a_launch_writes_what_inductor_finds(case: str) -> None:
    """Its own analysis, which the declaration spares it, is asked here."""
    mode = fake_mode(symbolic=True)
    paged = case == "paged"
    inputs = paged_operands(mode) if paged else operands(mode, batch=132 if case == "single" else 2)
    analyse = getattr(triton_kernel_wrap, lowering.analysis_name())
    with lowered(paged_decode if paged else decode, inputs, mode) as graph:
        launches = [node.launch for node in graph.operations if hasattr(node, "launch")]
        assert len(launches) == (1 if case == "single" else 2)
        for step in launches:
            found = analyse(step.kernel, step.arguments, {})
            assert written(found) == written(lowering.accesses(step)) == set(step.writes)
    assert getattr(triton_kernel_wrap, lowering.analysis_name()) is analyse


def written(accesses: Any) -> set[str]:
    """The arguments that Inductor's analysis says are written to."""
    if isinstance(accesses, list):
        return set(accesses)
    return {access.name for access in accesses.read_writes.writes}


def test_a_layer_more_costs_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor would compile each layer's kernels to Triton's IR to find what they write."""

    compiled = []
    monkeypatch.setattr(triton_kernel_wrap, "generate_ttir", lambda *call: compiled.append(call))
    mode = fake_mode(symbolic=True)
    with lowered(decode, operands(mode), mode) as graph:
        assert [node.launch.label for node in graph.operations if hasattr(node, "launch")] == [
            f"{kernel}_d256_bf16" for kernel in KERNELS
        ]
    assert not compiled
