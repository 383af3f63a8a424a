"""The program of each page of docs/patterns, as a user would write it, and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import fusion_pass
from fusion_pass.patterns import Attention, Decline, arguments, read_attention

BATCH, HEADS, KV_HEADS, LENGTH, DIM = 2, 8, 2, 256, 64
PAGE_SIZE = 16


def fused_sdpa(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, mask: Tensor, gate: Tensor
) -> Tensor:
    key = key_cache.repeat_interleave(4, dim=1)
    value = value_cache.repeat_interleave(4, dim=1)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return output.transpose(1, 2).reshape(gate.shape) * torch.sigmoid(gate)


def spelled_out(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, mask: Tensor, gate: Tensor
) -> Tensor:
    key = key_cache.repeat_interleave(4, dim=1)
    value = value_cache.repeat_interleave(4, dim=1)
    logits = query @ key.transpose(2, 3) * 0.125
    logits = logits.masked_fill(~mask, float("-inf"))
    output = logits.softmax(dim=-1) @ value
    return output.transpose(1, 2).reshape(gate.shape) * torch.sigmoid(gate)


def flex(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, blocks: BlockMask, gate: Tensor
) -> Tensor:
    output: Any = flex_attention(query, key_cache, value_cache, block_mask=blocks, enable_gqa=True)
    gated: Tensor = output.transpose(1, 2).reshape(gate.shape) * torch.sigmoid(gate)
    return gated


def sinks(query: Tensor, key: Tensor, value: Tensor, sink: Tensor, gate: Tensor) -> Tensor:
    logits = query @ key.transpose(2, 3) * 0.125
    extra = sink.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[2], 1)
    weights = torch.cat([logits, extra], dim=-1).softmax(dim=-1)
    output = weights[..., :-1] @ value
    return output.transpose(1, 2).reshape(gate.shape) * torch.sigmoid(gate)


@torch.library.custom_op("my_engine::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(query)


def read_attend(node: Node) -> Attention | Decline:
    given = arguments(node)
    return read_attention(
        node,
        "my engine",
        query=given["query"],
        key=given["key"],
        value=given["value"],
        output=node,
    )


def registered(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    output = torch.ops.my_engine.attend(query, key, value)
    gated: Tensor = output.transpose(1, 2).reshape(gate.shape) * torch.sigmoid(gate)
    return gated


def gate_for_each_head(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    output = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    weight = torch.sigmoid(gate.float())[..., None]
    return (output.float() * weight).to(query.dtype).flatten(2)


def window(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, gate: Tensor) -> Tensor:
    bias = torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)
    return output.transpose(1, 2).reshape(gate.shape) * torch.sigmoid(gate)


def paged(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    gate: Tensor,
) -> Tensor:
    output = fusion_pass.paged_decode_attention(
        query, k_cache, v_cache, None, block_table, kv_lengths=lengths
    )
    return output.flatten(1) * torch.sigmoid(gate)


def paged_csr(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, sinks: Tensor, gate: Tensor
) -> Tensor:
    device = query.device
    # Two requests and pages of 16 tokens: the first has pages 7, 2 and 9, the second 4 and 0.
    kv_indptr = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    kv_indices = torch.tensor([7, 2, 9, 4, 0], dtype=torch.int32, device=device)
    # The last page of each is not full.
    lengths = torch.tensor([40, 17], dtype=torch.int32, device=device)
    return fusion_pass.paged_decode_attention(
        query,
        k_cache,
        v_cache,
        kv_indptr,
        kv_indices,
        kv_lengths=lengths,
        gate=gate,
        sinks=sinks,
        window=32,
    )


def gathered(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    gate: Tensor,
) -> Tensor:
    key, value = (cache[block_table].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
    mask = torch.arange(key.shape[2], device=key.device) < lengths[:, None, None, None]
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    return output.transpose(1, 2).reshape(gate.shape) * torch.sigmoid(gate)


@dataclass(frozen=True)
class Page:
    """One page of docs/patterns: its program, what else of its source is shown, and its inputs."""

    program: Callable[..., Tensor]
    inputs: tuple[Any, ...]
    shown: tuple[Callable[..., Any], ...] = ()


def _empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(size, dtype=dtype)


def _blocks() -> BlockMask:
    make: Any = BlockMask.from_kv_blocks
    counts = torch.tensor([[[2]]], dtype=torch.int32)
    blocks = torch.tensor([[[[0, 1]]]], dtype=torch.int32)
    made: BlockMask = make(
        counts,
        blocks,
        BLOCK_SIZE=128,
        mask_mod=lambda batch, head, query, key: key <= 200,
        seq_lengths=(1, LENGTH),
    )
    return made


def pages() -> dict[str, Page]:
    """The pages by the name of their file."""
    query, gate = _empty(BATCH, HEADS, 1, DIM), _empty(BATCH, 1, HEADS * DIM)
    stored = [_empty(BATCH, KV_HEADS, LENGTH, DIM) for _ in range(2)]
    wide = [_empty(BATCH, HEADS, LENGTH, DIM) for _ in range(2)]
    mask = _empty(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    caches = [_empty(64, PAGE_SIZE, KV_HEADS, DIM) for _ in range(2)]
    table = _empty(BATCH, LENGTH // PAGE_SIZE, dtype=torch.int32)
    lengths = _empty(BATCH, dtype=torch.int32)
    return {
        "fused-sdpa": Page(fused_sdpa, (query, *stored, mask, gate)),
        "spelled-out": Page(spelled_out, (query, *stored, mask, gate)),
        "flex-attention": Page(flex, (query, *stored, _blocks(), gate)),
        "sinks": Page(sinks, (query, *wide, _empty(HEADS), gate)),
        "registered": Page(registered, (query, *stored, gate), (read_attend,)),
        "gate": Page(gate_for_each_head, (query, *wide, _empty(BATCH, 1, HEADS))),
        "operands": Page(window, (query, *stored, mask, gate)),
        "paged": Page(paged, (query[:, :, 0], *caches, table, lengths, gate[:, 0])),
        "gathered": Page(gathered, (query, *caches, table, lengths, gate)),
    }
