"""Recogniser of FlexAttention.

What a key is hidden by is read exactly, as compiled flex_attention computes it: it is attended to
if score_mod does not set its score to -inf, and its block is listed as full, or is listed as
partial and mask_mod is True. A block mask that hides nothing (the one that stands for None) drops
out. Any other is not assumed to agree with its mask_mod, which no graph can show where the block
mask comes from outside: its lists of blocks become part of the mask. They are taken to hold each
block at most once, as a BlockMask must.

score_mod may be the identity, a constant scale, a mask (`where`, or a sum with one) or a bias that
is looked up in a captured tensor. mask_mod and the conditions of score_mod may be any pointwise
computation with integers and booleans on the four indices, captured tensors, sizes and constants,
with lookups in captured tensors by such numbers. Everything else declines.

A row without a live key gives zeros: so do the kernels of Inductor for GPUs and for the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from .attention import Attention
from .fused import LOWEST_IN_BASE_2, first_result
from .layout import same
from .mask_program import (
    Apply,
    Axis,
    Captured,
    ComputedMask,
    Constant,
    Expression,
    Listed,
    Lookup,
)
from .operands import LOWEST_BIAS, read_attention
from .reason import Decline, Reason
from .score_mod import ScoreMod, read_score_mod
from .subgraph import Score, Unknown, captured, evaluate, result
from .trace import aten, constant, has_tensor, shape, tensor

# Options that say how to compute and not what. PRESCALE_QK and the precision only round otherwise;
# ROWS_GUARANTEED_SAFE and BLOCKS_ARE_CONTIGUOUS are promises about the mask.
_HARMLESS_OPTIONS = {
    "BACKEND",
    "BLOCKS_ARE_CONTIGUOUS",
    "BLOCK_M",
    "BLOCK_N",
    "FLOAT32_PRECISION",
    "FORCE_USE_FLEX_ATTENTION",
    "OUTPUT_LOGSUMEXP",
    "OUTPUT_MAX",
    "PARTITION_SIZE",
    "PRESCALE_QK",
    "ROWS_GUARANTEED_SAFE",
    "SPLIT_KV",
    "USE_TMA",
    "WRITE_DQ",
    "kpack",
    "matrix_instr_nonkdim",
    "num_stages",
    "num_warps",
    "waves_per_eu",
}
# What the flash backend makes of rows without a live key has not been checked.
_BACKENDS = ("AUTO", "TRITON", "TRITON_DECODE")
_WHOLE_BLOCK = 1 << 30


@dataclass(frozen=True)
class _Call:
    """The arguments of one flex_attention node."""

    query: Any
    key: Any
    value: Any
    score_mod: Any
    block_mask: Sequence[Any]
    scale: Any
    options: dict[str, Any]
    score_buffers: Sequence[Any] = ()
    mask_buffers: Sequence[Any] = ()


def recognise_flex(node: Node) -> Attention | Decline:
    """The attention that a flex_attention node computes, or why it is not understood."""
    call, output = _Call(*cast(Any, node.args), **cast(Any, node.kwargs)), first_result(node)
    if isinstance(output, Decline):
        return output
    if refusal := _refuse_options(call.options):
        return refusal
    attention = read_attention(
        node,
        "flex",
        query=call.query,
        key=call.key,
        value=call.value,
        output=output,
        scale=call.scale,
    )
    return attention if isinstance(attention, Decline) else _with_mods(attention, call)


def _refuse_options(options: dict[str, Any]) -> Decline | None:
    for name, option in options.items():
        if name.startswith("bwd_"):
            continue
        plain = name.removeprefix("fwd_")
        if plain not in _HARMLESS_OPTIONS or (plain == "BACKEND" and option not in _BACKENDS):
            return Decline(Reason.KERNEL_OPTION, f"the kernel option {name} is {option}")
    return None


def _with_mods(attention: Attention, call: _Call) -> Attention | Decline:
    axes = _axes(attention)
    score_mod = _read_score_mod(call, axes)
    if isinstance(score_mod, Decline):
        return score_mod
    visible = _visible(call, axes)
    if isinstance(visible, Decline):
        return visible
    on_cpu = tensor(attention.query.node).device.type == "cpu"
    lowest_bias = LOWEST_BIAS if on_cpu else LOWEST_IN_BASE_2
    mask = _mask(attention, score_mod, visible, lowest_bias)
    if isinstance(mask, Decline):
        return mask
    return replace(
        attention,
        mask=mask,
        scale=attention.scale * score_mod.scale,
        # On GPUs the splits of flex decoding are summed up in the kernel that gates.
        is_rounded=on_cpu,
        lowest_bias=lowest_bias,
    )


def _axes(attention: Attention) -> tuple[Axis, Axis, Axis, Axis]:
    sizes, query, key = attention.sizes, attention.query.node, attention.key.node
    return (
        Axis(0, sizes.batch, query, 0),
        Axis(1, sizes.query_heads, query, 1),
        Axis(2, sizes.query_tokens, query, 2),
        Axis(3, sizes.kv_length, key, 2),
    )


def _module(node: Any) -> GraphModule | None:
    """The subgraph that a get_attr node holds."""
    if not isinstance(node, Node) or node.op != "get_attr" or node.graph.owning_module is None:
        return None
    found = attrgetter(cast(str, node.target))(node.graph.owning_module)
    return found if isinstance(found, GraphModule) else None


def _read_score_mod(call: _Call, axes: Sequence[Axis]) -> ScoreMod | Decline:
    module = _module(call.score_mod)
    if module is None:
        return Decline(Reason.SCORE_MOD, "score_mod is not a subgraph of the graph")
    return read_score_mod(module, [Score(), *axes, *map(captured, call.score_buffers)])


def _visible(call: _Call, axes: tuple[Axis, Axis, Axis, Axis]) -> Expression | Decline:
    """Where the block mask lets a query see a key."""
    mask_mod = _read_mask_mod(call, axes)
    if isinstance(mask_mod, Decline):
        return mask_mod
    count, blocks, full_count, full_blocks = call.block_mask[2:6]
    sizes = call.block_mask[-3:-1]
    if full_count is None and _is_trivial(count, blocks, sizes):
        return mask_mod
    partial = _listed(count, blocks, axes, sizes)
    if isinstance(partial, Decline):
        return partial
    visible = partial if _is_true(mask_mod) else _both(mask_mod, partial)
    if full_count is None:
        return visible
    full = _listed(full_count, full_blocks, axes, sizes)
    if isinstance(full, Decline):
        return full
    return Apply(aten.bitwise_or.Tensor, (visible, full), (), torch.bool)


def _read_mask_mod(call: _Call, axes: Sequence[Axis]) -> Expression | Decline:
    module = _module(call.block_mask[-1])
    returned = result(module) if module is not None else None
    if module is None or returned is None:
        return Decline(Reason.MASK_MOD, "mask_mod is not a subgraph of the graph")
    value = evaluate(module, [*axes, *map(captured, call.mask_buffers)])[returned]
    if isinstance(value, Expression) and tensor(returned).dtype is torch.bool:
        return value
    culprit = value.node if isinstance(value, Unknown) else returned
    return Decline(
        Reason.MASK_MOD,
        f"{culprit.name} ({culprit.target}) in mask_mod is not understood",
    )


def _is_trivial(count: Any, blocks: Any, sizes: Sequence[Any]) -> bool:
    """Whether the block mask has one block, which is everything and is listed."""
    whole = all(size == _WHOLE_BLOCK for size in sizes)
    return whole and constant(count) == 1 and constant(blocks) == 0


def _listed(
    count: Any, blocks: Any, axes: tuple[Axis, Axis, Axis, Axis], sizes: Sequence[Any]
) -> Listed | Decline:
    readable = has_tensor(count) and has_tensor(blocks)
    readable = readable and len(shape(count)) == 3 and len(shape(blocks)) == 4
    readable = readable and all(isinstance(size, int) and size > 0 for size in sizes)
    if readable:
        for node in (count, blocks):
            for axis in axes[:2]:
                own = shape(node)[axis.dim]
                readable = readable and (same(own, 1) or same(own, axis.size))
    if not readable:
        return Decline(
            Reason.BLOCK_MASK,
            f"the lists of blocks {count} and {blocks} are not one for all, or one for each, of "
            "the batch and of the query heads",
        )
    return Listed(count, blocks, axes, *sizes)


def _mask(
    attention: Attention, score_mod: ScoreMod, visible: Expression, lowest_bias: float
) -> ComputedMask | Decline | None:
    """Everything that hides a key or is added to its logit, as one mask."""
    device = tensor(attention.query.node).device
    if score_mod.is_filled and not _is_true(visible):
        return Decline(
            Reason.MASK_FILL,
            f"score_mod fills with {score_mod.fill} what the block mask hides in part",
        )
    conditions = [*score_mod.conditions, *([] if _is_true(visible) else [visible])]
    live: Expression | None = None
    for condition in conditions:
        live = condition if live is None else _both(live, condition)
    if score_mod.bias is not None:
        return _bias(score_mod.bias, live, device)
    if live is None:
        return None
    return ComputedMask(live, torch.bool, device, _fill(score_mod, lowest_bias), score_mod.replaces)


def _bias(bias: Lookup | Captured, live: Expression | None, device: torch.device) -> ComputedMask:
    """A bias, -inf where a key is hidden."""
    dtype = tensor(bias.table if isinstance(bias, Lookup) else bias.node).dtype
    if live is None:
        return ComputedMask(bias, dtype, device)
    hidden = Constant(-math.inf, dtype)
    return ComputedMask(Apply(aten.where.self, (live, bias, hidden), (), dtype), dtype, device)


def _fill(score_mod: ScoreMod, lowest_bias: float) -> float:
    """What hidden keys get, in a row that has no other."""
    if score_mod.fill < lowest_bias:
        return -math.inf
    # A fill in place of the score makes the row uniform, whatever the fill is.
    return lowest_bias if score_mod.replaces and score_mod.is_filled else score_mod.fill


def _both(first: Expression, second: Expression) -> Expression:
    return Apply(aten.bitwise_and.Tensor, (first, second), (), torch.bool)


def _is_true(expression: Expression) -> bool:
    return isinstance(expression, Constant) and bool(expression.value)
