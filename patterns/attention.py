"""The vocabulary in which every producer of attention is read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from .layout import Layout, Size
from .mask_program import ComputedMask
from .trace import Operand, tensor


@dataclass(frozen=True)
class Sizes:
    """The sizes of an attention's axes."""

    batch: Size
    query_heads: Size
    query_tokens: Size
    kv_length: Size
    head_dim: Size
    value_dim: Size

    def layout(self, *names: str) -> Layout:
        """One dimension for each of the named axes, in that order."""
        axes = {
            "batch": self.batch,
            "head": self.query_heads,
            "query": self.query_tokens,
            "key": self.kv_length,
            "dim": self.head_dim,
            "value_dim": self.value_dim,
        }
        # K and V are never seen together, so that both may call their last axis "dim".
        return Layout.of((name.removeprefix("value_"), axes[name], 1) for name in names)


@dataclass(frozen=True)
class Mask:
    """What keeps a query from a key.

    Attributes:
        operand: boolean, or floating and added to the logits; axes batch, head, query and key,
            each present or broadcast.
        fill: what a boolean mask adds to the logit of a key that it keeps away.
        inverted: whether a boolean mask keeps keys away where it is True, not where it is False.
        replaces: whether the fill takes the place of the logit instead, whatever that is.
    """

    operand: Operand
    fill: float = -math.inf
    inverted: bool = False
    replaces: bool = False

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The values of the graph that the mask is read from."""
        return (self.operand.node,)

    @property
    def is_boolean(self) -> bool:
        return tensor(self.operand.node).dtype is torch.bool


@dataclass(frozen=True)
class Attention:
    """`softmax(scale * query @ key^T + mask) @ value` as one producer computes it.

    Attributes:
        node: the producer.
        producer: what to call it in a report.
        sizes: of all axes.
        query: axes batch, head, query and dim.
        key: axes batch, head, key and dim. Where K has fewer heads than the query, its head axis
            holds the leading digits of the query's: query head `h` reads `h // (Hq // Hkv)`.
        value: the same axes; its dim is the value's.
        mask: what is added to the scaled logits, if anything.
        sinks: one more logit for each head, which has no value; axis head alone.
        is_causal: whether query token `i` sees the keys `0` to `i` alone.
        result: the output; axes batch, head, query and dim.
        scale: factor of the logits.
        is_rounded: whether Inductor rounds the output to its dtype before it is used, as it does
            where an operator writes it to memory, and not where a cast in its own kernel does.
        masked_row: `"zero"` or `"nan"`, the result of a row whose logits are all -inf.
        lowest_bias: what is added to a logit counts as -inf below this.
        is_narrowed: whether the logits are cast to a narrower dtype, or the weights to one that is
            not V's, which eager torch rounds to and Inductor does not.
    """

    node: Node
    producer: str
    sizes: Sizes
    query: Operand
    key: Operand
    value: Operand
    mask: Mask | ComputedMask | None
    sinks: Operand | None
    is_causal: bool
    result: Operand
    scale: float
    is_rounded: bool
    masked_row: str
    lowest_bias: float
    is_narrowed: bool = False
