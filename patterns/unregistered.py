"""Operators that nobody registered, where an attention with a gate would stand."""

from __future__ import annotations

import itertools
from operator import getitem

import torch
from torch.fx import Graph, Node

from .registry import may_be_attention
from .sigmoid import sigmoid_behind
from .trace import Operand, aten, behind, has_tensor, own_layout

# How functional graphs call an operator that writes to its arguments: it is the first argument.
_FUNCTIONALISED = ("auto_functionalized", "auto_functionalized_v2")
# torch's own have no hidden attention, and fusion_pass knows its own.
_KNOWN = ("aten", "prims", "prim", "fusion_pass", "higher_order", "_c10d_functional")


def unregistered(graph: Graph) -> list[torch._ops.OpOverload]:
    """The operators whose result is multiplied by a sigmoid, each once."""
    found: dict[torch._ops.OpOverload, None] = {}
    for product in graph.find_nodes(op="call_function", target=aten.mul.Tensor, sort=False):
        for value, factor in itertools.permutations(filter(has_tensor, product.args), 2):
            operator = _unknown_operator(_producer(value))
            if operator is not None and _is_sigmoid(factor):
                found[operator] = None
    return list(found)


def _producer(node: Node) -> Node:
    """What computes the elements that `node` rearranges, casts or takes out of several results."""
    while True:
        origin = behind(node)
        if node.target is getitem:
            origin = node.all_input_nodes[0]
        if origin is None:
            return node
        node = origin


def _unknown_operator(node: Node) -> torch._ops.OpOverload | None:
    operator: object = node.target
    if isinstance(operator, torch._ops.HigherOrderOperator) and operator.name() in _FUNCTIONALISED:
        operator = node.args[0]
    if not isinstance(operator, torch._ops.OpOverload) or may_be_attention(node):
        return None
    return None if operator.namespace in _KNOWN else operator


def _is_sigmoid(node: Node) -> bool:
    return sigmoid_behind(Operand(node, own_layout(node))) is not None
