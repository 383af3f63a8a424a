"""Values that dropout thins out at random, which no fused attention does."""

from __future__ import annotations

from typing import cast

import torch
from torch.fx import Node

from .reason import Decline, Reason
from .softmax import softmax_behind
from .trace import aten, has_tensor, recast, scaling, source

# By their schemas: Inductor registers its own when it is imported, which need not be yet.
_DRAWS = ("prims::inductor_random", "aten::rand", "aten::rand_like", "aten::bernoulli")
_OF_DRAWS = (
    aten.gt.Scalar,
    aten.ge.Scalar,
    aten.lt.Scalar,
    aten.le.Scalar,
    torch.ops.prims.convert_element_type.default,
)


def dropped(node: Node) -> Decline | None:
    """The refusal of softmax weights that dropout thins out; None of anything else."""
    while has_tensor(node):
        origin = source(node) or recast(node)
        if origin is None and scaling(node) is not None:
            origin = cast(Node, node.args[0])
        if origin is None:
            break
        node = origin
    if node.target is not aten.mul.Tensor or not all(map(has_tensor, node.args)):
        return None
    kept, weights = cast(tuple[Node, Node], node.args)
    for drawn, thinned in ((kept, weights), (weights, kept)):
        if is_random(drawn) and softmax_behind(thinned) is not None:
            return Decline(Reason.DROPOUT, f"{node.name} drops weights at random")
    return None


def is_random(node: Node) -> bool:
    """Whether a value is drawn at random: a draw, compared with a number or cast."""
    while node.target in _OF_DRAWS:
        node = cast(Node, node.args[0])
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name in _DRAWS
