"""The fused decode against its rivals: `python -m bench.kernel [--quick]`.

CUDA-graph replays of a bfloat16 decode attention with its gate, every candidate interleaved in one
run on a cold L2. Cells: the grid of geometry, batch and length; masks, live tokens and capacity;
one and four query tokens.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench import geometry, operands, peers
from bench.geometry import GEOMETRIES, Geometry
from bench.operands import Operands, Truth
from bench.peers import OURS, PEERS, STOCK, Peer
from bench.results import candidates, failed
from bench.session import Session, parser, tell
from bench.timing import Arm, capture, interleave, with_null

PRECOMPILE_SECONDS = 150
LIVE = 600
MASK_CAPACITIES = (4096, 131072)
MASK_BATCHES = (1, 8)
TOKENS_LENGTH = 32768
TOKENS = (1, 4)


@dataclass(frozen=True)
class Cell:
    """One geometry at one batch and KV length."""

    geometry: Geometry
    batch: int
    kv_length: int


@dataclass(frozen=True)
class Entry:
    """A named candidate: who computes what."""

    name: str
    peer: Peer
    operands: Operands
    truth: Truth


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cells that the options name; returns the exit status."""
    options = parser("kernel", __doc__, 300)
    names = [g.name for g in GEOMETRIES]
    options.add_argument("--geometries", nargs="+", choices=names, help="only these")
    options.add_argument("--peers", nargs="+", choices=[p.name for p in PEERS], help="only these")
    options.add_argument("--only", nargs="+", choices=("grid", "masks", "tokens"), help="parts")
    options.add_argument("--precompile", metavar="GEOMETRY", choices=names, help=argparse.SUPPRESS)
    arguments = options.parse_args(argv)
    if arguments.precompile:
        return precompile(geometry.named(arguments.precompile))
    quick = arguments.quick
    shapes = geometry.QUICK_GRID if quick else geometry.GRID
    chosen = arguments.geometries or (geometry.QUICK_GEOMETRIES if quick else names)
    rivals = arguments.peers or (peers.QUICK_PEERS if quick else [p.name for p in PEERS])
    parts = arguments.only or (("grid",) if quick else ("masks", "tokens", "grid"))
    begun = time.monotonic()
    if not quick and "grid" in parts and arguments.peers is None:
        compile_ahead(chosen)

    session = Session.begin("kernel", arguments, begun)
    entrants = [peer for peer in PEERS if peer.name in rivals]
    absent = {peer.name: reason for peer in entrants if (reason := peer.missing())}
    session.results.set(missing=absent)
    for name, reason in absent.items():
        tell(f"{name}: {reason}")
    entrants = [peer for peer in entrants if peer.name not in absent]
    first = geometry.named(names[0])
    if "masks" in parts:
        session.each(MASK_BATCHES, partial(masks, session, first), describe_masks, "masks")
    if "tokens" in parts:
        session.each(MASK_BATCHES, partial(tokens, session, first), describe_tokens, "tokens")
    cells = [Cell(geometry.named(name), *shape) for name in chosen for shape in shapes]
    if "grid" in parts:
        session.each(cells, partial(grid, session, entrants), describe_grid, "grid")
    return session.finish()


def grid(session: Session, entrants: Sequence[Peer], cell: Cell) -> dict[str, Any]:
    """Every peer on one cell of the grid."""
    given = operands.make(cell.geometry, cell.batch, cell.kv_length, session.device)
    exact = operands.truth(given)
    entries = [Entry(peer.name, peer, given, exact) for peer in entrants]
    floor = session.ceilings.floor_us(cell.geometry.kv_bytes(cell.batch, cell.kv_length))
    return {"floor_us": round(floor, 3), **compare(session, entries)}


def masks(session: Session, shape: Geometry, batch: int) -> dict[str, Any]:
    """No mask, a full one and 600 live tokens, at two capacities."""
    entries = []
    for capacity in MASK_CAPACITIES:
        given = operands.make(shape, batch, capacity, session.device)
        live = operands.live_mask(capacity, LIVE, session.device)
        bias = torch.zeros(live.shape, dtype=operands.DTYPE, device=session.device)
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
    return compare(session, entries)


def tokens(session: Session, shape: Geometry, batch: int) -> dict[str, Any]:
    """One and four query tokens, the latter also under a lower-right causal mask."""
    entries = []
    for count in TOKENS:
        given = operands.make(shape, batch, TOKENS_LENGTH, session.device, query_tokens=count)
        exact = operands.truth(given)
        entries.append(Entry(f"{OURS.name} {count}", OURS, given, exact))
        entries.append(Entry(f"{STOCK.name} {count}", STOCK, given, exact))
    causal = torch.ones(count, TOKENS_LENGTH, dtype=torch.bool, device=session.device)
    causal = causal.tril(TOKENS_LENGTH - count)[None, None]
    masked = given.masked(causal)
    entries.append(Entry(f"{OURS.name} {count} causal", OURS, masked, operands.truth(masked)))
    return compare(session, entries)


def compare(session: Session, entries: Sequence[Entry]) -> dict[str, Any]:
    """Capture each entry, check its result, and time those that are right, interleaved."""
    torch._dynamo.reset()
    arms: list[Arm] = []
    refused: dict[str, dict[str, Any]] = {}
    details: dict[str, dict[str, Any]] = {}
    for entry in entries:
        try:
            captured = capture(entry.peer.build(entry.operands))
            captured.output.fill_(torch.nan)
            captured.replay()
            error = entry.truth.error(captured.output)
        except Exception as fault:
            refused[entry.name] = failed(fault)
            continue
        if not error <= entry.truth.bound:
            refused[entry.name] = failed(f"wrong: error {error:.2e} > {entry.truth.bound:.2e}")
            continue
        details[entry.name] = {"error": float(f"{error:.4g}")}
        arms.append(Arm(entry.name, captured.replay))
    summaries = interleave(with_null(arms), session.clock, seconds=0.4)
    return candidates(summaries, refused, details)


def describe_grid(cell: Cell) -> dict[str, Any]:
    """The cell's kind and shape."""
    return {
        "kind": "grid",
        "shape": {**shape_entry(cell.geometry, cell.batch), "S": cell.kv_length},
    }


def describe_masks(batch: int) -> dict[str, Any]:
    """The cell's kind and shape."""
    return {"kind": "masks", "shape": shape_entry(GEOMETRIES[0], batch)}


def describe_tokens(batch: int) -> dict[str, Any]:
    """The cell's kind and shape."""
    return {"kind": "tokens", "shape": {**shape_entry(GEOMETRIES[0], batch), "S": TOKENS_LENGTH}}


def shape_entry(shape: Geometry, batch: int) -> Mapping[str, Any]:
    """A geometry and batch under the letters that results use."""
    return {
        "geometry": shape.name,
        "Hq": shape.query_heads,
        "Hkv": shape.kv_heads,
        "D": shape.head_dim,
        "head_wise_gate": shape.head_wise_gate,
        "B": batch,
    }


def compile_ahead(names: Sequence[str]) -> None:
    """Fill Inductor's, Triton's and FlashInfer's caches, one process a geometry.

    Nothing is timed meanwhile: they use the device. One that takes too long is stopped, and the
    run compiles for itself.
    """
    command = [sys.executable, "-m", "bench.kernel", "--precompile"]
    compilers = [
        subprocess.Popen([*command, name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for name in names
    ]
    tell(f"compiling {', '.join(names)}")
    deadline = time.monotonic() + PRECOMPILE_SECONDS
    for compiler in compilers:
        try:
            compiler.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            compiler.kill()
            compiler.wait()


def precompile(shape: Geometry) -> int:
    """Call every peer once on every cell of one geometry, whatever comes of it."""
    device = torch.device("cuda")
    for batch, kv_length in geometry.GRID:
        torch._dynamo.reset()
        given = operands.make(shape, batch, kv_length, device)
        for peer in PEERS:
            if peer.missing():
                continue
            try:
                peer.build(given)()
            except Exception as fault:
                tell(f"{shape.name} {batch} {kv_length} {peer.name}: {fault}")
        torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
