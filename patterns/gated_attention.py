"""The pattern `attention -> sigmoid(gate) -> mul`, whatever produces and rearranges its parts."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from .attention import Attention, Mask
from .gate import Gate, find_gate
from .gather import Pages, trace_pages
from .keyvalue import KeyValue, trace_key_value
from .mask import trace_mask
from .mask_program import ComputedMask
from .paged import OpaqueAttention
from .reason import Decline
from .registry import recognise_attention


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
    return Recognition(node, attention, _match(attention))


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
