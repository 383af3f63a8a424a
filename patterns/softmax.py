"""Recognition of a softmax over the last dimension, decomposed or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import TypeGuard, cast

from torch.fx import Node

from .layout import Size, same, same_shape
from .trace import (
    Operand,
    arguments,
    aten,
    behind,
    constant,
    follow,
    has_tensor,
    narrows,
    own_layout,
    recast,
    scaling,
    shape,
)


@dataclass(frozen=True)
class Softmax:
    """A softmax over the last dimension.

    Attributes:
        node: the result.
        argument: the logits.
        is_safe: whether a row of -inf gives zeros instead of NaN.
        sink: one more logit, of size one in the last dimension, whose weight is dropped.
        scale: what the argument is multiplied by first.
        is_rearranged: whether the weights change places before the sink's are dropped.
        is_narrowed: whether the argument and the sink are cast to a narrower dtype first.
    """

    node: Node
    argument: Node
    is_safe: bool
    sink: Node | None = None
    scale: float = 1.0
    is_rearranged: bool = False
    is_narrowed: bool = False


def softmax_behind(node: Node) -> Softmax | None:
    """The softmax that `node` rearranges or casts."""
    found = softmax_or_origin(node)
    return found if isinstance(found, Softmax) else None


def softmax_or_origin(node: Node) -> Softmax | Node:
    """The softmax that `node` rearranges or casts; if it is none, the first value behind it."""
    while has_tensor(node):
        if (softmax := _softmax(node) or _sunk_softmax(node)) is not None:
            return softmax
        origin = behind(node)
        if origin is None:
            break
        node = origin
    return node


def _softmax(node: Node) -> Softmax | None:
    found = None
    if node.target is aten._softmax.default and _is_last(node.args[1], node):
        found = Softmax(node, cast(Node, node.args[0]), is_safe=False)
    elif node.target is aten.div.Tensor:
        found = _exponentials(node)
    elif node.target is aten.where.self:
        found = _safe_softmax(node)
    # What broadcasts on its way to the result has fewer logits than that has weights.
    whole = found is not None and same_shape(shape(found.argument), shape(node))
    return found if whole else None


def _exponentials(node: Node) -> Softmax | None:
    """`exp(x - amax(x)) / sum(exp(x - amax(x)))`, all along the last dimension."""
    exp, total = node.args
    if not (_calls(exp, aten.exp.default) and _calls(total, aten.sum.dim_IntList)):
        return None
    if total.args[0] is not exp or total.kwargs or not _keeps_last(total, shape(node)):
        return None
    shifted = exp.args[0]
    if _calls(shifted, aten.where.self):
        # Inductor's softmax(c * x) picks between two spellings; the second is the plain one.
        shifted = _unscaled_or_plain(shifted)
    argument, scale = _shifted(shifted), 1.0
    if argument is None and isinstance(shifted, Node):
        # Before torch 2.13 there is the first alone.
        argument, scale = _scaled_shift(shifted) or (None, 1.0)
    return Softmax(node, argument, is_safe=False, scale=scale) if argument is not None else None


def _shifted(node: object) -> Node | None:
    """`x` of `x - amax(x)`, along the last dimension."""
    if not _calls(node, aten.sub.Tensor) or node.kwargs:
        return None
    argument, highest = node.args
    if not _calls(highest, aten.amax.default) or highest.args[0] is not argument:
        return None
    return cast(Node, argument) if _keeps_last(highest, shape(node)) else None


def _scaled_shift(node: Node) -> tuple[Node, float] | None:
    """`x` and the factor c > 0 of `(x - amax(x)) * c`, or the divisor's inverse."""
    factor = scaling(node)
    argument = _shifted(node.args[0]) if factor is not None and factor > 0 else None
    return None if argument is None or factor is None else (argument, factor)


def _unscaled_or_plain(node: Node) -> Node | None:
    """`y - amax(y)` of `where(_, (x - amax(x)) * c, y - amax(y))` with `y = x * c`.

    Either may divide instead, and `x` of the first be multiplied by 1.
    """
    _, first, plain = node.args
    scaled = _shifted(plain)
    if scaled is None or not isinstance(first, Node):
        return None
    unscaled = _scaled_shift(first)
    if unscaled is None or scaling(scaled) != unscaled[1]:
        return None
    same_argument = _without_one(unscaled[0]) is _without_one(cast(Node, scaled.args[0]))
    return cast(Node, plain) if same_argument else None


def _without_one(node: Node) -> Node:
    """`x` of `x * 1`."""
    while scaling(node) == 1.0:
        node = cast(Node, node.args[0])
    return node


def _sunk_softmax(node: Node) -> Softmax | None:
    """`softmax(cat([x, sink], -1))[..., :-1]`, less its maximum or not."""
    if node.target is not aten.slice.Tensor:
        return None
    inner = softmax_behind(cast(Node, node.args[0]))
    if inner is None or inner.sink is not None:
        return None
    call = arguments(node)
    if not _is_last(call["dim"], node):
        return None
    if inner.scale != 1.0:
        return None
    joined, is_narrowed = _unshifted(inner.argument)
    whole, kept = shape(inner.node)[-1], shape(node)[-1]
    if not _calls(joined, aten.cat.default) or not same(kept + 1, whole) or call["start"] != 0:
        return None
    parts = cast(list[Node], joined.args[0])
    dim = joined.args[1] if len(joined.args) > 1 else 0
    if len(parts) != 2 or not _is_last(dim, joined) or not same(shape(parts[1])[-1], 1):
        return None
    return replace(
        inner,
        node=node,
        argument=parts[0],
        sink=parts[1],
        is_rearranged=not _is_in_place(inner.node, call["self"]),
        is_narrowed=is_narrowed,
    )


def _is_in_place(start: Node, end: Node) -> bool:
    """Whether each element of `start` is where it was in `end`, which rearranges and casts it."""
    layout = own_layout(start)
    followed = follow(Operand(start, layout), end)
    return followed is not None and followed.layout == layout


def _unshifted(node: Node) -> tuple[Node, bool]:
    """`x` of `x - max(x)` along the last dimension, which no softmax tells from `x`; casts too.

    And whether one of the casts is to a narrower dtype.
    """
    is_narrowed = False
    while True:
        if (origin := recast(node)) is not None:
            is_narrowed |= narrows(node)
            node = origin
            continue
        if not _calls(node, aten.sub.Tensor) or node.kwargs:
            return node, is_narrowed
        argument, highest = node.args
        if _calls(highest, getitem) and highest.args[1] == 0:
            highest = highest.args[0]
        reductions = (aten.max.dim, aten.amax.default)
        if not any(_calls(highest, reduction) for reduction in reductions):
            return node, is_narrowed
        assert isinstance(highest, Node)
        if highest.args[0] is not argument or not _keeps_last(highest, shape(node)):
            return node, is_narrowed
        node = cast(Node, argument)


def _safe_softmax(node: Node) -> Softmax | None:
    """`where(not any(not (x == -inf)), 0, softmax(x))`: rows that are all -inf become zeros."""
    dead, zero, weights = node.args
    inner = _softmax(weights) if isinstance(weights, Node) else None
    if inner is None or inner.scale != 1.0 or constant(zero) != 0.0:
        return None
    if not _calls(dead, aten.logical_not.default):
        return None
    some = dead.args[0]
    if not _calls(some, aten.any.dim) or not _keeps_last(some, shape(node)):
        return None
    live = some.args[0]
    if not _calls(live, aten.logical_not.default):
        return None
    equal = live.args[0]
    if not _calls(equal, aten.eq.Scalar) or tuple(equal.args) != (inner.argument, -math.inf):
        return None
    return replace(inner, node=node, is_safe=True)


def _calls(node: object, target: object) -> TypeGuard[Node]:
    return isinstance(node, Node) and node.target is target


def _keeps_last(node: Node, reduced: Sequence[Size]) -> bool:
    """Whether a reduction of a tensor of the shape `reduced` keeps its last dimension, at one."""
    if len(node.args) < 3 or node.args[2] is not True:
        return False
    dims = node.args[1]
    (dim,) = dims if isinstance(dims, (list, tuple)) and len(dims) == 1 else (dims,)
    return dim in (-1, len(reduced) - 1)


def _is_last(dim: object, node: Node) -> bool:
    return dim in (-1, len(shape(node)) - 1)
