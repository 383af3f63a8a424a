"""Decode steps of one model sharded over GPUs, stock against the pass: `bench.model --tp 2`.

The model is sharded by its own plan, one process a GPU, with the heads of a whole Qwen3.5. Each
step is timed as a CUDA graph and without one, as in `bench.model`; the ranks begin every sample
together, and of their times the slowest rank's count.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from bench import model as one_gpu
from bench.models import Decode, named
from bench.results import candidates, failed
from bench.session import Session, parser
from examples.tensor_parallel import shard_by_its_plan, start
from fusion_pass.timing import Arm, Clock, CudaClock, Summary, WallClock, interleave, with_nulls

HEADS: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 4}
# The ranks must take the same number of samples, so that it cannot depend on how long they take.
ROUNDS = 40
SECONDS_TO_START = 120


@dataclass(frozen=True)
class Cell:
    """One batch and capacity of the sharded model, with these numbers of live tokens."""

    batch: int
    capacity: int
    lives: tuple[int, ...]


def launch(world: int, output: Path, budget: float, quick: bool) -> int:
    """Run `main` on `world` ranks, one a GPU; the exit status.

    Raises:
        SystemExit: there are fewer GPUs.
    """
    if torch.cuda.device_count() < world:
        raise SystemExit(f"bench.model --tp {world} needs {world} CUDA devices")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    module = ["--nproc-per-node", str(world), "-m", "bench.tensor_parallel"]
    options = ["--output", str(output), "--budget", str(budget), *(["--quick"] if quick else [])]
    # A rank that waits for one that has failed does not end by itself.
    limit = budget + SECONDS_TO_START
    return subprocess.run([*launcher, *module, *options], check=False, timeout=limit).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, as one of the ranks that torchrun has started; the first writes the results."""
    arguments = parser("model --tp", __doc__, 240).parse_args(argv)
    device = start()
    world = dist.get_world_size()
    session = Session.begin(f"model-tp{world}", arguments) if dist.get_rank() == 0 else None
    lives = (one_gpu.LIVE,) if arguments.quick else (one_gpu.LIVE, 32768)
    cells = [Cell(8, 32768, lives)]
    with torch.no_grad():
        bench = ShardedBench(device, session.clock if session else CudaClock(device))
        if session is None:
            for cell in cells:
                bench.measure(cell)
            status = 0
        else:
            session.each(cells, bench.measure, partial(describe, world), "tensor parallel")
            status = session.finish()
    dist.destroy_process_group()
    return status


def describe(world: int, cell: Cell) -> dict[str, Any]:
    """The cell's kind and shape, by which the tensor-parallel table shows it."""
    name = f"dense on {world} GPUs"
    return {"kind": "step", "shape": {"model": name, "B": cell.batch, "capacity": cell.capacity}}


class ShardedBench:
    """The cells of one sharded model, on one of the ranks."""

    def __init__(self, device: torch.device, clock: CudaClock) -> None:
        self._model = shard_by_its_plan(named("dense").build(device, **HEADS))
        torch.cuda.empty_cache()
        self._device_clock = clock
        self._wall_clock = WallClock(torch.cuda.synchronize, clock.evict)
        self._meeting = torch.zeros((), device=device)

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Compile both for the cell's shape, then time each number of live tokens."""
        torch._dynamo.reset()
        counters.clear()
        decode = Decode(self._model, cell.batch, cell.capacity)
        compiled = {
            name: torch.compile(self._model, backend=backend)
            for name, backend in one_gpu.BACKENDS.items()
        }
        lives = {}
        for live in cell.lives:
            decode.set_live(live)
            lives[str(live)] = self._live(decode, compiled)
        return {"fusion_pass": dict(counters["fusion_pass"]), "heads": HEADS, "live": lives}

    def _live(self, decode: Decode, compiled: dict[str, Any]) -> dict[str, Any]:
        outputs, refused = one_gpu.warm(decode, compiled)
        details, wrong = one_gpu.judge(outputs)
        refused = agreed({**refused, **wrong})
        kept = {name: step for name, step in compiled.items() if name not in refused}
        prepare = partial(self._prepare, decode)
        calls = [Arm(name, partial(decode.step, step), prepare) for name, step in kept.items()]
        called = self._time(calls, self._wall_clock)
        torch.cuda.empty_cache()
        graphs, unrecorded = one_gpu.capture_steps(decode, kept)
        unrecorded = agreed(unrecorded)
        graphs = [Arm(arm.name, arm.run, prepare) for arm in graphs if arm.name not in unrecorded]
        replayed = self._time(graphs, self._device_clock)
        return {
            "graph": candidates(replayed, {**refused, **unrecorded}, details),
            "no_graph": candidates(called, refused),
        }

    def _prepare(self, decode: Decode) -> None:
        decode.prepare()
        dist.all_reduce(self._meeting)

    def _time(self, arms: Sequence[Arm], clock: Clock) -> dict[str, Summary]:
        """The slowest rank's times of each arm."""
        own = interleave(with_nulls(arms), clock, rounds=ROUNDS)
        everyone = everywhere(own)
        return {
            name: max((ranks[name] for ranks in everyone), key=lambda summary: summary.median)
            for name in own
        }


def agreed(refused: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What any rank refuses, so that none waits for another in a step that is not taken."""
    names = sorted({name for ranks in everywhere(dict(refused)) for name in ranks})
    return {name: refused.get(name, failed("refused by another rank")) for name in names}


def everywhere(own: Any) -> list[Any]:
    """`own` of every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


if __name__ == "__main__":
    raise SystemExit(main())
