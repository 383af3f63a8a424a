"""Every producer of attention that is known, by the operator that its computation ends in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from .attention import Attention
from .decomposed import recognise_decomposed
from .fused import FUSED
from .logits import MATMULS
from .reason import Decline

Recogniser = Callable[[Node], Attention | Decline | None]

_RECOGNISERS: dict[Any, Recogniser] = {
    **FUSED,
    **dict.fromkeys(MATMULS, recognise_decomposed),
}


def may_be_attention(node: Node) -> bool:
    """Whether `node` calls an operator that some producer of attention ends in."""
    return node.op == "call_function" and node.target in _RECOGNISERS


def recognise_attention(node: Node) -> Attention | Decline | None:
    """The attention that `node` produces, why it is not understood, or None if it is none."""
    return _RECOGNISERS[node.target](node) if may_be_attention(node) else None
