"""`sigmoid_gate_mul` on a GPU: bits of eager torch, one launch; and Inductor's kernel for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from fusion_pass import sigmoid_gate_mul
from tests.test_gate_mul import DTYPES, INDIRECT, LAYOUTS, eager, negated, numbers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

FALL_BACK = ("no-dimensions", "six-uneven")


def on_gpu(layout: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The operands of a layout, with their strides."""

    def move(operand: Tensor) -> Tensor:
        whole = operand.as_strided((operand.untyped_storage().nbytes() // 4,), (1,), 0)
        moved = whole.to("cuda", dtype)
        return moved.as_strided(operand.shape, operand.stride(), operand.storage_offset())

    x, gate = LAYOUTS[layout]()
    return move(x), move(gate)


def kernels(function: Callable[..., Any], *args: Any) -> list[str]:
    """The kernels of one call."""
    function(*args)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function(*args)
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == device]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_gate_of_16_bits(dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16)
    gate = bits.view(dtype)
    for x in (torch.ones_like(gate), numbers(2**16).to("cuda", dtype)):
        found, expected = sigmoid_gate_mul(x, gate), eager(x, gate)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_bitwise(layout: str, dtype: torch.dtype) -> None:
    x, gate = on_gpu(layout, dtype)
    copies = x.clone(), gate.clone()
    found, expected = sigmoid_gate_mul(x, gate), eager(x, gate)
    assert torch.equal(found, expected)
    assert torch.equal(x, copies[0])
    assert torch.equal(gate, copies[1])
    if layout in FALL_BACK or not x.numel():
        return
    (name,) = kernels(sigmoid_gate_mul, x, gate)
    assert name.startswith("sigmoid_gate_mul")


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("gate_dtype", DTYPES)
def test_dtypes_promote_as_in_eager(x_dtype: torch.dtype, gate_dtype: torch.dtype) -> None:
    x = numbers(1000).to("cuda", x_dtype)
    gate = numbers(1000, seed=1).to("cuda", gate_dtype)
    found, expected = sigmoid_gate_mul(x, gate), eager(x, gate)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [(1, 4096), (32, 8192), (257, 1023)])
def test_replays_see_changed_inputs(size: tuple[int, int]) -> None:
    x, gate = (numbers(*size, seed=seed).to("cuda", torch.bfloat16) for seed in (0, 1))
    out = torch.empty_like(x)
    sigmoid_gate_mul(x, gate, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sigmoid_gate_mul(x, gate, out=out)
    for seed in (2, 3):
        x.copy_(numbers(*size, seed=seed))
        gate.copy_(numbers(*size, seed=seed + 10))
        graph.replay()
        assert torch.equal(out, eager(x, gate))


def test_offsets_beyond_32_bits() -> None:
    buffer = torch.zeros(2, 2**31 + 64, dtype=torch.bfloat16, device="cuda")
    x = buffer[:, -64:]
    x.copy_(numbers(2, 64))
    gate = numbers(2, 64, seed=1).to("cuda", torch.bfloat16)
    assert torch.equal(sigmoid_gate_mul(x, gate), eager(x, gate))


def test_gradient() -> None:
    def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        inputs = [numbers(8, 64, seed=seed).cuda().requires_grad_() for seed in (0, 1)]
        function(*inputs).square().sum().backward()
        return [x.grad for x in inputs if x.grad is not None]

    found, expected = gradients(sigmoid_gate_mul), gradients(eager)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("call", INDIRECT)
def test_not_where_a_kernel_would_miss_something(call: str) -> None:
    x, gate = (numbers(3, 4, seed=seed).cuda() for seed in (0, 1))
    found, expected = (INDIRECT[call](function, x, gate) for function in (sigmoid_gate_mul, eager))
    assert torch.equal(found, expected)


def test_a_negated_out() -> None:
    x, gate, out = (numbers(3, 4, seed=seed).cuda() for seed in range(3))
    out = negated(out)
    sigmoid_gate_mul(x, gate, out=out)
    assert torch.equal(out, eager(x, gate))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_out_counts_as_changed(mode: Any) -> None:
    x, gate, out = (numbers(4, seed=seed).cuda() for seed in range(3))
    version = out._version
    with mode():
        sigmoid_gate_mul(x, gate, out=out)
    assert out._version == version + 1


def test_a_default_device_keeps_the_kernel() -> None:
    x, gate = (numbers(3, 4, seed=seed).cuda() for seed in (0, 1))
    with torch.device("cuda"):
        (name,) = kernels(sigmoid_gate_mul, x, gate)
    assert name.startswith("sigmoid_gate_mul")


class TestOpaque:
    """An attention that nobody registered: Inductor makes one kernel of its gate."""

    @pytest.fixture(autouse=True)
    def _engine(self) -> Iterator[None]:
        with torch.library._scoped_library("fusion_pass_opaque_gpu_tests", "DEF") as library:
            library.define("attend(Tensor query) -> Tensor")
            library.impl("attend", torch.empty_like, "Meta")
            library.impl("attend", torch.clone, "CUDA")
            yield

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_one_kernel_reads_the_gate_where_it_is(self, dtype: torch.dtype) -> None:
        def model(query: Tensor, fused: Tensor) -> Tensor:
            output = torch.ops.fusion_pass_opaque_gpu_tests.attend(query).view(8, -1)
            gate = fused.view(8, 16, 512)[..., 256:]
            return output * torch.sigmoid(gate.reshape(8, -1))

        query = numbers(8, 16, 256).to("cuda", dtype)
        fused = numbers(8, 16 * 512, seed=1).to("cuda", dtype)
        compiled = torch.compile(model, backend="fusion_pass")
        with torch.no_grad():
            found, codes = run_and_get_code(compiled, query, fused)
            launched = kernels(compiled, query, fused)
        code = "".join(codes)
        assert "fused" not in counters["fusion_pass"]
        assert code.count("@triton.jit") == 1
        assert len([name for name in launched if name.startswith("triton_")]) == 1
        (arguments,) = re.findall(r"triton_poi_\w+\.run\((.*)\)", code)
        # The gate is read from the graph's input, and the product takes the output's place.
        assert "arg1_1" in arguments
        assert "empty_strided_cuda((" not in code
        gate = fused.view(8, 16, 512)[..., 256:].reshape(8, -1)
        torch.testing.assert_close(found, eager(query.view(8, -1), gate))
