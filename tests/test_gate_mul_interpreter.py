"""The kernel of `sigmoid_gate_mul` under Triton's interpreter; each launch of it is counted."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_pass import gate_mul, gate_mul_launch
from fusion_pass.gate_mul import sigmoid_gate_mul
from fusion_pass.overlap import overlaps_itself, span
from tests.test_gate_mul import INDIRECT, LAYOUTS, eager, negated, numbers

pytest.importorskip("triton")

from tests.test_kernel_interpreter import interpreted_kernels  # noqa: F401 (a fixture)


def load(name: str) -> ModuleType:
    """A second copy of a module."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Operators(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """The functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


class Labelled(Tensor):
    """A subclass that computes as any tensor does."""


class TestInterpreted:
    """The kernel itself, of which each launch is counted."""

    @pytest.fixture(autouse=True)
    def _kernel(
        self,
        interpreted_kernels: ModuleType,  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        helpers = "fusion_pass.kernels.gated_decode"
        monkeypatch.setitem(sys.modules, helpers, interpreted_kernels)
        module = load("fusion_pass.kernels.sigmoid_gate_mul")
        monkeypatch.setattr(gate_mul_launch, "kernels", lambda: module)
        monkeypatch.setattr(gate_mul, "interpretable", lambda dtype: dtype is not torch.bfloat16)
        original, self.launches = gate_mul.start, 0

        def counting(*args: Any) -> None:
            self.launches += 1
            original(*args)

        monkeypatch.setattr(gate_mul, "start", counting)

    def check(self, x: Tensor, gate: Tensor, launches: int = 1) -> None:
        copies = x.clone(), gate.clone()
        found, expected = sigmoid_gate_mul(x, gate), eager(x, gate)
        assert self.launches == launches
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        # numpy's exponential is not the CPU's: one unit in the last place of the sigmoid, and one
        # of the product.
        eps = torch.finfo(expected.dtype).eps
        assert ((found - expected).abs() <= 2 * eps * expected.abs()).all()
        assert torch.equal(x, copies[0])
        assert torch.equal(gate, copies[1])

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts(self, layout: str) -> None:
        without = ("empty", "no-dimensions", "six-uneven")
        self.check(*LAYOUTS[layout](), launches=0 if layout in without else 1)

    @pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float16,) * 2])
    def test_dtypes(self, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        x, gate = numbers(300, dtype=dtypes[0]), numbers(300, seed=1, dtype=dtypes[1])
        self.check(x, gate)

    def test_strides_of_x(self) -> None:
        x, gate = LAYOUTS["transposed-x"]()
        assert sigmoid_gate_mul(x, gate).stride() == eager(x, gate).stride()

    def test_large_blocks_and_a_ragged_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gate_mul_launch, "_FEW_ELEMENTS", 100)
        self.check(numbers(3, 700), numbers(700, seed=1))

    def test_out_keeps_what_is_around_it(self) -> None:
        x, gate = LAYOUTS["strided-gate"]()
        buffer = torch.full((2, 3, 4, 48), torch.nan)
        sigmoid_gate_mul(x, gate, out=buffer[..., 16:32])
        torch.testing.assert_close(buffer[..., 16:32], eager(x, gate))
        assert buffer[..., :16].isnan().all()
        assert buffer[..., 32:].isnan().all()

    def test_gradient_through_the_kernel(self) -> None:
        x, gate = (numbers(4, seed=seed).requires_grad_() for seed in (0, 1))
        sigmoid_gate_mul(x, gate).sum().backward()
        torch.testing.assert_close(x.grad, torch.sigmoid(gate.detach()))
        assert self.launches == 1

    @pytest.mark.parametrize("call", INDIRECT)
    def test_not_where_it_would_miss_something(self, call: str) -> None:
        x, gate = numbers(3, 4), numbers(3, 4, seed=1)
        found, expected = (
            INDIRECT[call](function, x, gate) for function in (sigmoid_gate_mul, eager)
        )
        assert torch.equal(found, expected)
        assert self.launches == 0

    def test_a_negated_out(self) -> None:
        x, gate, out = (numbers(3, 4, seed=seed) for seed in range(3))
        out = negated(out)
        sigmoid_gate_mul(x, gate, out=out)
        assert torch.equal(out, eager(x, gate))

    def test_modes_see_operators(self) -> None:
        x, gate = numbers(3, 4), numbers(3, 4, seed=1)
        with Operators() as operators:
            sigmoid_gate_mul(x, gate)
        assert operators.names[-2:] == ["aten::sigmoid", "aten::mul.Tensor"]
        with Functions() as functions:
            sigmoid_gate_mul(x, gate)
        assert {torch.sigmoid, torch.mul} <= set(functions.called)
        assert self.launches == 0

    def test_a_subclass_gives_a_subclass(self) -> None:
        x, gate = numbers(3, 4), numbers(3, 4, seed=1)
        assert type(sigmoid_gate_mul(x.as_subclass(Labelled), gate)) is Labelled
        assert self.launches == 0

    def test_a_default_device_changes_nothing(self) -> None:
        x, gate = numbers(3, 4), numbers(3, 4, seed=1)
        with torch.device("meta"):
            result = sigmoid_gate_mul(x, gate)
        torch.testing.assert_close(result, eager(x, gate))
        assert self.launches == 1

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_out_counts_as_changed(self, mode: Any) -> None:
        x, gate, out = (numbers(4, seed=seed) for seed in range(3))
        versions = [out._version]
        with mode():
            sigmoid_gate_mul(x, gate, out=out)
            versions.append(out._version)
            torch.mul(x, gate, out=out)
            versions.append(out._version)
        assert self.launches == 1
        assert versions[1] - versions[0] == versions[2] - versions[1] == 1

    def test_a_backward_pass_sees_that_out_has_changed(self) -> None:
        x, gate = numbers(4).requires_grad_(), numbers(4, seed=1)
        saved = 1 * x
        result = saved.sin()
        with torch.no_grad():
            sigmoid_gate_mul(saved, gate, out=saved)
        assert self.launches == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()

    def test_out_may_be_an_inference_tensor_in_inference_mode_alone(self) -> None:
        x, gate = numbers(4), numbers(4, seed=1)
        with torch.inference_mode():
            out = torch.empty(4)
            sigmoid_gate_mul(x, gate, out=out)
        assert self.launches == 1
        with pytest.raises(RuntimeError, match="outside InferenceMode"):
            sigmoid_gate_mul(x, gate, out=out)

    def test_out_may_not_require_a_gradient(self) -> None:
        leaf = numbers(2, 8).requires_grad_()
        base = 1 * leaf
        for out in (leaf, base, base[:, :4]):
            # Also where it lies over an input: a copy would be recorded.
            x = base.detach()[:, 2:6] if out.shape == (2, 4) else numbers(2, 8)
            with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
                sigmoid_gate_mul(x, x, out=out)
        assert self.launches == 0

    def test_a_new_result_is_dense_whatever_x_is(self) -> None:
        x, gate = numbers(4, 20)[:, ::4].T, numbers(5, 4, seed=1)
        for operand in (x, x.T.contiguous().T, x.expand(3, 5, 4)):
            result = sigmoid_gate_mul(operand, gate)
            assert span(result)[1] - result.data_ptr() == 4 * result.numel()
            assert not overlaps_itself(result)
        assert sigmoid_gate_mul(x.T.contiguous().T, gate).stride() == (1, 5)
