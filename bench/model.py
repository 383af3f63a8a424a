"""Decode steps of unmodified models, stock against the pass: `python -m bench.model [--quick]`.

Random weights, bfloat16, a static cache filled with random K and V. Each step is timed as a CUDA
graph on the device and, without a graph, on the host's clock until the device is idle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from bench import models
from bench.generate import generate_cell
from bench.models import MODELS, Decode, Model
from bench.operands import relative_error
from bench.results import candidates, failed
from bench.session import Session, parser
from fusion_pass.timing import Arm, WallClock, capture, interleave, with_null, with_nulls

BATCHES = (1, 8, 32)
CAPACITIES = (4096, 32768, 131072)
LIVE = 600
QUICK = ((8, 32768), (1, 4096))
MOST_SECONDS = 0.5
# Free memory to leave, for weights, activations and what Inductor allocates besides.
HEADROOM = 6 << 30
BACKENDS = {"stock": "inductor", "fused": "fusion_pass"}
# Equally good bfloat16 computations of these logits differ by about 1 % (the tests' small models).
AGREEMENT = 4 * torch.finfo(torch.bfloat16).eps
# Where router logits nearly agree, as those of random weights do, a rounding chooses other experts.
EXPERTS_AGREEMENT = 0.5


@dataclass(frozen=True)
class Cell:
    """One model at one batch and capacity, with few live tokens and, unless quick, with all."""

    model: Model
    batch: int
    capacity: int
    lives: tuple[int, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cells that the options name; returns the exit status."""
    options = parser("model", __doc__, 540)
    names = [model.name for model in MODELS]
    options.add_argument("--models", nargs="+", choices=names, help="only these")
    options.add_argument("--batches", nargs="+", type=int, help=f"default {BATCHES}")
    options.add_argument("--capacities", nargs="+", type=int, help=f"default {CAPACITIES}")
    options.add_argument("--no-generate", action="store_true", help="leave generate() out")
    options.add_argument("--tp", type=int, metavar="N", help="instead: one model over N GPUs")
    arguments = options.parse_args(argv)
    if arguments.tp:
        # It imports this module.
        from bench.tensor_parallel import launch

        return launch(arguments.tp, arguments.output, arguments.budget, arguments.quick)
    chosen = arguments.models or (["dense"] if arguments.quick else names)
    run = "model" if not arguments.models else "-".join(["model", *chosen])
    session = Session.begin(run, arguments)
    with torch.no_grad():
        for cells in grid(chosen, arguments):
            bench = ModelBench(session, cells[0].model)
            session.each(cells, bench.measure, describe, cells[0].model.name)
            bench.close()
        if not (arguments.quick or arguments.no_generate) and "dense" in chosen:
            measure = partial(generate_cell, session.device)
            session.each(list(BACKENDS.items()), measure, describe_generate, "generate")
    return session.finish()


def grid(chosen: Sequence[str], arguments: Any) -> list[list[Cell]]:
    """The cells, one list a model, small ones first."""
    batches = arguments.batches or BATCHES
    capacities = arguments.capacities or CAPACITIES
    shapes = sorted(itertools.product(batches, capacities), key=lambda shape: shape[0] * shape[1])
    if arguments.quick:
        shapes = list(QUICK)
    return [
        [
            Cell(
                models.named(name),
                batch,
                capacity,
                (LIVE,) if arguments.quick else (LIVE, capacity),
            )
            for batch, capacity in shapes
        ]
        for name in chosen
    ]


def describe(cell: Cell) -> dict[str, Any]:
    """The cell's kind and shape."""
    shape = {"model": cell.model.name, "B": cell.batch, "capacity": cell.capacity}
    return {"kind": "step", "shape": shape}


def describe_generate(backend: tuple[str, str]) -> dict[str, Any]:
    """The cell's kind and candidate."""
    return {"kind": "generate", "candidate": backend[0]}


class ModelBench:
    """The cells of one model, which is built once."""

    def __init__(self, session: Session, model: Model) -> None:
        self._session = session
        self._model: torch.nn.Module | None = None
        self._spec = model
        self._device_clock = session.clock
        self._wall_clock = WallClock(torch.cuda.synchronize, session.clock.evict)

    def close(self) -> None:
        """Give the model's memory back."""
        self._model = None
        torch._dynamo.reset()
        torch.cuda.empty_cache()

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Compile both for the cell's shape, then time each number of live tokens."""
        if self._model is None:
            self._model = self._spec.build(self._session.device)
        if shortage := lacks_memory(self._model, cell):
            return {"skipped": shortage}
        torch._dynamo.reset()
        counters.clear()
        decode = Decode(self._model, cell.batch, cell.capacity)
        compiled = {
            name: torch.compile(self._model, backend=backend) for name, backend in BACKENDS.items()
        }
        lives = {}
        for live in cell.lives:
            try:
                decode.set_live(live)
                lives[str(live)] = self._live(decode, compiled)
            except Exception as fault:
                lives[str(live)] = failed(fault)
        # Beyond the first compilation, automatic dynamic shapes may have compiled again.
        return {"fusion_pass": dict(counters["fusion_pass"]), "live": lives}

    def _live(self, decode: Decode, compiled: dict[str, Any]) -> dict[str, Any]:
        """Times of one number of live tokens, with and without CUDA graphs."""
        outputs, refused = warm(decode, compiled)
        agreement = EXPERTS_AGREEMENT if self._spec.has_experts else AGREEMENT
        details, wrong = judge(outputs, agreement)
        refused |= wrong
        kept = {name: step for name, step in compiled.items() if name not in refused}
        calls = [
            Arm(name, partial(decode.step, step), decode.prepare) for name, step in kept.items()
        ]
        called = interleave(with_nulls(calls), self._wall_clock, seconds=MOST_SECONDS, most=60)
        # The graphs' pools take the memory that the calls have given back.
        torch.cuda.empty_cache()
        graphs, unrecorded = capture_steps(decode, kept)
        replayed = interleave(with_null(graphs), self._device_clock, seconds=MOST_SECONDS, most=60)
        return {
            "graph": candidates(replayed, {**refused, **unrecorded}, details),
            "no_graph": candidates(called, refused),
        }


def warm(
    decode: Decode, compiled: dict[str, Callable[..., Any]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Logits of one step by each, and by the eager model; who fails is refused.

    A first step compiles, a second one shows what a changed length makes of it.
    """
    outputs: dict[str, Tensor] = {}
    refused: dict[str, Any] = {}
    steps: dict[str, Callable[..., Any]] = {**compiled, "eager": decode.model}
    for name, step in steps.items():
        try:
            for _ in range(1 if name == "eager" else 2):
                decode.restore()
                decode.prepare()
                logits = decode.step(step)
            outputs[name] = logits.clone()
        except Exception as fault:
            if name != "eager":
                refused[name] = failed(fault)
            torch.cuda.empty_cache()
    return outputs, refused


def judge(
    outputs: dict[str, Tensor], agreement: float = AGREEMENT
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Each candidate's distance from the eager logits, and who is further off than it may be.

    That is twice as far as stock, and `agreement` more. Against stock alone where the eager model
    did not run.
    """
    anchor = outputs.get("eager", outputs.get("stock"))
    if anchor is None:
        return {}, {}
    exact = anchor.double()
    distances = {
        name: relative_error(logits, exact) for name, logits in outputs.items() if name != "eager"
    }
    bound = 2 * distances.get("stock", 0.0) + agreement
    wrong = {
        name: failed(f"logits differ from eager's by {distance:.2e} > {bound:.2e}")
        for name, distance in distances.items()
        if not distance <= bound
    }
    details = {
        name: {"difference_from_eager": float(f"{distance:.3g}")}
        for name, distance in distances.items()
    }
    return details, wrong


def capture_steps(
    decode: Decode, compiled: dict[str, Callable[..., Any]]
) -> tuple[list[Arm], dict[str, Any]]:
    """A CUDA graph of one step by each, and who could not be captured."""
    arms: list[Arm] = []
    refused: dict[str, Any] = {}
    for name, step in compiled.items():
        try:
            captured = capture(partial(decode.step, step), decode.prepare, warmups=0)
        except Exception as fault:
            refused[name] = failed(fault)
        else:
            arms.append(Arm(name, captured.replay, decode.prepare))
    return arms, refused


def lacks_memory(model: torch.nn.Module, cell: Cell) -> str | None:
    """Why the cell does not fit: stock holds a layer's K and V once more per query head."""
    torch.cuda.empty_cache()
    cache, repeated = models.cache_bytes(model, cell.batch, cell.capacity)
    needed = cache + repeated + repeated // 4 + HEADROOM
    free = torch.cuda.mem_get_info()[0]
    if needed <= free:
        return None
    return f"needs about {needed >> 30} GiB of the {free >> 30} GiB that are free"


if __name__ == "__main__":
    raise SystemExit(main())
