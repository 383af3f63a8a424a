"""Naming the activation of a gate that is no sigmoid. Only reports rest on it."""

from __future__ import annotations

from operator import getitem
from typing import cast

from torch.fx import Node

from .dropout import COMPARISONS, is_random
from .trace import CAST, aten, constant, has_tensor, scaling, source

DROPOUT = "dropout"
_POINTWISE = {
    aten.abs.default,
    aten.add.Tensor,
    aten.clamp.default,
    aten.clamp_max.default,
    aten.clamp_min.default,
    aten.div.Scalar,
    aten.div.Tensor,
    aten.erf.default,
    aten.exp.default,
    aten.expm1.default,
    *COMPARISONS,
    aten.log1p.default,
    aten.maximum.default,
    aten.minimum.default,
    aten.mul.Scalar,
    aten.mul.Tensor,
    aten.neg.default,
    aten.pow.Tensor_Scalar,
    aten.reciprocal.default,
    aten.relu.default,
    aten.rsub.Scalar,
    aten.sigmoid.default,
    aten.sub.Tensor,
    aten.tanh.default,
    aten.where.self,
    CAST,
}
_REDUCTIONS = (aten.amax.default, aten.sum.dim_IntList)
_PROJECTIONS = (
    aten.addmm.default,
    aten.bmm.default,
    aten.mm.default,
    aten.slice.Tensor,
    getitem,
)
_FARTHEST = 24


def activation_of(gate: Node) -> str | None:
    """What a user calls the function that makes `gate`, such as "silu"; None if it is not known.

    "no activation" where nothing but arrangement is between a gate and the operator before it.
    """
    cone = _cone(gate)
    inside = [_plain(gate), *(before for node in cone for before in (node, *node.all_input_nodes))]
    if any(map(_drops, inside)):
        return DROPOUT
    targets = {node.target for node in cone} - {CAST}
    if not targets:
        return _of_root(_plain(gate))
    if any(before.target in _REDUCTIONS for node in cone for before in node.all_input_nodes):
        return "softmax" if aten.exp.default in targets else None
    products = (node for node in cone if node.target is aten.mul.Tensor)
    is_weighted = any(all(map(has_tensor, product.args)) for product in products)
    for name, wanted in (*_WEIGHTED, *_NAMES) if is_weighted else _NAMES:
        if wanted <= targets:
            return name
    return _of_sigmoid(cone)


# Of these the argument itself is a factor.
_WEIGHTED = (
    ("mish", {aten.log1p.default, aten.tanh.default}),
    ("gelu", {aten.erf.default}),
    ("gelu", {aten.tanh.default, aten.add.Tensor}),
    ("hardswish", {aten.clamp_min.default, aten.clamp_max.default, aten.add.Tensor}),
)
_NAMES = (
    ("logsigmoid", {aten.log1p.default, aten.minimum.default}),
    ("softplus", {aten.log1p.default}),
    ("erf with a factor or an offset", {aten.erf.default, aten.mul.Tensor}),
    ("erf with a factor or an offset", {aten.erf.default, aten.add.Tensor}),
    ("erf", {aten.erf.default}),
    ("tanhshrink", {aten.tanh.default, aten.sub.Tensor}),
    ("tanh with a factor or an offset", {aten.tanh.default, aten.mul.Tensor}),
    ("tanh with a factor or an offset", {aten.tanh.default, aten.add.Tensor}),
    ("tanh", {aten.tanh.default}),
    ("hardsigmoid", {aten.clamp_min.default, aten.clamp_max.default, aten.add.Tensor}),
    ("a clamp", {aten.clamp_min.default, aten.clamp_max.default}),
    ("elu, selu or celu", {aten.expm1.default}),
    ("relu to a power", {aten.relu.default, aten.pow.Tensor_Scalar}),
    ("relu", {aten.relu.default}),
    ("relu", {aten.clamp_min.default}),
)


def _of_root(root: Node) -> str | None:
    """What a gate is that nothing pointwise is done to."""
    if root.target is aten._softmax.default:
        return "softmax"
    if root.target is getitem and root.all_input_nodes[0].target is aten.native_dropout.default:
        return DROPOUT
    is_given = root.op in ("placeholder", "get_attr") or root.target in _PROJECTIONS
    return "no activation" if is_given else None


def _of_sigmoid(cone: list[Node]) -> str | None:
    """Whether the sigmoid in a cone, spelled out or not, is multiplied by its own argument."""
    targets = {node.target for node in cone}
    arguments = {_root(node) for node in cone if node.target is aten.sigmoid.default}
    spelled_out = {aten.exp.default, aten.neg.default} <= targets
    if spelled_out:
        arguments |= {_root(node) for node in cone if node.target is aten.neg.default}
    unscaled = {_plain(node.args[0]) for node in arguments if scaling(node) is not None}
    if not arguments:
        return "exp" if targets - {CAST} == {aten.exp.default} else None
    for node in cone:
        if node.target not in (aten.mul.Tensor, aten.div.Tensor):
            continue
        if any(factor in arguments for factor in map(_plain, node.args)):
            return "silu"
        if any(factor in unscaled for factor in map(_plain, node.args)):
            return "a silu of a scaled argument"
        if any(constant(factor) not in (None, 1.0) for factor in node.args):
            return "a sigmoid with a factor"
    return "a sigmoid with an offset" if aten.add.Tensor in targets and not spelled_out else None


def _cone(gate: Node) -> list[Node]:
    """The pointwise operators between `gate` and what it is computed from, at most _FARTHEST."""
    pending: list[Node] = [gate]
    cone: dict[Node, None] = {}
    while pending and len(cone) < _FARTHEST:
        node = pending.pop(0)
        if node in cone:
            continue
        if (origin := source(node)) is not None and node.target is not CAST:
            pending.append(origin)
        elif node.op == "call_function" and node.target in _POINTWISE:
            cone[node] = None
            pending += [cast(Node, argument) for argument in node.args if has_tensor(argument)]
    return list(cone)


def _drops(node: Node) -> bool:
    """Whether a value is zero at random, as what dropout multiplies by."""
    schema = getattr(node.target, "_schema", None)
    is_drawn = schema is not None and schema.name == "aten::bernoulli"
    return is_drawn or (node.target in COMPARISONS and is_random(node))


def _root(node: Node) -> Node:
    """What `node` reads, before casts and arrangement."""
    return _plain(node.args[0]) if node.args and has_tensor(node.args[0]) else node


def _plain(value: object) -> Node:
    node = cast(Node, value)
    while has_tensor(node):
        origin = cast(Node, node.args[0]) if node.target is CAST else source(node)
        if origin is None:
            break
        node = origin
    return node
