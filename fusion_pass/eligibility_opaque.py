"""Whether an operator may be replaced that reads caches itself, or a gather by a table's reader."""

from __future__ import annotations

from collections.abc import Callable

from fusion_pass.guards import Context, numerics, strides, unasked_device
from fusion_pass.patterns import Decline, GatedAttention, GatedOpaque, Pages, Reason
from fusion_pass.patterns.trace import tensor


def check_opaque(match: GatedOpaque, context: Context) -> Decline | None:
    """The first reason why the gated form cannot take the place of `match`, or None."""
    for guard in _GUARDS:
        if refusal := guard(match, context):
            return refusal
    return None


def readable_pages(match: GatedAttention, context: Context) -> Pages | None:
    """Where K and V are gathered from, if all of it is still there at the gated product."""
    pages, product = match.pages, match.gate.product.node
    if pages is None:
        return None
    bounds = [node for bound in pages.bounds for node in bound.inputs]
    device = tensor(match.attention.query.node).device
    for node in (*pages.inputs, *bounds):
        if tensor(node).device != device or context.mutated_before(node, product):
            return None
    return pages


def _device(match: GatedOpaque, context: Context) -> Decline | None:
    device = tensor(match.attention.result.node).device
    gate = match.gate.sigmoid.argument.node
    if tensor(gate).device != device:
        return Decline(Reason.MIXED_DEVICES, f"{gate.name} is not on {device}, as the output is")
    return unasked_device(device, context)


def _gated_form(match: GatedOpaque, context: Context) -> Decline | None:
    """The gated form must round as the graph does."""
    attention, sigmoid = match.attention, match.gate.sigmoid
    own, product = tensor(attention.result.node).dtype, tensor(match.gate.product.node).dtype
    if product is not own and not attention.takes("dtype"):
        return Decline(
            Reason.GATE_DTYPE,
            f"the product is {product}; {attention.gated} gives {own} and takes no `dtype`",
        )
    is_cast = sigmoid.dtype is not tensor(sigmoid.argument.node).dtype
    asked = ["numerics"] if context.numerics != "compiled" else []
    asked += ["sigmoid_dtype"] if context.numerics == "eager" and is_cast else []
    for name in asked:
        if not attention.takes(name):
            return Decline(
                Reason.NUMERICS,
                f'{attention.gated} takes no `{name}`, and the numerics are "{context.numerics}"',
            )
    return None


def _mutation(match: GatedOpaque, context: Context) -> Decline | None:
    attention, product = match.attention, match.gate.product.node
    gate = match.gate.sigmoid.argument.node
    # What the operator reads is read later than before, from its own place on.
    reads = [(gate, None), *((operand, attention.node) for operand in attention.inputs)]
    for operand, since in reads:
        if context.mutated_before(operand, product, since):
            return Decline(
                Reason.MUTATION, f"{operand.name} is written in place before the gated product"
            )
    return None


_GUARDS: tuple[Callable[[GatedOpaque, Context], Decline | None], ...] = (
    _device,
    numerics,
    _gated_form,
    strides,
    _mutation,
)
