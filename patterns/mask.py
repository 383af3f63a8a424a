"""Tracing an attention mask back to the boolean or float tensor that it comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch.fx import Node

from .attention import Attention
from .layout import Layout, differ
from .reason import Decline, Reason
from .trace import Operand, aten, furthest, has_tensor, shape, source, tensor

# A dead key's weight, exp(fill + logit - largest live logit), is exactly 0 in fp32 for every fill
# at or under this one, finfo(float16).min, as long as logits stay within +-32,000.
LARGEST_FILL = -65504.0

_AXES = ("batch", "head", "query", "key")


@dataclass(frozen=True)
class Mask:
    """What keeps a query from a key.

    Attributes:
        operand: boolean (True attends) or floating (added to the logits); axes batch, head, query
            and key, each present or broadcast.
        fill: what a boolean mask adds to a logit where it is False.
    """

    operand: Operand
    fill: float = -math.inf

    @property
    def is_boolean(self) -> bool:
        return tensor(self.operand.node).dtype is torch.bool


def trace_mask(attention: Attention) -> Mask | Decline | None:
    """The mask of an attention, as early in the graph as it can be read; None if it has none."""
    node = attention.mask
    if node is None:
        return None
    layout = _mask_layout(attention, node) if has_tensor(node) else None
    if layout is None:
        return Decline(
            Reason.MASK_LAYOUT,
            f"the mask {node} does not broadcast to (batch, heads, query tokens, keys)",
        )
    operand = _furthest(Operand(node, layout))
    mask = _through_where(operand) or Mask(operand)
    return replace(mask, fill=-math.inf) if mask.fill < attention.lowest_bias else mask


def _furthest(operand: Operand) -> Operand:
    """The earliest value behind `operand` that has each of its axes in one piece or not at all."""
    start = operand.layout
    whole = {axis: start.of_axis(axis) for axis in _AXES}
    return furthest(
        operand,
        lambda layout: all(layout.of_axis(axis) in (whole[axis], ()) for axis in _AXES),
    )


def _mask_layout(attention: Attention, node: Node) -> Layout | None:
    """The axes of a mask that is broadcast from the right to (B, Hq, Q, S)."""
    full = (
        attention.batch,
        attention.query_heads,
        attention.query_tokens,
        attention.kv_length,
    )
    own = shape(node)
    offset = len(full) - len(own)
    if offset < 0 or any(
        differ(size, 1) and differ(size, whole)
        for size, whole in zip(own, full[offset:], strict=True)
    ):
        return None
    return Layout.of((axis, size, 1) for axis, size in zip(_AXES[offset:], own, strict=True))


def _through_where(operand: Operand) -> Mask | None:
    """The boolean behind `where(boolean, 0, fill)`, casts of the result included."""
    current = operand
    casts: list[torch.dtype] = []
    while current.node.target is torch.ops.prims.convert_element_type.default:
        casts.append(tensor(current.node).dtype)
        current = _furthest(Operand(cast(Node, current.node.args[0]), current.layout))
    if current.node.target is not aten.where.self:
        return None
    condition, kept, dropped = current.node.args
    fill = _constant(dropped)
    if not has_tensor(condition) or _constant(kept) != 0.0 or fill is None:
        return None
    for dtype in reversed(casts):
        fill = _rounded(fill, dtype)
    if not fill <= LARGEST_FILL:
        return None
    boolean = cast(Node, condition)
    layout = current.layout.shrink(shape(boolean), shape(current.node))
    return None if layout is None else Mask(_furthest(Operand(boolean, layout)), fill)


def _constant(value: object) -> float | None:
    """The number that a node holds in every element, as its dtype stores it."""
    if isinstance(value, (int, float)):
        return float(value)
    if not has_tensor(value):
        return None
    node = cast(Node, value)
    while (origin := source(node)) is not None:
        node = origin
    if node.target is not aten.full.default or not isinstance(node.args[1], (int, float)):
        return None
    return _rounded(node.args[1], tensor(node).dtype)


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(dtype).item())
