"""Tracing K and V back through the repetition over query heads to what the cache holds."""

from __future__ import annotations

from dataclasses import dataclass

from .attention import Attention
from .layout import Layout, Size
from .reason import Decline, Reason
from .trace import Operand, origins, readable, shape

_AXES = ("batch", "head", "key", "dim")


@dataclass(frozen=True)
class KeyValue:
    """Where K and V really are, each head stored once.

    Attributes:
        key: axes batch, head, key, dim in any arrangement; the batch axis is absent where one K
            serves the whole batch.
        value: the same for V.
        heads: Hkv.
    """

    key: Operand
    value: Operand
    heads: int


def trace_key_value(attention: Attention) -> KeyValue | Decline:
    """K and V before any repetition; the fewest heads that both of them reach."""
    keys = _by_heads(attention, attention.key)
    values = _by_heads(attention, attention.value)
    common = sorted(keys.keys() & values.keys())
    if not common:
        key, value = attention.key.node, attention.value.node
        return Decline(
            Reason.KEY_VALUE_LAYOUT,
            f"{key.name} {list(shape(key))} and {value.name} {list(shape(value))} cannot be read "
            f"as heads that are shared by {attention.sizes.query_heads} query heads",
        )
    heads = common[0]
    return KeyValue(keys[heads], values[heads], heads)


def _by_heads(attention: Attention, operand: Operand) -> dict[int, Operand]:
    """The furthest origin of `operand` for every number of heads that one of its origins holds."""
    start = operand.layout
    found: dict[int, Operand] = {}
    for origin in reversed(list(origins(operand))):
        count = stored_heads(origin.layout, start, attention.sizes.query_heads)
        if count is not None and count not in found and readable(origin, *_AXES):
            found[count] = origin
    return found


def stored_heads(layout: Layout, start: Layout, query_heads: Size) -> int | None:
    """How many heads of K or V an origin of this layout holds; None if it cannot be read as such.

    `start` is the layout in which the attention reads it: of that an origin may lack repeated
    heads and the batch, and nothing else.
    """
    return _head_count(layout, query_heads) if _is_whole(layout, start) else None


def _head_count(layout: Layout, query_heads: Size) -> int | None:
    """The number of stored heads; None where they are not the leading digits of the query head."""
    factors = layout.of_axis("head")
    if not factors:
        return 1
    outermost = factors[0]
    if len(factors) > 1 or outermost.end != query_heads or not isinstance(outermost.size, int):
        return None
    return outermost.size


def _is_whole(layout: Layout, start: Layout) -> bool:
    """Whether every key and every dim is there, and the batch entirely or not at all."""
    whole = all(layout.of_axis(axis) == start.of_axis(axis) for axis in ("key", "dim"))
    return whole and layout.of_axis("batch") in (start.of_axis("batch"), ())
