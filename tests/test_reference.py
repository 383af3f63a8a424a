"""The reference against torch's own attention and against cases solved by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_pass import reference

INF = math.inf
MODES = {"scale": 0.25, "mask_fill": -INF, "masked_row": "zero", "numerics": "compiled"}


def operands(tokens: int = 3, length: int = 20, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 6, tokens, 16), (2, 2, length, 16), (2, 2, length, 8), (2, tokens, 6, 8))
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def run(tensors: list[Tensor], mask: Tensor | None = None, **modes: Any) -> Tensor:
    modes = {**MODES, "compute_dtype": torch.float64, **modes}
    return reference.gated_decode_attention(*tensors, mask, **modes)


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_equals_torch_attention(kind: str) -> None:
    query, key, value, gate = operands()
    mask = None
    if kind != "none":
        mask = torch.rand(2, 1, 3, 20, generator=torch.Generator().manual_seed(1)) < 0.7
        mask[..., 0] = True
    if kind == "float":
        mask = torch.randn(2, 6, 1, 20).double().masked_fill(~mask[:, :, :1], -INF)
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.25, enable_gqa=True
    )
    expected = attended.transpose(1, 2) * gate.sigmoid()
    torch.testing.assert_close(run([query, key, value, gate], mask), expected)


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -65536.0])
def test_masked_row_with_a_finite_fill_attends_to_everything(fill: float) -> None:
    query, key, value, gate = operands()
    mask = torch.ones(2, 1, 3, 20, dtype=torch.bool)
    mask[1] = False
    result = run([query, key, value, gate], mask, mask_fill=fill)
    bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, fill)
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=0.25, enable_gqa=True
    )
    torch.testing.assert_close(result, attended.transpose(1, 2) * gate.sigmoid())


@pytest.mark.parametrize("floating", [False, True])
def test_masked_row_with_an_infinite_fill(floating: bool) -> None:
    mask = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    mask[1] = False
    if floating:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -INF)
    assert (run(operands(), mask)[1] == 0).all()
    result = run(operands(), mask, masked_row="nan")
    assert result[1].isnan().all()
    assert result[0].isfinite().all()


def test_nan_spreads_from_live_keys_alone() -> None:
    query, key, value, gate = operands()
    mask = torch.ones(1, 1, 1, 20, dtype=torch.bool)
    mask[..., 5] = False
    key[:, :, 5] = math.nan
    value[:, :, 5] = math.nan
    assert run([query, key, value, gate], mask).isfinite().all()
    assert run([query, key, value, gate]).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_contracts_round_where_they_say(dtype: torch.dtype) -> None:
    gate = torch.linspace(-12, 12, 4001).to(dtype).view(1, 1, 1, -1)
    attended = torch.full(gate.shape, 1.2345678)
    sigmoid = gate.float().sigmoid()
    results = {
        name: reference.apply_gate(attended, gate, name, dtype)
        for name in ("compiled", "eager", "fp32")
    }
    assert torch.equal(results["eager"], attended.to(dtype) * gate.sigmoid())
    assert torch.equal(results["compiled"], (attended.to(dtype).float() * sigmoid).to(dtype))
    assert torch.equal(results["fp32"], (attended * sigmoid).to(dtype))
    assert not torch.equal(results["eager"], results["compiled"])
    assert not torch.equal(results["fp32"], results["compiled"])


def test_result_is_contiguous_and_of_the_operands_dtype() -> None:
    result = run(operands(dtype=torch.bfloat16), compute_dtype=torch.float32)
    assert result.shape == (2, 3, 6, 8)
    assert result.is_contiguous()
    assert result.dtype == torch.bfloat16
