"""The soak under Triton's interpreter: it finds nothing, and it would find what is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

from tests import soak
from tests.soak_steps import INTERPRETED, Geometry, Step, draw_geometry, make_step
from tests.test_kernel_interpreter import interpreted_kernels  # noqa: F401

CPU = torch.device("cpu")


def part(*arguments: str, seconds: float = 600.0) -> soak.Part:
    return soak.plan(soak.parse(["--device", "cpu", *arguments]), time.time() - 600 + seconds)


# The interpreter multiplies the poison of dead slots, and throws the products away.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_a_small_soak_has_no_mismatch() -> None:
    outcome = soak.soak(part("--steps", "60"))
    assert outcome.mismatches == []
    assert not outcome.declined
    assert (outcome.steps, outcome.compiled) == (60, 8)


def drop_the_last_key(step: Step) -> Tensor | None:
    keep = step.mask.clone()
    last = keep.shape[-1] - 1 - keep.flip(-1).float().argmax(-1, keepdim=True)
    return keep.scatter(-1, last, False)


FAULTS: dict[str, Callable[[Geometry, Step], Tensor]] = {
    "scale": lambda g, s: call(g, s, scale=1.05 * g.head_dim**-0.5),
    "a key is missing": lambda g, s: call(g, s, mask=drop_the_last_key(s)),
    "a dead key is read": lambda g, s: call(g, s, mask=torch.ones_like(s.mask)),
    "no gate": lambda g, s: call(g, s, gate=torch.full_like(s.poisoned[3], 40.0)),
    "a sink": lambda g, s: call(g, s, sinks=torch.full((g.heads,), 1.0)),
    "another dtype": lambda g, s: call(g, s).double(),
    "one element": lambda g, s: call(g, s).index_fill(3, torch.tensor([5]), 0.5),
}


def call(g: Geometry, step: Step, **changes: Tensor | float | None) -> Tensor:
    query, key, value, gate = step.poisoned
    operands = {"query": query, "key": key, "value": value, "gate": gate}
    given = {**operands, "mask": step.mask, "sinks": None, **g.modes, **changes}
    return soak.gated_decode_attention(**given)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    geometry = next(
        g
        for g in (draw_geometry(Random(i), INTERPRETED) for i in range(10**4))
        if (g.mask, g.capacity, g.tokens, g.batch) == ("prefix", 33, 1, 1) and not g.sinks
    )
    for seed in range(2):
        step = make_step(geometry, seed, CPU, CPU)
        assert soak.judge(geometry, step, call(geometry, step)) is None
        assert soak.judge(geometry, step, FAULTS[fault](geometry, step)) is not None


def test_the_seed_determines_the_steps() -> None:
    drawn = [
        draw_geometry(Random(f"{seed} {i}"), INTERPRETED) for seed in (0, 0, 1) for i in range(20)
    ]
    assert drawn[:20] == drawn[20:40] != drawn[40:]
    geometry = drawn[0]
    first, again, other = (make_step(geometry, seed, CPU, CPU) for seed in (5, 5, 6))
    assert torch.equal(first.clean[1], again.clean[1])
    assert not torch.equal(first.clean[1], other.clean[1])


def test_it_stops_when_the_budget_is_spent() -> None:
    assert soak.soak(part("--steps", "60", "--budget", "1", seconds=-1.0)).steps == 0


def test_every_kind_is_drawn() -> None:
    drawn = [draw_geometry(Random(i), soak.ON_GPU) for i in range(400)]
    for name in ("mask", "gate", "cache", "numerics", "dtype", "fill", "sinks", "dead_row"):
        found = {getattr(geometry, name) for geometry in drawn}
        assert len(found) == {
            "mask": 8, "gate": 4, "cache": 7, "numerics": 3, "dtype": 3, "fill": 3,
        }.get(name, 2)  # fmt: skip
