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


def test_a_fill_in_the_place_of_the_logits_gives_the_mean() -> None:
    query, key, value, gate = operands()
    query[1] = torch.nan
    mask = torch.ones(2, 1, 3, 20, dtype=torch.bool)
    mask[1] = False
    modes = {"mask_fill": -65536.0, "masked_row": "mean"}
    result = run([query, key, value, gate], mask, **modes)
    mean = value[1].mean(dim=1).repeat_interleave(3, dim=0)
    torch.testing.assert_close(result[1], mean * gate[1].sigmoid())


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
    gate = torch.linspace(-12, 12, 4001).to(dtype).view(1, 1, -1, 1)
    # One key, so that the attention output is the value: in float32 it is not of dtype T.
    value = torch.full((1, 4001, 1, 1), 1.2345678)
    query, key = value.to(dtype), torch.ones(1, 4001, 1, 1).to(dtype)
    sigmoid = gate.float().sigmoid()
    attended = value.transpose(1, 2)

    def result(numerics: str, **dtypes: torch.dtype) -> Tensor:
        modes = {**MODES, "numerics": numerics, **dtypes}
        return reference.gated_decode_attention(query, key, value, gate, None, **modes)

    rounded = attended.to(dtype)
    assert torch.equal(result("eager"), rounded * sigmoid.to(dtype))
    assert torch.equal(result("compiled"), (rounded.float() * sigmoid).to(dtype))
    assert torch.equal(result("fp32"), (attended * sigmoid).to(dtype))
    assert not torch.equal(result("eager"), result("compiled"))
    assert not torch.equal(result("fp32"), result("compiled"))
    wide = torch.float32
    assert torch.equal(result("eager", sigmoid_dtype=wide), result("compiled"))
    product = rounded.float() * sigmoid.to(dtype).float()
    assert torch.equal(result("eager", dtype=wide), product)
    assert torch.equal(result("compiled", sigmoid_dtype=dtype, dtype=wide), rounded * sigmoid)
    assert torch.equal(result("fp32", dtype=wide), attended * sigmoid)


@pytest.mark.parametrize("fill", [-INF, torch.finfo(torch.float32).min, -65536.0])
def test_a_sink_is_a_key_of_its_own_whose_value_is_zero(fill: float) -> None:
    query, key, value, gate = operands()
    sinks = torch.tensor([-INF, -10, -1, 0, 3, 10]).double()
    mask = torch.rand(2, 1, 3, 20, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[1, :, 1] = False
    # The sink as an additional key: a dimension of the query that only this key looks at.
    query = torch.cat([query, (sinks / 0.25).view(1, 6, 1, 1).expand(2, 6, 3, 1)], -1)
    wider = F.pad(key, (0, 1, 0, 1))
    wider[:, :, -1] = 0
    wider[..., -1, -1] = 1
    wider[..., :-1, -1] = 0
    bias = torch.zeros(mask.shape).double().masked_fill(~mask, fill)
    expected = F.scaled_dot_product_attention(
        query.nan_to_num(neginf=-1e300),
        wider,
        F.pad(value, (0, 0, 0, 1)),
        attn_mask=F.pad(bias, (0, 1)),
        scale=0.25,
        enable_gqa=True,
    )
    result = run(
        [query[..., :-1], key, value, gate], mask, mask_fill=fill, masked_row="nan", sinks=sinks
    )
    if fill == -INF:
        assert (result[1, 1] == 0).all()
    torch.testing.assert_close(result, expected.transpose(1, 2) * gate.sigmoid())


def test_result_is_contiguous_and_of_the_operands_dtype() -> None:
    result = run(operands(dtype=torch.bfloat16), compute_dtype=torch.float32)
    assert result.shape == (2, 3, 6, 8)
    assert result.is_contiguous()
    assert result.dtype == torch.bfloat16
