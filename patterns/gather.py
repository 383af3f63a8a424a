"""K and V that are gathered from a cache by a table: `cache[block_table]` in any spelling.

Read here is where the pages are, and how many keys each row of the batch sees. The latter must be
plain from the graph: no mask, or one that compares the position of a key with a number for each
row. Any other mask leaves the attention to be read from the gathered copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Node

from .attention import Attention, Mask
from .keyvalue import KeyValue
from .layout import Conversion, Dim, Factor, Layout, convert, same
from .mask_program import ComputedMask
from .prefix import Bound, read_bounds
from .trace import (
    Operand,
    arguments,
    aten,
    furthest,
    has_tensor,
    origins,
    readable,
    shape,
    tensor,
)

# A row whose logits are all filled with no less than this attends to all of its keys: the fill
# only shifts them, as it does in exact arithmetic. One that is lower drowns some in float32.
SHIFT = -65536.0
# A row whose logits are all filled with no more than this attends to all of its keys alike: added
# to logits within +-32,000, the fill is rounded back to itself in float32.
DROWNING = -(2.0**40)
_INDICES = (torch.int32, torch.int64)
_BY_TENSORS = (aten.index.Tensor, aten._unsafe_index.Tensor)
GATHERS = (
    *_BY_TENSORS,
    aten.index_select.default,
    aten.embedding.default,
    aten.gather.default,
)


@dataclass(frozen=True)
class Cache:
    """Pages of K or V: a view of `operand` is `(pages, page size, Hkv, D)`."""

    operand: Operand
    view: Conversion


@dataclass(frozen=True)
class Pages:
    """Where gathered K and V come from.

    Attributes:
        key: the pages of K.
        value: the pages of V, of the same size.
        table: the number of each page; axes batch, which is absent where all rows share their
            pages, and key.
        is_wrapping: whether a negative number counts from the end.
        bounds: every row sees the keys that are within all of these, and so all keys if none.
    """

    key: Cache
    value: Cache
    table: Operand
    is_wrapping: bool
    bounds: tuple[Bound, ...]

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The values of the graph that are read instead of K and V."""
        return self.key.operand.node, self.value.operand.node, self.table.node


@dataclass(frozen=True)
class _Gather:
    """`cache[..., table, ...]`: what of K or V each of the two holds."""

    cache: Operand
    table: Operand
    is_wrapping: bool


def trace_pages(
    attention: Attention, key_value: KeyValue, mask: Mask | ComputedMask | None
) -> Pages | None:
    """The pages that K and V are gathered from; None if they are not, or cannot be read there."""
    if attention.is_causal or not same(attention.sizes.query_tokens, 1):
        return None
    key, value = _gather_behind(key_value.key), _gather_behind(key_value.value)
    if key is None or value is None or not _are_alike(key.table, value.table):
        return None
    bounds = _bounds(attention, mask)
    caches = _cache(key), _cache(value)
    if bounds is None or caches[0] is None or caches[1] is None:
        return None
    if any(_of_cache(key, axis) != _of_cache(value, axis) for axis in ("page", "key")):
        return None
    wraps = key.is_wrapping or value.is_wrapping
    return Pages(caches[0], caches[1], key.table, wraps, bounds)


def _are_alike(first: Operand, second: Operand) -> bool:
    """Whether two tables hold the same numbers: one node, or the same computation twice."""
    pairs: dict[tuple[Node, Node], None] = {}
    if first.layout != second.layout or not _same_value(first.node, second.node, pairs):
        return False
    if not pairs:
        return True
    # What is written between any two steps may have been read by one of them alone.
    steps = sorted({step for pair in pairs for step in pair})
    node = steps[0]
    while node is not steps[-1]:
        node = node.next
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and (schema is None or schema.is_mutable):
            return False
    return True


def _same_value(first: object, second: object, pairs: dict[tuple[Node, Node], None]) -> bool:
    """Whether two arguments are equal, or nodes that compute the same from the same.

    Pairs of different nodes that do are added to `pairs`.
    """
    if not isinstance(first, Node) or not isinstance(second, Node):
        if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
            return len(first) == len(second) and all(
                _same_value(*each, pairs) for each in zip(first, second, strict=True)
            )
        # 1 is not True, and 0.0 is not -0.0.
        return type(first) is type(second) and repr(first) == repr(second)
    if first is second or (first, second) in pairs:
        return True
    if first.target is not second.target or not isinstance(first.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in first.target.tags or first.is_impure():
        return False
    pairs[first, second] = None
    keywords = first.kwargs.keys() == second.kwargs.keys() and all(
        _same_value(value, second.kwargs[name], pairs) for name, value in first.kwargs.items()
    )
    return keywords and _same_value(first.args, second.args, pairs)


def _bounds(attention: Attention, mask: Mask | ComputedMask | None) -> tuple[Bound, ...] | None:
    """What hides keys, unless a row without a live key would differ from what the kernel gives."""
    if mask is None:
        return ()
    if mask.fill == -math.inf:
        is_same = attention.masked_row == "zero"
    else:
        is_known = mask.fill >= SHIFT or mask.fill <= DROWNING
        # What takes the place of a logit hides a NaN in K, with which the kernel multiplies.
        is_same = is_known and attention.sinks is None and not mask.replaces
    return read_bounds(attention, mask) if is_same else None


def _gather_behind(operand: Operand) -> _Gather | None:
    """The gather that K or V is a rearrangement of."""
    *_, first = origins(operand)
    found = _gather_at(first)
    if found is None:
        return None
    for axis in ("head", "dim"):
        if found.cache.layout.of_axis(axis) != operand.layout.of_axis(axis):
            return None
    table = furthest(
        found.table,
        lambda origin: (
            origin.layout.keeps(found.table.layout, ("batch", "key"))
            and origin.layout.of_axis("key") == found.table.layout.of_axis("key")
            and readable(origin, "batch", "key")
        ),
    )
    axes = {factor.axis for factor in table.layout.factors}
    if not axes <= {"batch", "key"} or not readable(table, "batch", "key"):
        return None
    whole = operand.layout.of_axis("batch")
    if table.layout.of_axis("batch") not in (whole, ()) or found.cache.layout.of_axis("batch"):
        return None
    # Each key is one slot of one page: none is repeated, and no slot has pages of its own.
    keys = Layout((table.layout.of_axis("key"), found.cache.layout.of_axis("key")))
    if keys.of_axis("key") != operand.layout.of_axis("key"):
        return None
    return _Gather(found.cache, table, found.is_wrapping)


def _gather_at(operand: Operand) -> _Gather | None:
    """The gather that `operand.node` is."""
    node, layout = operand.node, operand.layout
    if node.op != "call_function" or not has_tensor(node):
        return None
    if node.target in _BY_TENSORS:
        return _by_tensors(node, layout)
    if node.target is aten.index_select.default:
        cache, dim, index = cast(Any, node.args)
        return _split(cache, index, dim % len(shape(cache)), layout, False)
    if node.target is aten.embedding.default:
        return _split(cast(Node, node.args[0]), cast(Node, node.args[1]), 0, layout, False)
    if node.target is aten.gather.default and not arguments(node)["sparse_grad"]:
        return _element_wise(node, layout)
    return None


def _by_tensors(node: Node, layout: Layout) -> _Gather | None:
    cache, indices = cast(Any, node.args)
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or not has_tensor(given[0][1]):
        return None
    ((dim, index),) = given
    return _split(cache, index, dim, layout, True)


def _split(cache: Node, index: Node, dim: int, layout: Layout, wraps: bool) -> _Gather | None:
    """Divide the dimensions of a gather between the cache, of which one is indexed, and table."""
    end = dim + len(shape(index))
    page = _page(cache, dim)
    around = (*layout.dims[:dim], page, *layout.dims[end:])
    return _gather(cache, Layout(around), index, Layout(layout.dims[dim:end]), wraps)


def _element_wise(node: Node, layout: Layout) -> _Gather | None:
    """`torch.gather`, whose table has been expanded over heads and dim."""
    cache, dim, index = cast(Any, node.args[:3])
    dim %= len(shape(cache))
    own = list(layout.dims)
    own[dim] = _page(cache, dim)
    shared = _without(Operand(cache, Layout(tuple(own))), "batch")
    table = _without(Operand(index, layout), "head", "dim")
    if shared is None or table is None:
        return None
    for place, (size, taken) in enumerate(zip(shape(cache), shape(index), strict=True)):
        # Along the other dimensions `gather` may take a part of the cache.
        if place != dim and not same(size, taken):
            return None
    return _gather(shared.node, shared.layout, table.node, table.layout, False)


def _without(operand: Operand, *axes: str) -> Operand | None:
    """The latest value behind `operand` that is the same all along the named axes."""
    for origin in origins(operand):
        if not any(factor.axis in axes for factor in origin.layout.factors):
            return origin
    return None


def _page(cache: Node, dim: int) -> Dim:
    return Layout.of((("page", shape(cache)[dim], 1),)).dims[0]


def _gather(cache: Node, around: Layout, index: Node, own: Layout, wraps: bool) -> _Gather | None:
    if tensor(index).dtype not in _INDICES or tensor(index).device != tensor(cache).device:
        return None
    return _Gather(Operand(cache, around), Operand(index, own), wraps)


def _cache(gather: _Gather) -> Cache | None:
    """The cache as pages, if that is a view of it."""
    layout = gather.cache.layout
    inner = layout.of_axis("key")
    if inner not in ((), (Factor("key", inner[0].size, 1) if inner else None,)):
        return None
    dims = (layout.of_axis("page"), inner, layout.of_axis("head"), layout.of_axis("dim"))
    view = convert(layout, Layout(dims))
    if view is None or not _is_view(gather.cache.node, view):
        return None
    return Cache(gather.cache, view)


def _of_cache(gather: _Gather, axis: str) -> Dim:
    return gather.cache.layout.of_axis(axis)


def _is_view(node: Node, conversion: Conversion) -> bool:
    """Whether a conversion copies nothing."""
    if not all(isinstance(size, int) for size in shape(node)):
        return False
    value = tensor(node)
    try:
        if conversion.split is not None:
            value = value.view(cast(Any, conversion.split))
        if conversion.order is not None:
            value = value.permute(conversion.order)
        if conversion.shape is not None:
            value.view(cast(Any, conversion.shape))
    except (RuntimeError, ValueError):
        return False
    return True
