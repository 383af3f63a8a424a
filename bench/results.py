"""One JSON file a run: the environment, the device's ceilings and one entry a cell."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_pass.timing import NULL, Summary, is_null

SCHEMA = 1
FOLDER = Path(__file__).parent / "results"


def timed(summary: Summary, **details: Any) -> dict[str, Any]:
    """A candidate's entry: its quantiles in microseconds, and `details`."""
    return {
        "median_us": round(summary.median, 3),
        "p20_us": round(summary.p20, 3),
        "p80_us": round(summary.p80, 3),
        "samples": summary.samples,
        **details,
    }


def failed(fault: BaseException | str) -> dict[str, Any]:
    """The entry of a candidate that has no time: why it has none."""
    text = fault if isinstance(fault, str) else f"{type(fault).__name__}: {fault}"
    return {"failed": " ".join(text.split())[:300]}


def candidates(
    summaries: Mapping[str, Summary],
    refused: Mapping[str, Mapping[str, Any]],
    details: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The part of a cell that tells of its candidates: `candidates` and the null arm, `null`.

    `refused` holds the entries of those that have no time, `details` more about those that have.
    """
    details = details or {}
    timings = {
        name: timed(summary, **details.get(name, {}))
        for name, summary in summaries.items()
        if not is_null(name)
    }
    null = timed(summaries[NULL]) if NULL in summaries else None
    return {"candidates": timings | {k: dict(v) for k, v in refused.items()}, "null": null}


class Results:
    """The result file of one run; every `add` writes it anew, so that a stopped run keeps it.

    `begun` is when the run began, by `time.monotonic()`; without it, now.
    """

    def __init__(
        self,
        run: str,
        gpu: str,
        folder: Path,
        environment: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        begun: float | None = None,
    ) -> None:
        self.path = folder / f"{run}-{gpu}.json"
        self._start = time.monotonic() if begun is None else begun
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "run": run,
            "gpu": gpu,
            "environment": dict(environment),
            "options": dict(options or {}),
            "ceilings": None,
            "missing": {},
            "cells": [],
            "wall_s": 0.0,
        }

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._start

    def set(self, **entries: Any) -> None:
        """Replace top-level entries."""
        self.data.update(entries)
        self.save()

    def add(self, cell: Mapping[str, Any]) -> None:
        """Append a cell."""
        self.data["cells"].append(dict(cell))
        self.save()

    def save(self) -> None:
        """Write the file, whole or not at all."""
        self.data["wall_s"] = round(self.elapsed, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(partial, self.path)


def load(path: Path) -> dict[str, Any]:
    """Read a result file. Raises ValueError if it is no result of this schema."""
    data: dict[str, Any] = json.loads(path.read_text())
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {data.get('schema')}, expected {SCHEMA}")
    return data
