"""Recognisers of PyTorch's fused attention operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem

import torch
from torch.fx import Node

from .attention import Attention
from .layout import same
from .operands import LOWEST_BIAS, read_attention
from .reason import Decline, Reason
from .trace import arguments, aten, has_tensor


@dataclass(frozen=True)
class _Producer:
    """How to read one fused attention operator whose first result is the output."""

    name: str
    target: torch._ops.OpOverload
    mask: str | None
    lowest_bias: float


# Measured on an H200 (torch 2.11): the CUDA producers multiply the biased logits by log2(e), so
# that finfo.min overflows to -inf and a row of it gives zeros; the CPU's gives the mean of V.
LOWEST_IN_BASE_2 = LOWEST_BIAS / math.log2(math.e)

_PRODUCERS = (
    _Producer(
        "cudnn",
        aten._scaled_dot_product_cudnn_attention.default,
        "attn_bias",
        LOWEST_IN_BASE_2,
    ),
    _Producer("flash", aten._scaled_dot_product_flash_attention.default, None, LOWEST_IN_BASE_2),
    _Producer(
        "efficient",
        aten._scaled_dot_product_efficient_attention.default,
        "attn_bias",
        LOWEST_IN_BASE_2,
    ),
    _Producer(
        "cpu-flash",
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        "attn_mask",
        LOWEST_BIAS,
    ),
)


def _recogniser(producer: _Producer) -> Callable[[Node], Attention | Decline]:
    def recognise(node: Node) -> Attention | Decline:
        call = arguments(node)
        output = first_result(node)
        if call["dropout_p"] != 0.0:
            return Decline(Reason.DROPOUT, f"dropout_p is {call['dropout_p']}")
        if isinstance(output, Decline):
            return output
        found = read_attention(
            node,
            producer.name,
            query=call["query"],
            key=call["key"],
            value=call["value"],
            output=output,
            mask=call[producer.mask] if producer.mask else None,
            is_causal=call["is_causal"],
            scale=call["scale"],
            lowest_bias=producer.lowest_bias,
        )
        return _refuse_causal(producer, found) or found

    return recognise


def _refuse_causal(producer: _Producer, found: Attention | Decline) -> Decline | None:
    """Whether `is_causal` may not mean that query token `i` sees the keys `0` to `i`."""
    if isinstance(found, Decline) or not found.is_causal:
        return None
    square = same(found.sizes.query_tokens, found.sizes.kv_length)
    if square or producer.target is not aten._scaled_dot_product_flash_attention.default:
        return None
    # The flash kernel itself counts from the right; SDPA gives it equally many tokens alone.
    return Decline(
        Reason.CAUSAL,
        "flash attention with is_causal=True and fewer query tokens than keys; pass a mask instead",
    )


def first_result(node: Node) -> Node | Decline:
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


FUSED = {producer.target: _recogniser(producer) for producer in _PRODUCERS}
"""A recogniser for each fused operator."""
