"""Markdown tables of the results of `bench.kernel`: ours, its rivals and what bounds them."""

from __future__ import annotations

from collections.abc import Sequence

from bench.geometry import GEOMETRIES, GRID
from bench.tables import (
    ABSENT,
    FUSED,
    Cell,
    Data,
    best_peer,
    candidate_names,
    geometric_mean,
    heads,
    median,
    not_measured,
    null_time,
    number,
    of_kind,
    table,
    time_of,
)


def grid(data: Data) -> list[str]:
    """Ours, the best peer over ours, and the floor over ours, for each cell of the grid."""
    cells = of_kind(data, "grid")
    if not cells:
        return []
    found = {(c["shape"]["geometry"], c["shape"]["B"], c["shape"]["S"]): c for c in cells}
    shown = [g for g in GEOMETRIES if any(key[0] == g.name for key in found)]
    header = ["batch, KV length", *(heads(g.query_heads, g.kv_heads, g.head_dim) for g in shown)]
    rows = [
        [f"{batch}, {length}", *(_cell(found.get((g.name, batch, length))) for g in shown)]
        for batch, length in GRID
        if any((g.name, batch, length) in found for g in shown)
    ]
    return [*table(header, rows), "", *summary(cells)]


def summary(cells: Sequence[Cell]) -> list[str]:
    """Geometric means over the cells that have a time of ours."""
    ratios = [ratio for cell in cells if (ratio := best_peer(cell)) is not None]
    floors = [cell["floor_us"] / own for cell in cells if (own := median(cell, FUSED)) is not None]
    lines = []
    if ratios:
        worst = min(ratio for _, ratio in ratios)
        mean = geometric_mean(ratio for _, ratio in ratios)
        lines.append(f"Best peer over fused: geometric mean {mean:.2f}, least {worst:.2f}.")
    if floors:
        mean = geometric_mean(floors)
        lines.append(f"Floor over fused: geometric mean {mean:.2f}, least {min(floors):.2f}.")
    if bounded := [bound for cell in cells if (bound := _over_reading(cell)) is not None]:
        own, rival = (geometric_mean(bounds) for bounds in zip(*bounded, strict=True))
        lines.append(f"Mean over reading alone: fused {own:.2f}, best peer {rival:.2f}.")
    return [" ".join(lines)] if lines else []


def every(data: Data) -> list[str]:
    """The median of every candidate on every cell of the grid, in us."""
    cells = of_kind(data, "grid")
    names = candidate_names(cells)
    header = ["heads, batch, KV length", "floor", "read", *names, "null"]
    rows = []
    for cell in cells:
        shape = cell["shape"]
        label = f"{heads(shape['Hq'], shape['Hkv'], shape['D'])}, {shape['B']}, {shape['S']}"
        bounds = [number(cell.get(bound)) for bound in ("floor_us", "read_us")]
        rows.append([label, *bounds, *(time_of(cell, name) for name in names), null_time(cell)])
    return [*table(header, rows), *not_measured(data, names)] if rows else []


def _over_reading(cell: Cell) -> tuple[float, float] | None:
    """Ours and the best peer, each over the mere reading of K and V."""
    own, peer, read = median(cell, FUSED), best_peer(cell), cell.get("read_us")
    if own is None or peer is None or read is None:
        return None
    return own / read, own * peer[1] / read


def _cell(cell: Cell | None) -> str:
    """Such as "26.5 us, 1.36x fa3, 0.71"."""
    if cell is None:
        return ABSENT
    own = median(cell, FUSED)
    if own is None:
        return "skipped" if "skipped" in cell else "failed"
    peer = best_peer(cell)
    against = f"{peer[1]:.2f}x {peer[0]}" if peer else ABSENT
    return f"{number(own)} us, {against}, {cell['floor_us'] / own:.2f}"


TABLES = {"kernel": ("kernel", grid), "kernel-all": ("kernel", every)}
