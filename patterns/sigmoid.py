"""Recognition of a sigmoid, its casts and its decomposed spelling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch.fx import Node

from .layout import same_shape
from .trace import (
    Operand,
    aten,
    backward,
    constant,
    has_tensor,
    readable,
    recast,
    shape,
    tensor,
    widened,
)

_AXES = ("batch", "query", "head", "dim")


@dataclass(frozen=True)
class Sigmoid:
    """The sigmoid of a tensor.

    Attributes:
        argument: what it is taken of, before any cast that loses nothing.
        dtype: what eager torch rounds it to before it is used; None if it does so more than once.
        is_spelled_out: whether it is written as `1 / (1 + exp(-x))`, each step of which rounds.
    """

    argument: Operand
    dtype: torch.dtype | None
    is_spelled_out: bool


def sigmoid_behind(value: Operand) -> Sigmoid | None:
    """The sigmoid that `value` rearranges, repeats or casts, read as early as it can be."""

    def accept(operand: Operand) -> bool:
        return operand.layout.keeps(value.layout, _AXES) and readable(operand, *_AXES)

    dtypes: list[torch.dtype] = []
    current: Operand | None = value
    while current is not None and current.layout.keeps(value.layout, _AXES):
        dtypes.append(tensor(current.node).dtype)
        argument = _argument(current.node)
        if argument is not None and same_shape(shape(argument), shape(current.node)):
            spelled_out = current.node.target is not aten.sigmoid.default
            start = Operand(argument, current.layout)
            return Sigmoid(_earliest(start, accept), _narrowest(dtypes), spelled_out)
        current = _before(current)
    return None


def _before(current: Operand) -> Operand | None:
    if (origin := recast(current.node)) is not None:
        return Operand(origin, current.layout)
    return backward(current.node, current.layout)


def _earliest(start: Operand, accept: Callable[[Operand], bool]) -> Operand:
    """The first value behind `start` from which it differs by arrangement and exact casts alone."""
    behind: list[Operand] = []
    step: Operand | None = start
    while step is not None:
        behind.append(step)
        origin = widened(step.node)
        step = Operand(origin, step.layout) if origin else backward(step.node, step.layout)
    return next(found for found in reversed(behind) if found is start or accept(found))


def _narrowest(dtypes: list[torch.dtype]) -> torch.dtype | None:
    """The one dtype that a chain of casts rounds to; None if it rounds to two that differ."""
    narrow = {dtype for dtype in dtypes if dtype in (torch.float16, torch.bfloat16)}
    (only,) = narrow if len(narrow) == 1 else set(dtypes) if len(set(dtypes)) == 1 else (None,)
    return only


def _argument(node: Node) -> Node | None:
    """`x` of `sigmoid(x)`, `1 / (1 + exp(-x))` or the reciprocal of the latter's denominator."""
    if node.target is aten.sigmoid.default:
        return cast(Node, node.args[0])
    if node.target is aten.reciprocal.default:
        return _of_denominator(node.args[0])
    if node.target is aten.div.Tensor and constant(node.args[0]) == 1.0 and not node.kwargs:
        return _of_denominator(node.args[1])
    if node.target is aten.mul.Tensor and constant(node.args[1]) == 1.0:
        return _argument(cast(Node, node.args[0])) if has_tensor(node.args[0]) else None
    return None


def _of_denominator(node: object) -> Node | None:
    """`x` of `1 + exp(-x)`."""
    if not isinstance(node, Node) or node.target is not aten.add.Tensor or node.kwargs:
        return None
    terms = [term for term in node.args if constant(term) != 1.0]
    exp = terms[0] if len(terms) == 1 else None
    if not isinstance(exp, Node) or exp.target is not aten.exp.default:
        return None
    negated = exp.args[0]
    if not isinstance(negated, Node) or negated.target is not aten.neg.default:
        return None
    return cast(Node, negated.args[0])
