"""What a fusion saves: bytes read and kernels launched in one step, before and after."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fusion_pass.launch import LaunchConfig, Operand, fills, scratch_sizes
from fusion_pass.patterns import ComputedMask, GatedAttention
from fusion_pass.patterns.layout import Size
from fusion_pass.patterns.trace import shape, source, tensor

_COPIES = (
    torch.ops.aten.clone.default,
    torch.ops.aten.index.Tensor,
    torch.ops.aten.repeat.default,
)
_OPERATORS_OF_SPELLED_OUT = 3
_FLOAT32 = 4


@dataclass(frozen=True)
class KernelPlan:
    """The kernels that stand for one fused attention, and what they save in one step.

    The counts are of the traced graph, not measured: an attention operator counts as one launch,
    an attention that is spelled out as three, and each copy of K or V as one; bytes are those of
    every operand that a launch reads, in full. The fused kernels read less where a mask hides whole
    tiles.

    Attributes:
        config: tile sizes, splits, warps and stages.
        bytes_before, bytes_after: read in one step; None where a size is symbolic.
        launches_before, launches_after: kernels launched in one step.
    """

    config: dict[str, Any]
    bytes_before: int | None
    bytes_after: int | None
    launches_before: int
    launches_after: int

    @property
    def launches_saved(self) -> int:
        return self.launches_before - self.launches_after


def kernel_plan(match: GatedAttention, config: LaunchConfig) -> KernelPlan:
    """What `config` for `match` is, and what it saves."""
    copies = _copies(match)
    attention = _OPERATORS_OF_SPELLED_OUT if match.attention.producer == "decomposed" else 1
    scratch = _scratch(match, config)
    return KernelPlan(
        config=dict(vars(config)),
        bytes_before=_bytes_before(match, copies),
        bytes_after=_bytes_after(match, scratch),
        launches_before=len(copies) + attention + 1,
        launches_after=2 if scratch else 1,
    )


def _copies(match: GatedAttention) -> list[tuple[Node, Node]]:
    """Every copy of K or V that the fusion does without, as (what is read, what is written)."""
    found: list[tuple[Node, Node]] = []
    ends = (
        (match.attention.key, match.key_value.key),
        (match.attention.value, match.key_value.value),
    )
    for end, start in ends:
        node = end.node
        while node is not start.node and (origin := source(node)) is not None:
            if node.target in _COPIES:
                found.append((start.node, node))
            node = origin
    return found


def _bytes_before(match: GatedAttention, copies: list[tuple[Node, Node]]) -> int | None:
    attention = match.attention
    read = [stored for stored, _ in copies]
    read += [operand.node for operand in (attention.query, attention.key, attention.value)]
    read += match.mask.inputs if match.mask else ()
    read += [attention.result.node, match.gate.sigmoid.argument.node]
    sizes = attention.sizes
    logits = (sizes.batch, sizes.query_heads, sizes.query_tokens, sizes.kv_length)
    total = _sum(_bytes(node) for node in read)
    if attention.producer == "decomposed" and total is not None:
        # The softmax reads the logits, and the second matmul the weights.
        count = _product(logits)
        itemsize = tensor(attention.query.node).dtype.itemsize
        return None if count is None else total + 2 * count * itemsize
    return total


def _bytes_after(match: GatedAttention, scratch: list[tuple[Size, ...]]) -> int | None:
    read = [match.attention.query, match.key_value.key, match.key_value.value]
    read.append(match.gate.sigmoid.argument)
    nodes = [operand.node for operand in read] + list(match.mask.inputs if match.mask else ())
    partials = [_product((*size, _FLOAT32)) for size in scratch]
    return _sum([*map(_bytes, nodes), *partials])


def _scratch(match: GatedAttention, config: LaunchConfig) -> list[tuple[Size, ...]]:
    """Sizes of what the reduce kernel reads of every split, in float32; empty if none runs."""
    sizes, mask = match.attention.sizes, match.mask
    query = (sizes.batch, sizes.query_heads, sizes.query_tokens, sizes.head_dim)
    value = (sizes.batch, match.key_value.heads, sizes.kv_length, sizes.value_dim)
    dtype = tensor(match.attention.query.node).dtype
    fill = False
    if mask is not None:
        of = mask.dtype if isinstance(mask, ComputedMask) else tensor(mask.operand.node).dtype
        fill = fills(_operand((), of), mask.fill)
    scratch = scratch_sizes(config, _operand(query, dtype), _operand(value, dtype), fill=fill)
    return list(scratch.values())


def _operand(size: tuple[Size, ...], dtype: torch.dtype) -> Operand:
    return Operand(None, size, (), dtype)


def _bytes(node: Node) -> int | None:
    """The bytes that a tensor's elements take in memory; a dimension of stride 0 is there once."""
    value = tensor(node)
    count = _product(
        1 if step == 0 else size for size, step in zip(shape(node), value.stride(), strict=True)
    )
    return None if count is None else count * value.dtype.itemsize


def _product(sizes: Iterable[Size]) -> int | None:
    count = 1
    for size in sizes:
        if not isinstance(size, int):
            return None
        count *= size
    return count


def _sum(counts: Any) -> int | None:
    known = list(counts)
    return None if None in known else sum(known)
