"""What every run shares: its options, its device and clock, its progress and its time budget."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from bench import bars, ceilings, environment
from bench.ceilings import Ceilings
from bench.results import FOLDER, Results, failed
from fusion_pass.environment import device_name, slug
from fusion_pass.timing import CudaClock

Item = TypeVar("Item")


def parser(run: str, description: str | None, budget: float) -> argparse.ArgumentParser:
    """Options that all runs have: --quick, --output and --budget."""
    options = argparse.ArgumentParser(prog=f"python -m bench.{run}", description=description)
    options.add_argument("--quick", action="store_true", help="a few cells, about a minute")
    options.add_argument("--output", type=Path, default=FOLDER, help="folder of the result file")
    options.add_argument(
        "--budget",
        type=float,
        default=budget,
        help=f"seconds after which no further cell is begun (default {budget:g})",
    )
    return options


@dataclass
class Session:
    """A run under way on a CUDA device."""

    results: Results
    clock: CudaClock
    ceilings: Ceilings
    device: torch.device
    budget: float

    @classmethod
    def begin(cls, run: str, arguments: argparse.Namespace, begun: float | None = None) -> Session:
        """Open the result file and measure the device; `begun` is as `Results` has it.

        Raises:
            SystemExit: there is no CUDA device.
        """
        if not torch.cuda.is_available():
            raise SystemExit(f"bench.{run} needs a CUDA device")
        device = torch.device("cuda", torch.cuda.current_device())
        described = environment.describe(device)
        options = {k: v for k, v in vars(arguments).items() if k != "output"}
        gpu = slug(device_name(device))
        name = f"{run}-quick" if arguments.quick else run
        results = Results(name, gpu, arguments.output, described, options, begun)
        clock = CudaClock(device)
        measured = ceilings.measure(clock, device)
        torch.cuda.empty_cache()
        results.set(ceilings=measured.to_dict())
        tell(f"{described['device']}: {measured}")
        return cls(results, clock, measured, device, arguments.budget)

    def each(
        self,
        cells: Sequence[Item],
        measure: Callable[[Item], Mapping[str, Any]],
        describe: Callable[[Item], Mapping[str, Any]],
        label: str,
    ) -> None:
        """Measure cell after cell; one that fails, or comes after the budget, is recorded so."""
        for cell in progress(cells, label):
            begun = time.monotonic()
            if self.results.elapsed > self.budget:
                entry: dict[str, Any] = {"skipped": f"time budget of {self.budget:g} s"}
            else:
                try:
                    entry = dict(measure(cell))
                except Exception as fault:
                    entry = failed(fault)
            spent = round(time.monotonic() - begun, 2)
            self.results.add({**describe(cell), **entry, "wall_s": spent})
            # Last, since it raises where a cell has broken the device for good.
            torch.cuda.empty_cache()

    def finish(self) -> int:
        """Say which bars are met and where the results are; the exit status."""
        self.results.set(clocks_after=environment.clocks(self.device))
        for line in bars.lines(self.results.data):
            tell(line)
        tell(
            f"{self.results.path}: {len(self.results.data['cells'])} cells, "
            f"{self.results.elapsed:.0f} s"
        )
        return 0


def tell(message: str) -> None:
    """A line to the user, on stderr."""
    print(message, file=sys.stderr, flush=True)


def progress(items: Sequence[Item], label: str) -> Iterator[Item]:
    """The items, with a progress bar (tqdm) or, where that is not installed, a line for each."""
    try:
        bar: Any = importlib.import_module("tqdm").tqdm
    except ImportError:
        for done, item in enumerate(items):
            tell(f"{label}: {done + 1} of {len(items)}")
            yield item
    else:
        yield from bar(items, desc=label, file=sys.stderr, mininterval=1.0)
