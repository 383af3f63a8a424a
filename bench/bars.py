"""The project's bars against what was measured: markdown rows of value, limit and verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.tables import (
    ABSENT,
    COMPILED,
    EAGER,
    FUSED,
    MODES,
    STOCK,
    Cell,
    Data,
    best_peer,
    geometric_mean,
    median,
    number,
    of_kind,
    over_fused,
    table,
)

DENSE, FLASHINFER = "dense", "flashinfer"
LIVE, SHORT, LONG = 600, 4096, 131072


@dataclass(frozen=True)
class Bar:
    """A measured value and the limit that it may not pass; None where it was not measured."""

    name: str
    value: float | None
    limit: float
    at_least: bool = True
    unit: str = ""

    @property
    def verdict(self) -> str:
        """Whether the value keeps to the limit."""
        if self.value is None or not math.isfinite(self.value):
            return "not measured"
        kept = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "met" if kept else "missed"

    @property
    def row(self) -> list[str]:
        """The bar as a row of a table."""
        sign = "≥" if self.at_least else "≤"
        limit = f"{sign} {self.limit:g}{self.unit}"
        return [self.name, _spell(self.value, self.unit), limit, self.verdict]


def kernel(data: Data) -> list[Bar]:
    """Peers, floor, live tokens, masks, query tokens and error."""
    cells = of_kind(data, "grid")
    ratios = [peer[1] for cell in cells if (peer := best_peer(cell)) is not None]
    floors = [cell["floor_us"] / own for cell in cells if (own := median(cell, FUSED)) is not None]
    errors = [ratio for cell in cells if (ratio := _error_ratio(cell)) is not None]
    found = [
        Bar("best peer over fused, geometric mean", _mean(ratios), 1.35),
        Bar("best peer over fused, least", min(ratios, default=None), 0.98),
        Bar("floor over fused, geometric mean", _mean(floors), 0.80),
        Bar("floor over fused, least", min(floors, default=None), 0.50),
        Bar("error over stock's, most", max(errors, default=None), 1.0, at_least=False),
    ]
    for cell in of_kind(data, "masks"):
        batch = f"batch {cell['shape']['B']}"
        for mask in ("bool", "where"):
            name = f"{batch}, {LIVE} live, {mask} mask: capacity {LONG} over {SHORT}"
            cost = _ratio(cell, f"{mask}-{LIVE} @{LONG}", f"{mask}-{LIVE} @{SHORT}")
            found.append(Bar(name, cost, 1.25, at_least=False))
        for capacity in (SHORT, LONG):
            cost = _ratio(cell, f"bool-full @{capacity}", f"none @{capacity}")
            name = f"{batch}, full mask over none at {capacity}"
            found.append(Bar(name, cost, 1.05, at_least=False))
    for cell in of_kind(data, "tokens"):
        name = f"batch {cell['shape']['B']}, 4 query tokens over 1"
        found.append(Bar(name, _ratio(cell, "4", "1"), 1.15, at_least=False))
    return found


# Model, capacity, batch, whether 600 tokens are live or all, and the least speedup.
MODEL_BARS = (
    ("dense", 32768, 8, False, 25.0),
    ("dense", 32768, 8, True, 10.0),
    ("dense", 4096, 1, False, 1.5),
    ("hybrid", 4096, 1, False, 1.08),
    ("dense on 2 GPUs", 32768, 8, False, 10.0),
)


def model(data: Data) -> list[Bar]:
    """Speedups of decode steps as CUDA graphs, and the least of all cells and modes."""
    steps = {
        (shape["model"], shape["capacity"], shape["B"], live): timings
        for cell in of_kind(data, "step")
        if (shape := cell["shape"])
        for live, timings in cell.get("live", {}).items()
    }
    found = []
    for name, capacity, batch, is_full, limit in MODEL_BARS:
        live = str(capacity if is_full else LIVE)
        speedup = _speedup(steps.get((name, capacity, batch, live), {}).get("graph", {}))
        words = f"{name}, capacity {capacity}, batch {batch}, {live} live: stock over fused"
        found.append(Bar(words, speedup, limit))
    for mode, words in zip(MODES, ("with", "without"), strict=True):
        margins = [
            speedup * (1 + _spread(timings[mode]))
            for timings in steps.values()
            if (speedup := _speedup(timings.get(mode, {}))) is not None
        ]
        name = f"least stock over fused {words} CUDA graphs, the null arm's spread allowed"
        found.append(Bar(name, min(margins, default=None), 1.0))
    return found


def gate(data: Data) -> list[Bar]:
    """What the fused gate saves; the pull request that it follows had 1.36 to 1.44."""
    found = []
    for cell in of_kind(data, "gate"):
        for name in (EAGER, COMPILED):
            bar = f"batch {cell['shape']['B']}: {name} over fused"
            found.append(Bar(bar, over_fused(cell, name), 1.0))
    return found


# The least time of a separate eager gate over the fused one, by batch; and where the paged kernels
# may take a tenth longer than the dense ones.
PAGED_GATE_BARS = {1: 1.40, 4: 1.35}
PAGED_LONG = 32768


def paged(data: Data) -> list[Bar]:
    """Paged decode against its rivals, and the gate and the product alone."""
    cells = of_kind(data, "grid")
    rivals = _all_over_fused(cells, FLASHINFER)
    separate = _all_over_fused(cells, COMPILED)
    long = [cell for cell in cells if cell["shape"]["S"] == PAGED_LONG]
    dense = [1 / ratio for ratio in _all_over_fused(long, DENSE)]
    most = max(dense, default=None)
    found = [
        Bar("FlashInfer over fused, geometric mean", _mean(rivals), 1.25),
        Bar("FlashInfer over fused, least", min(rivals, default=None), 0.98),
        Bar("un-gated and a compiled gate over fused, least", min(separate, default=None), 1.0),
        Bar(f"fused over dense at {PAGED_LONG}, most", most, 1.1, at_least=False),
    ]
    gates = {cell["shape"]["B"]: cell for cell in of_kind(data, "gate")}
    for batch, limit in PAGED_GATE_BARS.items():
        value = over_fused(gates.get(batch, {}), EAGER)
        found.append(Bar(f"batch {batch}: separate eager gate over fused", value, limit))
    shares = [1 / ratio for ratio in _all_over_fused(of_kind(data, "product"), EAGER)]
    product = max(shares, default=None)
    found.append(Bar("sigmoid_gate_mul over eager, most", product, 0.6, at_least=False))
    return found


def host(data: Data) -> list[Bar]:
    """Host time of a step."""
    found = []
    for cell in of_kind(data, "host"):
        for part, words in (("returns", "the call returns"), ("done", "it is done")):
            stock, fused = (median(cell.get(part, {}), name) for name in (STOCK, FUSED))
            value = None if stock is None or fused is None else fused / stock
            name = f"{cell['shape']['layers']} layers, until {words}: fused over stock"
            found.append(Bar(name, value, 1.0, at_least=False))
    return found


def compile_time(data: Data) -> list[Bar]:
    """What the pass and its lowering take of a compilation."""
    found = []
    for cell in of_kind(data, "compile_time"):
        if "pass_ms" not in cell:
            continue
        layers = cell["shape"]["layers"]
        added = cell["pass_ms"] + cell["lowering_ms"]
        share = 100 * cell["added_share"]
        found.append(Bar(f"{layers} layers: added share", share, 1.0, at_least=False, unit=" %"))
        if layers == 64:
            found.append(Bar("64 layers: added time", added, 200, at_least=False, unit=" ms"))
    return found


BARS: Mapping[str, Callable[[Data], list[Bar]]] = {
    "kernel": kernel,
    "model": model,
    "gate": gate,
    "paged": paged,
    "host": host,
    "compile_time": compile_time,
}


def rows(run: str) -> Callable[[Data], list[str]]:
    """The renderer of one run's bars; nothing where none was measured."""

    def render(data: Data) -> list[str]:
        found = BARS[run](data)
        if all(bar.value is None for bar in found):
            return []
        return table(["bar", "measured", "limit", ""], [bar.row for bar in found])

    return render


def lines(data: Data) -> list[str]:
    """One line a bar, for the end of a run; a run of another name has none."""
    bars_of = BARS.get(data["run"].split("-")[0])
    found = bars_of(data) if bars_of else []
    return [": ".join((bar.name, " ".join(bar.row[1:]))) for bar in found]


def _error_ratio(cell: Cell) -> float | None:
    """Our error against float64 over stock's."""
    candidates = cell.get("candidates", {})
    own, stock = (candidates.get(name, {}).get("error") for name in (FUSED, STOCK))
    return own / stock if own is not None and stock else None


def _ratio(cell: Cell, numerator: str, denominator: str) -> float | None:
    """The quotient of two arms of ours."""
    above, below = (median(cell, f"{FUSED} {name}") for name in (numerator, denominator))
    return None if above is None or below is None else above / below


def _all_over_fused(cells: Sequence[Cell], name: str) -> list[float]:
    """A candidate's time over ours, of each cell that has both."""
    return [ratio for cell in cells if (ratio := over_fused(cell, name)) is not None]


def _speedup(timings: Cell) -> float | None:
    stock, fused = (median(timings, name) for name in (STOCK, FUSED))
    return None if stock is None or fused is None else stock / fused


def _spread(timings: Cell) -> float:
    """How far the null arm lies, and scatters, from the arm that it repeats, as a share."""
    null: Mapping[str, Any] = timings.get("null") or {}
    first = median(timings, STOCK)
    if not null or not first:
        return 0.0
    scatter = (null["p80_us"] - null["p20_us"]) / 2
    return float((abs(null["median_us"] - first) + scatter) / first)


def _mean(values: Sequence[float]) -> float | None:
    return geometric_mean(values) if values else None


def _spell(value: float | None, unit: str) -> str:
    return ABSENT if value is None else f"{number(value)}{unit}"
