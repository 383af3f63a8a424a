"""The fused decode against its rivals: `python -m bench.kernel [--quick]`.

CUDA-graph replays of a bfloat16 decode attention with its gate, every candidate interleaved in one
run on a cold L2. Cells: the grid of geometry, batch and length; masks, live tokens and capacity;
one and four query tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench import entries, geometry, peers, reading
from bench.ahead import compile_ahead
from bench.entries import Entry
from bench.geometry import GEOMETRIES, Geometry
from bench.operands import Truth
from bench.peers import PEERS, Peer
from bench.results import candidates, failed
from bench.session import Session, parser, tell
from fusion_pass.timing import Arm, capture, interleave, with_null


@dataclass(frozen=True)
class Cell:
    """One geometry at one batch and KV length."""

    geometry: Geometry
    batch: int
    kv_length: int


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cells that the options name; returns the exit status."""
    options = parser("kernel", __doc__, 300)
    names = [g.name for g in GEOMETRIES]
    options.add_argument("--geometries", nargs="+", choices=names, help="only these")
    options.add_argument("--peers", nargs="+", choices=[p.name for p in PEERS], help="only these")
    options.add_argument("--only", nargs="+", choices=("grid", *entries.PARTS), help="parts")
    arguments = options.parse_args(argv)
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
    for name in (name for name in entries.PARTS if name in parts):
        measure, describe = partial(part, session, name), partial(describe_part, name)
        session.each(entries.BATCHES, measure, describe, name)
    cells = [Cell(geometry.named(name), *shape) for name in chosen for shape in shapes]
    if "grid" in parts:
        session.each(cells, partial(grid, session, entrants), describe_grid, "grid")
    return session.finish()


def grid(session: Session, entrants: Sequence[Peer], cell: Cell) -> dict[str, Any]:
    """Every peer on one cell of the grid, the cell's floor, and what reading alone takes."""
    compared = entries.grid(cell.geometry, cell.batch, cell.kv_length, entrants, session.device)
    readers = reading.arms(compared[0].operands) if compared else []
    floor = session.ceilings.floor_us(cell.geometry.kv_bytes(cell.batch, cell.kv_length))
    return {"floor_us": round(floor, 3), **compare(session, compared, readers)}


def part(session: Session, name: str, batch: int) -> dict[str, Any]:
    """The candidates of masks or of tokens."""
    return compare(session, entries.PARTS[name](batch, session.device))


def compare(
    session: Session, compared: Sequence[Entry], readers: Sequence[Arm] = ()
) -> dict[str, Any]:
    """Capture each entry, check its result, and time those that are right, interleaved.

    The `readers`, which compute nothing, are timed among them and give `read_us`.
    """
    torch._dynamo.reset()
    arms: list[Arm] = []
    outputs: dict[str, tuple[Truth, torch.Tensor]] = {}
    refused: dict[str, dict[str, Any]] = {}
    details: dict[str, dict[str, Any]] = {}
    for entry in compared:
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
        outputs[entry.name] = entry.truth, captured.output
    summaries = interleave([*with_null(arms), *readers], session.clock, seconds=0.5)
    read = reading.least(summaries)
    for name, (truth, output) in outputs.items():
        # A graph whose operands were gone would have been timed at something else.
        if not (error := truth.error(output)) <= truth.bound:
            refused[name] = failed(f"wrong after it was timed: error {error:.2e}")
            del summaries[name]
    return {**read, **candidates(summaries, refused, details)}


def describe_grid(cell: Cell) -> dict[str, Any]:
    """The cell's kind and shape."""
    return {
        "kind": "grid",
        "shape": {**shape_entry(cell.geometry, cell.batch), "S": cell.kv_length},
    }


def describe_part(name: str, batch: int) -> dict[str, Any]:
    """The kind and shape of a cell of masks or of tokens."""
    shape: dict[str, Any] = {**shape_entry(entries.GEOMETRY, batch)}
    if name == "tokens":
        shape["S"] = entries.TOKENS_LENGTH
    return {"kind": name, "shape": shape}


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


if __name__ == "__main__":
    raise SystemExit(main())
