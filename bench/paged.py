"""Gated decode over a paged cache: `python -m bench.paged [--quick]`.

The fused kernels against FlashInfer's paged decode and against the same kernels un-gated, each with
a compiled gate, on a cold L2; what fusing the gate alone is worth, as FreeToken measured it; and
`sigmoid_gate_mul` against eager torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from bench import geometry, operands, paged_operands
from bench.bars import DENSE
from bench.entries import Entry
from bench.gate import sigmoid_multiply
from bench.geometry import Geometry
from bench.kernel import compare, shape_entry
from bench.operands import Operands, Truth
from bench.peers import FLASHINFER, OURS, PEERS, Peer
from bench.results import candidates, failed
from bench.session import Session, parser, tell
from bench.tables import COMPILED, EAGER, FUSED
from fusion_pass.paged.operands import PagedModes
from fusion_pass.timing import Arm, Summary, capture, interleave, with_null

GEOMETRIES = geometry.GEOMETRIES[:2]
PARTS = ("gate", "product", "grid")
PAGE_SIZES = (1, 16, 64)
DENSE_PAGE = 16
# FreeToken's pull request: four calls a graph and 50 replays a sample, alternating.
GATE_LENGTHS = ((512,), (512, 495, 478, 461))
GATE_CALLS, GATE_REPLAYS = 4, 50
PRODUCT_SHAPES = ((1, 4096), (8, 4096), (32, 4096), (1, 8192), (8, 8192), (32, 8192))
PRODUCT_CALLS, PRODUCT_REPLAYS = 20, 10


@dataclass(frozen=True)
class Cell:
    """One geometry at one page size, batch and KV length."""

    geometry: Geometry
    page_size: int
    batch: int
    kv_length: int


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the parts that the options name; returns the exit status."""
    options = parser("paged", __doc__, 280)
    options.add_argument("--only", nargs="+", choices=PARTS, help="parts")
    arguments = options.parse_args(argv)
    parts = arguments.only or PARTS
    session = Session.begin("-".join(["paged", *(arguments.only or ())]), arguments)
    flashinfer = next(peer for peer in PEERS if peer.name == FLASHINFER)
    absent = flashinfer.missing()
    if absent is not None:
        session.results.set(missing={FLASHINFER: absent})
        tell(f"{FLASHINFER}: {absent}")
    if "gate" in parts:
        session.each(GATE_LENGTHS, partial(gate, session), describe_gate, "gate")
    if "product" in parts:
        session.each(PRODUCT_SHAPES, partial(product, session), describe_product, "product")
    if "grid" in parts:
        cells = [
            Cell(shape, page_size, *size)
            for size in (geometry.QUICK_GRID if arguments.quick else geometry.GRID)
            for shape in GEOMETRIES
            for page_size in ((DENSE_PAGE,) if arguments.quick else PAGE_SIZES)
        ]
        measure = partial(grid, session, absent is None)
        session.each(cells, measure, describe_grid, "grid")
        contents.cache_clear()
    return session.finish()


def grid(session: Session, has_flashinfer: bool, cell: Cell) -> dict[str, Any]:
    """The candidates on one cell; with pages of 16 tokens also the dense kernels."""
    given, exact = contents(cell.geometry, cell.batch, cell.kv_length, session.device)
    paged = paged_operands.in_pages(given, cell.page_size)
    modes = PagedModes(given.scale, numerics="compiled")

    def compiled(build: Callable[..., Any]) -> Callable[[Operands], Any]:
        return lambda _: build(paged, modes, torch.compile(sigmoid_multiply, dynamic=False))

    peers = [
        Peer(FUSED, lambda _: paged_operands.ours(paged, modes)),
        Peer(COMPILED, compiled(paged_operands.separate)),
    ]
    if has_flashinfer:
        peers.append(Peer(FLASHINFER, compiled(paged_operands.flashinfer)))
    if cell.page_size == DENSE_PAGE:
        peers.append(Peer(DENSE, OURS.build))
    floor = session.ceilings.floor_us(cell.geometry.kv_bytes(cell.batch, cell.kv_length))
    entries = [Entry(peer.name, peer, given, exact) for peer in peers]
    return {"floor_us": round(floor, 3), **compare(session, entries)}


@lru_cache(maxsize=1)
def contents(
    shape: Geometry, batch: int, kv_length: int, device: torch.device
) -> tuple[Operands, Truth]:
    """What the cells of all page sizes have in common."""
    given = operands.make(shape, batch, kv_length, device)
    return given, operands.truth(given)


def gate(session: Session, lengths: tuple[int, ...]) -> dict[str, Any]:
    """The fused gate against a separate one, over pages of one token, warm."""
    shape = GEOMETRIES[0]
    given = operands.make(shape, len(lengths), max(lengths), session.device)
    paged = paged_operands.shortened(paged_operands.in_pages(given, 1), lengths)
    modes = PagedModes(given.scale, numerics="eager")
    compiled = torch.compile(sigmoid_multiply, dynamic=False)
    calls = {
        FUSED: paged_operands.ours(paged, modes),
        EAGER: paged_operands.separate(paged, modes, sigmoid_multiply),
        COMPILED: paged_operands.separate(paged, modes, compiled),
    }
    if not torch.equal(calls[FUSED](), calls[EAGER]()):
        return {"candidates": {FUSED: failed("wrong: not what un-gated and torch give")}}
    return repeated(session, calls, GATE_CALLS, GATE_REPLAYS)


def product(session: Session, size: tuple[int, int]) -> dict[str, Any]:
    """`sigmoid_gate_mul` against eager sigmoid and multiply, of bfloat16."""
    from fusion_pass.gate_mul import sigmoid_gate_mul

    generator = torch.Generator(session.device).manual_seed(0)
    x, values = (
        torch.randn(size, device=session.device, dtype=operands.DTYPE, generator=generator)
        for _ in range(2)
    )
    calls = {
        FUSED: lambda: sigmoid_gate_mul(x, values),
        EAGER: lambda: sigmoid_multiply(x, values),
    }
    if not torch.equal(calls[FUSED](), calls[EAGER]()):
        return {"candidates": {FUSED: failed("wrong: not what torch gives")}}
    return repeated(session, calls, PRODUCT_CALLS, PRODUCT_REPLAYS)


def repeated(
    session: Session, calls: Mapping[str, Callable[[], Tensor]], in_graph: int, replays: int
) -> dict[str, Any]:
    """Time a call as one of `in_graph` in a CUDA graph that a sample replays several times."""

    def several(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: [call() for _ in range(in_graph)][-1]

    def replay(graph: Callable[[], object]) -> Callable[[], object]:
        return lambda: [graph() for _ in range(replays)]

    arms = [Arm(name, replay(capture(several(call)).replay)) for name, call in calls.items()]
    samples = interleave(with_null(arms), session.clock, seconds=1.0)
    count = in_graph * replays
    return candidates({name: _each(summary, count) for name, summary in samples.items()}, {})


def _each(summary: Summary, count: int) -> Summary:
    """A summary of samples that took `count` calls each, of one call."""
    return dataclasses.replace(
        summary,
        median=summary.median / count,
        p20=summary.p20 / count,
        p80=summary.p80 / count,
    )


def describe_grid(cell: Cell) -> dict[str, Any]:
    """The cell's kind and shape."""
    shape = {**shape_entry(cell.geometry, cell.batch), "page": cell.page_size, "S": cell.kv_length}
    return {"kind": "grid", "shape": shape}


def describe_gate(lengths: tuple[int, ...]) -> dict[str, Any]:
    """The cell's kind and shape."""
    shape = {**shape_entry(GEOMETRIES[0], len(lengths)), "page": 1, "S": list(lengths)}
    return {"kind": "gate", "shape": shape}


def describe_product(size: tuple[int, int]) -> dict[str, Any]:
    """The cell's kind and shape."""
    return {"kind": "product", "shape": {"rows": size[0], "columns": size[1]}}


if __name__ == "__main__":
    raise SystemExit(main())
