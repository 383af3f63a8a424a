"""Recognisers of attention: every producer that reaches the post-grad graph, in one vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from .layout import Layout, Size
from .reason import Decline, Reason
from .trace import Operand, arguments, aten, has_tensor, shape


@dataclass(frozen=True)
class Attention:
    """`softmax(scale * query @ key^T + mask) @ value` as one producer computes it.

    Attributes:
        node: the producer.
        output: the node that holds the result, `(B, Hq, Q, Dv)`.
        producer: what to call it in a report.
        query: `(B, Hq, Q, D)`.
        key: `(B, Hkv, S, D)`; query head `h` attends with key head `h // (Hq // Hkv)`.
        value: `(B, Hkv, S, Dv)`.
        mask: None, or what is added to the logits (boolean: what must be True), broadcastable from
            the right to `(B, Hq, Q, S)`.
        scale: factor of the logits.
        masked_row: `"zero"` or `"nan"`, the result of a row whose logits are all -inf.
        lowest_bias: what is added to a logit counts as -inf below this.
    """

    node: Node
    output: Node
    producer: str
    query: Node
    key: Node
    value: Node
    mask: Node | None
    scale: float
    masked_row: str
    lowest_bias: float

    @property
    def batch(self) -> Size:
        return shape(self.query)[0]

    @property
    def query_heads(self) -> Size:
        return shape(self.query)[1]

    @property
    def query_tokens(self) -> Size:
        return shape(self.query)[2]

    @property
    def kv_length(self) -> Size:
        return shape(self.key)[2]

    @property
    def value_dim(self) -> Size:
        return shape(self.value)[3]

    @property
    def result(self) -> Operand:
        """The output with its axes named."""
        axes = (
            ("batch", self.batch, 1),
            ("head", self.query_heads, 1),
            ("query", self.query_tokens, 1),
            ("dim", self.value_dim, 1),
        )
        return Operand(self.output, Layout.of(axes))


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

Recogniser = Callable[[Node], "Attention | Decline"]


def _fused(producer: _Producer) -> Recogniser:
    def recognise(node: Node) -> Attention | Decline:
        call = arguments(node)
        if refusal := _refuse_call(call):
            return refusal
        results = {user.args[1]: user for user in node.users if user.target is getitem}
        if len(results) != len(node.users) or 0 not in results:
            return Decline(Reason.ATTENTION_LAYOUT, "its results are not taken one by one")
        used = sorted(str(index) for index in results if index != 0)
        if any(results[index].users for index in results if index != 0):
            return Decline(
                Reason.STATISTICS_USED,
                f"result {', '.join(used)} of {node.name} (logsumexp, seed) is used as well",
            )
        query, key, value = call["query"], call["key"], call["value"]
        if not all(has_tensor(operand) for operand in (query, key, value, results[0])):
            return Decline(Reason.ATTENTION_LAYOUT, "an operand is not a single tensor")
        if any(len(shape(operand)) != 4 for operand in (query, key, value)):
            return Decline(Reason.ATTENTION_LAYOUT, "query, key and value are not all 4-D")
        scale = call["scale"]
        if scale is None:
            scale = _default_scale(query)
        if not isinstance(scale, (int, float)):
            return Decline(Reason.SCALE, f"the scale is {scale}, not a constant")
        return Attention(
            node=node,
            output=results[0],
            producer=producer.name,
            query=query,
            key=key,
            value=value,
            mask=call[producer.mask] if producer.mask else None,
            scale=float(scale),
            masked_row="zero",
            lowest_bias=producer.lowest_bias,
        )

    return recognise


def _default_scale(query: Node) -> float | None:
    head_dim = shape(query)[3]
    return 1 / math.sqrt(head_dim) if isinstance(head_dim, int) else None


def _refuse_call(call: dict[str, Any]) -> Decline | None:
    if call["dropout_p"] != 0.0:
        return Decline(Reason.DROPOUT, f"dropout_p is {call['dropout_p']}")
    if call["is_causal"]:
        return Decline(
            Reason.CAUSAL,
            "is_causal=True lets the first query token see one key alone; pass a mask instead",
        )
    return None


_RECOGNISERS: dict[Any, Recogniser] = {producer.target: _fused(producer) for producer in _PRODUCERS}


def is_attention(node: Node) -> bool:
    """Whether `node` calls an operator that some producer of attention ends in."""
    return node.op == "call_function" and node.target in _RECOGNISERS


def recognise_attention(node: Node) -> Attention | Decline | None:
    """The attention that `node` produces, why it is not understood, or None if it is none."""
    return _RECOGNISERS[node.target](node) if is_attention(node) else None
