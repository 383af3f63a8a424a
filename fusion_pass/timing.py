"""Interleaved samples of several candidates on a cold L2, summed up as median, p20 and p80."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

NULL = "null"
LEAST_ROUNDS = 10
EVICTION_FLOOR = 256 << 20
L2_MULTIPLE = 8


@dataclass(frozen=True)
class Arm:
    """One candidate: `run` is what is timed; `prepare`, before it, is not."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] | None = None


@dataclass(frozen=True)
class Summary:
    """Quantiles of the samples of one arm, in microseconds."""

    median: float
    p20: float
    p80: float
    samples: int


class Clock(Protocol):
    """A way to time arms: on the device, on the host, or, in tests, by a script."""

    def time(self, arms: Sequence[Arm]) -> list[float]:
        """Run each arm once, in order, and return microseconds in that order."""
        ...


def quantile(ordered: Sequence[float], share: float) -> float:
    """The `share` quantile (0 to 1) of sorted samples, interpolated between neighbours."""
    if not ordered:
        raise ValueError("no samples")
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(samples: Sequence[float]) -> Summary:
    """Median, p20 and p80 of the samples of one arm."""
    ordered = sorted(samples)
    return Summary(
        statistics.median(ordered), quantile(ordered, 0.2), quantile(ordered, 0.8), len(ordered)
    )


def with_null(arms: Sequence[Arm]) -> list[Arm]:
    """The arms and, as the arm "null", the first of them once more: the noise of the run."""
    if not arms:
        return []
    return [*arms, Arm(NULL, arms[0].run, arms[0].prepare)]


def with_nulls(arms: Sequence[Arm]) -> list[Arm]:
    """As `with_null`, and each other arm once more too, as a null arm of its own.

    For what is timed on the host, where code is the faster the more often it runs: with stock
    alone run twice a round, a step of equal work took 3 to 5 % longer.
    """
    others = [Arm(f"{NULL} of {arm.name}", arm.run, arm.prepare) for arm in arms[1:]]
    return [*with_null(arms), *others]


def is_null(name: str) -> bool:
    """Whether an arm of this name repeats another."""
    return name == NULL or name.startswith(f"{NULL} of ")


def interleave(
    arms: Sequence[Arm],
    clock: Clock,
    *,
    seconds: float = 0.5,
    rounds: int | None = None,
    most: int = 200,
    seed: int = 0,
) -> dict[str, Summary]:
    """Time all arms sample by sample in shuffled rounds, so that drift meets them alike.

    Args:
        seconds: how long the rounds should take together; a first round, not counted, tells how
            many that is, at least 10 and at most `most`. `rounds` sets their number instead.

    Raises:
        ValueError: two arms have one name.
    """
    if len({arm.name for arm in arms}) != len(arms):
        raise ValueError("arms need distinct names")
    if not arms:
        return {}
    pilot = sum(clock.time(arms))
    if rounds is None:
        rounds = max(LEAST_ROUNDS, min(most, int(seconds * 1e6 / max(pilot, 1.0))))
    shuffle = random.Random(seed)
    samples: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for _ in range(rounds):
        order = shuffle.sample(arms, len(arms))
        for arm, sample in zip(order, clock.time(order), strict=True):
            samples[arm.name].append(sample)
    return {name: summarise(taken) for name, taken in samples.items()}


def eviction_buffer(device: torch.device) -> torch.Tensor:
    """A float32 buffer of several times the device's L2, written once."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    size = max(EVICTION_FLOOR, L2_MULTIPLE * l2)
    return torch.ones(size // 4, dtype=torch.float32, device=device)


class CudaClock:
    """Device time between two events, each sample after a read of the eviction buffer.

    The buffer is read, never written: dirty lines would be written back inside the timed interval.
    Reading it keeps the device busy while the host queues the arm, so that no launch gap counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.buffer = eviction_buffer(device)
        self._sum = torch.empty((), device=device)

    def evict(self) -> None:
        """Replace what the L2 holds by clean lines of the buffer."""
        torch.sum(self.buffer, dim=0, out=self._sum)

    def time(self, arms: Sequence[Arm]) -> list[float]:
        intervals = []
        # After a synchronisation the host has no lead yet, and the first arm would pay for it.
        self.evict()
        for arm in arms:
            if arm.prepare is not None:
                arm.prepare()
            self.evict()
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            arm.run()
            end.record()
            intervals.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in intervals]


class WallClock:
    """Host time from the call until the device is idle again; the L2 is cold if `evict` is given.

    With `wait=False` the time until the call returns, the device's work not awaited.
    """

    def __init__(
        self,
        synchronize: Callable[[], object],
        evict: Callable[[], object] | None = None,
        wait: bool = True,
    ) -> None:
        self._synchronize = synchronize
        self._evict = evict
        self._wait = wait

    def time(self, arms: Sequence[Arm]) -> list[float]:
        return list(self._each(arms))

    def _each(self, arms: Sequence[Arm]) -> Iterator[float]:
        for arm in arms:
            if arm.prepare is not None:
                arm.prepare()
            if self._evict is not None:
                self._evict()
            self._synchronize()
            start = time.perf_counter()
            arm.run()
            if self._wait:
                self._synchronize()
            yield (time.perf_counter() - start) * 1e6
            self._synchronize()


@dataclass(frozen=True)
class Captured:
    """A CUDA graph of one call and the tensor that each replay writes."""

    replay: Callable[[], object]
    output: torch.Tensor


def capture(
    call: Callable[[], torch.Tensor],
    prepare: Callable[[], object] | None = None,
    warmups: int = 2,
) -> Captured:
    """Capture `call` in a CUDA graph, after `warmups` calls outside it; `prepare` precedes each."""
    prepare = prepare or (lambda: None)
    for _ in range(warmups):
        prepare()
        call()
    prepare()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()

    def replay(_kept: object = call) -> None:
        # The graph's kernels read what the call refers to, which must live as long as the graph.
        graph.replay()

    return Captured(replay, output)
