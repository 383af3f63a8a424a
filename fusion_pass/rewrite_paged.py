"""Rewriting to operators that read their caches themselves: gated forms, and reading by a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fusion_pass.insertion import GatedFormError, Inserter, erase_unused, inserting
from fusion_pass.paged import check
from fusion_pass.patterns import (
    ComputedMask,
    Conversion,
    Decline,
    GatedAttention,
    GatedOpaque,
    Layout,
    Operand,
    Pages,
    Reason,
    convert,
)
from fusion_pass.patterns.gather import DROWNING
from fusion_pass.patterns.layout import same_shape
from fusion_pass.patterns.prefix import Bound, expression_dtype
from fusion_pass.patterns.trace import has_tensor, shape, tensor
from fusion_pass.rewrite import check_result, converted, into, rounding

aten = torch.ops.aten

_ROW_AXES = ("batch", "head", "dim")


@dataclass(frozen=True)
class OpaquePlan:
    """How gate and result are brought into the gated form's shape and into the product's."""

    match: GatedOpaque
    gate: Conversion
    result: Conversion


def plan_opaque(match: GatedOpaque) -> OpaquePlan | Decline:
    """Work out the rewriting of `match` without touching the graph."""
    attention = match.attention
    gate = into(match.gate.sigmoid.argument, attention.axes, attention.result.layout)
    if gate is None:
        return Decline(
            Reason.GATE_LAYOUT, "the gate cannot be read in the dimensions of the attention output"
        )
    result = convert(attention.result.layout, match.gate.product.layout)
    if result is None:
        return Decline(
            Reason.ATTENTION_LAYOUT, "the product does not hold every element of the output once"
        )
    return OpaquePlan(match, gate, result)


def fuse_opaque(graph: Graph, plan: OpaquePlan, numerics: str) -> Node:
    """Put the gated form in the place of the product; as `rewrite.fuse` in all else."""
    match = plan.match
    attention, product = match.attention, match.gate.product.node
    modes = rounding(attention, match.gate, numerics)
    modes = {name: mode for name, mode in modes.items() if attention.takes(name)}
    gate_argument = match.gate.sigmoid.argument.node
    operands = filter(has_tensor, attention.node.all_input_nodes)
    with inserting(graph, product, *operands, gate_argument) as insert:
        gate = converted(insert, gate_argument, plan.gate)
        fused = _call_gated(insert, match, gate, modes)
        result = converted(insert, fused, plan.result)
        check_result(result, product)
    product.replace_all_uses_with(result)
    erase_unused(graph, product, attention.node)
    return fused


def _call_gated(insert: Inserter, match: GatedOpaque, gate: Node, modes: dict[str, Any]) -> Node:
    """The call of the gated form.

    Raises:
        GatedFormError: it fails under fake tensors, or its result is no gated output.
    """
    attention = match.attention
    args, keywords = attention.call(gate, **modes)
    try:
        fused = insert(attention.gated, *args, **keywords)
    except Exception as fault:
        raise GatedFormError(
            f"{attention.gated} fails under fake tensors: {type(fault).__name__}: {fault}"
        ) from fault
    if not has_tensor(fused):
        raise GatedFormError(f"{attention.gated} gives no tensor under fake tensors")
    found, product = tensor(fused), tensor(match.gate.product.node)
    sizes, expected = shape(fused), shape(attention.result.node)
    if (
        not same_shape(sizes, expected)
        or (found.dtype, found.device) != (product.dtype, product.device)
        or not found.is_contiguous()
    ):
        raise GatedFormError(
            f"{attention.gated} is {found.dtype} {list(sizes)} of strides {found.stride()} on "
            f"{found.device} under fake tensors, not {product.dtype} {list(expected)}, "
            f"contiguous, on {product.device}"
        )
    return fused


@dataclass(frozen=True)
class PagedPlan:
    """How the operands of a dense attention are brought into the paged operator's shape."""

    match: GatedAttention
    pages: Pages
    query: Conversion
    table: Conversion
    sinks: Conversion | None
    gate: Conversion
    result: Conversion


def plan_paged(match: GatedAttention) -> PagedPlan | None:
    """Work out how to read `match.pages`; None if there are none, or an operand resists it."""
    attention, pages = match.attention, match.pages
    if pages is None:
        return None
    rows = attention.result.layout
    query = into(attention.query, _ROW_AXES)
    table = into(pages.table, ("batch", "key"))
    sinks = into(attention.sinks, ("head",)) if attention.sinks else None
    gate = into(match.gate.sigmoid.argument, _ROW_AXES, rows)
    result = convert(Layout(tuple(map(rows.of_axis, _ROW_AXES))), match.gate.product.layout)
    if query is None or table is None or gate is None or result is None:
        return None
    if attention.sinks and sinks is None:
        return None
    return PagedPlan(match, pages, query, table, sinks, gate, result)


def fuse_paged(graph: Graph, plan: PagedPlan, numerics: str) -> Node:
    """Put the gated paged operator in the place of the product; as `rewrite.fuse` in all else."""
    match, pages = plan.match, plan.pages
    attention, product = match.attention, match.gate.product.node
    gate_argument = match.gate.sigmoid.argument.node
    with inserting(graph, product, attention.query.node, gate_argument) as insert:
        table = _table(insert, plan)
        sinks = attention.sinks
        fused = insert(
            torch.ops.fusion_pass.gated_paged_decode_attention.default,
            _query(insert, plan),
            converted(insert, pages.key.operand.node, pages.key.view),
            converted(insert, pages.value.operand.node, pages.value.view),
            None,
            table,
            converted(insert, gate_argument, plan.gate),
            _lengths(insert, plan),
            None,
            converted(insert, sinks.node, plan.sinks) if sinks and plan.sinks else None,
            scale=attention.scale,
            **rounding(attention, match.gate, numerics),
        )
        result = converted(insert, fused, plan.result)
        check_result(result, product)
    product.replace_all_uses_with(result)
    erase_unused(graph, product, attention.node)
    return fused


def _table(insert: Inserter, plan: PagedPlan) -> Node:
    """The block table `(B, pages of a row)`, its numbers not negative."""
    operand, pages = plan.pages.table, plan.pages.key.operand
    node = operand.node
    if plan.pages.is_wrapping:
        # Every layer has the same table: what is computed from it is shared.
        count = math.prod(factor.size for factor in pages.layout.of_axis("page"))
        node = _wrapped(insert, node, count)
    node = converted(insert, node, plan.table)
    if operand.layout.of_axis("batch"):
        return node
    return insert(aten.expand.default, node, [_batch(insert, plan), -1])


def _wrapped(insert: Inserter, numbers: Node, count: int) -> Node:
    """Page numbers of which negative ones have counted from the end.

    Those that are out of range reach the check, if there is one, and are in range if not.
    """
    if not check.is_asked_for():
        return insert.shared(aten.remainder.Scalar, numbers, count)
    is_negative = insert.shared(aten.lt.Scalar, numbers, 0)
    from_end = insert.shared(aten.add.Tensor, numbers, count)
    return insert.shared(aten.where.self, is_negative, from_end, numbers)


def _query(insert: Inserter, plan: PagedPlan) -> Node:
    """The query `(B, Hq, D)`; zero in a row that is to attend to all keys alike."""
    query = converted(insert, plan.match.attention.query.node, plan.query)
    mask = plan.match.mask
    if not plan.pages.bounds or mask is None or not -math.inf < mask.fill <= DROWNING:
        return query
    sees_keys = insert.shared(aten.gt.Scalar, _visible(insert, plan), 0)
    return insert(aten.mul.Tensor, query, insert(aten.reshape.default, sees_keys, [-1, 1, 1]))


def _lengths(insert: Inserter, plan: PagedPlan) -> Node:
    """How many keys each row of the batch attends to, `(B,)`."""
    attention, batch = plan.match.attention, _batch(insert, plan)
    device = tensor(attention.query.node).device
    length = insert.size(attention.key.node, attention.sizes.kv_length)
    if not plan.pages.bounds:
        return insert.shared(aten.full.default, [batch], length, dtype=torch.int64, device=device)
    node = _visible(insert, plan)
    mask = plan.match.mask
    if mask is not None and mask.fill != -math.inf:
        # A row whose keys are all filled alike attends to all of them.
        empty = insert.shared(aten.eq.Scalar, node, 0)
        dtype = tensor(node).dtype
        whole = insert.shared(aten.full.default, [1], length, dtype=dtype, device=device)
        node = insert.shared(aten.where.self, empty, whole, node)
    return insert(aten.expand.default, node, [batch])


def _visible(insert: Inserter, plan: PagedPlan) -> Node:
    """How many keys are within the bounds, for each row of the batch or one number for all."""
    attention = plan.match.attention
    device = tensor(attention.query.node).device
    length = insert.size(attention.key.node, attention.sizes.kv_length)
    node: Node | None = None
    for bound in plan.pages.bounds:
        # Before one is added, so that the largest integer stays large.
        number = insert.shared(aten.clamp_max.default, _number(insert, bound, device), length)
        if bound.is_inclusive:
            number = insert.shared(aten.add.Tensor, number, 1)
        node = insert.shared(aten.minimum.default, node, number) if node else number
    assert node is not None
    node = insert.shared(aten.clamp_max.default, node, length)
    return insert.shared(aten.clamp_min.default, node, 0)


def _number(insert: Inserter, bound: Bound, device: torch.device) -> Node:
    """A bound as one number for each row of the batch, or one for all, in one dimension."""
    number = bound.number
    if isinstance(number, int):
        return insert.shared(aten.full.default, [1], number, dtype=torch.int64, device=device)
    if isinstance(number, Operand):
        rows = into(number, ("batch",))
        if rows is None:
            raise AssertionError(f"{number.node.name} has no number for each row")
        return converted(insert, number.node, rows)
    dtype = expression_dtype(number)
    assert dtype is not None
    node = ComputedMask(number, dtype, device).emit(insert.shared)
    return insert.shared(aten.reshape.default, node, [-1])


def _batch(insert: Inserter, plan: PagedPlan) -> int | Node:
    attention = plan.match.attention
    return insert.size(attention.query.node, attention.sizes.batch)
