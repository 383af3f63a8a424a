"""Recognition of a softmax over the last dimension, decomposed or not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeGuard, cast

from torch.fx import Node

from .trace import CAST, aten, constant, has_tensor, shape, source


@dataclass(frozen=True)
class Softmax:
    """A softmax over the last dimension: its argument, and whether a row of -inf gives zeros."""

    node: Node
    argument: Node
    is_safe: bool


def softmax_behind(node: Node) -> Softmax | None:
    """The softmax that `node` rearranges or casts."""
    while has_tensor(node):
        if (softmax := _softmax(node)) is not None:
            return softmax
        origin = source(node)
        if origin is None and node.target is CAST:
            origin = cast(Node, node.args[0])
        if origin is None:
            return None
        node = origin
    return None


def _softmax(node: Node) -> Softmax | None:
    if node.target is aten._softmax.default and _is_last(node.args[1], node):
        return Softmax(node, cast(Node, node.args[0]), is_safe=False)
    if node.target is aten.div.Tensor:
        argument = _exponentials(node)
        return Softmax(node, argument, is_safe=False) if argument is not None else None
    if node.target is aten.where.self:
        return _safe_softmax(node)
    return None


def _exponentials(node: Node) -> Node | None:
    """`x` of `exp(x - amax(x)) / sum(exp(x - amax(x)))`, all along the last dimension."""
    exp, total = node.args
    if not (_calls(exp, aten.exp.default) and _calls(total, aten.sum.dim_IntList)):
        return None
    if total.args[0] is not exp or not _keeps_last(total):
        return None
    shifted = exp.args[0]
    if not _calls(shifted, aten.sub.Tensor) or shifted.kwargs:
        return None
    argument, highest = shifted.args
    if not _calls(highest, aten.amax.default) or highest.args[0] is not argument:
        return None
    return cast(Node, argument) if _keeps_last(highest) else None


def _safe_softmax(node: Node) -> Softmax | None:
    """`where(not any(not (x == -inf)), 0, softmax(x))`: rows that are all -inf become zeros."""
    dead, zero, weights = node.args
    inner = _softmax(weights) if isinstance(weights, Node) else None
    if inner is None or constant(zero) != 0.0 or not _calls(dead, aten.logical_not.default):
        return None
    some = dead.args[0]
    if not _calls(some, aten.any.dim) or not _keeps_last(some):
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


def _keeps_last(node: Node) -> bool:
    """Whether a reduction is over the last dimension alone and keeps it."""
    dims = node.args[1]
    (dim,) = dims if isinstance(dims, (list, tuple)) and len(dims) == 1 else (dims,)
    return len(node.args) > 2 and node.args[2] is True and _is_last(dim, node)


def _is_last(dim: object, node: Node) -> bool:
    return dim in (-1, len(shape(node)) - 1)
