"""Every producer of attention that is known, by the operator that its computation ends in."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from .attention import Attention
from .decomposed import recognise_decomposed
from .flex import recognise_flex
from .fused import FUSED
from .logits import MATMULS
from .reason import Decline

Recogniser = Callable[[Node], Attention | Decline | None]

_RECOGNISERS: dict[Any, Recogniser] = {
    **FUSED,
    **dict.fromkeys(MATMULS, recognise_decomposed),
    torch.ops.higher_order.flex_attention: recognise_flex,
}
_ADAPTERS: dict[torch._ops.OpOverload, str] = {}


def may_be_attention(node: Node) -> bool:
    """Whether `node` calls an operator that some producer of attention ends in."""
    return node.op == "call_function" and node.target in _RECOGNISERS


def recognise_attention(node: Node) -> Attention | Decline | None:
    """The attention that `node` produces, why it is not understood, or None if it is none."""
    return _RECOGNISERS[node.target](node) if may_be_attention(node) else None


def register_attention(op: torch._ops.OpOverload, adapter: Recogniser) -> None:
    """Make an operator of one's own known as a producer of attention.

    Args:
        op: the operator overload, such as `torch.ops.engine.attention.default`.
        adapter: given a node that calls `op`, returns what it computes (see `read_attention`), a
            `Decline` that says why it cannot be replaced, or None if it is no attention. It must
            not change the graph. Registering again replaces the adapter.

    Raises:
        TypeError: `op` is no operator overload, or `adapter` cannot be called.
        ValueError: fusion_pass reads `op` itself.
    """
    if not isinstance(op, torch._ops.OpOverload):
        raise TypeError(f"{op} is no operator overload; give one such as torch.ops.lib.op.default")
    if not callable(adapter):
        raise TypeError(f"the adapter of {op} must be callable, not {adapter!r}")
    if op in _RECOGNISERS and op not in _ADAPTERS:
        raise ValueError(f"{op} is read by fusion_pass itself")
    _RECOGNISERS[op] = adapter
    _ADAPTERS[op] = _fingerprint(adapter)


def adapters() -> tuple[tuple[str, str], ...]:
    """The registered operators, and a fingerprint of each one's adapter, for cache keys."""
    return tuple(sorted((str(op), fingerprint) for op, fingerprint in _ADAPTERS.items()))


def _fingerprint(adapter: Recogniser) -> str:
    """A hash of the source file that defines an adapter, or of its code where there is none."""
    try:
        path = inspect.getsourcefile(adapter)
    except TypeError:
        path = None
    digest = hashlib.sha256(getattr(adapter, "__qualname__", repr(adapter)).encode())
    if path is not None:
        with open(path, "rb") as file:
            digest.update(file.read())
    else:
        digest.update(getattr(getattr(adapter, "__code__", None), "co_code", b""))
    return digest.hexdigest()
