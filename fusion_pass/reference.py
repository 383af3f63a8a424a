"""Naive reference of gated decode attention: the statement of its semantics, in torch alone."""

from __future__ import annotations

import torch
from torch import Tensor


def gated_decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    mask_fill: float,
    masked_row: str,
    numerics: str,
    sigmoid_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Attention of a few query tokens to a KV cache, times the sigmoid of a gate.

    Shapes and modes are those of `fusion_pass::gated_decode_attention` (see `fusion_pass.ops`).
    Returns (B, Q, Hq, Dv) in `dtype`, which defaults to that of `query`. With
    `compute_dtype=torch.float64` nothing is rounded to the operands' dtype and the result is the
    float64 truth to measure errors against.
    """
    attended = attention(
        query,
        key,
        value,
        mask,
        sinks,
        scale=scale,
        mask_fill=mask_fill,
        masked_row=masked_row,
        compute_dtype=compute_dtype,
    )
    if compute_dtype == torch.float64:
        return attended * gate.double().sigmoid()
    attended = attended if numerics == "fp32" else attended.to(query.dtype)
    return apply_gate(attended, gate, numerics, sigmoid_dtype or gate.dtype, dtype or query.dtype)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    *,
    scale: float,
    mask_fill: float,
    masked_row: str,
    compute_dtype: torch.dtype,
) -> Tensor:
    """The attention output before the gate, (B, Q, Hq, Dv), contiguous, in `compute_dtype`.

    A masked key (boolean False, or float -inf) weighs exactly 0, and one that no row of its KV
    head attends to is not looked at, so NaN there does not spread. A row without a live key gives
    0 or NaN (`masked_row`) when the fill is -inf; a finite `mask_fill` is added to all its logits
    in at least float32, or takes their place (`masked_row="mean"`), and they are softmaxed over all
    keys. `sinks` (Hq,) holds one more logit a head, neither scaled nor masked, which takes weight
    and has no value: with it, a row without a live key gives 0 unless the fill is finite.
    """
    batch, query_heads, tokens, _ = query.shape
    kv_heads, kv_length = key.shape[1:3]
    group = query_heads // kv_heads
    rows = (batch, kv_heads, group, tokens)
    q = query.unflatten(1, (kv_heads, group)).to(compute_dtype)
    k = key.unsqueeze(2).to(compute_dtype)
    v = value.unsqueeze(2).to(compute_dtype)
    logits = scale * (q @ k.transpose(-2, -1))

    bias = torch.zeros((), dtype=compute_dtype, device=query.device)
    live = torch.ones((), dtype=torch.bool, device=query.device)
    if mask is not None:
        mask = mask.expand(batch, query_heads, tokens, kv_length)
        mask = mask.unflatten(1, (kv_heads, group))
        live = mask if mask.dtype == torch.bool else mask != -torch.inf
        bias = bias if mask.dtype == torch.bool else mask.to(compute_dtype)
    live = live.expand(*rows, kv_length)
    row_live = live.any(dim=-1, keepdim=True)
    empty = torch.nan if masked_row == "nan" and sinks is None else 0.0
    filled = mask is not None and mask.dtype == torch.bool and mask_fill != -torch.inf

    attended_keys = live.any(dim=(2, 3), keepdim=True).transpose(-2, -1)
    weights = _softmax((logits + bias).masked_fill(~live, -torch.inf), sinks)
    output = weights.masked_fill(~live, 0) @ v.masked_fill(~attended_keys, 0)
    if filled:
        fill = max(mask_fill, torch.finfo(torch.float32).min)
        filled_logits = torch.full_like(logits, fill) if masked_row == "mean" else logits + fill
        replacement = _softmax(filled_logits, sinks) @ v
    else:
        replacement = torch.full_like(output, empty)
    output = torch.where(row_live, output, replacement)
    return output.flatten(1, 2).transpose(1, 2).contiguous()


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of (B, Hkv, G, Q, S) logits over the keys and the head's sink, if it has one."""
    if sinks is None:
        return logits.softmax(-1)
    shares = sinks.to(logits.dtype).unflatten(0, logits.shape[1:3])[:, :, None, None]
    shares = shares.expand(*logits.shape[:-1], 1)
    return torch.cat([logits, shares], dim=-1).softmax(-1)[..., :-1]


def apply_gate(
    attended: Tensor,
    gate: Tensor,
    numerics: str,
    sigmoid_dtype: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply by the gate's sigmoid in float32, and round the product once, to `dtype`.

    The contract "eager" rounds the sigmoid to `sigmoid_dtype`; the others do not.
    """
    sigmoid = gate.float().sigmoid()
    if numerics == "eager":
        sigmoid = sigmoid.to(sigmoid_dtype).float()
    return (attended.float() * sigmoid).to(dtype)
