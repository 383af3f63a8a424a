"""The kernel of `sigmoid_gate_mul` under Triton's interpreter; each launch of it is counted."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion_pass import gate_mul
from fusion_pass.gate_mul import sigmoid_gate_mul
from tests.test_gate_mul import LAYOUTS, eager, numbers

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
        monkeypatch.setattr(gate_mul, "kernels", lambda: module)
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
        monkeypatch.setattr(gate_mul, "_FEW_ELEMENTS", 100)
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
