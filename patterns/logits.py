"""Walking from a softmax back to the matmul that its logits come from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch.fx import Node

from .attention import Mask
from .layout import Layout, same_shape
from .mask import LARGEST_FILL
from .reason import Decline, Reason
from .trace import (
    FLOATING,
    SCALINGS,
    Operand,
    aten,
    backward,
    behind,
    constant,
    has_tensor,
    narrows,
    recast,
    rounded,
    scaling,
    shape,
    tensor,
)

MATMULS = (aten.bmm.default, aten.mm.default)


@dataclass(frozen=True)
class Logits:
    """What is between the first matmul and the softmax, and whether it is narrowed there."""

    product: Operand
    scale: float = 1.0
    mask: Mask | None = None
    is_narrowed: bool = False


def trace_logits(current: Operand, scale: float = 1.0) -> Logits | Decline:
    """Walk from the softmax's argument back to the matmul that its logits come from.

    `scale` is what the softmax multiplies its argument by.
    """
    mask, is_narrowed = None, False
    while current.node.target not in MATMULS:
        is_narrowed |= narrows(current.node)
        step, behind = _before(current), current.node
        if step is None:
            return Decline(
                Reason.LOGITS,
                f"{current.node.name} ({current.node.target}) changes the logits in a way that is "
                "not a constant scale or one mask",
            )
        current, factor, found = step
        if found is not None and (mask is not None or scale != 1.0):
            return Decline(Reason.LOGITS, f"the mask {found.operand.node.name} is not added last")
        if found is not None and found.replaces:
            # A number of no dimensions takes the dtype of the logits.
            is_narrowed |= rounded(found.fill, tensor(behind).dtype) == -math.inf != found.fill
        scale, mask = scale * factor, mask or found
    return Logits(current, scale, mask, is_narrowed)


def _before(current: Operand) -> tuple[Operand, float, Mask | None] | None:
    """What `current` is made of in one step: earlier logits, a factor, and a mask."""
    node, layout = current.node, current.layout
    if (origin := backward(node, layout)) is not None:
        return origin, 1.0, None
    if node.op != "call_function" or not node.args or not has_tensor(node):
        return None
    if (uncast := recast(node)) is not None:
        return Operand(uncast, layout), 1.0, None
    if (scaled := scaling(node)) is not None:
        return Operand(cast(Node, node.args[0]), layout), scaled, None
    if node.target is aten.add.Tensor and node.kwargs.get("alpha", 1) == 1:
        return _added_mask(node, layout)
    if node.target is aten.where.self:
        return _selected_mask(node, layout)
    return None


def _added_mask(node: Node, layout: Layout) -> tuple[Operand, float, Mask | None] | None:
    first, second = node.args
    if not (has_tensor(first) and has_tensor(second)):
        return None
    logits, mask = cast(Node, first), cast(Node, second)
    if not _comes_from_matmul(logits):
        logits, mask = mask, logits
    # A boolean or an integer is added as a number.
    if tensor(mask).dtype not in FLOATING:
        return None
    return _with_mask(node, layout, logits, mask)


def _with_mask(
    node: Node, layout: Layout, logits: Node, mask: Node, **meaning: float | bool
) -> tuple[Operand, float, Mask | None] | None:
    seen = layout.shrink(shape(mask), shape(node))
    if seen is None or not same_shape(shape(logits), shape(node)):
        return None
    return Operand(logits, layout), 1.0, Mask(Operand(mask, seen), **meaning)  # type: ignore[arg-type]


def _selected_mask(node: Node, layout: Layout) -> tuple[Operand, float, Mask | None] | None:
    """`where(keep, logits, fill)` or `where(drop, fill, logits)`."""
    condition, first, second = node.args
    if not has_tensor(condition) or tensor(cast(Node, condition)).dtype is not torch.bool:
        return None
    inverted = constant(first) is not None
    logits, fill = (second, constant(first)) if inverted else (first, constant(second))
    if fill is None or not fill <= LARGEST_FILL or not has_tensor(logits):
        return None
    return _with_mask(
        node,
        layout,
        cast(Node, logits),
        cast(Node, condition),
        fill=fill,
        inverted=inverted,
        replaces=True,
    )


def _comes_from_matmul(node: Node) -> bool:
    """Whether the first arguments lead from `node` to a matmul before anything else."""
    while node.target not in MATMULS:
        origin = behind(node)
        if origin is None and node.target in SCALINGS:
            origin = cast(Node, node.args[0])
        if origin is None:
            return False
        node = origin
    return True
