"""Finding the sigmoid gate that an attention's output is multiplied by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch.fx import Node

from .activation import DROPOUT, activation_of
from .attention import Attention
from .dropout import is_random
from .layout import same_shape
from .paged import OpaqueAttention
from .reason import Decline, Reason
from .sigmoid import Sigmoid, sigmoid_behind
from .trace import (
    CAST,
    Operand,
    aten,
    forward,
    has_tensor,
    recast,
    shape,
    source,
    tensor,
    widened,
)

_FLOATING = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Gate:
    """The multiplication of an attention's output by a sigmoid.

    Attributes:
        product: the gated output, with the axes batch, query, head and dim in its own arrangement:
            the `mul` node or, where that is in float32, the cast that rounds it.
        sigmoid: the other factor; its argument has each axis present or broadcast.
    """

    product: Operand
    sigmoid: Sigmoid


def find_gate(attention: Attention | OpaqueAttention) -> Gate | Decline:
    """The gate that is the only use of an attention's output."""
    reached = _reach_product(attention)
    if isinstance(reached, Decline):
        return reached
    arriving, product = reached
    gate = _other_factor(product.node, arriving)
    if isinstance(gate, Decline):
        return gate
    layout = product.layout.shrink(shape(gate), shape(product.node))
    if layout is None:
        return Decline(
            Reason.GATE_LAYOUT,
            f"the gate {gate.name} {list(shape(gate))} does not broadcast to the attention output "
            f"{list(shape(product.node))}",
        )
    sigmoid = sigmoid_behind(Operand(gate, layout))
    if sigmoid is None:
        return _refuse_activation(gate)
    return _refuse_dtypes(attention, product.node, sigmoid) or Gate(_rounded(product), sigmoid)


def _reach_product(attention: Attention | OpaqueAttention) -> tuple[Node, Operand] | Decline:
    """Follow the output through whatever rearranges or widens it to its multiplication."""
    current = attention.result
    while True:
        users = list(current.node.users)
        if len(users) != 1:
            return Decline(
                Reason.OUTPUT_USED,
                f"{current.node.name} has {len(users)} uses: "
                + ", ".join(f"{user.name} ({user.target})" for user in users[:4]),
            )
        user = users[0]
        if user.target is aten.mul.Tensor and has_tensor(user):
            if not same_shape(shape(user), shape(current.node)):
                return Decline(
                    Reason.GATE_LAYOUT, f"{user.name} broadcasts the output to {list(shape(user))}"
                )
            return current.node, Operand(user, current.layout)
        layout = current.layout if widened(user) is not None else forward(user, current.layout)
        if layout is None:
            return _refuse_user(user)
        current = Operand(user, layout)


def _refuse_user(user: Node) -> Decline:
    if user.op == "output":
        return Decline(Reason.LEAVES_GRAPH, "the output is a result of the graph, before any gate")
    if source(user) is not None:
        return Decline(
            Reason.ATTENTION_LAYOUT,
            f"{user.name} ({user.target}) to {list(shape(user))} cuts across batch, heads, query "
            "tokens or head_dim",
        )
    is_chosen = user.target is aten.where.self and is_random(cast(Node, user.args[0]))
    if is_chosen or user.target is aten.native_dropout.default:
        return Decline(Reason.DROPOUT, f"{user.name} drops elements of the output at random")
    return Decline(Reason.NO_GATE, f"the output goes to {user.name} ({user.target}), not to a gate")


def _other_factor(product: Node, arriving: Node) -> Node | Decline:
    others = [factor for factor in product.args if factor is not arriving]
    if not others:
        return Decline(Reason.OUTPUT_USED, f"{product.name} multiplies the output by itself")
    if not has_tensor(others[0]):
        return Decline(Reason.NOT_SIGMOID, f"the output is multiplied by {others[0]}")
    return cast(Node, others[0])


def _refuse_activation(gate: Node) -> Decline:
    found = activation_of(gate)
    while (origin := recast(gate)) is not None:
        gate = origin
    computed = gate.target if gate.op == "call_function" else "an input"
    told = f"the output is multiplied by {gate.name} ({computed})"
    if found == DROPOUT:
        return Decline(Reason.DROPOUT, f"{told}, which drops elements at random")
    named = f"the gate is {found}: " if found else ""
    return Decline(Reason.NOT_SIGMOID, f"{named}{told}, which is not a sigmoid", found)


def _rounded(product: Operand) -> Operand:
    """The cast of a float32 product to a narrower dtype, if that is its only use."""
    users = list(product.node.users)
    if tensor(product.node).dtype is not torch.float32 or len(users) != 1:
        return product
    narrow = users[0].target is CAST and tensor(users[0]).dtype in _FLOATING
    return Operand(users[0], product.layout) if narrow else product


def _refuse_dtypes(
    attention: Attention | OpaqueAttention, product: Node, sigmoid: Sigmoid
) -> Decline | None:
    """The product must be in the attention's dtype or in float32: its rounding is known."""
    own = tensor(attention.result.node).dtype
    if tensor(product).dtype not in (own, torch.float32):
        return Decline(
            Reason.GATE_DTYPE,
            f"the product is {tensor(product).dtype}, the attention output {own}",
        )
    argument = sigmoid.argument.node
    if tensor(argument).dtype in (*_FLOATING, own) and sigmoid.dtype is not None:
        return None
    return Decline(
        Reason.GATE_DTYPE,
        f"the gate {argument.name} is {tensor(argument).dtype}, or is rounded more than once",
    )
