"""Recognisers of PyTorch's fused attention operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from .attention import Attention, Mask, Sizes
from .layout import Layout, Size, differ, same
from .reason import Decline, Reason
from .trace import Operand, arguments, aten, has_tensor, shape


@dataclass(frozen=True)
class _Producer:
    """How to read one fused attention operator whose first result is the output."""

    name: str
    target: torch._ops.OpOverload
    mask: str | None
    lowest_bias: float


_LOWEST = torch.finfo(torch.float32).min
# Measured on an H200 (torch 2.11): the CUDA producers multiply the biased logits by log2(e), so
# that finfo.min overflows to -inf and a row of it gives zeros; the CPU's gives the mean of V.
_LOWEST_IN_BASE_2 = _LOWEST / math.log2(math.e)

_PRODUCERS = (
    _Producer(
        "cudnn",
        aten._scaled_dot_product_cudnn_attention.default,
        "attn_bias",
        _LOWEST_IN_BASE_2,
    ),
    _Producer("flash", aten._scaled_dot_product_flash_attention.default, None, _LOWEST_IN_BASE_2),
    _Producer(
        "efficient",
        aten._scaled_dot_product_efficient_attention.default,
        "attn_bias",
        _LOWEST_IN_BASE_2,
    ),
    _Producer(
        "cpu-flash",
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        "attn_mask",
        _LOWEST,
    ),
)


def _recogniser(producer: _Producer) -> Callable[[Node], Attention | Decline]:
    def recognise(node: Node) -> Attention | Decline:
        call = arguments(node)
        output = _first_result(node)
        if call["dropout_p"] != 0.0:
            return Decline(Reason.DROPOUT, f"dropout_p is {call['dropout_p']}")
        if isinstance(output, Decline):
            return output
        query, key, value = call["query"], call["key"], call["value"]
        sizes = _sizes(query, key, value)
        if sizes is None:
            return Decline(
                Reason.ATTENTION_LAYOUT,
                f"query, key and value of {node.name} are not (batch, heads, tokens, dim) with "
                "key and value heads that divide the query's",
            )
        if call["is_causal"] and not _is_causal_from_the_left(producer, sizes):
            return Decline(
                Reason.CAUSAL,
                "whether is_causal=True counts from the first key or from the last is not known "
                "of flash attention with fewer query tokens than keys; pass a mask instead",
            )
        scale = _scale(call["scale"], sizes.head_dim)
        if scale is None:
            return Decline(Reason.SCALE, f"the scale is {call['scale']}, not a constant")
        mask = _mask(sizes, call[producer.mask] if producer.mask else None)
        if isinstance(mask, Decline):
            return mask
        return Attention(
            node=node,
            producer=producer.name,
            sizes=sizes,
            query=Operand(query, sizes.layout("batch", "head", "query", "dim")),
            key=Operand(key, _stored(sizes, key)),
            value=Operand(value, _stored(sizes, value)),
            mask=mask,
            is_causal=call["is_causal"],
            result=Operand(output, sizes.layout("batch", "head", "query", "value_dim")),
            scale=scale,
            is_rounded=True,
            masked_row="zero",
            lowest_bias=producer.lowest_bias,
        )

    return recognise


def _is_causal_from_the_left(producer: _Producer, sizes: Sizes) -> bool:
    """Whether `is_causal` lets query token `i` see the keys `0` to `i`, as SDPA defines it."""
    # The flash kernel itself counts from the right; SDPA gives it equally many tokens alone.
    square = same(sizes.query_tokens, sizes.kv_length)
    return square or producer.target is not aten._scaled_dot_product_flash_attention.default


def _first_result(node: Node) -> Node | Decline:
    """The output, if nobody uses the softmax statistics that come with it."""
    results = {user.args[1]: user for user in node.users if user.target is getitem}
    used = [index for index in results if index != 0 and results[index].users]
    if used:
        return Decline(
            Reason.STATISTICS_USED,
            f"result {used[0]} of {node.name} (logsumexp, random state) is used as well",
        )
    if len(results) != len(node.users) or not has_tensor(results.get(0)):
        return Decline(Reason.ATTENTION_LAYOUT, f"the results of {node.name} are not taken apart")
    return results[0]


def _sizes(query: object, key: object, value: object) -> Sizes | None:
    operands = [node for node in (query, key, value) if isinstance(node, Node)]
    if not all(has_tensor(node) and len(shape(node)) == 4 for node in operands):
        return None
    (batch, heads, tokens, head_dim), (_, _, length, _), (*_, value_dim) = map(shape, operands)
    for node in operands[1:]:
        stored = shape(node)[1]
        if differ(shape(node)[0], batch) or not _divides(stored, heads):
            return None
    return Sizes(batch, heads, tokens, length, head_dim, value_dim)


def _divides(stored: Size, heads: Size) -> bool:
    known = isinstance(stored, int) and isinstance(heads, int)
    return known and stored > 0 and heads % stored == 0


def _stored(sizes: Sizes, node: Node) -> Layout:
    """The layout of K or V, whose heads may be fewer than the query's."""
    batch, heads, length, dim = shape(node)
    stride = int(sizes.query_heads) // int(heads)
    return Layout.of(
        (("batch", batch, 1), ("head", heads, stride), ("key", length, 1), ("dim", dim, 1))
    )


def _scale(given: Any, head_dim: Size) -> float | None:
    if given is None:
        return 1 / math.sqrt(head_dim) if isinstance(head_dim, int) else None
    return float(given) if isinstance(given, (int, float)) else None


def _mask(sizes: Sizes, node: Any) -> Mask | Decline | None:
    """A mask that is broadcast from the right to (B, Hq, Q, S)."""
    if node is None:
        return None
    axes = ("batch", "head", "query", "key")
    whole = (sizes.batch, sizes.query_heads, sizes.query_tokens, sizes.kv_length)
    own = shape(node) if has_tensor(node) else ()
    offset = len(whole) - len(own)
    if (
        not has_tensor(node)
        or offset < 0
        or any(
            differ(size, 1) and differ(size, full)
            for size, full in zip(own, whole[offset:], strict=True)
        )
    ):
        return Decline(
            Reason.MASK_LAYOUT,
            f"the mask {node} does not broadcast to (batch, heads, query tokens, keys)",
        )
    named = zip(axes[offset:], own, strict=True)
    return Mask(Operand(node, Layout.of((axis, size, 1) for axis, size in named)))


FUSED = {producer.target: _recogniser(producer) for producer in _PRODUCERS}
"""A recogniser for each fused operator."""
