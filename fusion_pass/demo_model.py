"""A small gated-attention decoder with a static cache, written as Qwen3.5 is; no weights needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Sizes of a `Decoder`; `capacity` is the number of tokens that its cache holds."""

    batch: int
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    vocabulary: int


class GatedAttention(nn.Module):
    """One decode step of attention over a static cache, gated by a half of the query projection."""

    key_cache: Tensor
    value_cache: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        query_width = sizes.query_heads * sizes.head_dim
        kv_width = sizes.kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden, 2 * query_width, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(query_width, sizes.hidden, bias=False)
        self.q_norm = nn.RMSNorm(sizes.head_dim)
        self.k_norm = nn.RMSNorm(sizes.head_dim)
        cache = torch.zeros(sizes.batch, sizes.kv_heads, sizes.capacity, sizes.head_dim)
        self.register_buffer("key_cache", cache)
        self.register_buffer("value_cache", cache.clone())

    def forward(self, hidden: Tensor, position: Tensor) -> Tensor:
        """Attends from `hidden` (B, 1, hidden) at `position` (1,) int64 to all up to it."""
        heads = (*hidden.shape[:2], -1, self.sizes.head_dim)
        query, gate = self.q_proj(hidden).view(*heads[:3], 2 * self.sizes.head_dim).chunk(2, dim=-1)
        gate = gate.reshape(*hidden.shape[:2], -1)
        query = rotate(self.q_norm(query).transpose(1, 2), position)
        key = rotate(self.k_norm(self.k_proj(hidden).view(heads)).transpose(1, 2), position)
        value = self.v_proj(hidden).view(heads).transpose(1, 2)
        self.key_cache.index_copy_(2, position, key)
        self.value_cache.index_copy_(2, position, value)

        groups = self.sizes.query_heads // self.sizes.kv_heads
        mask = torch.arange(self.sizes.capacity, device=position.device) <= position
        attended = F.scaled_dot_product_attention(
            query,
            repeat_kv(self.key_cache, groups),
            repeat_kv(self.value_cache, groups),
            attn_mask=mask[None, None, None],
        )
        attended = attended.transpose(1, 2).reshape(*hidden.shape[:2], -1)
        projected: Tensor = self.o_proj(attended * torch.sigmoid(gate))
        return projected


class Layer(nn.Module):
    """Gated attention and a gated MLP, each behind a norm and a residual."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.hidden)
        self.attention = GatedAttention(sizes)
        self.mlp_norm = nn.RMSNorm(sizes.hidden)
        self.up = nn.Linear(sizes.hidden, 4 * sizes.hidden, bias=False)
        self.down = nn.Linear(2 * sizes.hidden, sizes.hidden, bias=False)

    def forward(self, hidden: Tensor, position: Tensor) -> Tensor:
        """(B, 1, hidden) to the same shape."""
        hidden = hidden + self.attention(self.attention_norm(hidden), position)
        gate, up = self.up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        down: Tensor = self.down(F.silu(gate) * up)
        return hidden + down


class Decoder(nn.Module):
    """Maps one token a sequence to the logits of the next, and keeps K and V of those before."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """Logits (B, vocabulary) after `token` (B,) int64 at `position` (1,) int64."""
        hidden = self.embedding(token)[:, None]
        for layer in self.layers:
            hidden = layer(hidden, position)
        logits: Tensor = self.head(self.norm(hidden))[:, 0]
        return logits

    def forget(self) -> None:
        """Empties the cache."""
        for buffer in self.buffers():
            buffer.zero_()


def repeat_kv(states: Tensor, groups: int) -> Tensor:
    """(B, Hkv, S, D) to (B, Hkv * groups, S, D), each head `groups` times in a row."""
    batch, heads, length, dim = states.shape
    expanded = states[:, :, None].expand(batch, heads, groups, length, dim)
    return expanded.reshape(batch, heads * groups, length, dim)


def rotate(states: Tensor, position: Tensor) -> Tensor:
    """Rotary embedding of `states` (B, H, 1, D) at `position` (1,), in float32 or wider."""
    wide = torch.promote_types(states.dtype, torch.float32)
    half = states.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=states.device, dtype=wide) / half)
    angle = position.to(wide) * frequencies
    first, second = states.to(wide).chunk(2, dim=-1)
    rotated = (
        first * angle.cos() - second * angle.sin(),
        second * angle.cos() + first * angle.sin(),
    )
    return torch.cat(rotated, dim=-1).to(states.dtype)
