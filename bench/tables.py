"""Markdown tables of measured results, by the name of the marker that they go between."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

Cell = Mapping[str, Any]
Data = Mapping[str, Any]
FUSED, STOCK = "fused", "stock"
EAGER, COMPILED = "separate, eager", "separate, compiled"
ABSENT = "-"
SHARDED = " GPUs"
MODES = ("graph", "no_graph")
RUNS_WITH_PEERS = ("kernel", "paged")


def environments(files: Sequence[Data]) -> list[str]:
    """Where results come from: a line for those that have all but the commit and file in common."""
    named: dict[str, dict[str, list[str]]] = {}
    for data in files:
        commits = named.setdefault(environment(data), {})
        commits.setdefault(_commit(data), []).append(f"`{data['file']}`")
    return [
        "; ".join([origin, *(f"commit {c}: {', '.join(of)}" for c, of in commits.items())]) + "."
        for origin, commits in named.items()
    ]


def environment(data: Data) -> str:
    """Device and versions of a result."""
    env = data["environment"]
    smi = env.get("nvidia_smi") or {}
    packages = env.get("packages", {})
    names = ["torch", "triton", "transformers"]
    if data["run"].split("-")[0] in RUNS_WITH_PEERS:
        names += ["fa3-fwd", "flashinfer-python"]
    versions = [f"{name} {packages[name]}" for name in names if packages.get(name)]
    driver = smi.get("driver_version")
    return ", ".join([env["device"], *([f"driver {driver}"] if driver else []), *versions])


def _commit(data: Data) -> str:
    env = data["environment"]
    return (env.get("commit") or "unknown")[:12] + (" (dirty)" if env.get("dirty") else "")


def arms(kind: str) -> Callable[[Data], list[str]]:
    """The renderer of cells whose candidates are listed one a row, with one column a cell."""

    def render(data: Data) -> list[str]:
        cells = of_kind(data, kind)
        names = candidate_names(cells)
        header = ["us", *(f"batch {cell['shape']['B']}" for cell in cells)]
        rows = [[name, *(time_of(cell, name) for cell in cells)] for name in names]
        return table(header, rows) if rows else []

    return render


def model(
    mode: str, only: str | None = None, *, largest: int | None = None, sharded: bool = False
) -> Callable[[Data], list[str]]:
    """The renderer of decode steps: `mode` is "graph" or "no_graph".

    `only` is a number of live tokens, besides which none is shown, and `largest` the last capacity;
    `sharded` takes in models that are spread over several GPUs.
    """

    def render(data: Data) -> list[str]:
        cells = [cell for cell in of_kind(data, "step") if sharded or not _is_sharded(cell)]
        found = {tuple(cell["shape"].values()): cell for cell in cells}
        batches = sorted({cell["shape"]["B"] for cell in cells})
        names = dict.fromkeys(cell["shape"]["model"] for cell in cells)
        sizes = sorted({cell["shape"]["capacity"] for cell in cells})
        capacities = [size for size in sizes if largest is None or size <= largest]
        rows = []
        for name in names:
            for capacity in capacities:
                column = [found.get((name, batch, capacity)) for batch in batches]
                lives = dict.fromkeys(live for c in column if c for live in c.get("live", {}))
                for live in [live for live in lives or ("600",) if only in (None, live)]:
                    steps = [_step_cell(cell, live, mode) for cell in column]
                    if any(step != ABSENT for step in steps):
                        rows.append([name, str(capacity), live, *steps])
        header = ["model", "capacity", "live", *(f"batch {batch}" for batch in batches)]
        return table(header, rows) if rows else []

    return render


def tensor_parallel(data: Data) -> list[str]:
    """Decode steps of one model over several GPUs."""
    rows = []
    for cell in of_kind(data, "step"):
        if not _is_sharded(cell):
            continue
        shape = cell["shape"]
        label = [shape["model"], *(str(shape[name]) for name in ("B", "capacity"))]
        for live in cell.get("live") or (ABSENT,):
            rows.append([*label, live, *(_step_cell(cell, live, mode) for mode in MODES)])
    header = ["model", "batch", "capacity", "live", "CUDA graph", "without"]
    return table(header, rows) if rows else []


def generate(data: Data) -> list[str]:
    """Tokens a second of generate()."""
    cells = [cell for cell in of_kind(data, "generate") if "tokens_per_s" in cell]
    rows = [[cell["candidate"], f"{cell['tokens_per_s']:.0f}"] for cell in cells]
    return table(["generate()", "tokens/s"], rows) if rows else []


def host(data: Data) -> list[str]:
    """Host time of a step without CUDA graphs."""
    rows = [
        [f"{cell['shape']['layers']} layers, {label}", time_of(part, STOCK), time_of(part, FUSED)]
        for cell in of_kind(data, "host")
        for key, label in (("returns", "until the call returns"), ("done", "until it is done"))
        if (part := cell.get(key))
    ]
    return table(["us a step", STOCK, FUSED], rows) if rows else []


def compile_time(data: Data) -> list[str]:
    """What the pass adds to compilation."""
    rows = [
        [
            str(cell["shape"]["layers"]),
            ABSENT if cell["stock_s"] is None else f"{cell['stock_s']:.1f} s",
            f"{cell['fused_s']:.1f} s",
            f"{cell['pass_ms']:.1f} ms",
            f"{cell['lowering_ms']:.1f} ms",
            f"{cell['collector_ms']:.1f} ms" if "collector_ms" in cell else ABSENT,
            f"{100 * cell['added_share']:.2f} %",
        ]
        for cell in of_kind(data, "compile_time")
        if "stock_s" in cell
    ]
    header = ["layers", "stock", "with the pass", "the pass", "its lowering", "collector", "share"]
    return table(header, rows) if rows else []


# Marker, the run whose results it shows, and the renderer; the bars' are in `report`.
TABLES: dict[str, tuple[str, Callable[[Data], list[str]]]] = {
    "masks": ("kernel", arms("masks")),
    "tokens": ("kernel", arms("tokens")),
    "model": ("model", model("graph")),
    "model-live": ("model", model("graph", "600", largest=32768, sharded=True)),
    "model-no-graph": ("model", model("no_graph")),
    "tensor-parallel": ("model", tensor_parallel),
    "generate": ("model", generate),
    "gate": ("gate", arms("gate")),
    "host": ("host", host),
    "compile_time": ("compile_time", compile_time),
}


def of_kind(data: Data, kind: str) -> list[Cell]:
    """The cells of one kind."""
    return [cell for cell in data["cells"] if cell["kind"] == kind]


def median(cell: Cell, name: str) -> float | None:
    """A candidate's median in us; None where it has no time."""
    value = cell.get("candidates", {}).get(name, {}).get("median_us")
    return None if value is None else float(value)


def over_fused(cell: Cell, name: str) -> float | None:
    """A candidate's time over ours; None where one of them has none."""
    own, other = median(cell, FUSED), median(cell, name)
    return None if own is None or other is None else other / own


def best_peer(cell: Cell, besides: Container[str] = ()) -> tuple[str, float] | None:
    """The fastest candidate but ours and those of `besides`, and its time over ours."""
    others = {
        name: ratio
        for name in cell.get("candidates", {})
        if name != FUSED and name not in besides and (ratio := over_fused(cell, name)) is not None
    }
    return min(others.items(), key=lambda other: other[1], default=None)


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of positive values."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def number(value: float | None) -> str:
    """Three significant digits, or a dash."""
    if value is None:
        return ABSENT
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def heads(query: int, key: int, width: int) -> str:
    """A geometry in words."""
    return f"{query}/{key} heads of {width}"


def candidate_names(cells: Iterable[Cell]) -> list[str]:
    """Whom any of the cells tells of, in their order."""
    return list(dict.fromkeys(name for cell in cells for name in cell.get("candidates", {})))


def not_measured(data: Data, names: Container[str]) -> list[str]:
    """Why who is not among the names was not measured, below a table."""
    missing = data.get("missing", {}).items()
    lines = [f"Not measured: {name}, {why}." for name, why in missing if name not in names]
    return ["", *lines] if lines else []


def null_time(cell: Cell) -> str:
    """The null arm's median in us."""
    return number((cell.get("null") or {}).get("median_us"))


def time_of(cell: Cell, name: str) -> str:
    """A candidate's median in us, or that it failed."""
    entry = cell.get("candidates", {}).get(name, {})
    return "failed" if "failed" in entry else number(entry.get("median_us"))


def _is_sharded(cell: Cell) -> bool:
    return bool(cell["shape"]["model"].endswith(SHARDED))


def _step_cell(cell: Cell | None, live: str, mode: str) -> str:
    """Such as "11.3 → 0.31 ms (36x)"."""
    if cell is None:
        return ABSENT
    if "skipped" in cell:
        return "skipped"
    timings = cell.get("live", {}).get(live)
    if timings is None:
        return "failed" if "failed" in cell else ABSENT
    stock, fused = (median(timings.get(mode, {}), name) for name in (STOCK, FUSED))
    if stock is None or fused is None:
        return "failed"
    return f"{number(stock / 1e3)} → {number(fused / 1e3)} ms ({number(stock / fused)}x)"
