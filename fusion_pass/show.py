"""`python -m fusion_pass show`: the graphs in a dump folder as one self-contained HTML page."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fusion_pass.dump_format import KERNELS, REPORT, SCHEMA

_PAGE = Path(__file__).parent / "page"
_MALFORMED = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    RecursionError,
    MemoryError,
)


class ShowError(Exception):
    """A folder holds nothing that can be shown; the message says what to do."""


def write_page(folder: Path, output: Path) -> str:
    """Writes the page of the dump in `folder` to `output`; what it shows, in one line.

    Raises:
        ShowError: `folder` holds no readable report.
        OSError: `output` cannot be written.
    """
    data = collect(folder)
    output.write_text(render(data), encoding="utf-8")
    sites = [site for graph in data["graphs"] for site in graph["sites"]]
    fused = sum(site["fused"] for site in sites)
    return f"{fused} of {len(sites)} attentions fused, in {data['extent']}: {output}"


def render(data: dict[str, Any]) -> str:
    """The page that shows what `collect` returned."""
    parts = {
        "STYLE": (_PAGE / "style.css").read_text(encoding="utf-8"),
        "DATA": _embedded(data),
        "SCRIPT": "\n".join(
            path.read_text(encoding="utf-8") for path in sorted(_PAGE.glob("*.js"))
        ),
    }
    template = (_PAGE / "page.html").read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda match: parts[match[1]], template)


def _embedded(data: dict[str, Any]) -> str:
    """JSON that no text in it can end or open as HTML, wherever it comes from."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", text)


def collect(folder: Path) -> dict[str, Any]:
    """What the page shows of a dump: its graphs in order, the strings of their nodes, and sources.

    Graphs of one process are a run; runs come in the order in which they began. A graph that cannot
    be read is told in "notes".

    Raises:
        ShowError: `folder` holds no readable report.
    """
    if not folder.is_dir():
        raise ShowError(f"{folder} is no folder; run the model with FUSION_PASS_DUMP={folder}")
    strings = _Strings()
    graphs, notes, versions = [], [], set[str]()
    runs = _runs(list(_reports(folder)))
    for path in (path for run in runs.values() for path in run):
        try:
            report = _loaded(path)
            graphs.append(_graph(path, report, strings))
            versions.add(f"fusion_pass {report['fusion_pass']}, torch {report['torch']}")
        except (OSError, *_MALFORMED) as error:
            notes.append(f"{path.name} cannot be read: {type(error).__name__}: {error}")
    if not graphs:
        raise ShowError(
            notes[0] if notes else f"{folder} holds no graph-*.report.json; is it a dump's folder?"
        )
    shown = [graph for graph in graphs if graph["sites"]]
    idle = len(graphs) - len(shown)
    if idle:
        notes.append(f"Graphs without any attention, not shown: {idle}.")
    titles = dict(_run_titles(runs))
    for graph in shown:
        graph["run"] = titles[graph.pop("process")]
    return {
        "versions": "; ".join(sorted(versions)),
        "extent": _extent(shown),
        "graphs": shown,
        "strings": strings.all,
        "sources": _sources(folder),
        "notes": notes,
    }


def _reports(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if REPORT.fullmatch(path.name))


def _order(path: Path) -> tuple[int, int]:
    match = REPORT.fullmatch(path.name)
    assert match is not None
    return int(match["process"]), int(match["number"])


def _runs(paths: Iterable[Path]) -> dict[int, list[Path]]:
    """Each process's reports in order, the process that wrote the first one first."""
    runs: dict[int, list[Path]] = {}
    for path in sorted(paths, key=_order):
        runs.setdefault(_order(path)[0], []).append(path)
    return dict(sorted(runs.items(), key=lambda run: _began(run[1])))


def _began(paths: Iterable[Path]) -> float:
    return min(path.stat().st_mtime for path in paths)


def _run_titles(runs: dict[int, list[Path]]) -> Iterator[tuple[int, str]]:
    """As in "Run of 77 at 12:30:05"; with the date where not all began on one day."""
    began = {process: time.localtime(_began(paths)) for process, paths in runs.items()}
    days = {moment[:3] for moment in began.values()}
    form = "%H:%M:%S" if len(days) == 1 else "%Y-%m-%d %H:%M:%S"
    for process, moment in began.items():
        yield process, f"Run of {process} at {time.strftime(form, moment)}"


def _extent(graphs: list[dict[str, Any]]) -> str:
    """As in "3 graphs of 2 runs"."""
    runs = len({graph["run"] for graph in graphs})
    of_runs = f" of {_count(runs, 'run')}" if runs > 1 else ""
    return f"{_count(len(graphs), 'graph')}{of_runs}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class _Strings:
    """Every string once, by its place in `all`."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, text: str | None) -> int:
        """Where `text` stands; -1 for None."""
        if text is None:
            return -1
        if text not in self._places:
            self._places[text] = len(self.all)
            self.all.append(str(text))
        return self._places[text]


def _graph(path: Path, report: dict[str, Any], strings: _Strings) -> dict[str, Any]:
    """One graph as the page takes it; without its nodes where the dump has none that are known."""
    process, number = _order(path)
    sites = [dict(site) for site in report["sites"]]
    graph: dict[str, Any] = {
        "title": f"Graph {number}",
        "process": process,
        "summary": f"{report['fused']} fused, {report['declined']} declined",
        "sites": sites,
        **_no_nodes(),
    }
    for site in sites:
        site["attention"], site["fused"] = str(site["attention"]), bool(site["fused"])
        site["reason"] = None if site["fused"] else str(site["reason"])
    if sites:
        _add_record(graph, path.with_name(path.name.replace(".report.", ".graph.")), strings)
    return graph


def _no_nodes() -> dict[str, Any]:
    return {"packed": [], "before": [], "after": [], "changes": {}}


def _add_record(graph: dict[str, Any], path: Path, strings: _Strings) -> None:
    """The nodes that lie beside a report; a note where there are none that can be read."""
    try:
        record = _loaded(path) if path.is_file() else {}
        if record.get("schema") == SCHEMA:
            _add_nodes(graph, record, strings)
        else:
            graph["note"] = "The dump does not hold this graph's nodes in a form that is known."
    except (OSError, *_MALFORMED) as error:
        graph.update(
            _no_nodes(), note=f"{path.name} cannot be read: {type(error).__name__}: {error}"
        )


def _loaded(path: Path) -> Any:
    """What a JSON file holds; NaN and infinities, which a browser's JSON does not know, are none.

    Raises:
        ValueError: it is no regular file, or no JSON.
    """
    if not path.is_file():
        raise ValueError("it is no regular file")

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def _add_nodes(graph: dict[str, Any], record: dict[str, Any], strings: _Strings) -> None:
    places: dict[str, int] = {}
    for state in ("before", "after"):
        for node in record[state]:
            packed = _packed(node, strings)
            key = json.dumps(packed)
            if key not in places:
                places[key] = len(graph["packed"])
                graph["packed"].append(packed)
            graph[state].append(places[key])
    graph["changes"] = {change["attention"]: change for change in record["sites"]}
    modules = {node["name"]: node["module"] for node in record["before"]}
    for site in graph["sites"]:
        site.setdefault("module", modules.get(site["attention"]))


def _packed(node: dict[str, Any], strings: _Strings) -> list[Any]:
    """A node as places of strings; page/1_data.js reads it."""
    outputs = node["outputs"]
    first = outputs[0] if outputs else None
    fields = (
        node["name"],
        node["op"],
        node["target"],
        node["args"],
        ", ".join(f"{made['dtype']}[{_list(made['shape'])}]" for made in outputs) or None,
        f"({_list(first['stride'])})" if first and first["stride"] is not None else None,
        first["device"] if first else None,
        node["source"],
        node["module"],
    )
    inputs = [[strings.place(name), strings.place(role)] for name, role in node["inputs"]]
    return [*map(strings.place, fields), inputs]


def _list(sizes: list[Any]) -> str:
    return ", ".join(map(str, sizes))


def _sources(folder: Path) -> dict[str, list[dict[str, str]]]:
    """The functions of every file of kernels, by the file's name."""
    found = {}
    for path in sorted(folder.iterdir()):
        if not KERNELS.fullmatch(path.name):
            continue
        try:
            if path.is_file():
                found[path.name] = list(_functions(path.read_text(encoding="utf-8")))
        except (OSError, SyntaxError, *_MALFORMED):
            found[path.name] = []
    return found


def _functions(source: str) -> Iterator[dict[str, str]]:
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
            yield {"name": node.name, "code": "\n".join(lines[first - 1 : node.end_lineno])}
