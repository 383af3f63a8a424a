"""The report of `explain`: typed, as a table, as JSON and as a page."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import torch

from fusion_pass import __version__
from fusion_pass.patterns import Reason
from fusion_pass.report import GraphReport, Site

SCHEMA = 2
SWITCHED_OFF = "switched-off"
"""The reason of what a pass that is switched off would fuse."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_HEADINGS = ("attention", "producer", "query", "keys", "mask", "gate", "decision")
_WITHOUT = {Reason.TRAINING.value: "without gradients", SWITCHED_OFF: "switched on"}
_MASKED = ", less where the mask hides whole tiles of keys"
_ASSUMED = "* whether it pays is assumed: decided on the GPU"


@dataclass(frozen=True)
class ExplainedSite(Site):
    """One attention, and what is told of it beyond what the pass reports.

    Attributes:
        assumed: whether it was only assumed that fusing it pays.
        gate_source: where the output is multiplied by what is no sigmoid, as "file:line".
        otherwise: the same attention without what `reason` names, where that is a gradient or the
            pass being switched off; else None.
    """

    assumed: bool = False
    gate_source: str | None = None
    otherwise: ExplainedSite | None = None

    @property
    def is_gated(self) -> bool:
        """Whether the output has a gate, or may have one that was not looked for."""
        return self.otherwise.is_gated if self.otherwise else super().is_gated


@dataclass(frozen=True)
class ExplainedGraph(GraphReport):
    """Every attention of one graph, in the graph's order."""

    sites: tuple[ExplainedSite, ...]


@dataclass(frozen=True)
class Explanation:
    """Every attention of every graph that a program compiles to, and what the pass does with it.

    Attributes:
        graphs: one for each graph that has an attention, in the order in which they run.
        device: name of the device that the program was judged for.
        is_assumed: whether that device is not in this machine.
        notes: what else limits what the report says, one sentence each.
        stopped: what ended the trace early, such as `.item()` of a tensor without data; None if
            nothing did. Graphs after it are missing.
        enabled: whether the pass is switched on; where it is not, nothing is fused.
    """

    graphs: tuple[ExplainedGraph, ...]
    device: str
    is_assumed: bool
    notes: tuple[str, ...]
    stopped: str | None
    enabled: bool = True

    @property
    def sites(self) -> tuple[ExplainedSite, ...]:
        """The attentions of all graphs."""
        return tuple(site for graph in self.graphs for site in graph.sites)

    @property
    def fused(self) -> int:
        """How many attentions would be fused."""
        return sum(site.fused for site in self.sites)

    @property
    def fused_otherwise(self) -> int:
        """How many more would be, were the pass switched on or, if it is, no gradient needed."""
        return sum(site.otherwise.fused for site in self.sites if site.otherwise)

    @property
    def gated(self) -> int:
        """How many attentions have a gate, or may have one that was not looked for."""
        return sum(site.is_gated for site in self.sites)

    @property
    def all_fused(self) -> bool:
        """Whether there is a gated attention, every one would be fused, and all was traced."""
        return 0 < self.fused == self.gated and self.stopped is None

    def summary(self) -> str:
        """One line, such as "4 of 4 gated attentions would be fused; 2 have no gate"."""
        without = len(self.sites) - self.gated
        tail = f"; {without} without a gate" if without else ""
        if not self.enabled:
            return f"switched off: 0 fused; {self.fused_otherwise} would be{tail}"
        if not self.sites:
            return "no attention was found"
        if self.fused_otherwise:
            tail = f"; {self.fused_otherwise} would be without gradients{tail}"
        return f"{self.fused} of {self.gated} gated attentions would be fused{tail}"

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-serialisable data; "schema" changes when a key does."""
        return {
            "schema": SCHEMA,
            "fusion_pass": __version__,
            "torch": torch.__version__,
            "enabled": self.enabled,
            "device": self.device,
            "assumed": self.is_assumed,
            "notes": list(self.notes),
            "stopped": self.stopped,
            "fused": self.fused,
            "fused_otherwise": self.fused_otherwise,
            "gated": self.gated,
            "graphs": [[asdict(site) for site in graph.sites] for graph in self.graphs],
        }

    def __str__(self) -> str:
        """A compact table; attentions that differ in their layer's number alone share a row."""
        groups = list(_groups(self.sites))
        rows = [_HEADINGS, *(_row(group) for group in groups)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
        lines = [self._title(), self.summary()]
        if groups:
            lines += ["", _align(rows[0], widths)]
        for group, row in zip(groups, rows[1:], strict=True):
            lines += [_align(row, widths), *(f"    {name}: {text}" for name, text in _more(group))]
        return "\n".join([*lines, *([""] if groups else []), *self._remarks()]).rstrip()

    def to_html(self) -> str:
        """The table as a page of its own, which loads nothing."""
        rows = "".join(_html_row(group) for group in _groups(self.sites))
        headings = "".join(f"<th>{heading}</th>" for heading in _HEADINGS)
        remarks = "".join(f"<p>{escape(remark)}</p>" for remark in self._remarks())
        return _PAGE.format(
            title=escape(self._title()),
            summary=escape(self.summary()),
            table=f"<table><tr>{headings}</tr>{rows}</table>" if self.sites else "",
            remarks=remarks,
        )

    def _title(self) -> str:
        assumed = " (assumed)" if self.is_assumed else ""
        return f"fusion_pass {__version__}, torch {torch.__version__}, {self.device}{assumed}"

    def _remarks(self) -> list[str]:
        stopped = f"The trace stopped early, what comes after is missing: {self.stopped}"
        is_assumed = any((site.otherwise or site).assumed for site in self.sites)
        footer = [_ASSUMED] if is_assumed else []
        return [*footer, *self.notes, *([stopped] if self.stopped else [])]


_Group = tuple[ExplainedSite, ...]


def _groups(sites: Iterable[ExplainedSite]) -> Iterable[_Group]:
    """Attentions that are the same but for numbers in their module's path, in order."""
    found: dict[tuple[object, ...], list[ExplainedSite]] = {}
    for site in sites:
        module = _NUMBER.sub("*", site.module or "")
        place = site.source, site.gate_source
        shown = module, site.producer, place, site.tensors, _decision(site), site.kernel
        key = (*map(repr, shown), site.mask_kind, site.gate_kind, site.ground)
        found.setdefault(key, []).append(site)
    return map(tuple, found.values())


def _row(group: _Group) -> tuple[str, ...]:
    site = group[0]
    name = site.module or site.attention
    if len(group) > 1:
        name = f"{_NUMBER.sub('*', name) if site.module else name} x{len(group)}"
    return (
        name,
        site.producer,
        _sizes(site, "query"),
        _sizes(site, "key"),
        site.mask_kind or "?",
        site.gate_kind or ("?" if site.is_gated else "none"),
        _decision(site),
    )


def _decision(site: ExplainedSite) -> str:
    if site.fused:
        return "fused*" if site.assumed else "fused"
    declined = f"declined: {site.reason}"
    if site.otherwise is None:
        return declined
    return f"{declined} ({_WITHOUT[site.reason or '']}: {_decision(site.otherwise)})"


def _sizes(site: Site, name: str) -> str:
    tensor = site.tensors.get(name)
    if tensor is None:
        return "?"
    return f"{_DTYPES.get(tensor.dtype, tensor.dtype)}[{','.join(map(str, tensor.shape))}]"


def _more(group: _Group) -> list[tuple[str, str]]:
    """What is told below a row, as (name, text)."""
    site = group[0]
    more = [("at", place)] if (place := _place(site)) else []
    if not site.fused:
        texts = {"found": site.detail, "expected": site.expected, "to change it": site.remedy}
        more += [(name, text) for name, text in texts.items() if text]
        return more + (_more_otherwise(site, site.otherwise) if site.otherwise else [])
    return more + _more_fused(site)


def _more_otherwise(site: ExplainedSite, otherwise: ExplainedSite) -> list[tuple[str, str]]:
    """What is told of the attention without what `site.reason` names."""
    told = (_decision(otherwise), otherwise.detail, otherwise.ground, otherwise.remedy)
    return [(_WITHOUT[site.reason or ""], "; ".join(filter(None, told)))]


def _more_fused(site: ExplainedSite) -> list[tuple[str, str]]:
    more = [("why", site.ground)] if site.ground else []
    kernel = site.kernel
    if kernel is None:
        return more
    config = kernel.config
    splits = config["num_splits"]
    tiles = (
        f"{splits} split{'' if splits == 1 else 's'}, tiles of {config['block_m']} rows x "
        f"{config['block_n']} keys, {config['split_warps']} warps, {config['split_stages']} stages"
    )
    more.append(("kernel", tiles))
    before, after = kernel.bytes_before, kernel.bytes_after
    if before is not None and after is not None:
        hidden = "" if site.mask_kind in (None, "none") else _MASKED
        more.append(
            ("reads a step", f"{_megabytes(before)} before, {_megabytes(after)} after{hidden}")
        )
    launches = f"{kernel.launches_before} before, {kernel.launches_after} after"
    return [*more, ("launches", launches)]


def _place(site: ExplainedSite) -> str:
    """The lines of the module's own code, of the attention, and of a gate that is no sigmoid."""
    calls = [call.rpartition(" in ") for call in site.frames]
    own = [line for line, _, function in calls if function == "forward"][-1:]
    others = [line for line in (site.source, site.gate_source) if line]
    return ", ".join(dict.fromkeys(map(_short, own + others)))


def _short(source: str) -> str:
    """A path relative to the working folder, or its last three parts."""
    here = os.getcwd() + os.sep
    within = source.startswith(here)
    return source.removeprefix(here) if within else os.sep.join(source.split(os.sep)[-3:])


def _megabytes(count: int) -> str:
    if count >= 100_000_000:
        return f"{count / 1e6:,.0f} MB"
    return f"{count / 1e6:.3g} MB" if count >= 1_000_000 else f"{count / 1e3:.3g} kB"


def _align(row: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _html_row(group: _Group) -> str:
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in _row(group))
    more = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in _more(group))
    kind = "fused" if group[0].fused else "declined"
    return (
        f'<tr class="{kind}">{cells}</tr>'
        f'<tr class="more"><td colspan="{len(_HEADINGS)}"><dl>{more}</dl></td></tr>'
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem; max-width: 72rem; }}
h1 {{ font-size: 1.1rem; font-weight: 500; opacity: .7; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: .3rem .8rem .3rem 0; white-space: nowrap; }}
th {{ font-weight: 500; opacity: .7; }}
tr.fused, tr.declined {{ border-top: 1px solid #8884; }}
tr.fused td:last-child {{ color: #2a7f4f; }}
tr.declined td:last-child {{ color: #b4552d; }}
.more td {{ white-space: normal; padding-bottom: .8rem; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; margin: 0; }}
dt {{ opacity: .7; }} dd {{ margin: 0; }}
</style></head>
<body><h1>{title}</h1><p>{summary}</p><div>{table}</div>{remarks}</body></html>
"""
