"""What the pass adds to compilation: `python -m bench.compile_time [--quick] [--layers 4 16 64]`.

Each model is compiled from cold caches by stock Inductor and with the pass. Whole compilations
differ by more than the pass takes, so that its own time and its lowering's are taken inside, and
with them what Python's garbage collector, which may set in at any time, took of both.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

from bench import models
from bench.host import depth
from bench.model import BACKENDS
from bench.models import Decode
from bench.session import Session, parser
from fusion_pass import lowering
from fusion_pass.graph_pass import GatedAttentionPass

LAYERS = (4, 16, 64)
QUICK_LAYERS = (4,)
BATCH, CAPACITY, LIVE = 1, 4096, 600
Span = tuple[float, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the dense model at each depth; returns the exit status."""
    options = parser("compile_time", __doc__, 400)
    options.add_argument("--layers", nargs="+", type=int, help=f"default {LAYERS}")
    options.add_argument("--no-stock", action="store_true", help="compile with the pass alone")
    arguments = options.parse_args(argv)
    depths = arguments.layers or (QUICK_LAYERS if arguments.quick else LAYERS)
    session = Session.begin("compile_time", arguments)
    with torch.no_grad():
        # The first compilation of a process also starts Inductor's workers.
        compile_once(session.device, "inductor", 1)
        names = ("fused",) if arguments.no_stock else tuple(BACKENDS)
        measure_depth = partial(measure, session.device, names)
        session.each(depths, measure_depth, describe, "compile_time")
    return session.finish()


def measure(device: torch.device, names: Sequence[str], layers: int) -> dict[str, Any]:
    """Seconds of the named compilations, and milliseconds of the pass and its lowering in one."""
    whole = {name: compile_once(device, BACKENDS[name], layers) for name in names}
    fused = whole["fused"]
    added = fused["pass_ms"] + fused["lowering_ms"]
    return {
        "stock_s": round(whole["stock"]["seconds"], 3) if "stock" in whole else None,
        "fused_s": round(fused["seconds"], 3),
        "pass_ms": round(fused["pass_ms"], 2),
        "lowering_ms": round(fused["lowering_ms"], 2),
        "collector_ms": round(fused["collector_ms"], 2),
        "added_share": round(added / 1e3 / (fused["seconds"] - added / 1e3), 5),
        "fused_sites": fused["sites"],
    }


def compile_once(device: torch.device, backend: str, layers: int) -> dict[str, float]:
    """Compile one decode step from cold caches and run it once."""
    from torch._dynamo.utils import counters
    from torch._inductor.lowering import lowerings

    torch._dynamo.reset()
    counters.clear()
    model = models.named("dense").build(device, **depth(layers))
    decode = Decode(model, BATCH, CAPACITY)
    decode.set_live(LIVE)
    step = torch.compile(model, backend=backend)
    passes: list[Span] = []
    lowered: list[Span] = []
    collected: list[Span] = []
    lowering.register()
    timed_pass = stopwatch(GatedAttentionPass.__call__, passes)
    timed_lowering = stopwatch(lowerings[lowering.OPERATOR], lowered)
    with (
        collections(collected),
        inductor_config.patch(force_disable_caches=True),
        functorch_config.patch(enable_autograd_cache=False),
        mock.patch.object(GatedAttentionPass, "__call__", timed_pass),
        mock.patch.dict(lowerings, {lowering.OPERATOR: timed_lowering}),
    ):
        torch.cuda.synchronize()
        start = time.perf_counter()
        decode.step(step)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "pass_ms": length(passes) * 1e3,
        "lowering_ms": length(lowered) * 1e3,
        "collector_ms": length(within(collected, [*passes, *lowered])) * 1e3,
        "sites": counters["fusion_pass"]["fused"],
    }


def stopwatch(function: Callable[..., Any], spans: list[Span]) -> Callable[..., Any]:
    """`function`, each call of which appends its span to `spans`."""

    def timing(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spans.append((start, time.perf_counter()))

    return timing


@contextmanager
def collections(spans: list[Span]) -> Iterator[None]:
    """Append to `spans` when Python's garbage collector ran."""
    begun: list[float] = []

    def called(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            begun.append(time.perf_counter())
        elif begun:
            spans.append((begun.pop(), time.perf_counter()))

    gc.callbacks.append(called)
    try:
        yield
    finally:
        gc.callbacks.remove(called)


def within(inner: Sequence[Span], outer: Sequence[Span]) -> list[Span]:
    """The spans of `inner` that lie in one of `outer`."""
    return [(a, b) for a, b in inner if any(start <= a and b <= end for start, end in outer)]


def length(spans: Sequence[Span]) -> float:
    """Seconds of all spans together."""
    return sum(end - start for start, end in spans)


def describe(layers: int) -> dict[str, Any]:
    """The cell's kind and shape."""
    shape = {"model": "dense", "layers": layers, "B": BATCH, "capacity": CAPACITY}
    return {"kind": "compile_time", "shape": shape}


if __name__ == "__main__":
    raise SystemExit(main())
