"""Replacing one matched gated attention by one node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion_pass.insertion import Inserter, MisfitError, erase_unused, inserting
from fusion_pass.patterns import (
    Attention,
    ComputedMask,
    Conversion,
    Decline,
    Gate,
    GatedAttention,
    Layout,
    Mask,
    OpaqueAttention,
    Operand,
    Reason,
    convert,
)
from fusion_pass.patterns.layout import covers, differ, same
from fusion_pass.patterns.trace import shape, tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Plan:
    """How every operand is brought into the operator's shape, and its result into the product's."""

    match: GatedAttention
    query: Conversion
    key: Conversion
    value: Conversion
    mask: Conversion | None
    sinks: Conversion | None
    gate: Conversion
    result: Conversion


def plan(match: GatedAttention) -> Plan | Decline:
    """Work out the rewriting of `match` without touching the graph."""
    attention, key_value = match.attention, match.key_value
    query = into(attention.query, _QUERY_AXES)
    if query is None:
        return Decline(
            Reason.ATTENTION_LAYOUT, "the query cannot be read as (batch, heads, tokens, dim)"
        )
    key = into(key_value.key, _STORED_AXES)
    value = into(key_value.value, _STORED_AXES)
    if key is None or value is None:
        return Decline(
            Reason.KEY_VALUE_LAYOUT, "K or V cannot be read as (batch, heads, keys, dim)"
        )
    mask = None
    if isinstance(match.mask, Mask):
        mask = into(match.mask.operand, _MASK_AXES, attention.sizes.layout(*_MASK_AXES))
        if mask is None:
            return Decline(
                Reason.MASK_LAYOUT, "the mask cannot be read as (batch, heads, query tokens, keys)"
            )
    sinks = None
    if attention.sinks is not None:
        sinks = into(attention.sinks, ("head",))
        if sinks is None:
            return Decline(Reason.SINKS, "the sinks cannot be read as (heads)")
    gate = into(match.gate.sigmoid.argument, _RESULT_AXES, attention.result.layout)
    if gate is None:
        return Decline(
            Reason.GATE_LAYOUT, "the gate cannot be read as (batch, query tokens, heads, dim)"
        )
    result = convert(_result_layout(attention), match.gate.product.layout)
    if result is None:
        return Decline(
            Reason.ATTENTION_LAYOUT, "the product does not hold every element of the output once"
        )
    return Plan(match, query, key, value, mask, sinks, gate, result)


_QUERY_AXES = ("batch", "head", "query", "dim")
_STORED_AXES = ("batch", "head", "key", "dim")
_MASK_AXES = ("batch", "head", "query", "key")
_RESULT_AXES = ("batch", "query", "head", "dim")


def into(operand: Operand, axes: tuple[str, ...], whole: Layout | None = None) -> Conversion | None:
    """How to read `operand` with one dimension an axis, of size one where it has not got the axis.

    None if it has a part of an axis; `whole` says what all of each is, if that matters.
    """
    dims = tuple(operand.layout.of_axis(axis) for axis in axes)
    if whole is not None and not all(
        not dim or covers(dim, whole.of_axis(axis)) for axis, dim in zip(axes, dims, strict=True)
    ):
        return None
    return convert(operand.layout, Layout(dims))


def _result_layout(attention: Attention) -> Layout:
    result = attention.result.layout
    return Layout(tuple(result.of_axis(axis) for axis in _RESULT_AXES))


def _masked_row(match: GatedAttention) -> str:
    """What a row without a live key gives, in the operator's terms."""
    mask = match.mask
    if mask is not None and mask.replaces and mask.fill != -torch.inf:
        return "mean"
    return match.attention.masked_row


def fuse(graph: Graph, plan: Plan, numerics: str) -> Node:
    """Put the fused operator in the place of the product and remove what nobody uses any more.

    Returns the operator's node. If anything fails the graph is as it was before, and the error is
    raised.
    """
    match = plan.match
    attention, product = match.attention, match.gate.product.node
    gate_argument = match.gate.sigmoid.argument.node
    with inserting(graph, product, attention.query.node, gate_argument) as insert:
        query = converted(insert, attention.query.node, plan.query)
        key = _stored(insert, match.key_value.key, plan.key, attention)
        value = _stored(insert, match.key_value.value, plan.value, attention)
        gate = converted(insert, gate_argument, plan.gate)
        fused = insert(
            torch.ops.fusion_pass.gated_decode_attention.default,
            query,
            key,
            value,
            gate,
            _mask(insert, plan),
            *_sinks(insert, plan),
            scale=attention.scale,
            mask_fill=match.mask.fill if match.mask else -torch.inf,
            masked_row=_masked_row(match),
            **rounding(attention, match.gate, numerics),
        )
        result = converted(insert, fused, plan.result)
        check_result(result, product)
    product.replace_all_uses_with(result)
    erase_unused(graph, product, attention.node)
    return fused


def _stored(
    insert: Inserter, operand: Operand, conversion: Conversion, attention: Attention
) -> Node:
    """K or V as `(B, Hkv, S, D)`, expanded over the batch if it is stored once for all of it."""
    node = converted(insert, operand.node, conversion)
    if operand.layout.of_axis("batch") or same(attention.sizes.batch, 1):
        return node
    batch = insert.size(attention.query.node, attention.sizes.batch)
    return insert(aten.expand.default, node, [batch, -1, -1, -1])


def _mask(insert: Inserter, plan: Plan) -> Node | None:
    """The mask as `(B|1, Hq|1, Q|1, S|1)`, True where a boolean one lets a query see a key."""
    mask, attention = plan.match.mask, plan.match.attention
    if attention.is_causal:
        return _causal_mask(insert, attention)
    if isinstance(mask, ComputedMask):
        return mask.emit(insert.shared)
    if mask is None or plan.mask is None:
        return None
    node = converted(insert, mask.operand.node, plan.mask)
    return insert(aten.logical_not.default, node) if mask.inverted else node


def _sinks(insert: Inserter, plan: Plan) -> list[Node]:
    """The sinks as `(Hq,)`, if there are any."""
    sinks = plan.match.attention.sinks
    if sinks is None or plan.sinks is None:
        return []
    return [converted(insert, sinks.node, plan.sinks)]


def _causal_mask(insert: Inserter, attention: Attention) -> Node:
    """Query token `i` sees the keys `0` to `i`."""
    device = tensor(attention.query.node).device
    query, key = (
        insert(
            torch.ops.prims.iota.default,
            size,
            start=0,
            step=1,
            dtype=torch.int64,
            device=device,
            requires_grad=False,
        )
        for size in (
            attention.sizes.query_tokens,
            insert.size(attention.key.node, attention.sizes.kv_length),
        )
    )
    visible = insert(aten.le.Tensor, key, insert(aten.unsqueeze.default, query, -1))
    return insert(aten.unsqueeze.default, insert(aten.unsqueeze.default, visible, 0), 0)


def rounding(attention: Attention | OpaqueAttention, gate: Gate, numerics: str) -> dict[str, Any]:
    """Where the gate rounds, as arguments of the operator; its defaults are left out."""
    if numerics == "compiled" and not attention.is_rounded:
        numerics = "fp32"
    modes: dict[str, Any] = {"numerics": numerics}
    if gate.sigmoid.dtype is not tensor(gate.sigmoid.argument.node).dtype:
        modes["sigmoid_dtype"] = gate.sigmoid.dtype
    own = attention.query if isinstance(attention, Attention) else attention.result
    if tensor(gate.product.node).dtype is not tensor(own.node).dtype:
        modes["dtype"] = tensor(gate.product.node).dtype
    return modes


def converted(insert: Inserter, node: Node, conversion: Conversion) -> Node:
    """`node` after a conversion."""
    if conversion.split is not None:
        node = insert(aten.reshape.default, node, insert.sizes(node, conversion.split))
    if conversion.order is not None:
        node = insert(aten.permute.default, node, list(conversion.order))
    if conversion.shape is not None:
        node = insert(aten.reshape.default, node, insert.sizes(node, conversion.shape))
    return node


def check_result(result: Node, product: Node) -> None:
    """Raise unless `result` can take the place of `product`.

    Raises:
        MisfitError: they differ in a symbolic size.
        AssertionError: they differ in anything else.
    """
    found, expected = tensor(result), tensor(product)
    sizes = list(zip(shape(result), shape(product), strict=False))
    if (
        found.dtype != expected.dtype
        or found.device != expected.device
        or found.dim() != expected.dim()
        or any(differ(*pair) for pair in sizes)
    ):
        raise AssertionError(f"{result.name} is {found}, but {product.name} is {expected}")
    if not all(same(*pair) for pair in sizes):
        raise MisfitError(f"{result.name} is {found}, but {product.name} is {expected}")
