"""An unknown torch is looked at before anything is rewritten; this one has all that is needed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.ir import ExternKernel, UserDefinedTritonKernel

from fusion_pass import inductor, lowering, selfcheck
from fusion_pass.config import warn_once
from tests.graphs import CPU, fake_mode, qwen, qwen_inputs, run_pass, trace


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    problems = selfcheck.problems
    problems.cache_clear()
    warn_once.cache_clear()
    yield
    problems.cache_clear()


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.0.dev20291129+cu999")


def fused() -> int:
    with fake_mode():
        module = trace(qwen("cpu-flash"), *qwen_inputs(CPU))
    before = str(module.graph)
    count = run_pass(module, devices=("cpu",))
    assert (str(module.graph) == before) == (count == 0)
    return count


def test_this_torch_has_all_that_is_needed() -> None:
    assert selfcheck.problems() == ()


def test_a_torch_that_was_tested_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    oldest, newest = (
        ".".join(map(str, x)) for x in (selfcheck.OLDEST_TESTED, selfcheck.NEWEST_TESTED)
    )
    monkeypatch.setattr(selfcheck, "problems", lambda: ("all is lost",))
    for version in (f"{oldest}.0", "2.13.0+cpu", f"{newest}.3"):
        monkeypatch.setattr(torch, "__version__", version)
        assert selfcheck.check() is None
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    with pytest.warns(RuntimeWarning, match="all is lost"):
        assert selfcheck.check() is not None


@pytest.mark.usefixtures("newer")
def test_a_newer_torch_warns_once_and_fuses() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [fused(), fused()] == [1, 1]
    (warning,) = [w for w in caught if "fusion_pass" in str(w.message)]
    assert "9.9.0" in str(warning.message)
    assert "no fault" in str(warning.message)


def gone(*arguments: Any, **keywords: Any) -> Any:
    raise AttributeError("it has moved")


def moved() -> None:
    """What takes none of the arguments that it is given."""


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize(
    ("owner", "name", "what"),
    [
        (inductor, "current_slot", "the slot for custom passes"),
        (inductor, "stock_compiler", "the compiler behind torch.compile"),
        (inductor, "traced_for_inference", "the context of a compilation"),
        (lowering, "register", "the registry of lowerings"),
        (ExternKernel, "realize_input", "the buffers of inductor's ir"),
        (UserDefinedTritonKernel, "codegen", "the launch of a user's triton"),
    ],
)
def test_a_newer_torch_without_what_is_needed_is_left_alone(
    owner: Any, name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, moved if isinstance(owner, type) else gone)
    (problem,) = selfcheck.problems()
    assert problem.startswith(what)
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    monkeypatch.setattr(selfcheck, "problems", lambda: (problem,))
    with pytest.warns(RuntimeWarning, match="nothing is fused") as caught:
        assert [fused(), fused()] == [0, 0]
    assert len([w for w in caught if problem in str(w.message)]) == 1
    assert counters["fusion_pass"] == {"declined": 2, "declined: unknown-torch": 2}
