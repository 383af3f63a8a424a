"""What the pass did to a graph, and where it is told: counters, log and dump."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fusion_pass import __version__, dump
from fusion_pass.config import Config, configure_logging
from fusion_pass.inductor import trace_artifact
from fusion_pass.patterns import Reason
from fusion_pass.savings import KernelPlan

SCHEMA = 2
ARTIFACT = "fusion_pass_report"
"""The name of each graph's report in torch's structured trace, where tlparse shows it."""

_logger = logging.getLogger("fusion_pass")
_graph_numbers = itertools.count()


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the graph; a symbolic size or stride (in elements) is text."""

    dtype: str
    shape: tuple[int | str, ...]
    stride: tuple[int | str, ...]


@dataclass(frozen=True)
class Site:
    """One attention of a graph, and what became of it.

    Attributes:
        attention: name of the attention's node in the graph before the pass.
        producer: what computes the attention, such as "cudnn" or "cpu-flash".
        fused: whether the fused op replaced it.
        reason: why it was left alone, such as "silu-gate"; None where it was fused.
        detail: the reason's particulars in words; may be empty.
        query, key, value, gate, mask: dtype and sizes, as in "bfloat16[8, 16, 1, 256]"; None
            where the attention has no gate or no mask, or none was recognised.
        source: where the user's code calls the attention, as "file:line", if the graph tells.
        ground: why fusing it pays, as `profitability.decide` has it; empty where it was left alone.
        module: path of the innermost module that computes it, such as "model.layers.3.self_attn".
        frames: the calls that led to it, outermost first, as "file:line in function".
        tensors: "query", "key", "value" and "output", and "mask", "gate" and "sinks" where there
            are such; K and V as they are stored where that was recognised.
        mask_kind: "none", "boolean", "additive", "causal", "computed" (from indices), or None where
            the attention was not understood.
        gate_kind: "sigmoid", or the name of another activation; None where no gate was found.
        expected: what the fusion needs in place of what was found; None where it was fused.
        remedy: what would change the decision; None where it was fused.
        kernel: the kernels' configuration and what they save; None where none run.
    """

    attention: str
    producer: str
    fused: bool
    reason: str | None
    detail: str
    query: str
    key: str
    value: str
    gate: str | None
    mask: str | None
    source: str | None
    ground: str = ""
    module: str | None = None
    frames: tuple[str, ...] = ()
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    mask_kind: str | None = None
    gate_kind: str | None = None
    expected: str | None = None
    remedy: str | None = None
    kernel: KernelPlan | None = None

    @property
    def is_gated(self) -> bool:
        """Whether the output has, or may have, a gate: where none was looked for it may."""
        return self.reason != Reason.NO_GATE.value

    def line(self) -> str:
        """One line for a log: what and where it is, and what became of it."""
        where = " ".join(part for part in (self.module, self.source) if part)
        shapes = f"query {self.query}, key {self.key}" if self.query else "not understood"
        if self.fused:
            outcome = f"fused: {self.ground}" if self.ground else "fused"
        else:
            outcome = f"declined: {self.reason}: {self.detail}"
        return f"{self.attention} ({self.producer}) at {where or 'an unknown line'}, {shapes}, " + (
            f"gate {self.gate_kind or 'none'}, mask {self.mask_kind or 'unknown'}: {outcome}"
        )


@dataclass(frozen=True)
class GraphReport:
    """Every attention of one graph, in the graph's order."""

    sites: tuple[Site, ...]

    @property
    def fused(self) -> int:
        """How many attentions the fused op replaced."""
        return sum(site.fused for site in self.sites)

    @property
    def declined(self) -> int:
        """How many attentions were left as they were."""
        return len(self.sites) - self.fused

    def reasons(self) -> Counter[str]:
        """How many attentions were left alone for each reason."""
        return Counter(site.reason or "unknown" for site in self.sites if not site.fused)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-serialisable data; "schema" changes when a key does."""
        return {
            "schema": SCHEMA,
            "fusion_pass": __version__,
            "torch": torch.__version__,
            "fused": self.fused,
            "declined": self.declined,
            "sites": [asdict(site) for site in self.sites],
        }

    def summary(self) -> str:
        """One line: "4 of 4 gated attentions fused", "1 fused, 2 declined: silu-gate x2"."""
        if not self.sites:
            return "no attention"
        if not self.declined:
            return f"{self.fused} of {len(self.sites)} gated attentions fused"
        reasons = ", ".join(f"{reason} x{n}" for reason, n in sorted(self.reasons().items()))
        return f"{self.fused} fused, {self.declined} declined: {reasons}"


def publish(
    report: GraphReport,
    before: str,
    after: str,
    config: Config,
    record: dict[str, Any] | None = None,
) -> None:
    """Counts, logs, traces and (with `config.dump`) writes down what happened to one graph.

    `before` and `after` are the graph's text before and after the pass, `record` what
    `dump.Recorder` noted of it. Counts go to `torch._dynamo.utils.counters["fusion_pass"]`. A
    folder that cannot be written warns once.
    """
    number = next(_graph_numbers)
    _count(report)
    configure_logging(config)
    _log(report, number)
    if report.sites:
        trace_artifact(ARTIFACT, lambda: json.dumps(report.to_dict(), indent=2))
    if config.dump is not None:
        dump.write(config.dump, number, report.to_dict(), before, after, record)


def fused_so_far() -> int:
    """How many attentions were counted as fused in this process."""
    from torch._dynamo.utils import counters

    return int(counters["fusion_pass"]["fused"])


def retract(fused: int) -> None:
    """Counts the last `fused` attentions as declined after all: their graph did not compile."""
    from torch._dynamo.utils import counters

    counts = counters["fusion_pass"]
    counts.subtract({"fused": fused})
    if not counts["fused"]:
        del counts["fused"]
    counts.update({"declined": fused, "declined: internal-fault": fused})


def _count(report: GraphReport) -> None:
    from torch._dynamo.utils import counters

    counts = Counter(fused=report.fused, declined=report.declined)
    counts.update({f"declined: {reason}": n for reason, n in report.reasons().items()})
    counters["fusion_pass"].update({key: n for key, n in counts.items() if n})


def _log(report: GraphReport, number: int) -> None:
    level = logging.INFO if report.sites else logging.DEBUG
    _logger.log(level, "graph %d: %s", number, report.summary())
    for site in report.sites:
        _logger.debug("graph %d: %s", number, site.line())
