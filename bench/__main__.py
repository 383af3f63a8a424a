"""Every benchmark in one command: `python -m bench [--quick] [--only RUN ...]`.

Runs share out the machine's GPUs, one process each, so that four GPUs take a quarter of the time.
Those that time the host, or need several GPUs, come last and alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.models import MODELS
from bench.results import FOLDER
from bench.session import tell

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """One run: a module of bench and its options.

    An exclusive one has the machine to itself, and alone can have more than one of its GPUs;
    --quick leaves out those that are not `quick`.
    """

    name: str
    module: str
    options: tuple[str, ...] = ()
    exclusive: bool = False
    quick: bool = True
    gpus: int = 1


JOBS = (
    *(
        Job("model", "bench.model", ("--models", model.name), quick=model.name == "dense")
        for model in MODELS
    ),
    Job("kernel", "bench.kernel"),
    Job("gate", "bench.gate"),
    Job("paged", "bench.paged"),
    Job("tensor_parallel", "bench.model", ("--tp", "2"), exclusive=True, gpus=2),
    Job("host", "bench.host", exclusive=True),
    Job("compile_time", "bench.compile_time", exclusive=True),
)
NAMES = tuple(dict.fromkeys(job.name for job in JOBS))

Start = Callable[[Job, int], "subprocess.Popen[bytes]"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the options name; 0 if every run ended well."""
    import torch

    options = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    options.add_argument("--quick", action="store_true", help="a few cells of each run")
    options.add_argument("--output", type=Path, default=FOLDER, help="folder of the result files")
    options.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="only these")
    arguments = options.parse_args(argv)
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise SystemExit("bench needs a CUDA device")
    extra = ["--output", str(arguments.output), *(["--quick"] if arguments.quick else [])]

    def start(job: Job, gpu: int) -> subprocess.Popen[bytes]:
        tell(f"GPU {gpu}: {job.name} {' '.join(job.options)}")
        return subprocess.Popen(
            [sys.executable, "-m", job.module, *job.options, *extra],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": devices(gpu, job.gpus)},
        )

    jobs = chosen(arguments.only, arguments.quick, gpus)
    failures = share_out([job for job in jobs if not job.exclusive], gpus, start)
    failures += share_out([job for job in jobs if job.exclusive], 1, start)
    for job in failures:
        tell(f"failed: {job.name} {' '.join(job.options)}")
    return 1 if failures else 0


def chosen(names: Sequence[str], quick: bool, gpus: int) -> list[Job]:
    """The jobs of these names that this many GPUs can run; says which they cannot."""
    named = [job for job in JOBS if job.name in names and (job.quick or not quick)]
    for job in named:
        if job.gpus > gpus:
            tell(f"left out: {job.name} needs {job.gpus} GPUs, and there is {gpus}")
    return [job for job in named if job.gpus <= gpus]


def devices(first: int, count: int) -> str:
    """CUDA_VISIBLE_DEVICES for `count` of the GPUs that are visible here, from `first` on."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(gpu) for gpu in range(first + count)]
    return ",".join(names[first : first + count])


def share_out(jobs: Sequence[Job], gpus: int, start: Start) -> list[Job]:
    """Run the jobs in order, at most one at a time on each GPU; those that failed."""
    waiting, failures = list(jobs), []
    running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}
    while waiting or running:
        for gpu in range(gpus):
            if gpu in running and running[gpu][1].poll() is not None:
                job, done = running.pop(gpu)
                if done.returncode:
                    failures.append(job)
            if gpu not in running and waiting:
                job = waiting.pop(0)
                running[gpu] = job, start(job, gpu)
        time.sleep(POLL_SECONDS)
    return failures


if __name__ == "__main__":
    raise SystemExit(main())
