"""Tracing an attention mask back to the boolean or float tensor that it comes from."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import torch
from torch.fx import Node

from .attention import Attention, Mask
from .mask_program import ComputedMask
from .trace import (
    Operand,
    aten,
    constant,
    furthest,
    has_tensor,
    readable,
    recast,
    rounded,
    shape,
    tensor,
)

# A dead key's weight, exp(fill + logit - largest live logit), is exactly 0 in fp32 for every fill
# at or under this one, finfo(float16).min, as long as logits stay within +-32,000.
LARGEST_FILL = -65504.0

_AXES = ("batch", "head", "query", "key")
_NEGATIONS = (aten.logical_not.default, aten.bitwise_not.default)


def trace_mask(attention: Attention) -> Mask | ComputedMask | None:
    """The mask of an attention, as early in the graph as it can be read; None if it has none."""
    if not isinstance(attention.mask, Mask):
        return attention.mask
    mask = replace(attention.mask, operand=_furthest(attention.mask.operand))
    if not mask.is_boolean:
        mask = _through_where(mask.operand) or mask
    mask = _through_negations(mask)
    return replace(mask, fill=-math.inf) if mask.fill < attention.lowest_bias else mask


def _furthest(operand: Operand) -> Operand:
    """The earliest value behind `operand` that has each of its axes in one piece or not at all."""
    return furthest(
        operand,
        lambda origin: origin.layout.keeps(operand.layout, _AXES) and readable(origin, *_AXES),
    )


def _through_where(operand: Operand) -> Mask | None:
    """The boolean behind `where(boolean, 0, fill)` or its reverse, casts of the result included."""
    current = operand
    casts: list[torch.dtype] = []
    while (origin := recast(current.node)) is not None:
        casts.append(tensor(current.node).dtype)
        current = _furthest(Operand(origin, current.layout))
    if current.node.target is not aten.where.self or not has_tensor(current.node.args[0]):
        return None
    condition, kept, dropped = current.node.args
    inverted = constant(dropped) == 0.0
    fill = constant(kept if inverted else dropped)
    if constant(dropped if inverted else kept) != 0.0 or fill is None:
        return None
    for dtype in reversed(casts):
        fill = rounded(fill, dtype)
    if not fill <= LARGEST_FILL:
        return None
    boolean = cast(Node, condition)
    if tensor(boolean).dtype is not torch.bool:
        return None
    layout = current.layout.shrink(shape(boolean), shape(current.node))
    return None if layout is None else Mask(_furthest(Operand(boolean, layout)), fill, inverted)


def _through_negations(mask: Mask) -> Mask:
    """The boolean behind any negations; of a number, which may be negated too, the last boolean."""
    while mask.operand.node.target in _NEGATIONS:
        origin = cast(Node, mask.operand.node.args[0])
        if tensor(origin).dtype is not torch.bool:
            break
        negated = _furthest(Operand(origin, mask.operand.layout))
        mask = replace(mask, operand=negated, inverted=not mask.inverted)
    return mask
