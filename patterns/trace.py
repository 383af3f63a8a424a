"""Following a value through the nodes that only rearrange it."""

from __future__ import annotations

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
_RESHAPES = {
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
}
_REARRANGEMENTS = {
    *_RESHAPES,
    aten.permute.default,
    aten.transpose.int,
    aten.slice.Tensor,
    aten.expand.default,
    CAST,
}


@dataclass(frozen=True)
class Operand:
    """A node together with what each of its dimensions means."""

    node: Node
    layout: Layout


def tensor(node: Node) -> torch.Tensor:
    """The fake tensor of a node whose value is one tensor."""
    return cast(torch.Tensor, node.meta["val"])


def has_tensor(node: object) -> bool:
    """Whether `node` is a graph node whose value is one tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def shape(node: Node) -> tuple[Size, ...]:
    """The shape of a node's tensor; symbolic sizes as expressions."""
    return tuple(map(as_size, tensor(node).shape))


def as_size(size: int | torch.SymInt) -> Size:
    """A size without its power to add guards."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_Integer else expression


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operator call by name, defaults filled in."""
    schema = cast(torch._ops.OpOverload, node.target)._schema
    bound: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args):
            bound[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound


def source(node: Node) -> Node | None:
    """The input whose elements `node` rearranges or repeats; None if it does more than that."""
    if node.op != "call_function" or node.target not in _REARRANGEMENTS:
        return None
    origin = node.args[0] if node.args else None
    if not has_tensor(node) or not has_tensor(origin):
        return None
    if _order(node) or _keeps_order(node) or node.target is aten.expand.default:
        return cast(Node, origin)
    return None


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


def _keeps_order(node: Node) -> bool:
    if node.target in _RESHAPES:
        return True
    if node.target is CAST:
        return tensor(node).dtype is tensor(cast(Node, node.args[0])).dtype
    # A slice or an expansion that selects everything.
    if node.target in (aten.slice.Tensor, aten.expand.default):
        whole = same_shape(shape(node), shape(cast(Node, node.args[0])))
        return whole and arguments(node).get("step", 1) == 1
    return False


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
