"""The pattern `attention -> sigmoid(gate) -> mul`, whatever produces and rearranges its parts."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from .attention import Attention, Mask
from .gate import Gate, find_gate
from .gather import Pages, trace_pages
from .keyvalue import KeyValue, trace_key_value
from .layout import covers
from .mask import trace_mask
from .mask_program import ComputedMask
from .paged import OpaqueAttention
from .reason import Decline, Reason
from .registry import recognise_attention
from .trace import shape


@dataclass(frozen=True)
class GatedAttention:
    """One whole match: everything between the stored K and V and the gated product.

    `pages` is where K and V are gathered from, if they are and can be read there.
    """

    attention: Attention
    key_value: KeyValue
    mask: Mask | ComputedMask | None
    gate: Gate
    pages: Pages | None = None


@dataclass(frozen=True)
class GatedOpaque:
    """A match whose operator has a gated form: what it computes inside is not read."""

    attention: OpaqueAttention
    gate: Gate


@dataclass(frozen=True)
class Recognition:
    """What was made of one attention node.

    Attributes:
        node: the producer.
        attention: how it was read; None if it could not be.
        outcome: the match, or why there is none.
    """

    node: Node
    attention: Attention | OpaqueAttention | None
    outcome: GatedAttention | GatedOpaque | Decline


def recognise(node: Node) -> Recognition | None:
    """The gated attention around `node`, or why it is none; None if `node` is no attention."""
    attention = recognise_attention(node)
    if attention is None:
        return None
    if isinstance(attention, Decline):
        return Recognition(node, None, attention)
    if isinstance(attention, Attention) and (refusal := _misread(attention)):
        return Recognition(node, attention, refusal)
    return Recognition(node, attention, _match(attention))


def _misread(attention: Attention) -> Decline | None:
    """Why the operands are not those of an attention of its sizes, whoever read them.

    A value that is the same all along an axis may lack it, and then holds less than is read.
    """
    rows = ("batch", "head", "query")
    needed = {
        "query": (attention.query, (*rows, "dim")),
        "key": (attention.key, ("key", "dim")),
        "value": (attention.value, ("key", "value_dim")),
        "output": (attention.result, (*rows, "value_dim")),
    }
    for role, (operand, axes) in needed.items():
        whole = attention.sizes.layout(*axes)
        for axis in (name.removeprefix("value_") for name in axes):
            if not covers(operand.layout.of_axis(axis), whole.of_axis(axis)):
                return Decline(
                    Reason.ATTENTION_LAYOUT,
                    f"the {role} {operand.node.name} {list(shape(operand.node))} does not have "
                    f"the axis {axis} of the attention",
                )
    return None


def _match(attention: Attention | OpaqueAttention) -> GatedAttention | GatedOpaque | Decline:
    gate = find_gate(attention)
    if isinstance(gate, Decline):
        return gate
    if isinstance(attention, OpaqueAttention):
        return GatedOpaque(attention, gate)
    key_value = trace_key_value(attention)
    if isinstance(key_value, Decline):
        return key_value
    mask = trace_mask(attention)
    pages = trace_pages(attention, key_value, mask)
    return GatedAttention(attention, key_value, mask, gate, pages)
