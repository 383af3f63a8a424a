"""Finding the sigmoid gate that an attention's output is multiplied by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch.fx import Node

from .attention import Attention
from .layout import Layout, same_shape
from .reason import Decline, Reason
from .trace import Operand, aten, forward, furthest, has_tensor, shape, source, tensor


@dataclass(frozen=True)
class Gate:
    """The multiplication of an attention's output by a sigmoid.

    Attributes:
        product: the `mul` node, with the axes batch, query, head and dim in its own arrangement.
        logits: what the sigmoid is taken of; each axis present or broadcast.
    """

    product: Operand
    logits: Operand


def find_gate(attention: Attention) -> Gate | Decline:
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
    logits = _sigmoid_argument(Operand(gate, layout))
    if logits is None:
        return Decline(
            Reason.NOT_SIGMOID,
            f"the output is multiplied by {gate.name} ({gate.target}), which is not a sigmoid",
        )
    return _refuse_dtypes(attention, product, gate, logits) or Gate(product, logits)


def _reach_product(attention: Attention) -> tuple[Node, Operand] | Decline:
    """Follow the output through whatever rearranges it to the multiplication that ends it."""
    current = attention.result
    while True:
        users = list(current.node.users)
        if len(users) != 1:
            return Decline(
                Reason.OUTPUT_USED,
                f"{current.node.name} has {len(users)} uses: "
                + ", ".join(user.name for user in users[:4]),
            )
        user = users[0]
        if user.target is aten.mul.Tensor and has_tensor(user):
            if not same_shape(shape(user), shape(current.node)):
                return Decline(
                    Reason.GATE_LAYOUT, f"{user.name} broadcasts the output to {list(shape(user))}"
                )
            return current.node, Operand(user, current.layout)
        layout = forward(user, current.layout)
        if layout is None:
            return _refuse_user(user)
        current = Operand(user, layout)


def _refuse_user(user: Node) -> Decline:
    if source(user) is not None:
        return Decline(
            Reason.ATTENTION_LAYOUT,
            f"{user.name} ({user.target}) to {list(shape(user))} cuts across batch, heads, query "
            "tokens or head_dim",
        )
    return Decline(Reason.NO_GATE, f"the output goes to {user.name} ({user.target}), not to a gate")


def _other_factor(product: Node, arriving: Node) -> Node | Decline:
    others = [factor for factor in product.args if factor is not arriving]
    if not others:
        return Decline(Reason.OUTPUT_USED, f"{product.name} multiplies the output by itself")
    if not has_tensor(others[0]):
        return Decline(Reason.NOT_SIGMOID, f"the output is multiplied by {others[0]}")
    return cast(Node, others[0])


def _sigmoid_argument(gate: Operand) -> Operand | None:
    """What the sigmoid is taken of, read as early in the graph as it can be."""
    whole = {axis: gate.layout.of_axis(axis) for axis in _AXES}

    def keeps_axes(layout: Layout) -> bool:
        return all(layout.of_axis(axis) in (whole[axis], ()) for axis in _AXES)

    sigmoid = furthest(gate, keeps_axes)
    if sigmoid.node.target is not aten.sigmoid.default:
        return None
    argument = cast(Node, sigmoid.node.args[0])
    return furthest(Operand(argument, sigmoid.layout), keeps_axes)


_AXES = ("batch", "head", "query", "dim")


def _refuse_dtypes(
    attention: Attention, product: Operand, gate: Node, logits: Operand
) -> Decline | None:
    """Every step of the gate must be in the attention's own dtype, for its rounding is known."""
    own = tensor(attention.result.node).dtype
    steps = {
        "the gate": tensor(logits.node).dtype,
        "its sigmoid": tensor(gate).dtype,
        "the product": tensor(product.node).dtype,
    }
    for name, dtype in steps.items():
        if dtype is not own:
            return Decline(Reason.GATE_DTYPE, f"{name} is {dtype}, the attention output {own}")
    return None
