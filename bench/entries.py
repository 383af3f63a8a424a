"""What a cell of `bench.kernel` compares: candidates by name, each with its operands and truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench import operands
from bench.geometry import GEOMETRIES, Geometry
from bench.operands import Operands, Truth
from bench.peers import OURS, STOCK, Peer

LIVE = 600
BATCHES = (1, 8)
CAPACITIES = (4096, 131072)
TOKENS_LENGTH = 32768
TOKENS = (1, 4)
GEOMETRY = GEOMETRIES[0]


@dataclass(frozen=True)
class Entry:
    """A named candidate: who computes what."""

    name: str
    peer: Peer
    operands: Operands
    truth: Truth


def grid(
    shape: Geometry, batch: int, kv_length: int, entrants: Sequence[Peer], device: torch.device
) -> list[Entry]:
    """Every peer on one cell of the grid."""
    given = operands.make(shape, batch, kv_length, device)
    exact = operands.truth(given)
    return [Entry(peer.name, peer, given, exact) for peer in entrants]


def masks(batch: int, device: torch.device) -> list[Entry]:
    """No mask, a full one and `LIVE` live tokens, at two capacities."""
    entries = []
    for capacity in CAPACITIES:
        given = operands.make(GEOMETRY, batch, capacity, device)
        live = operands.live_mask(capacity, LIVE, device)
        bias = torch.zeros(live.shape, dtype=operands.DTYPE, device=device)
        variants = {
            "none": None,
            "bool-full": torch.ones_like(live),
            f"bool-{LIVE}": live,
            f"where-{LIVE}": bias.masked_fill(~live, -torch.inf),
        }
        for name, mask in variants.items():
            masked = given.masked(mask)
            exact = operands.truth(masked)
            entries.append(Entry(f"{OURS.name} {name} @{capacity}", OURS, masked, exact))
            if name in ("none", f"bool-{LIVE}"):
                entries.append(Entry(f"{STOCK.name} {name} @{capacity}", STOCK, masked, exact))
    return entries


def tokens(batch: int, device: torch.device) -> list[Entry]:
    """One and four query tokens, the latter also under a lower-right causal mask."""
    entries = []
    for count in TOKENS:
        given = operands.make(GEOMETRY, batch, TOKENS_LENGTH, device, query_tokens=count)
        exact = operands.truth(given)
        entries.append(Entry(f"{OURS.name} {count}", OURS, given, exact))
        entries.append(Entry(f"{STOCK.name} {count}", STOCK, given, exact))
    causal = torch.ones(count, TOKENS_LENGTH, dtype=torch.bool, device=device)
    causal = causal.tril(TOKENS_LENGTH - count)[None, None]
    masked = given.masked(causal)
    entries.append(Entry(f"{OURS.name} {count} causal", OURS, masked, operands.truth(masked)))
    return entries


PARTS: dict[str, Callable[[int, torch.device], list[Entry]]] = {"masks": masks, "tokens": tokens}
