"""Markdown tables of the results of `bench.paged`: one cell a row, one candidate a column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bench.bars import DENSE
from bench.tables import (
    ABSENT,
    COMPILED,
    EAGER,
    Cell,
    Data,
    best_peer,
    candidate_names,
    heads,
    not_measured,
    null_time,
    number,
    of_kind,
    over_fused,
    table,
    time_of,
)

Column = Callable[[Cell], str]


def listing(
    kind: str, labels: Mapping[str, Column], results: Mapping[str, Column]
) -> Callable[[Data], list[str]]:
    """The renderer of cells of one kind: their labels, every time in us, and what comes of them."""

    def render(data: Data) -> list[str]:
        cells = of_kind(data, kind)
        names = candidate_names(cells)
        header = [*labels, *names, "null", *results]
        rows = [
            [
                *_columns(cell, labels),
                *(time_of(cell, name) for name in names),
                null_time(cell),
                *_columns(cell, results),
            ]
            for cell in cells
        ]
        return table(header, rows) if rows else []

    return render


def grid(data: Data) -> list[str]:
    """Every candidate on every cell of the grid, and who was not measured."""
    lines = listing("grid", GRID_LABELS, {"best paged peer over fused": _best})(data)
    names = candidate_names(of_kind(data, "grid"))
    return [*lines, *not_measured(data, names)] if lines else []


def _columns(cell: Cell, columns: Mapping[str, Column]) -> Sequence[str]:
    return [column(cell) for column in columns.values()]


def _shape(name: str) -> Column:
    return lambda cell: str(cell["shape"][name])


def _heads(cell: Cell) -> str:
    shape = cell["shape"]
    return heads(shape["Hq"], shape["Hkv"], shape["D"])


def _lengths(cell: Cell) -> str:
    return ", ".join(str(length) for length in cell["shape"]["S"])


def _best(cell: Cell) -> str:
    """Such as "1.36x flashinfer"; the dense kernels read another cache."""
    peer = best_peer(cell, besides=(DENSE,))
    if peer is None:
        return next((why for why in ("skipped", "failed") if why in cell), ABSENT)
    return f"{peer[1]:.2f}x {peer[0]}"


def _over_fused(name: str) -> Column:
    return lambda cell: number(over_fused(cell, name))


GRID_LABELS: Mapping[str, Column] = {
    "heads": _heads,
    "page": _shape("page"),
    "batch": _shape("B"),
    "KV length": _shape("S"),
    "floor": lambda cell: number(cell.get("floor_us")),
}
# Marker, the run whose results it shows, and the renderer.
TABLES: dict[str, tuple[str, Callable[[Data], list[str]]]] = {
    "paged": ("paged", grid),
    "paged-gate": (
        "paged",
        listing(
            "gate",
            {"batch": _shape("B"), "KV lengths": _lengths},
            {"eager over fused": _over_fused(EAGER), "compiled over fused": _over_fused(COMPILED)},
        ),
    ),
    "product": (
        "paged",
        listing(
            "product",
            {"rows": _shape("rows"), "columns": _shape("columns")},
            {"eager over fused": _over_fused(EAGER)},
        ),
    ),
}
