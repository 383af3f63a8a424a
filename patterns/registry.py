"""Every producer of attention that is known, by the operator that its computation ends in."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch.fx import Graph, Node

from .attention import Attention
from .decomposed import recognise_decomposed
from .fingerprint import Identity
from .flex import recognise_flex
from .fused import FUSED
from .logits import MATMULS
from .outcome import checked
from .paged import (
    OpaqueAttention,
    check_functional,
    check_gated,
    read_opaque,
    recognise_paged,
)
from .reason import Decline

Recogniser = Callable[[Node], Attention | OpaqueAttention | Decline | None]

_RECOGNISERS: dict[Any, Recogniser] = {
    **FUSED,
    **dict.fromkeys(MATMULS, recognise_decomposed),
    torch.ops.higher_order.flex_attention: recognise_flex,
    torch.ops.fusion_pass.paged_decode_attention.default: recognise_paged,
}
_ADAPTERS: dict[torch._ops.OpOverload, Identity | str] = {}


def may_be_attention(node: Node) -> bool:
    """Whether `node` calls an operator that some producer of attention ends in."""
    return node.op == "call_function" and node.target in _RECOGNISERS


def candidates(graph: Graph) -> list[Node]:
    """The nodes of `graph` that may be attention, in its order."""
    calls = (graph.find_nodes(op="call_function", target=op, sort=False) for op in _RECOGNISERS)
    return sorted(itertools.chain.from_iterable(calls))


def recognise_attention(node: Node) -> Attention | OpaqueAttention | Decline | None:
    """The attention that `node` produces, why it is not understood, or None if it is none.

    Raises:
        TypeError: the adapter of its operator returned something else.
        ValueError: it returned what cannot be.
    """
    if not may_be_attention(node):
        return None
    found = _RECOGNISERS[node.target](node)
    return checked(node, found) if node.target in _ADAPTERS else found


def register_attention(
    op: torch._ops.OpOverload,
    adapter: Recogniser | None = None,
    *,
    gated: torch._ops.OpOverload | None = None,
) -> None:
    """Make an operator of one's own known as a producer of attention.

    Give one of `adapter` and `gated`. An adapter says what the operator computes, and the kernels
    of fusion_pass take its place. `gated` is the engine's own operator that computes the same and
    gates it: nothing need be known then of caches, masks or lengths. It has

    * every argument of `op` under the same name, of its type or a wider one, and one more, the
      `Tensor gate`: before the sigmoid, broadcastable to the result, with any strides and in
      bfloat16, float16 or float32;
    * no others but with defaults, except `str numerics`, `ScalarType? sigmoid_dtype` and
      `ScalarType? dtype`. With these it is told how to round, as
      `fusion_pass::gated_decode_attention` is. Without `numerics` it is taken to round as
      "compiled", `T(T(o) * sigmoid_fp32(g))`, and calls for another rounding are left alone;
    * one result, of the shape and dtype of `op`'s output (or of `dtype`), contiguous.

    Both operators must be functional and have fake implementations, under which the results of
    the gated form are checked before the graph is changed. `op` may return several tensors, the
    output first, as long as a graph uses no other.

    Args:
        op: the operator overload, such as `torch.ops.engine.attention.default`.
        adapter: given a node that calls `op`, returns what it computes (see `read_attention`, and
            `read_opaque` for a gated form that depends on the call), a `Decline` that says why it
            cannot be replaced, or None if it is no attention. It must not change the graph. While
            one is registered that is bound to an object, as a method is, Inductor caches no graph.
        gated: the operator overload that computes `op(...) * sigmoid(gate)`.

    Registering again replaces what was registered.

    Raises:
        TypeError: `op` or `gated` is no operator overload, `adapter` cannot be called, or not
            exactly one of the two is given.
        ValueError: fusion_pass reads `op` itself, `op` writes to its arguments, or `gated` cannot
            be called in its place.
    """
    if not isinstance(op, torch._ops.OpOverload):
        raise TypeError(f"{op} is no operator overload; give one such as torch.ops.lib.op.default")
    if (adapter is None) == (gated is None):
        raise TypeError(f"give either an adapter for {op} or its gated form")
    if op in _RECOGNISERS and op not in _ADAPTERS:
        raise ValueError(f"{op} is read by fusion_pass itself")
    check_functional(op)
    if gated is not None:
        form = check_gated(op, gated)
        _RECOGNISERS[op] = lambda node: read_opaque(node, str(op), form)
        _ADAPTERS[op] = f"{form}{form._schema}"
        return
    if adapter is None or not callable(adapter):
        raise TypeError(f"the adapter of {op} must be callable, not {adapter!r}")
    identity = Identity(adapter)
    _RECOGNISERS[op] = adapter
    _ADAPTERS[op] = identity


def adapters() -> tuple[tuple[str, str | None], ...]:
    """The registered operators, and for cache keys what is known of each one's adapter by now.

    None stands for an adapter that depends on what cannot be known.
    """
    found = (
        (str(op), known.fingerprint() if isinstance(known, Identity) else known)
        for op, known in _ADAPTERS.items()
    )
    return tuple(sorted(found, key=itemgetter(0)))
