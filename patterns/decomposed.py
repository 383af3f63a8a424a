"""Recogniser of attention that is spelled out: matmul, scale, mask, softmax, matmul.

Both PyTorch's math path and hand-written attention look like this in the post-grad graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch.fx import Node

from .attention import Attention, Sizes
from .dropout import dropped
from .keyvalue import stored_heads
from .layout import Dim, Layout, Size
from .logits import MATMULS, Logits, trace_logits
from .reason import Decline, Reason
from .softmax import Softmax, softmax_or_origin
from .trace import (
    Operand,
    backward,
    behind,
    follow,
    forward,
    furthest,
    narrows,
    recast,
    scaling,
    shape,
    tensor,
    widened,
)

_AXES = ("batch", "head", "query", "key")
_LOWEST = torch.finfo(torch.float32).min


def recognise_decomposed(node: Node) -> Attention | Decline | None:
    """The attention whose second matmul is `node`; None if no softmax is multiplied there."""
    softmax = softmax_or_origin(cast(Node, node.args[0]))
    if isinstance(softmax, Node):
        return dropped(softmax)
    if softmax.is_rearranged:
        return Decline(
            Reason.SINKS, f"the weights change places before {softmax.node.name} drops the sink's"
        )
    if tensor(softmax.argument).dtype is torch.float64:
        # In which other numbers are finite.
        return Decline(
            Reason.LOGITS, f"the softmax before {node.name} is in float64, the kernel's in float32"
        )
    weights = _name_axes(softmax.node)
    start = Operand(softmax.node, weights) if weights else None
    arriving = follow(start, cast(Node, node.args[0])) if start else None
    argument = Operand(softmax.argument, weights) if weights else None
    logits = trace_logits(argument, softmax.scale) if argument else None
    if isinstance(logits, Decline):
        return logits
    if arriving is None or logits is None or not _is_rows_by(arriving.layout, "query", "key"):
        return _unreadable(node)
    return _assemble(node, softmax, logits, arriving.layout)


def _assemble(node: Node, softmax: Softmax, logits: Logits, weights: Layout) -> Attention | Decline:
    product = logits.product
    if not _is_rows_by(product.layout, "query", "key"):
        return _unreadable(node)
    if any(product.layout.of_axis(axis) != weights.of_axis(axis) for axis in _AXES):
        return Decline(
            Reason.LOGITS, f"the logits of {product.node.name} are repeated before the softmax"
        )
    leading = product.layout.dims[:-2]
    head_dim, value_dim = shape(cast(Node, product.node.args[0]))[-1], shape(node)[-1]
    sizes = _sizes(product.layout, head_dim, value_dim)

    def holds_query(found: Layout, start: Layout) -> bool:
        return all(found.of_axis(axis) == start.of_axis(axis) for axis in (*_AXES, "dim"))

    def holds_stored(found: Layout, start: Layout) -> bool:
        return stored_heads(found, start, sizes.query_heads) is not None

    query, query_scale = _unscaled(
        _operand(product.node.args[0], leading, ("query", "dim"), product.layout, head_dim),
        holds_query,
    )
    key, key_scale = _unscaled(
        _operand(product.node.args[1], leading, ("dim", "key"), product.layout, head_dim),
        holds_stored,
    )
    value, value_scale = _unscaled(
        _operand(node.args[1], weights.dims[:-2], ("key", "dim"), weights, value_dim),
        holds_stored,
    )
    result = _rounded_result(
        Operand(node, _matrix(weights.dims[:-2], ("query", "dim"), weights, value_dim)),
        tensor(query.node).dtype,
    )
    sinks = _sinks(softmax)
    if value_scale != 1.0 or result is None or isinstance(sinks, Decline):
        return sinks if isinstance(sinks, Decline) else _unreadable(node)
    if (leak := _used_outside(product.node, node)) is not None:
        return Decline(
            Reason.STATISTICS_USED, f"{leak.name}, inside the attention, is used elsewhere as well"
        )
    return Attention(
        node=node,
        producer="decomposed",
        sizes=sizes,
        query=query,
        key=key,
        value=value,
        mask=logits.mask,
        sinks=sinks,
        is_causal=False,
        result=result,
        scale=logits.scale * query_scale * key_scale,
        is_rounded=tensor(node).dtype is tensor(result.node).dtype,
        masked_row="zero" if softmax.is_safe else "nan",
        lowest_bias=_LOWEST,
        is_narrowed=logits.is_narrowed
        or softmax.is_narrowed
        or _are_narrowed(softmax, cast(Node, node.args[0]), tensor(value.node).dtype),
    )


def _are_narrowed(softmax: Softmax, weights: Node, dtype: torch.dtype) -> bool:
    """Whether a cast to a narrower dtype than `dtype`, to which the kernel rounds, is on the way.

    On that from the softmax to `weights`, which it reaches by casts and rearrangements.
    """
    node: Node | None = weights
    while node is not None:
        if narrows(node) and tensor(node).dtype is not dtype:
            return True
        is_cut = node is softmax.node and softmax.sink is not None
        node = cast(Node, node.args[0]) if is_cut else behind(node)
    return False


def _sinks(softmax: Softmax) -> Operand | Decline | None:
    """The sink logits, one a head; None if there are none."""
    weights = _name_axes(softmax.node)
    if softmax.sink is None or weights is None:
        return None
    start = Operand(softmax.sink, Layout((*weights.dims[:-1], ())))
    heads = weights.of_axis("head")
    found = furthest(start, lambda origin: origin.layout.of_axis("head") == heads)
    if all(factor.axis == "head" for factor in found.layout.factors):
        return found
    return Decline(Reason.SINKS, f"the sinks {found.node.name} are not one for each head")


def _unreadable(node: Node) -> Decline:
    return Decline(
        Reason.ATTENTION_LAYOUT,
        f"the matmuls around the softmax before {node.name} are not those of an attention",
    )


def _name_axes(node: Node) -> Layout | None:
    """The axes of attention weights by their rank: (batch, [kv head,] head, query, key)."""
    sizes = shape(node)
    names = {
        2: ("query", "key"),
        3: ("head", "query", "key"),
        4: ("batch", "head", "query", "key"),
    }
    if len(sizes) == 5 and isinstance(sizes[2], int):
        axes = (
            ("batch", sizes[0], 1),
            ("head", sizes[1], sizes[2]),
            ("head", sizes[2], 1),
            ("query", sizes[3], 1),
            ("key", sizes[4], 1),
        )
        return Layout.of(axes)
    if len(sizes) not in names:
        return None
    return Layout.of((name, n, 1) for name, n in zip(names[len(sizes)], sizes, strict=True))


def _is_rows_by(layout: Layout, rows: str, columns: str) -> bool:
    """Whether the last two dimensions are all of one axis each, and no other holds them."""
    *_, row, column = layout.dims
    return row == layout.of_axis(rows) and column == layout.of_axis(columns)


def _matrix(leading: tuple[Dim, ...], axes: tuple[str, str], known: Layout, new: Size) -> Layout:
    """A batch of matrices whose rows and columns are the named axes; "dim" has the size `new`."""
    dim = Layout.of((("dim", new, 1),)).dims[0]
    return Layout((*leading, *(dim if axis == "dim" else known.of_axis(axis) for axis in axes)))


def _operand(
    node: object, leading: tuple[Dim, ...], axes: tuple[str, str], known: Layout, new: Size
) -> Operand:
    return Operand(cast(Node, node), _matrix(leading, axes, known, new))


def _unscaled(operand: Operand, holds: Callable[[Layout, Layout], bool]) -> tuple[Operand, float]:
    """What `operand` is before exact casts to float32 and constant factors in float32.

    No further than something `holds` all that its own layout, the second, does: behind an expansion
    an axis may be gone.
    """
    scale, found = 1.0, operand
    current: Operand | None = operand
    while current is not None:
        node, following = current.node, backward(current.node, current.layout)
        if following is None and _is_exact(node) and holds(current.layout, operand.layout):
            scale *= scaling(node) or 1.0
            found = following = Operand(cast(Node, node.args[0]), current.layout)
        current = following
    return found, scale


def _is_exact(node: Node) -> bool:
    """Whether a node loses nothing to speak of: a wider dtype, or a constant factor in float32."""
    if widened(node) is not None:
        return True
    return tensor(node).dtype is torch.float32 and scaling(node) not in (None, 0.0)


def _rounded_result(result: Operand, dtype: torch.dtype) -> Operand | None:
    """The output in the dtype of the query, through whatever rearranges it before the cast."""
    current = result
    while tensor(current.node).dtype is not dtype:
        users = list(current.node.users)
        if len(users) != 1:
            return None
        user = users[0]
        if recast(user) is not None:
            return Operand(user, current.layout) if tensor(user).dtype is dtype else None
        layout = forward(user, current.layout)
        if layout is None:
            return None
        current = Operand(user, layout)
    return current


def _used_outside(first: Node, last: Node) -> Node | None:
    """A value between the two matmuls that something outside the attention uses."""
    inside = {first}
    for node in _between(first, last):
        if any(argument in inside for argument in node.all_input_nodes):
            inside.add(node)
    leading = _ancestors(last) & inside
    return next((node for node in leading if not set(node.users) <= leading | {last}), None)


def _between(first: Node, last: Node) -> Iterator[Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _ancestors(node: Node) -> set[Node]:
    """Everything that the first argument of `node` is computed from, back to a matmul."""
    pending, found = [cast(Node, node.args[0])], set[Node]()
    while pending:
        current = pending.pop()
        if current not in found:
            found.add(current)
            pending.extend(current.all_input_nodes if current.target not in MATMULS else ())
    return found


def _sizes(logits: Layout, head_dim: Size, value_dim: Size) -> Sizes:
    def size(axis: str) -> Size:
        return math.prod(factor.size for factor in logits.of_axis(axis))

    return Sizes(size("batch"), size("head"), size("query"), size("key"), head_dim, value_dim)
