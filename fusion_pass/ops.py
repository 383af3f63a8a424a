"""Registration of the operator `fusion_pass::gated_decode_attention`. Imports no triton."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusion_pass import launch, reference

NAME = "fusion_pass::gated_decode_attention"
SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor gate, Tensor? mask, Tensor? sinks=None, *, "
    "float scale, float mask_fill, str masked_row, str numerics, "
    "ScalarType? sigmoid_dtype=None, ScalarType? dtype=None) -> Tensor"
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MASKED_ROWS = ("zero", "nan", "mean")
NUMERICS = ("compiled", "eager", "fp32")
LARGEST_FINITE_FILL = -65504.0

# Every stride is honoured, so Inductor may lay the operands out as it likes.
torch.library.define(NAME, SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))


def gated_decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    mask_fill: float = -math.inf,
    masked_row: str = "zero",
    numerics: str = "compiled",
    sigmoid_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Attention of a few query tokens to a KV cache, times the sigmoid of a gate.

    Args:
        query: (B, Hq, Q, D), bfloat16, float16 or float32, called T below. Any strides.
        key: (B, Hkv, S, D) of dtype T, any strides, 0 included; S >= 1; Hkv divides Hq, and query
            head h reads KV head h // (Hq // Hkv).
        value: (B, Hkv, S, Dv) of dtype T, any strides.
        gate: 4-D and broadcastable to (B, Q, Hq, Dv), the layout of the output; before the
            sigmoid; bfloat16, float16 or float32; any strides.
        mask: None, boolean (True attends) or floating (added to the logits); 4-D and
            broadcastable to (B, Hq, Q, S); any strides.
        sinks: (Hq,), bfloat16, float16 or float32, any stride: one more logit a head, neither
            scaled nor masked, that takes weight and has no value. With it, a row without a live
            key gives zero if the fill is -inf, whatever `masked_row` says.
        scale: the logits are scale * (q . k).
        mask_fill: what a boolean False adds to a logit: -inf or at most -65504. A masked key
            weighs exactly 0 in a row that has a live one. NaN and inf in a K or V row do not
            spread if no query row of its KV head attends to it.
        masked_row: "zero" or "nan", the output of a row without a live key if the fill is -inf.
            With a finite fill such a row attends to all S keys, computed in float32; "mean", which
            needs one, says that the fill takes the place of the logits, whatever they are, so
            that all S values weigh the same; the sink has its own logit, whatever the fill.
        numerics: what is rounded before the product, with o the attention output in float32:
            "compiled" T(o) * sigmoid(g), "eager" T(o) * G(sigmoid(g)), "fp32" o * sigmoid(g).
        sigmoid_dtype: G of "eager", by default the gate's dtype.
        dtype: of the output, by default T. The product, in float32, is rounded to it once.

    Returns:
        (B, Q, Hq, Dv), contiguous, of `dtype`.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: sizes do not agree, devices differ, a mode is unknown, or the scale not finite.
        RuntimeError: in a backward pass, for there is no gradient.
    """
    op = torch.ops.fusion_pass.gated_decode_attention.default
    result: Tensor = op(
        query,
        key,
        value,
        gate,
        mask,
        sinks,
        scale=scale,
        mask_fill=mask_fill,
        masked_row=masked_row,
        numerics=numerics,
        sigmoid_dtype=sigmoid_dtype,
        dtype=dtype,
    )
    return result


def validate(
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
) -> None:
    """Raise TypeError or ValueError, naming the operand, unless the op is defined on these."""
    operands = {"query": query, "key": key, "value": value, "gate": gate}
    if mask is not None:
        operands["mask"] = mask
    if sinks is not None:
        operands["sinks"] = sinks
    for name, tensor in operands.items():
        dims = 1 if name == "sinks" else 4
        if tensor.dim() != dims:
            raise ValueError(f"{name} must have {dims} dimensions, not {tensor.dim()}")
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device} and query on {query.device}")
    floating = {"query": query, "gate": gate, "sinks": sinks}
    _validate_dtypes(
        {
            **{name: tensor.dtype for name, tensor in floating.items() if tensor is not None},
            "sigmoid_dtype": sigmoid_dtype or gate.dtype,
            "dtype": dtype or query.dtype,
        }
    )
    for name in ("key", "value"):
        if operands[name].dtype != query.dtype:
            raise TypeError(f"{name} is {operands[name].dtype} and query is {query.dtype}")
    if mask is not None and mask.dtype not in (torch.bool, *DTYPES):
        raise TypeError(f"mask must be boolean or floating, not {mask.dtype}")

    batch, query_heads, tokens, head_dim = query.shape
    kv_heads, kv_length = key.shape[1:3]
    if kv_heads < 1 or query_heads % kv_heads != 0:
        raise ValueError(f"query has {query_heads} heads, no multiple of key's {kv_heads}")
    if isinstance(kv_length, int) and kv_length < 1:
        raise ValueError("key has no tokens")
    value_dim = value.shape[3]
    _expect_shape("key", key, (batch, kv_heads, kv_length, head_dim))
    _expect_shape("value", value, (batch, kv_heads, kv_length, value_dim))
    _expect_broadcastable("gate", gate, (batch, tokens, query_heads, value_dim))
    if mask is not None:
        _expect_broadcastable("mask", mask, (batch, query_heads, tokens, kv_length))
    if sinks is not None:
        _expect_shape("sinks", sinks, (query_heads,))

    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, not {scale}")
    if not mask_fill <= LARGEST_FINITE_FILL:
        raise ValueError(f"mask_fill must be at most {LARGEST_FINITE_FILL}, not {mask_fill}")
    if masked_row not in MASKED_ROWS:
        raise ValueError(f"masked_row must be one of {MASKED_ROWS}, not {masked_row!r}")
    if masked_row == "mean" and mask_fill == -math.inf:
        raise ValueError('masked_row "mean" needs a finite mask_fill')
    if numerics not in NUMERICS:
        raise ValueError(f"numerics must be one of {NUMERICS}, not {numerics!r}")


def _validate_dtypes(dtypes: dict[str, torch.dtype]) -> None:
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise TypeError(f"{name} must be bfloat16, float16 or float32, not {dtype}")


def _expect_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if any(_differ(size, wanted) for size, wanted in zip(tensor.shape, shape, strict=True)):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")


def _expect_broadcastable(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if any(
        _differ(size, 1) and _differ(size, full)
        for size, full in zip(tensor.shape, shape, strict=True)
    ):
        raise ValueError(f"{name} of shape {tuple(tensor.shape)} does not broadcast to {shape}")


def _differ(size: int, wanted: int) -> bool:
    """Whether two sizes are known to differ. Comparing symbolic ones would add a guard."""
    return isinstance(size, int) and isinstance(wanted, int) and size != wanted


def fake(*operands: Any, **modes: Any) -> Tensor:
    """The result's shape, strides and dtype, without its elements.

    Raises:
        TypeError, ValueError: as `validate`.
    """
    size, dtype, device = result_of(*operands, **modes)
    # A fake tensor's own `new_empty` takes twice as long.
    return torch.empty(size, dtype=dtype, device=device)


def result_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    **modes: Any,
) -> tuple[tuple[Any, ...], torch.dtype, torch.device]:
    """The size, dtype and device of the result, which is contiguous.

    Raises:
        TypeError, ValueError: as `validate`.
    """
    validate(query, key, value, gate, mask, sinks, dtype=dtype, **modes)
    batch, query_heads, tokens, _ = query.shape
    size = (batch, tokens, query_heads, value.shape[3])
    return size, dtype or query.dtype, query.device


def _cuda(*operands: Any, **modes: Any) -> Tensor:
    validate(*operands, **modes)
    return launch.run(*operands, **modes)


def _cpu(*operands: Any, **modes: Any) -> Tensor:
    validate(*operands, **modes)
    query, gate = operands[0], operands[3]
    results = (modes.get("sigmoid_dtype") or gate.dtype, modes.get("dtype") or query.dtype)
    if launch.interpretable(query.dtype, *results):
        return launch.run(*operands, **modes)
    return reference.gated_decode_attention(*operands, **modes)


def _refuse_backward(ctx: Any, grad: Tensor) -> None:
    raise RuntimeError(f"{NAME} is for inference only: it has no gradient")


torch.library.register_fake(NAME, fake)
torch.library.impl(NAME, "CUDA", _cuda)
torch.library.impl(NAME, "CPU", _cpu)
torch.library.register_autograd(NAME, _refuse_backward)
