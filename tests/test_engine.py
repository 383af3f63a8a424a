"""The engine in miniature and the toy engine's operator, as they run on this machine."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch._dynamo.utils import counters

from fusion_pass.patterns import registry

FOLDER = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    """An example as a module, which must be known by its name for its dataclasses."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def engine() -> Any:
    return load("engine")


def test_tokens_are_those_of_the_dense_model(
    engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """`main` compares the tokens, with the pass off and on."""
    engine.main()
    told = capsys.readouterr().out
    for state in ("off", "on"):
        assert f"pass {state}: " in told
    assert f"{len(engine.BATCH_SIZES)} batch sizes" in told
    assert set(counters["fusion_pass"]) == {"fused"}


def test_batching_is_continuous(engine: Any) -> None:
    """Requests come and go in between; no two of them ever write to one page."""
    batches: list[list[tuple[int, int, list[int], int]]] = []

    def step(rows: list[tuple[int, int, list[int], int]]) -> list[int]:
        batches.append(rows)
        return [(7 * token + position) % engine.VOCABULARY for token, position, *_ in rows]

    requests = engine.make_requests(30)
    sizes = list(engine.serve(dict.fromkeys(engine.BATCH_SIZES, step), requests))
    assert [len(each.tokens) for each in requests] == [each.wanted for each in requests]
    assert set(sizes) == set(engine.BATCH_SIZES)
    owners = set()
    for rows in batches:
        held = [tuple(page for page in row[2] if page != engine.SCRATCH_PAGE) for row in rows]
        assert len({page for pages in held for page in pages}) == sum(map(len, held))
        for (_, position, _, length), pages in zip(rows, held, strict=True):
            assert length == position + 1 <= len(pages) * engine.PAGE_SIZE
        owners |= set(held)
    first_pages = [pages[0] for pages in owners]
    assert len(set(first_pages)) < len(first_pages)
    grown = [len(rows) for rows in batches]
    assert any(a < b for a, b in itertools.pairwise(grown))
    assert any(a > b for a, b in itertools.pairwise(grown))


def test_the_toy_engines_gated_kernel() -> None:
    before = dict(registry._RECOGNISERS), dict(registry._ADAPTERS)
    try:
        load("toy_engine_op").main()
    finally:
        for kept, held in zip(before, (registry._RECOGNISERS, registry._ADAPTERS), strict=True):
            held.clear()
            held.update(kept)
    assert counters["fusion_pass"] == {"fused": 1}
