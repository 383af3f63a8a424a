"""Reading the small graphs that FlexAttention's score_mod and mask_mod are traced to.

Their inputs and results are single numbers, one for every (batch, head, query token, key).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch
from torch.fx import GraphModule, Node

from .mask_program import Apply, Captured, Constant, Expression, Lookup
from .trace import CAST, aten, has_tensor, shape, source, tensor


@dataclass(frozen=True)
class Score:
    """A value that depends on the attention score."""


@dataclass(frozen=True)
class Table:
    """A captured tensor of which some leading dimensions are indexed already."""

    node: Node
    indices: tuple[Expression, ...] = ()


@dataclass(frozen=True)
class Unknown:
    """A value that cannot be told, because of `node`."""

    node: Node


Value: TypeAlias = Expression | Score | Table | Unknown

_SIZE_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.neg)
# Pointwise operators that hand a floating value on as it is.
_SELECTIONS = (aten.where.self, CAST)


def captured(node: object) -> Value | None:
    """What a buffer that a mod captures stands for: a tensor or a symbolic size of the graph."""
    if isinstance(node, (bool, int)):
        return Constant(node, torch.bool if isinstance(node, bool) else torch.int64)
    if not isinstance(node, Node):
        return None
    if has_tensor(node):
        return Table(node) if shape(node) else Captured(node)
    return Captured(node) if isinstance(node.meta.get("val"), torch.SymInt) else None


def result(module: GraphModule) -> Node | None:
    """The node that a mod returns."""
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    returned = output.args[0]
    if isinstance(returned, (tuple, list)) and len(returned) == 1:
        returned = returned[0]
    return returned if isinstance(returned, Node) else None


def evaluate(module: GraphModule, inputs: Sequence[Value | None]) -> dict[Node, Value]:
    """What every node of a mod stands for, given what its placeholders do."""
    placeholders = (node for node in module.graph.nodes if node.op == "placeholder")
    values: dict[Node, Value] = {}
    for node, value in zip(placeholders, inputs, strict=True):
        values[node] = Unknown(node) if value is None else value
    for node in module.graph.nodes:
        if node.op == "call_function":
            values[node] = _call(node, values)
        elif node.op == "get_attr":
            values[node] = Unknown(node)
    return values


def _call(node: Node, values: dict[Node, Value]) -> Value:
    operands = [values[operand] for operand in node.all_input_nodes]
    for operand in operands:
        if isinstance(operand, Unknown):
            return operand
    if any(isinstance(operand, Score) for operand in operands):
        return Score()
    return _expression(node, values) or Unknown(node)


def _expression(node: Node, values: dict[Node, Value]) -> Value | None:
    if node.target in _SIZE_ARITHMETIC:
        return _pointwise(node, values, None)
    if not has_tensor(node):
        return None
    if node.target in (aten.full.default, aten.scalar_tensor.default):
        return _number(node)
    if node.target is aten.index.Tensor:
        return _index(node, values)
    if node.target is aten.select.int:
        return _select(node, values)
    if shape(node):
        return None
    if (origin := source(node)) is not None:
        return values[origin] if not shape(origin) else None
    dtype = tensor(node).dtype
    # Floating arithmetic may round otherwise outside the attention kernel than inside it.
    if dtype.is_floating_point and node.target not in _SELECTIONS:
        return None
    return _pointwise(node, values, dtype)


def _number(node: Node) -> Constant | None:
    value = node.args[-1]
    if shape(node) or not isinstance(value, (bool, int, float)):
        return None
    return Constant(value, tensor(node).dtype)


def _index(node: Node, values: dict[Node, Value]) -> Value | None:
    table, indices = values[cast(Node, node.args[0])], cast(Sequence[Any], node.args[1])
    chosen = [values[index] if isinstance(index, Node) else None for index in indices]
    for index, number in zip(indices, chosen, strict=True):
        if not isinstance(number, Expression) or shape(index):
            return None
        if tensor(index).dtype not in (torch.int32, torch.int64):
            return None
    return _looked_up(table, cast(list[Expression], chosen))


def _select(node: Node, values: dict[Node, Value]) -> Value | None:
    table, dim, index = values[cast(Node, node.args[0])], node.args[1], node.args[2]
    if dim != 0 or not isinstance(index, int):
        return None
    return _looked_up(table, [Constant(index, torch.int64)])


def _looked_up(table: Value, indices: list[Expression]) -> Value | None:
    if not isinstance(table, Table):
        return None
    further = replace(table, indices=(*table.indices, *indices))
    sizes = shape(table.node)
    if 0 in sizes or len(further.indices) > len(sizes):
        return None
    complete = len(further.indices) == len(sizes)
    return Lookup(further.node, further.indices) if complete else further


def _pointwise(
    node: Node, values: dict[Node, Value], dtype: torch.dtype | None
) -> Expression | None:
    if dtype is not None and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return None
    arguments = [
        values[argument] if isinstance(argument, Node) else argument for argument in node.args
    ]
    plain = (bool, int, float, torch.dtype)
    if not all(isinstance(argument, (Expression, *plain)) for argument in arguments):
        return None
    if not all(isinstance(argument, (*plain, str)) for argument in node.kwargs.values()):
        return None
    target = cast(Callable[..., Any], node.target)
    return Apply(target, tuple(arguments), tuple(node.kwargs.items()), dtype)
