"""Programs that were once read as something else: each computes what it computed, fused or not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

B, H, S, D = 2, 4, 24, 16
OPTIONS = {"fusion_pass.devices": ("cpu",), "fusion_pass.strict": True}

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def flat(output: Tensor) -> Tensor:
    return output.transpose(1, 2).reshape(B, 1, -1)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    sizes = ((B, H, 1, D), (B, H, S, D), (B, H, S, D), (B, 1, H * D))
    query, key, value, gate = (torch.randn(x, generator=generator).to(dtype) for x in sizes)
    keep = (torch.rand(B, 1, 1, S, generator=generator) < 0.5).to(dtype)
    return query, key, value, keep, gate


def compare(model: Callable[..., Tensor], args: tuple[Tensor, ...], reason: str | None) -> None:
    """Fused where no reason is given, else declined for it; stock's numbers either way."""
    with torch.no_grad():
        stock = torch.compile(model)(*args)
        torch._dynamo.reset()
        found = torch.compile(model, backend="fusion_pass", options=OPTIONS)(*args)
    if reason is None:
        assert counters["fusion_pass"] == {"fused": 1}
        torch.testing.assert_close(found, stock)
    else:
        assert counters["fusion_pass"] == {"declined": 1, f"declined: {reason}": 1}
        assert torch.equal(found, stock)


def gated(attend: Attend) -> Callable[..., Tensor]:
    def model(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, gate: Tensor) -> Tensor:
        return flat(attend(query, key, value, keep)) * torch.sigmoid(gate)

    return model


def negated_numbers(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """The mask is 0.0 or 1.0, and negated as a truth."""
    mask = torch.where(torch.logical_not(keep), -math.inf, 0.0)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def filled_by_numbers(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    logits = query @ key.mT * 0.25
    return logits.masked_fill(torch.logical_not(keep), -math.inf).softmax(-1) @ value


def added_truth(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """True adds one to a logit; it does not mask."""
    return (query @ key.mT * 0.25 + (keep > 0)).softmax(-1) @ value


def added_integers(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    return (query @ key.mT * 0.25 + keep.to(torch.int64)).softmax(-1) @ value


def added_doubles(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    logits = query @ key.mT * 0.25 + keep.double()
    return logits.softmax(-1).to(query.dtype) @ value


def added_doubles_rounded(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    logits = query @ key.mT * 0.25 + keep.double()
    return logits.to(query.dtype).softmax(-1) @ value


def truncated_logits(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    logits = (query @ key.mT * 0.25).to(torch.int32).to(query.dtype)
    return (logits + keep).softmax(-1) @ value


def per_pair(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """One mask for each pair of heads: a part of the head axis."""
    logits = (query @ key.mT * 0.25).view(B, 2, 2, 1, S)
    mask = keep[:, None] * key[:, :2, :1, :1, None].transpose(2, 3)
    return (logits + mask).softmax(-1).view(B, H, 1, S) @ value


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (negated_numbers, None),
        (filled_by_numbers, None),
        (added_truth, "logits-changed"),
        (added_integers, "logits-changed"),
        (truncated_logits, "logits-changed"),
        (added_doubles, "logits-changed"),
        (added_doubles_rounded, "mask-dtype"),
        (per_pair, "mask-layout"),
    ],
)
def test_attention(attend: Attend, reason: str | None) -> None:
    compare(gated(attend), inputs(), reason)


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("spelled", [False, True])
def test_a_scale_that_is_not_finite(spelled: bool, scale: float) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
        if spelled:
            return (query @ key.mT * scale).softmax(-1) @ value
        return F.scaled_dot_product_attention(query, key, value, scale=scale)

    with torch.no_grad():
        torch.compile(gated(attend), backend="fusion_pass", options=OPTIONS)(*inputs())
    assert counters["fusion_pass"] == {"declined": 1, "declined: scale": 1}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float8_e5m2])
def test_a_hard_gate_stays_hard(dtype: torch.dtype) -> None:
    def model(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, gate: Tensor) -> Tensor:
        output = flat(F.scaled_dot_product_attention(query, key, value))
        return output * torch.sigmoid(gate).to(dtype).to(query.dtype)

    compare(model, inputs(torch.bfloat16), "gate-not-sigmoid")


def test_a_gate_for_half_of_the_dims() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, gate: Tensor) -> Tensor:
        output = F.scaled_dot_product_attention(query, key, value)
        half = torch.sigmoid(gate.view(B, H, 1, 2, 8)[..., :1, :])
        return output.view(B, H, 1, 2, 8) * half

    compare(model, inputs(), "gate-layout")


def test_a_product_that_is_read_by_its_strides() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, gate: Tensor) -> Tensor:
        output = F.scaled_dot_product_attention(query, key, value)
        product = output * torch.sigmoid(gate.view(B, 1, H, D).transpose(1, 2))
        return product.as_strided((B, H * D), (H * D, 1)) + 1.0

    compare(model, inputs(), "strides-used")


@torch.no_grad()
def test_a_mask_beside_is_causal() -> None:
    """SDPA forbids it; the operator itself takes both."""

    def model(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, gate: Tensor) -> Tensor:
        output = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, is_causal=True, attn_mask=keep
        )[0]
        return flat(output) * torch.sigmoid(gate)

    compare(model, inputs(), "causal")


@torch.no_grad()
def test_dynamic_batch_and_length_with_projected_k_and_v() -> None:
    """The projection's rows are batch times length: neither can be told from them."""

    def model(query: Tensor, hidden: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        stored = (hidden @ weight).view(batch, length, H, D).transpose(1, 2)
        output = F.scaled_dot_product_attention(query, stored, stored)
        return output.transpose(1, 2).flatten(2) * torch.sigmoid(gate)

    step = torch.compile(model, backend="fusion_pass", options=OPTIONS, dynamic=True)
    for batch, length in ((2, 24), (3, 40)):
        generator = torch.Generator().manual_seed(length)
        sizes = ((batch, H, 1, D), (batch, length, 32), (32, H * D), (batch, 1, H * D))
        args = [torch.randn(size, generator=generator) for size in sizes]
        torch.testing.assert_close(step(*args), model(*args), rtol=1e-4, atol=1e-4)
    assert counters["fusion_pass"] == {"fused": 1}
