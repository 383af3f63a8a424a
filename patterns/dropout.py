"""Values that dropout thins out at random, which no fused attention does."""

from __future__ import annotations

from operator import getitem
from typing import cast

import torch
from torch.fx import Node

from .reason import Decline, Reason
from .softmax import softmax_behind
from .trace import SCALINGS, aten, behind, constant, has_tensor, scaling

# By their schemas: Inductor registers its own when it is imported, which need not be yet.
_DRAWS = ("prims::inductor_random", "aten::rand", "aten::rand_like", "aten::bernoulli")
COMPARISONS = (
    aten.gt.Scalar,
    aten.ge.Scalar,
    aten.lt.Scalar,
    aten.le.Scalar,
    aten.gt.Tensor,
    aten.ge.Tensor,
    aten.lt.Tensor,
    aten.le.Tensor,
)
_OF_DRAWS = (
    *COMPARISONS,
    *SCALINGS,
    aten.logical_not.default,
    torch.ops.prims.convert_element_type.default,
)


def dropped(node: Node) -> Decline | None:
    """The refusal of softmax weights that dropout thins out; None of anything else."""
    by: Node | None = None
    while has_tensor(node):
        origin = behind(node)
        if origin is None and scaling(node) is not None:
            origin = cast(Node, node.args[0])
        if origin is None and node.target is aten.slice.Tensor:
            # The weight of a sink, which is thinned out with the others, is cut off.
            origin = cast(Node, node.args[0])
        if origin is None and (origin := _thinned(node)) is not None:
            by = by or node
        if origin is None:
            break
        node = origin
    if by is None or softmax_behind(node) is None:
        return None
    return Decline(Reason.DROPOUT, f"{by.name} drops weights at random")


def _thinned(node: Node) -> Node | None:
    """What `node` keeps at random, and zeroes elsewhere; None if it does no such thing."""
    if node.target is aten.mul.Tensor and all(map(has_tensor, node.args)):
        first, second = cast(tuple[Node, Node], node.args)
        return second if is_random(first) else first if is_random(second) else None
    if node.target is aten.where.self and is_random(cast(Node, node.args[0])):
        chosen = [value for value in node.args[1:] if constant(value) is None]
        return cast(Node, chosen[0]) if len(chosen) == 1 and has_tensor(chosen[0]) else None
    if node.target is getitem and node.args[1] == 0:
        (call,) = node.all_input_nodes
        return cast(Node, call.args[0]) if call.target is aten.native_dropout.default else None
    return None


def is_random(node: Node) -> bool:
    """Whether a value is drawn at random: a draw, compared with a number, scaled or cast."""
    while node.target in _OF_DRAWS:
        tensors = [value for value in node.args if has_tensor(value) and constant(value) is None]
        if len(tensors) != 1:
            return False
        node = cast(Node, tensors[0])
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name in _DRAWS
