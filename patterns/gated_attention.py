"""The pattern `attention -> sigmoid(gate) -> mul`, whatever produces and rearranges its parts."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from .attention import Attention, Mask
from .gate import Gate, find_gate
from .keyvalue import KeyValue, trace_key_value
from .mask import trace_mask
from .mask_program import ComputedMask
from .reason import Decline
from .registry import recognise_attention


@dataclass(frozen=True)
class GatedAttention:
    """One whole match: everything between the stored K and V and the gated product."""

    attention: Attention
    key_value: KeyValue
    mask: Mask | ComputedMask | None
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
    attention: Attention | None
    outcome: GatedAttention | Decline


def recognise(node: Node) -> Recognition | None:
    """The gated attention around `node`, or why it is none; None if `node` is no attention."""
    attention = recognise_attention(node)
    if attention is None:
        return None
    if isinstance(attention, Decline):
        return Recognition(node, None, attention)
    return Recognition(node, attention, _match(attention))


def _match(attention: Attention) -> GatedAttention | Decline:
    gate = find_gate(attention)
    if isinstance(gate, Decline):
        return gate
    key_value = trace_key_value(attention)
    if isinstance(key_value, Decline):
        return key_value
    return GatedAttention(attention, key_value, trace_mask(attention), gate)
