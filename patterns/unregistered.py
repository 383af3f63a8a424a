"""Operators that nobody registered, where an attention with a gate would stand."""

from __future__ import annotations

import itertools
from operator import getitem

import torch
from torch.fx import Graph, Node

from .registry import may_be_attention
from .sigmoid import sigmoid_behind
from .trace import Operand, aten, has_tensor, own_layout, recast, source

# torch's own have no hidden attention, and fusion_pass knows its own.
_KNOWN = ("aten", "prims", "prim", "fusion_pass", "higher_order", "_c10d_functional")


def unregistered(graph: Graph) -> list[str]:
    """Names of the operators whose result is multiplied by a sigmoid, each once."""
    names: dict[str, None] = {}
    for product in graph.find_nodes(op="call_function", target=aten.mul.Tensor, sort=False):
        for value, factor in itertools.permutations(filter(has_tensor, product.args), 2):
            producer = _producer(value)
            if _is_unknown(producer) and _is_sigmoid(factor):
                names[str(producer.target)] = None
    return list(names)


def _producer(node: Node) -> Node:
    """What computes the elements that `node` rearranges, casts or takes out of several results."""
    while True:
        origin = source(node) or recast(node)
        if node.target is getitem:
            origin = node.all_input_nodes[0]
        if origin is None:
            return node
        node = origin


def _is_unknown(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or may_be_attention(node):
        return False
    return node.target.namespace not in _KNOWN


def _is_sigmoid(node: Node) -> bool:
    return sigmoid_behind(Operand(node, own_layout(node))) is not None
