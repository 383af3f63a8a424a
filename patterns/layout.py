"""Layout as named axes: which part of which axis every dimension of a value runs over.

A `Layout` says of each dimension of a tensor which *factors* it is made of, outermost first. A
factor is a digit of an axis in mixed radix: `Factor("head", size=2, stride=8)` is
`(head // 8) % 2`.
Dimensions of size one hold no factor. Following a value through view, permute and expand nodes is
then arithmetic on factors, and two chains of nodes mean the same exactly when their layouts are
equal, whatever the sizes are.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import sympy

Size: TypeAlias = int | sympy.Expr
"""A size that is known, or an expression in the symbols of a dynamic graph.

Expressions, unlike SymInt, can be compared and hashed without adding a guard.
"""


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be equal."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(sympy.expand(a - b) == 0)


def differ(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be different.

    Two symbols are neither `same` nor `differ`. Where an operator demands that they be equal, as
    attention does of the batch of query and key, not differing is enough.
    """
    return isinstance(a, int) and isinstance(b, int) and a != b


def same_shape(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


class Factor(NamedTuple):
    """The index `(i // stride) % size` of the named axis, whose own index is `i`."""

    axis: str
    size: Size
    stride: int = 1

    @property
    def end(self) -> Size:
        """The stride of the next factor outwards."""
        return self.size * self.stride


Dim: TypeAlias = tuple[Factor, ...]


def covers(found: Dim, whole: Dim) -> bool:
    """Whether `found` is all of the axis that `whole` is; two symbols may be one size."""
    if found == whole:
        return True
    return (
        len(found) == len(whole) == 1
        and found[0].stride == whole[0].stride
        and not differ(found[0].size, whole[0].size)
    )


@dataclass(frozen=True)
class Layout:
    """The factors of every dimension of a value; `()` for a dimension of size one."""

    dims: tuple[Dim, ...]

    @classmethod
    def of(cls, axes: Iterable[tuple[str, Size, int]]) -> Layout:
        """One axis a dimension, given as (name, size, stride); size one leaves it empty."""
        return _of(tuple(axes))

    @functools.cached_property
    def factors(self) -> tuple[Factor, ...]:
        """All factors in memory order of a contiguous tensor."""
        return tuple(itertools.chain.from_iterable(self.dims))

    def of_axis(self, axis: str) -> tuple[Factor, ...]:
        """The factors of one axis, outermost first."""
        return self._axes.get(axis, ())

    @functools.cached_property
    def _axes(self) -> dict[str, tuple[Factor, ...]]:
        axes: dict[str, list[Factor]] = {}
        for factor in self.factors:
            axes.setdefault(factor.axis, []).append(factor)
        return {axis: _outermost_first(own) for axis, own in axes.items()}

    def keeps(self, whole: Layout, axes: Iterable[str]) -> bool:
        """Whether each of the axes is here as entirely as in `whole`, or not at all."""
        return all(self.of_axis(axis) in (whole.of_axis(axis), ()) for axis in axes)

    def permute(self, order: Sequence[int]) -> Layout:
        """The layout of `tensor.permute(order)`."""
        return _permute(self, tuple(order))

    def unpermute(self, order: Sequence[int]) -> Layout:
        """The layout of the tensor whose `permute(order)` has this layout."""
        return _permute(self, _inverse(order))

    def reshape(self, shape: Sequence[Size]) -> Layout | None:
        """The layout after a reshape to `shape`; None where a dimension straddles factors."""
        return _reshape(self, tuple(shape))

    def shrink(self, shape: Sequence[Size], expanded: Sequence[Size]) -> Layout | None:
        """The layout of the tensor of `shape` whose expansion to `expanded` has this layout.

        The factors of a dimension that the expansion repeats are gone from the result.
        """
        return _shrink(self, tuple(shape), tuple(expanded))


# K and V, and the layers of a model, arrange the same axes in the same ways. What a layout is asked
# about its factors it also keeps, so that equal ones had better be one.
@functools.lru_cache(maxsize=1024)
def _of(axes: tuple[tuple[str, Size, int], ...]) -> Layout:
    dims = (() if same(n, 1) else (Factor(name, n, stride),) for name, n, stride in axes)
    return Layout(tuple(dims))


@functools.lru_cache(maxsize=1024)
def _permute(layout: Layout, order: tuple[int, ...]) -> Layout:
    return Layout(tuple(layout.dims[i] for i in order))


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


@functools.lru_cache(maxsize=1024)
def _shrink(layout: Layout, shape: tuple[Size, ...], expanded: tuple[Size, ...]) -> Layout | None:
    offset = len(expanded) - len(shape)
    if offset < 0 or len(expanded) != len(layout.dims):
        return None
    dims: list[Dim] = []
    for size, wide, dim in zip(shape, expanded[offset:], layout.dims[offset:], strict=True):
        if same(size, wide):
            dims.append(dim)
        elif same(size, 1):
            dims.append(())
        else:
            return None
    return Layout(tuple(dims))


@functools.lru_cache(maxsize=1024)
def _reshape(layout: Layout, shape: tuple[Size, ...]) -> Layout | None:
    pending = list(reversed(layout.factors))
    dims: list[Dim] = []
    for size in shape:
        dim = _take(pending, size)
        if dim is None:
            return None
        dims.append(_merge(dim))
    return None if pending else Layout(tuple(dims))


def _take(pending: list[Factor], size: Size) -> Dim | None:
    """Pop factors whose product is `size` off the end of `pending`, splitting the last one."""
    taken: list[Factor] = []
    product: Size = 1
    while not same(product, size):
        if not pending:
            return None
        factor = pending.pop()
        if not same(product * factor.size, size):
            piece = _split(factor, product, size)
            if piece is not None:
                outer, inner = piece
                pending.append(inner)
                factor = outer
        taken.append(factor)
        product = product * factor.size
        if isinstance(product, int) and isinstance(size, int) and product > size:
            return None
    return tuple(taken)


def _split(factor: Factor, product: Size, size: Size) -> tuple[Factor, Factor] | None:
    """`factor` as (outer, inner) where `product * outer.size == size`; None if none divides."""
    if not (isinstance(factor.size, int) and isinstance(product, int) and isinstance(size, int)):
        return None
    if product == 0 or size % product or product * factor.size <= size:
        return None
    outer = size // product
    if outer == 0 or factor.size % outer:
        return None
    inner = factor.size // outer
    return (
        Factor(factor.axis, outer, factor.stride * inner),
        Factor(factor.axis, inner, factor.stride),
    )


def _outermost_first(own: Sequence[Factor]) -> Dim:
    return _merge(sorted(own, key=lambda factor: -factor.stride)) if len(own) > 1 else tuple(own)


def _merge(dim: Iterable[Factor]) -> Dim:
    """Join neighbours that are consecutive digits of one axis."""
    merged: list[Factor] = []
    for factor in dim:
        last = merged[-1] if merged else None
        if last is not None and last.axis == factor.axis and same(last.stride, factor.end):
            merged[-1] = Factor(factor.axis, last.size * factor.size, factor.stride)
        else:
            merged.append(factor)
    return tuple(merged)


@dataclass(frozen=True)
class Conversion:
    """`tensor.reshape(split).permute(order).reshape(shape)`; a step is None if not needed."""

    split: tuple[Size, ...] | None
    order: tuple[int, ...] | None
    shape: tuple[Size, ...] | None


@functools.lru_cache(maxsize=1024)
def convert(source: Layout, target: Layout) -> Conversion | None:
    """How to turn a value of layout `source` into one of layout `target`.

    None unless both hold the same digits of the same axes, in whatever arrangement.
    """
    if source == target:
        return Conversion(None, None, None)
    if (dims := _permutation(source.dims, target.dims)) is not None:
        return Conversion(None, dims, None)
    cuts = _cuts(source.factors + target.factors)
    pieces = [piece for factor in source.factors for piece in _refine(factor, cuts)]
    wanted = [piece for factor in target.factors for piece in _refine(factor, cuts)]
    if len(set(pieces)) != len(pieces) or set(pieces) != set(wanted) or len(pieces) != len(wanted):
        return None
    sizes = tuple(piece.size for piece in pieces)
    order = tuple(pieces.index(piece) for piece in wanted)
    arranged = tuple(sizes[i] for i in order)
    after = _shape(target)
    if order == tuple(range(len(order))):
        return Conversion(None, None, after)
    return Conversion(
        split=None if same_shape(_shape(source), sizes) else sizes,
        order=order,
        shape=None if same_shape(arranged, after) else after,
    )


def _permutation(source: Sequence[Dim], target: Sequence[Dim]) -> tuple[int, ...] | None:
    """The order in which `source` has the dimensions of `target`, those of size one included."""
    left = list(enumerate(source))
    order: list[int] = []
    for dim in target:
        place = next((place for place, (_, own) in enumerate(left) if own == dim), None)
        if place is None:
            return None
        order.append(left.pop(place)[0])
    return None if left else tuple(order)


def _shape(layout: Layout) -> tuple[Size, ...]:
    return tuple(math.prod(factor.size for factor in dim) for dim in layout.dims)


def _cuts(factors: Iterable[Factor]) -> dict[str, list[int]]:
    """The integer strides at which any factor of an axis begins or ends, ascending."""
    cuts: dict[str, set[int]] = {}
    for factor in factors:
        own = cuts.setdefault(factor.axis, set())
        own.add(factor.stride)
        if isinstance(factor.end, int):
            own.add(factor.end)
    return {axis: sorted(own) for axis, own in cuts.items()}


def _refine(factor: Factor, cuts: dict[str, list[int]]) -> list[Factor]:
    """`factor` cut at every boundary inside it, outermost first; whole if it is symbolic."""
    if not isinstance(factor.end, int):
        return [factor]
    inside = [cut for cut in cuts[factor.axis] if factor.stride <= cut <= factor.end]
    pairs = list(itertools.pairwise(inside))
    if any(high % low for low, high in pairs):
        return [factor]
    return [Factor(factor.axis, high // low, low) for low, high in reversed(pairs)]
