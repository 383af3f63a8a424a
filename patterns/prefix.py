"""Masks that let each row of the batch see its first keys, as many as a number of the graph says.

Such are `arange(S) < lengths[:, None]`, `position >= arange(S)` and their conjunctions, as nodes
of the graph or as FlexAttention's mask_mod.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch.fx import Node

from .attention import Attention, Mask, Sizes
from .layout import differ
from .mask_program import Apply, Axis, Captured, ComputedMask, Constant, Expression, Lookup
from .trace import CAST, Operand, aten, has_tensor, origins, readable, shape, tensor

_INTEGERS = (torch.int32, torch.int64)
_CONJUNCTIONS = (aten.bitwise_and.Tensor, aten.logical_and.default)
_NEGATIONS = (aten.bitwise_not.default, aten.logical_not.default)
_KEY, _BATCH = 3, 0

Number: TypeAlias = int | Operand | Expression


@dataclass(frozen=True)
class Bound:
    """What a row sees: the keys before `number`, and key `number` itself if it is inclusive.

    `number` is an int, a value with no axis but batch, or an expression in the batch index.
    """

    number: Number
    is_inclusive: bool

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The values of the graph that the number is read from."""
        if isinstance(self.number, int):
            return ()
        if isinstance(self.number, Operand):
            return (self.number.node,)
        return ComputedMask(self.number, torch.int64, torch.device("cpu")).inputs


@dataclass(frozen=True)
class _Comparison:
    """Whether the first of two numbers must be less or greater, and whether equal ones pass."""

    is_less: bool
    with_equal: bool


_COMPARISONS = {
    getattr(getattr(aten, name), kind): comparison
    for name, comparison in (
        ("lt", _Comparison(True, False)),
        ("le", _Comparison(True, True)),
        ("gt", _Comparison(False, False)),
        ("ge", _Comparison(False, True)),
    )
    for kind in ("Tensor", "Scalar")
}


def read_bounds(attention: Attention, mask: Mask | ComputedMask) -> tuple[Bound, ...] | None:
    """The bounds that a mask amounts to; None if it is not known to be a prefix for each row."""
    if isinstance(mask, ComputedMask):
        return _of_expression(mask.expression) if mask.dtype is torch.bool else None
    if not mask.is_boolean:
        return None
    return _of_value(mask.operand, mask.inverted, attention.sizes)


def _of_value(operand: Operand, is_negated: bool, sizes: Sizes) -> tuple[Bound, ...] | None:
    *_, found = origins(operand)
    node, layout = found.node, found.layout
    if node.op != "call_function" or not has_tensor(node) or tensor(node).dtype is not torch.bool:
        return None
    if node.target in _NEGATIONS:
        origin = cast(Node, node.args[0])
        negated = tensor(origin).dtype is torch.bool
        return _of_value(Operand(origin, layout), not is_negated, sizes) if negated else None
    sides = [_argument(argument, node, found) for argument in node.args[:2]]
    if len(sides) != 2 or sides[0] is None or sides[1] is None:
        return None
    if node.target in _CONJUNCTIONS and not is_negated:
        parts = [_of_value(side, False, sizes) for side in sides if isinstance(side, Operand)]
        return _joined(parts) if len(parts) == 2 else None
    comparison = _COMPARISONS.get(node.target)
    if comparison is None:
        return None
    first, second = sides[0], sides[1]
    keys = [_is_index(side, sizes) for side in (first, second)]
    numbers = _number(first, sizes), _number(second, sizes)
    return _bounded(comparison, is_negated, keys, numbers)


def _argument(argument: object, node: Node, found: Operand) -> Operand | int | None:
    """An argument of a pointwise operator, with what its dimensions mean."""
    if isinstance(argument, int) and not isinstance(argument, bool):
        return argument
    if not has_tensor(argument):
        return None
    own = cast(Node, argument)
    layout = found.layout.shrink(shape(own), shape(node))
    return None if layout is None else Operand(own, layout)


def _is_index(side: Operand | int, sizes: Sizes) -> bool:
    """Whether a value is the index of the key, 0 to S - 1."""
    if isinstance(side, int):
        return False
    *_, found = origins(side)
    while found.node.target is CAST and _is_integer(found.node):
        *_, found = origins(Operand(cast(Node, found.node.args[0]), found.layout))
    node, whole = found.node, sizes.layout("key").factors
    if found.layout.factors != whole or not whole or not _is_integer(node):
        return False
    if node.target is aten.arange.default:
        return True
    counts = (node.kwargs.get("start"), node.kwargs.get("step")) == (0, 1)
    return node.target is torch.ops.prims.iota.default and counts


def _number(side: Operand | int, sizes: Sizes) -> Number | None:
    """A number for each row of the batch, or one for all."""
    if isinstance(side, int):
        return side
    *_, found = origins(side)
    axes = {factor.axis for factor in found.layout.factors}
    if not axes <= {"batch"} or not readable(found, "batch") or not _is_integer(found.node):
        return None
    rows = found.layout.of_axis("batch")
    if rows and (len(rows) > 1 or rows[0].stride != 1 or differ(rows[0].size, sizes.batch)):
        return None
    return found


def _is_integer(node: Node) -> bool:
    return has_tensor(node) and tensor(node).dtype in _INTEGERS


def _of_expression(expression: Expression) -> tuple[Bound, ...] | None:
    if not isinstance(expression, Apply) or len(expression.arguments) != 2:
        return None
    first, second = expression.arguments
    if expression.target in _CONJUNCTIONS:
        sides = (first, second)
        parts = [_of_expression(side) for side in sides if isinstance(side, Expression)]
        return _joined(parts) if len(parts) == 2 else None
    comparison = _COMPARISONS.get(expression.target)
    if comparison is None:
        return None
    keys = [isinstance(side, Axis) and side.dim == _KEY for side in (first, second)]
    return _bounded(comparison, False, keys, (_of_row(first), _of_row(second)))


def _of_row(side: object) -> Number | None:
    """An integer that depends on the row of the batch alone."""
    if isinstance(side, int) and not isinstance(side, bool):
        return side
    if not isinstance(side, Expression) or not _depends_on_batch_alone(side):
        return None
    return side if expression_dtype(side) in _INTEGERS else None


def _depends_on_batch_alone(expression: Expression) -> bool:
    if isinstance(expression, Axis):
        return expression.dim == _BATCH
    if isinstance(expression, Captured):
        return has_tensor(expression.node)
    if isinstance(expression, Lookup):
        return all(_depends_on_batch_alone(index) for index in expression.indices)
    if isinstance(expression, Apply):
        operands = [part for part in expression.arguments if isinstance(part, Expression)]
        return all(_depends_on_batch_alone(part) for part in operands)
    return isinstance(expression, Constant)


def expression_dtype(expression: Expression) -> torch.dtype | None:
    """The dtype of what an expression is emitted as; None for arithmetic on sizes."""
    if isinstance(expression, Axis):
        return torch.int32
    if isinstance(expression, Captured):
        return tensor(expression.node).dtype if has_tensor(expression.node) else None
    if isinstance(expression, Lookup):
        return tensor(expression.table).dtype
    return expression.dtype if isinstance(expression, (Constant, Apply)) else torch.bool


def _bounded(
    comparison: _Comparison,
    is_negated: bool,
    keys: Sequence[bool],
    numbers: tuple[Number | None, Number | None],
) -> tuple[Bound, ...] | None:
    """The bound of a comparison of the key's index with a number, if it is an upper one."""
    if list(keys) not in ([True, False], [False, True]):
        return None
    number = numbers[1] if keys[0] else numbers[0]
    # `number > key` is `key < number`; what is negated is the other way round and swaps equality.
    is_less = comparison.is_less == keys[0]
    if number is None or is_less == is_negated:
        return None
    return (Bound(number, comparison.with_equal != is_negated),)


def _joined(parts: Sequence[tuple[Bound, ...] | None]) -> tuple[Bound, ...] | None:
    joined: tuple[Bound, ...] = ()
    for part in parts:
        if part is None:
            return None
        joined += part
    return joined
