"""Random decode steps for the soak: geometries, each with any number of steps.

What a kernel is compiled for is drawn once per geometry; lengths, masks, data and poison are drawn
for each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

INF = math.inf
LOWEST = torch.finfo(torch.float32).min
MARGIN = 32
MASKS = ("none", "prefix", "padded", "causal", "window", "holes", "per head", "bias")
CACHES = ("contiguous", "tokens first", "interleaved", "wide rows", "unaligned", "transposed")
GATES = ("elementwise", "headwise", "chunk", "shared")


@dataclass(frozen=True)
class Sizes:
    """What geometries are drawn from; `most` bounds the elements of K and of the logits."""

    dtypes: tuple[torch.dtype, ...]
    batches: tuple[int, ...]
    kv_heads: tuple[int, ...]
    groups: tuple[int, ...]
    tokens: tuple[int, ...]
    head_dims: tuple[int, ...]
    capacities: tuple[int, ...]
    most: int


HALVES = (torch.bfloat16, torch.float16)
ON_GPU = Sizes(
    dtypes=(*HALVES, torch.bfloat16, torch.float32),
    batches=(1, 1, 2, 3, 8, 17, 32, 64),
    kv_heads=(1, 2, 4, 8),
    groups=(1, 2, 3, 4, 5, 6, 7, 8, 8, 12, 16, 24, 64),
    tokens=(1, 1, 1, 2, 3, 4, 8, 16),
    head_dims=(16, 40, 64, 72, 80, 96, 128, 128, 192, 256, 256, 512),
    capacities=(1, 17, 100, 333, 1024, 1504, 4096, 4097, 8192, 32768, 32768),
    most=1 << 24,
)
SANITIZED = Sizes(
    dtypes=(*HALVES, torch.float32),
    batches=(1, 2, 3),
    kv_heads=(1, 2),
    groups=(1, 3, 8),
    tokens=(1, 1, 3),
    head_dims=(16, 40, 128, 256),
    capacities=(17, 100, 333, 1024),
    most=1 << 19,
)
INTERPRETED = Sizes(
    dtypes=(torch.float16, torch.float32),
    batches=(1, 2),
    kv_heads=(1, 2),
    groups=(1, 2, 3, 5),
    tokens=(1, 1, 3),
    head_dims=(16, 40, 64),
    capacities=(1, 17, 33, 33, 80),
    most=1 << 14,
)


@dataclass(frozen=True)
class Geometry:
    """What the kernels are compiled for."""

    dtype: torch.dtype
    batch: int
    kv_heads: int
    group: int
    tokens: int
    head_dim: int
    value_dim: int
    capacity: int
    mask: str
    expanded: bool
    bias_dtype: torch.dtype
    fill: float
    masked_row: str
    dead_row: bool
    gate: str
    gate_dtype: torch.dtype
    sinks: bool
    numerics: str
    cache: str
    ragged: bool = True

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def modes(self) -> dict[str, Any]:
        """Keyword arguments of the operator."""
        return {
            "scale": self.head_dim**-0.5,
            "mask_fill": self.fill if self.mask != "bias" else -INF,
            "masked_row": self.masked_row,
            "numerics": self.numerics,
        }


@dataclass(frozen=True)
class Step:
    """One decode step: clean operands, and those that the operator gets, with poison around."""

    clean: tuple[Tensor, Tensor, Tensor, Tensor]
    poisoned: tuple[Tensor, Tensor, Tensor, Tensor]
    mask: Tensor | None
    sinks: Tensor | None
    live_rows: Tensor


def draw_geometry(random: Random, sizes: Sizes) -> Geometry:
    """A geometry of which K and the logits have at most `sizes.most` elements.

    K that is repeated for every query head, as stock torch wants it, has at most 8 times as many.
    """
    while True:
        geometry = _draw(random, sizes)
        stored = geometry.batch * geometry.kv_heads * geometry.capacity * geometry.head_dim
        stored *= max(1, geometry.group // 8)
        logits = geometry.batch * geometry.heads * geometry.tokens * geometry.capacity
        if max(stored, logits) <= sizes.most and geometry.tokens <= geometry.capacity:
            return geometry


def _draw(random: Random, sizes: Sizes) -> Geometry:
    dtype, head_dim = random.choice(sizes.dtypes), random.choice(sizes.head_dims)
    mask = random.choice(MASKS)
    batch = random.choice(sizes.batches)
    dead_row = mask in ("prefix", "holes", "bias") and batch > 1 and random.random() < 0.25
    halves = [half for half in HALVES if half in sizes.dtypes]
    # A finite fill that is small keeps logits, which float32 then rounds: not with a dead row.
    fill = random.choice((-INF, LOWEST) if dead_row else (-INF, LOWEST, -65536.0))
    return Geometry(
        dtype=dtype,
        batch=batch,
        kv_heads=random.choice(sizes.kv_heads),
        group=random.choice(sizes.groups),
        tokens=random.choice(sizes.tokens),
        head_dim=head_dim,
        value_dim=random.choice((head_dim, head_dim, head_dim, *sizes.head_dims)),
        capacity=random.choice(sizes.capacities),
        mask=mask,
        expanded=random.random() < 0.3,
        bias_dtype=random.choice((dtype, torch.float32)),
        fill=fill,
        masked_row=random.choice(("zero", "nan") if fill == -INF else ("zero", "mean")),
        dead_row=dead_row,
        gate=random.choice(GATES),
        gate_dtype=random.choice((dtype, dtype, torch.float32, *halves)),
        sinks=random.random() < 0.2,
        numerics=random.choice(("compiled", "compiled", "eager", "fp32")),
        cache=random.choice((*CACHES, "shared")),
    )


def make_step(geometry: Geometry, seed: int, home: torch.device, device: torch.device) -> Step:
    """The step number `seed` of a geometry: drawn on `home`, its operands on `device`."""
    g, random = geometry, Random(seed)
    generator = torch.Generator(home).manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, device=home, generator=generator)

    length = random.choice(_lengths(g)) if g.ragged and g.mask == "none" else g.capacity
    mask = _mask(g, length, random, draw)
    keep = _keep(g, length, mask, home)
    seen = keep.unflatten(1, (g.kv_heads, g.group)).any((2, 3))  # [B, Hkv, S]
    if mask is not None and mask.dtype == torch.bool and g.fill != -INF:
        # A row without a live key attends to all of them.
        dead_rows = ~keep.any(-1).unflatten(1, (g.kv_heads, g.group))
        seen = seen | dead_rows.any((2, 3))[..., None]
    edges = _edges(seen)
    query = draw(g.batch, g.heads, g.tokens, g.head_dim).to(g.dtype)
    shared = 1 if g.cache == "shared" else g.batch
    key = draw(shared, g.kv_heads, length, g.head_dim).to(g.dtype)
    # The first and the last live key stand out, so that none may be missing.
    edges = edges.any(0, keepdim=True) if g.cache == "shared" else edges
    value = (draw(shared, g.kv_heads, length, g.value_dim) * (1 + 3 * edges[..., None])).to(g.dtype)
    gate = (2 * draw(*_gate_size(g))).to(g.gate_dtype)
    # Exact in every dtype that an operand may have.
    sinks = draw(g.heads).bfloat16().to(g.bias_dtype) if g.sinks else None
    poison = math.nan if random.random() < 0.5 else _huge(g.dtype)
    dead = ~(seen.any(0, keepdim=True) if g.cache == "shared" else seen)
    stored = [
        _store(g, x.masked_fill(dead[..., None], poison), which, poison, device)
        for which, x in enumerate((key, value))
    ]
    poisoned = _heads_last(query, poison, device), *stored, _store_gate(g, gate, poison, device)
    clean = query, key.expand(g.batch, -1, -1, -1), value.expand(g.batch, -1, -1, -1), gate
    return Step(clean, poisoned, _store_mask(g, mask, device), _to(sinks, device), keep.any(-1))


def _to(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _huge(dtype: torch.dtype) -> float:
    return INF if dtype == torch.float16 else 1e30


def _lengths(g: Geometry) -> tuple[int, ...]:
    """A few, since the kernels are compiled anew for a length that 16 divides."""
    return g.capacity, max(g.tokens, g.capacity // 2 + 1), max(g.tokens, g.capacity - 5)


def _mask(g: Geometry, length: int, random: Random, draw: Callable[..., Tensor]) -> Tensor | None:
    """A boolean mask or a bias, 4-D and broadcastable; every row but a dead one has a live key."""
    if g.mask == "none":
        return None
    home = draw(1).device
    position = torch.arange(length, device=home)
    # Often short, as a static cache is.
    lives = [random.randint(1, random.choice((length, min(length, 50)))) for _ in range(g.batch)]
    live = torch.tensor(lives, device=home)[:, None, None, None]
    newest = random.randint(g.tokens, length) - g.tokens + torch.arange(g.tokens, device=home)
    causal = position <= newest[:, None]
    if g.mask == "prefix":
        keep = position < live
    elif g.mask == "padded":
        keep = position >= length - live
    elif g.mask == "causal":
        keep = causal[None, None]
    elif g.mask == "window":
        window = random.randint(1, length)
        keep = (causal & (position > newest[:, None] - window))[None, None]
    else:
        sizes = {
            "holes": (g.batch, 1, g.tokens, length),
            "per head": (g.batch, g.heads, 1, length),
            "bias": (g.batch, 1, 1, length),
        }
        keep = draw(*sizes[g.mask]) < random.choice((-1.0, 0.0, 2.0))
        keep[..., random.randrange(length)] = True
    if g.dead_row:
        keep = keep.clone()
        keep[-1] = False
    if g.mask != "bias":
        return keep
    bias = draw(*keep.shape).bfloat16().to(g.bias_dtype)
    return bias.masked_fill(~keep, -INF)


def _keep(g: Geometry, length: int, mask: Tensor | None, home: torch.device) -> Tensor:
    """Which keys each row attends to, (B, Hq, Q, S)."""
    keep = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=home)
    if mask is not None:
        keep = mask if mask.dtype == torch.bool else mask != -INF
    return keep.expand(g.batch, g.heads, g.tokens, length)


def _edges(seen: Tensor) -> Tensor:
    """1 at the first and at the last True along the last dimension."""
    first = seen.cumsum(-1) == 1
    last = seen.flip(-1).cumsum(-1).flip(-1) == 1
    return (seen & (first | last)).float()


def _gate_size(g: Geometry) -> tuple[int, int, int, int]:
    if g.gate == "headwise":
        return g.batch, g.tokens, g.heads, 1
    return 1 if g.gate == "shared" else g.batch, g.tokens, g.heads, g.value_dim


def _heads_last(query: Tensor, poison: float, device: torch.device) -> Tensor:
    """(B, H, Q, D) as the transposed first half of the rows of a projection."""
    batch, heads, tokens, dim = query.shape
    base = torch.full((batch, tokens, heads, 2 * dim), poison, dtype=query.dtype, device=device)
    return base[..., :dim].transpose(1, 2).copy_(query)


def _store(g: Geometry, x: Tensor, which: int, poison: float, device: torch.device) -> Tensor:
    """K (`which` 0) or V in a cache of the geometry's layout, with poison all around it."""
    batch, heads, length, dim = x.shape

    def full(*size: int) -> Tensor:
        return torch.full(size, poison, dtype=x.dtype, device=device)

    if g.cache == "tokens first":
        view = full(batch, length + MARGIN, heads, dim).transpose(1, 2)[:, :, :length]
    elif g.cache == "interleaved":
        view = full(batch, length + MARGIN, 2, heads, dim)[:, :length, which].transpose(1, 2)
    elif g.cache == "wide rows":
        view = full(batch, heads, length, dim + 8)[..., :dim]
    elif g.cache == "unaligned":
        view = full(batch, heads, length, dim + 1)[..., 1:]
    elif g.cache == "transposed":
        view = full(batch, heads, dim, length + MARGIN).transpose(2, 3)[:, :, :length]
    else:
        view = full(batch, heads, length + MARGIN, dim)[:, :, :length]
    return view.copy_(x).expand(g.batch, -1, -1, -1)


def _store_gate(g: Geometry, gate: Tensor, poison: float, device: torch.device) -> Tensor:
    if g.gate != "chunk":
        return gate.to(device)
    *rows, dim = gate.shape
    # Its dtype may be one that does not hold the other operands' poison.
    value = poison if math.isnan(poison) else _huge(gate.dtype)
    base = torch.full((*rows, 2 * dim), value, dtype=gate.dtype, device=device)
    return base[..., dim:].copy_(gate)


def _store_mask(g: Geometry, mask: Tensor | None, device: torch.device) -> Tensor | None:
    """The mask as a slice of a wider one that would let everything through."""
    if mask is None:
        return None
    *rows, length = mask.shape
    base = torch.ones((*rows, length + 3), dtype=mask.dtype, device=device)
    view = base[..., 3:].copy_(mask)
    return view.expand(g.batch, g.heads, g.tokens, length) if g.expanded else view
