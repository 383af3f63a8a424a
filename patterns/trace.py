"""Following a value through the nodes that only rearrange it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Node

from .layout import Layout, Size, convert, same, same_shape

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SCALINGS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)

# All of these keep the row-major order of the elements: only the shape of their result counts.
_RESHAPES = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
)


@dataclass(frozen=True)
class Operand:
    """A node together with what each of its dimensions means."""

    node: Node
    layout: Layout


def tensor(node: Node) -> torch.Tensor:
    """The fake tensor of a node whose value is one tensor."""
    value: torch.Tensor = node.meta["val"]
    return value


def has_tensor(node: object) -> bool:
    """Whether `node` is a graph node whose value is one tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def shape(node: Node) -> tuple[Size, ...]:
    """The shape of a node's tensor; symbolic sizes as expressions."""
    sizes = node.meta["val"].shape
    return tuple([size if isinstance(size, int) else as_size(size) for size in sizes])


def as_size(size: int | torch.SymInt) -> Size:
    """A size without its power to add guards."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_Integer else expression


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operator call by name, defaults filled in."""
    bound: dict[str, Any] = {}
    for position, (name, default) in enumerate(_parameters(node.target)):
        if position < len(node.args):
            bound[name] = node.args[position]
        else:
            bound[name] = node.kwargs.get(name, default)
    return bound


@functools.cache
def _parameters(operator: Any) -> tuple[tuple[str, Any], ...]:
    """The names and defaults of an operator's arguments; a schema makes them anew each time."""
    return tuple((argument.name, argument.default_value) for argument in operator._schema.arguments)


def source(node: Node) -> Node | None:
    """The input whose elements `node` rearranges or repeats; None if it does more than that."""
    rearranges = _REARRANGEMENTS.get(node.target) if node.op == "call_function" else None
    if rearranges is None or not node.args:
        return None
    origin = cast(Node, node.args[0])
    if has_tensor(node) and has_tensor(origin) and rearranges(node, origin):
        return origin
    return None


def _always(node: Node, origin: Node) -> bool:
    return True


def _is_whole(node: Node, origin: Node) -> bool:
    """Whether a slice takes everything."""
    step = node.args[4] if len(node.args) > 4 else node.kwargs.get("step", 1)
    return bool(step == 1) and same_shape(shape(node), shape(origin))


def _is_same_dtype(node: Node, origin: Node) -> bool:
    return tensor(node).dtype is tensor(origin).dtype


# Whether a call of the operator rearranges or repeats its first argument, and does no more.
_REARRANGEMENTS: dict[Any, Callable[[Node, Node], bool]] = {
    **dict.fromkeys(_RESHAPES, _always),
    aten.permute.default: _always,
    aten.transpose.int: _always,
    aten.expand.default: _always,
    aten.slice.Tensor: _is_whole,
    CAST: _is_same_dtype,
}


def forward(node: Node, layout: Layout) -> Layout | None:
    """The layout of `node`'s result, given its input's; None if it does more than rearrange."""
    if source(node) is None:
        return None
    if order := _order(node):
        return layout.permute(order)
    return layout.reshape(shape(node))


def backward(node: Node, layout: Layout) -> Operand | None:
    """The input that `node` rearranges or repeats, with its layout; None if it does more."""
    origin = source(node)
    if origin is None:
        return None
    if order := _order(node):
        found: Layout | None = layout.unpermute(order)
    elif node.target is aten.expand.default:
        found = layout.shrink(shape(origin), shape(node))
    else:
        found = layout.reshape(shape(origin))
    return None if found is None else Operand(origin, found)


def follow(start: Operand, end: Node) -> Operand | None:
    """`end`, which rearranges and casts `start` and does no more, as an operand.

    None if a dimension of it straddles the factors of `start`.
    """
    path = [end]
    while path[-1] is not start.node:
        origin = behind(path[-1])
        assert origin is not None, "the caller came from the end to the start"
        path.append(origin)
    layout: Layout | None = start.layout
    for node in reversed(path[:-1]):
        if source(node) is not None and layout is not None:
            layout = forward(node, layout)
    return None if layout is None else Operand(end, layout)


def origins(operand: Operand) -> Iterator[Operand]:
    """`operand` and, one after another, the values that it is a rearrangement or repetition of."""
    current: Operand | None = operand
    while current is not None:
        yield current
        current = backward(current.node, current.layout)


def furthest(operand: Operand, accept: Callable[[Operand], bool]) -> Operand:
    """The earliest value behind `operand` that is accepted; `operand` itself always is."""
    behind = reversed(list(origins(operand)))
    return next(origin for origin in behind if origin is operand or accept(origin))


def _order(node: Node) -> tuple[int, ...] | None:
    """The permutation that a node applies to its input's dimensions, if it is one."""
    if node.target is aten.permute.default:
        rank = len(shape(node))
        return tuple(dim % rank for dim in cast(list[int], node.args[1]))
    if node.target is aten.transpose.int:
        order = list(range(len(shape(node))))
        first, second = cast(int, node.args[1]), cast(int, node.args[2])
        order[first], order[second] = order[second], order[first]
        return tuple(order)
    return None


def constant(value: object) -> float | None:
    """The number that `value` is or that a node holds in every element, as its dtype stores it."""
    if isinstance(value, (int, float)):
        return float(value)
    if not has_tensor(value):
        return None
    node = cast(Node, value)
    while (origin := source(node)) is not None:
        node = origin
    if node.target is not aten.full.default or not isinstance(node.args[1], (int, float)):
        return None
    return rounded(node.args[1], tensor(node).dtype)


def rounded(value: float, dtype: torch.dtype) -> float:
    """`value` as `dtype` stores it."""
    # To a cache, the zeros of both signs are one value.
    return _rounded(float(value), dtype) if value else float(value)


@functools.lru_cache(maxsize=1024)
def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(dtype).item())


def scaling(node: Node) -> float | None:
    """The constant that a node multiplies its first argument by."""
    if node.target not in SCALINGS or not has_tensor(node.args[0]):
        return None
    factor = constant(node.args[1])
    if factor is None or not same_shape(shape(cast(Node, node.args[0])), shape(node)):
        return None
    if node.target in (aten.div.Tensor, aten.div.Scalar):
        return 1.0 / factor if factor and "rounding_mode" not in node.kwargs else None
    return factor


def recast(node: Node) -> Node | None:
    """What `node` casts from one floating dtype to another; a cast to anything else is no cast."""
    if node.target is not CAST or not has_tensor(node.args[0]):
        return None
    origin = cast(Node, node.args[0])
    known = tensor(origin).dtype in FLOATING and tensor(node).dtype in FLOATING
    return origin if known else None


def widened(node: Node) -> Node | None:
    """What `node` is an exact cast of, to a floating dtype that holds all of its values."""
    if node.target is not CAST:
        return None
    origin = cast(Node, node.args[0])
    before, after = tensor(origin).dtype, tensor(node).dtype
    exact = before in (torch.float16, torch.bfloat16) and after in (torch.float32, torch.float64)
    return origin if exact else None


def behind(node: Node) -> Node | None:
    """What `node` rearranges or casts, and does no more to."""
    return source(node) or recast(node)


def narrows(node: Node) -> bool:
    """Whether `node` is a cast that may lose something."""
    return recast(node) is not None and widened(node) is None


def own_layout(node: Node) -> Layout:
    """A layout in which every dimension of `node` is an axis of its own."""
    return Layout.of((str(dim), size, 1) for dim, size in enumerate(shape(node)))


def readable(operand: Operand, *axes: str) -> bool:
    """Whether a value can be arranged in the named axes by sizes that it has itself.

    A size that is not known can be taken from a dimension of the value, or be what is left over;
    of a merged dimension with two of them neither can be told.
    """
    target = Layout(tuple(operand.layout.of_axis(axis) for axis in axes))
    conversion = convert(operand.layout, target)
    if conversion is None:
        return False
    own = shape(operand.node)
    for sizes in (conversion.split or (), conversion.shape or ()):
        unknown = [size for size in sizes if not isinstance(size, int)]
        if len(unknown) > 1 and not all(any(same(size, n) for n in own) for size in unknown):
            return False
    return True
