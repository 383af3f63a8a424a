"""Renders measured results into the documents: `python -m bench.report [--check | --print]`.

Tables go between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->` of README.md and
docs/benchmarks.md, plots to docs/images. With --check nothing is written, and the exit status is 1
if a document or a plot is not what the results give.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import bars, kernel_tables, paged_tables, tables
from bench.plot import Chart, svg
from bench.results import load

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "docs/benchmarks.md")
IMAGES = "docs/images"
MARKED = re.compile(r"(<!-- bench:([\w-]+) -->\n)(.*?)(<!-- /bench:\2 -->)", re.DOTALL)
PLOT_BATCH = 8
PLOTS = "plots"
# Marker, the run whose results it shows, and the renderer.
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], list[str]]]] = {
    **kernel_tables.TABLES,
    **tables.TABLES,
    **paged_tables.TABLES,
    **{f"{run}-bars": (run, bars.rows(run)) for run in bars.BARS},
}


@dataclass(frozen=True)
class Source:
    """The results of one run on one GPU, which several files may share among them."""

    run: str
    gpu: str
    files: tuple[dict[str, Any], ...]

    @property
    def data(self) -> dict[str, Any]:
        """The first file with the cells of all, and with whom any of them misses."""
        cells = [cell for file in self.files for cell in file["cells"]]
        missing = {name: why for file in self.files for name, why in file["missing"].items()}
        return {**self.files[0], "cells": cells, "missing": missing}


def main(argv: Sequence[str] | None = None) -> int:
    """Render, check or print; returns the exit status."""
    options = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    options.add_argument("--check", action="store_true", help="compare instead of writing")
    options.add_argument("--print", action="store_true", help="print every table instead")
    options.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs")
    options.add_argument("--results", type=Path, help="folder of the results")
    arguments = options.parse_args(argv)
    folder = arguments.results or arguments.root / "bench" / "results"
    if arguments.print:
        print(everything(sources(folder, quick=True)))
        return 0
    wanted = render(arguments.root, sources(folder))
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
        print(f"{path}: {'differs from the results' if arguments.check else 'written'}")
    return 1 if arguments.check and stale else 0


def sources(folder: Path, quick: bool = False) -> list[Source]:
    """The results in a folder by run and GPU; those of --quick runs only if asked for.

    Raises:
        ValueError: a file is no result, or two files hold one cell.
    """
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        data = {**load(path), "file": path.name}
        if data["run"].endswith("-quick") and not quick:
            continue
        grouped.setdefault((data["run"].split("-")[0], data["gpu"]), []).append(data)
    found = [Source(run, gpu, tuple(files)) for (run, gpu), files in sorted(grouped.items())]
    for source in found:
        keys = [cell_key(cell) for cell in source.data["cells"]]
        if not quick and len(set(keys)) != len(keys):
            raise ValueError(f"results of {source.run} on {source.gpu} hold a cell twice")
    return found


def cell_key(cell: dict[str, Any]) -> str:
    """What tells a cell from others of its run."""
    return f"{cell['kind']} {cell.get('candidate')} {sorted(cell.get('shape', {}).items())}"


def render(root: Path, found: Sequence[Source]) -> dict[Path, str]:
    """What each document and plot should hold, by its path."""
    wanted = {}
    for name in DOCUMENTS:
        path = root / name
        if path.exists():
            wanted[path] = fill(path.read_text(), found)
    for source in found:
        for name, chart in charts(source).items():
            wanted[root / IMAGES / f"{name}-{source.gpu}.svg"] = svg(chart)
    return wanted


def fill(text: str, found: Sequence[Source]) -> str:
    """A document with what lies between its markers replaced.

    Raises:
        ValueError: a marker names no table.
    """

    def replace(match: re.Match[str]) -> str:
        name = match.group(2)
        if name not in (*TABLES, PLOTS):
            raise ValueError(f"bench:{name} is none of {', '.join((*TABLES, PLOTS))}")
        content = links(found) if name == PLOTS else section(name, found)
        return f"{match.group(1)}{content}{match.group(4)}"

    return MARKED.sub(replace, text)


def section(name: str, found: Sequence[Source]) -> str:
    """The table of this name for every GPU that has results, each with its environment."""
    run, renderer = TABLES[name]
    parts = []
    for source in found:
        lines = renderer(source.data) if source.run == run else []
        if lines:
            origin = tables.environments([file for file in source.files if renderer(file)])
            parts.append("\n".join([*lines, "", *origin]))
    return "\n\n".join(parts) + "\n" if parts else ""


def links(found: Sequence[Source]) -> str:
    """The plots that there are, as images of a document in docs."""
    images = [
        f"![{chart.title}]({Path(IMAGES).name}/{name}-{source.gpu}.svg)"
        for source in found
        for name, chart in charts(source).items()
    ]
    return "\n\n".join(images) + "\n" if images else ""


def everything(found: Sequence[Source]) -> str:
    """All tables that the results give, under their names."""
    parts = [(name, section(name, found)) for name in TABLES]
    return "\n".join(f"## {name}\n{text}" for name, text in parts if text)


def charts(source: Source) -> dict[str, Chart]:
    """The plots that a run's results give, by file name."""
    makers: dict[str, dict[str, Callable[[Source], Chart]]] = {
        "kernel": {"speedup": speedup_chart, "floor": floor_chart},
        "model": {"capacity": capacity_chart},
    }
    made = {name: maker(source) for name, maker in makers.get(source.run, {}).items()}
    return {name: chart for name, chart in made.items() if any(chart.series.values())}


def speedup_chart(source: Source) -> Chart:
    """The best peer's time over ours, at batch 1, over KV length."""
    series: dict[str, list[tuple[float, float]]] = {}
    for cell in tables.of_kind(source.data, "grid"):
        peer = tables.best_peer(cell)
        if peer is not None and cell["shape"]["B"] == 1:
            points = series.setdefault(cell["shape"]["geometry"], [])
            points.append((cell["shape"]["S"], peer[1]))
    return Chart("Best peer's time over fused, batch 1", "KV length", "times", series, y_log=False)


def floor_chart(source: Source) -> Chart:
    """Our time against the floor of each cell."""
    series: dict[str, list[tuple[float, float]]] = {}
    for cell in tables.of_kind(source.data, "grid"):
        own = tables.median(cell, tables.FUSED)
        if own is not None:
            points = series.setdefault(cell["shape"]["geometry"], [])
            points.append((cell["floor_us"], own))
    return Chart(
        "Fused decode against its floor", "floor, us", "us", series, lines=False, diagonal=True
    )


def capacity_chart(source: Source) -> Chart:
    """A step of the dense model over the capacity of its cache, at batch 8 and 600 live tokens."""
    series: dict[str, list[tuple[float, float]]] = {}
    for cell in tables.of_kind(source.data, "step"):
        shape = cell["shape"]
        timings = cell.get("live", {}).get("600", {}).get("graph", {})
        if shape["model"] != "dense" or shape["B"] != PLOT_BATCH:
            continue
        for name in (tables.STOCK, tables.FUSED):
            taken = tables.median(timings, name)
            if taken is not None:
                series.setdefault(name, []).append((shape["capacity"], taken / 1e3))
    title = f"Decode step, dense Qwen3.5, batch {PLOT_BATCH}, 600 live tokens"
    return Chart(title, "capacity of the static cache", "ms", series)


if __name__ == "__main__":
    raise SystemExit(main())
