"""A mask as the computation that gives it, where no node of the graph holds it yet.

Recognition builds the expression and a rewrite emits it, so that recognition touches no graph. An
expression stands for one value a (batch, head, query token, key); what is emitted has those four
dimensions, of size one where the value is the same all along the axis.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch.fx import Node

from .layout import Size, same
from .trace import aten, shape, tensor

_iota = torch.ops.prims.iota.default


@dataclass(frozen=True)
class Axis:
    """The index along one of the four dimensions, int32.

    Attributes:
        dim: which of (batch, head, query token, key).
        size: how many of them.
        operand: a value whose dimension `operand_dim` has that size.
    """

    dim: int
    size: Size
    operand: Node
    operand_dim: int


@dataclass(frozen=True)
class Constant:
    """One number everywhere."""

    value: bool | int | float
    dtype: torch.dtype


@dataclass(frozen=True)
class Captured:
    """A value of the graph that is one number: a tensor without dimensions, or a symbolic size."""

    node: Node


@dataclass(frozen=True)
class Lookup:
    """`table[indices]` with an index for every dimension; negative ones count from the end."""

    table: Node
    indices: tuple[Expression, ...]


@dataclass(frozen=True)
class Apply:
    """A pointwise operator on expressions and plain numbers.

    `dtype` is that of its result; None for arithmetic on sizes.
    """

    target: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Listed:
    """Whether the block that a query token and a key lie in is in a list of blocks.

    Attributes:
        count: (B or 1, Hq or 1, query blocks), how many key blocks the list has.
        blocks: (B or 1, Hq or 1, query blocks, longest list), which ones they are.
        axes: batch, head, query token, key.
        query_block: query tokens in a block.
        key_block: keys in a block.
    """

    count: Node
    blocks: Node
    axes: tuple[Axis, Axis, Axis, Axis]
    query_block: int
    key_block: int


Expression: TypeAlias = Axis | Constant | Captured | Lookup | Apply | Listed


class Insert(Protocol):
    """Adds one operator call to a graph and gives its node."""

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node: ...


@dataclass(frozen=True)
class ComputedMask:
    """What keeps a query from a key, as a computation.

    Attributes:
        expression: boolean, True where the key is attended to, or floating and added to the logits.
        dtype: of the expression.
        device: where it is computed.
        fill: what a boolean mask adds to the logit of a key that it keeps away.
        replaces: whether the fill takes the place of the logit instead, whatever that is.
    """

    expression: Expression
    dtype: torch.dtype
    device: torch.device
    fill: float = -math.inf
    replaces: bool = False

    @property
    def inputs(self) -> tuple[Node, ...]:
        """Every value of the graph that the computation reads the elements of."""
        return tuple(dict.fromkeys(_read(self.expression)))

    def emit(self, insert: Insert) -> Node:
        """Compute the mask, `(B or 1, Hq or 1, Q or 1, S or 1)`, with calls of `insert`."""
        mask = _Emission(insert, self.device).of(self.expression)
        if tensor(mask).dtype is not self.dtype:
            raise AssertionError(f"{mask.name} is {tensor(mask).dtype}, not {self.dtype}")
        return mask


def _read(expression: Expression) -> Iterator[Node]:
    if isinstance(expression, Captured):
        if isinstance(expression.node.meta.get("val"), torch.Tensor):
            yield expression.node
    elif isinstance(expression, Lookup):
        yield expression.table
        for index in expression.indices:
            yield from _read(index)
    elif isinstance(expression, Apply):
        for argument in expression.arguments:
            if isinstance(argument, Expression):
                yield from _read(argument)
    elif isinstance(expression, Listed):
        yield from (expression.count, expression.blocks)


class _Emission:
    """Emits expressions, each once."""

    def __init__(self, insert: Insert, device: torch.device) -> None:
        self._insert = insert
        self._device = device
        self._emitted: dict[int, Node] = {}

    def of(self, expression: Expression) -> Node:
        """The node of an expression: four dimensions, or one number if it is arithmetic on sizes.

        Every operand has four dimensions, so that dtypes promote as they do among the numbers that
        the expression was written for.
        """
        key = id(expression)
        if key not in self._emitted:
            self._emitted[key] = self._emit(expression)
        return self._emitted[key]

    def _emit(self, expression: Expression) -> Node:
        if isinstance(expression, Axis):
            return self._axis(expression)
        if isinstance(expression, Constant):
            return self._constant(expression.value, expression.dtype)
        if isinstance(expression, Captured):
            node = expression.node
            if not isinstance(node.meta["val"], torch.Tensor):
                return node
            return self._insert(aten.reshape.default, node, [1, 1, 1, 1])
        if isinstance(expression, Lookup):
            return self._lookup(expression)
        if isinstance(expression, Listed):
            return self._listed(expression)
        return self._apply(expression)

    def _axis(self, axis: Axis) -> Node:
        if same(axis.size, 1):
            return self._constant(0, torch.int32)
        view = [1, 1, 1, 1]
        view[axis.dim] = -1
        length = self._length(axis.operand, axis.operand_dim)
        return self._insert(aten.reshape.default, self._count(length), view)

    def _count(self, length: int | Node) -> Node:
        """0, 1, 2, ... as a tensor of one dimension."""
        return self._insert(
            _iota,
            length,
            start=0,
            step=1,
            dtype=torch.int32,
            device=self._device,
            requires_grad=False,
        )

    def _constant(self, value: bool | int | float, dtype: torch.dtype) -> Node:
        return self._insert(
            aten.full.default,
            [1, 1, 1, 1],
            value,
            dtype=dtype,
            layout=torch.strided,
            device=self._device,
            pin_memory=False,
        )

    def _lookup(self, lookup: Lookup) -> Node:
        indices = [
            self._index(index, lookup.table, dim) for dim, index in enumerate(lookup.indices)
        ]
        return self._insert(aten.index.Tensor, lookup.table, indices)

    def _index(self, expression: Expression, table: Node, dim: int) -> Node:
        index, size = self.of(expression), shape(table)[dim]
        if _is_inside(expression, size):
            return index
        # Blocks that a kernel skips never evaluate their masks, so that an index there may be
        # beyond the table; what is read for it is not used, but must not fail.
        return self._insert(aten.remainder.Scalar, index, self._length(table, dim))

    def _apply(self, call: Apply) -> Node:
        arguments = [
            self.of(argument) if isinstance(argument, Expression) else argument
            for argument in call.arguments
        ]
        keywords = dict(call.keywords)
        if _divides_to_floor(call):
            node = self._floor_divided(*arguments)
        else:
            node = self._insert(call.target, *arguments, **keywords)
        if call.dtype is not None and tensor(node).dtype is not call.dtype:
            raise AssertionError(f"{node.name} is {tensor(node).dtype}, not {call.dtype}")
        return node

    def _floor_divided(self, dividend: Node | int, divisor: Node | int) -> Node:
        # Inductor's own floor division of an arange is wrong at its end on CPUs (torch 2.13).
        if not isinstance(dividend, Node):
            assert isinstance(divisor, Node), "an operator has an operand"
            dividend = self._constant(dividend, tensor(divisor).dtype)
        kind = "Tensor" if isinstance(divisor, Node) else "Scalar"
        rest = self._insert(getattr(aten.remainder, kind), dividend, divisor)
        multiple = self._insert(aten.sub.Tensor, dividend, rest)
        return self._divided(multiple, divisor)

    def _divided(self, dividend: Node, divisor: Node | int) -> Node:
        """Integer division whose quotient has no fraction, or is rounded towards zero."""
        return self._insert(aten.div.Tensor_mode, dividend, divisor, rounding_mode="trunc")

    def _listed(self, listed: Listed) -> Node:
        """Mark the blocks of every list, then look the mark of every token's and key's block up."""
        insert = self._insert
        batch, head, query, key = listed.axes
        key_block = self._divided(self._axis(key), listed.key_block)
        # 0, 1, 2, ...: the block of every block's first key.  # (1, 1, 1, key blocks)
        every = insert(aten.slice.Tensor, key_block, 3, 0, sys.maxsize, listed.key_block)
        equal = insert(aten.eq.Tensor, insert(aten.unsqueeze.default, listed.blocks, 4), every)
        place = self._count(self._length(listed.blocks, 3))
        place = insert(aten.reshape.default, place, [1, 1, 1, -1, 1])
        count = insert(aten.unsqueeze.default, listed.count, 3)
        count = insert(aten.unsqueeze.default, count, 4)
        valid = insert(aten.bitwise_and.Tensor, equal, insert(aten.lt.Tensor, place, count))
        marks = insert(aten.any.dim, valid, 3)  # (B or 1, Hq or 1, query blocks, key blocks)
        rows = [
            self._constant(0, torch.int32) if same(shape(marks)[axis.dim], 1) else self._axis(axis)
            for axis in (batch, head)
        ]
        query_block = self._divided(self._axis(query), listed.query_block)
        return insert(aten.index.Tensor, marks, [*rows, query_block, key_block])

    def _length(self, node: Node, dim: int) -> int | Node:
        size = shape(node)[dim]
        return size if isinstance(size, int) else self._insert(aten.sym_size.int, node, dim)


def _divides_to_floor(call: Apply) -> bool:
    """Whether a call is a floor division of integers."""
    if call.dtype is None or call.dtype.is_floating_point:
        return False
    to_floor = dict(call.keywords).get("rounding_mode") == "floor"
    return to_floor or call.target in (aten.floor_divide.default, aten.floor_divide.Scalar)


def _is_inside(index: Expression, size: Size) -> bool:
    """Whether an index is known to be an index of a dimension of that size."""
    if isinstance(index, Constant):
        return isinstance(size, int) and -size <= index.value < size
    if not isinstance(index, Axis):
        return False
    if isinstance(index.size, int) and isinstance(size, int):
        return index.size <= size
    return same(index.size, size)
