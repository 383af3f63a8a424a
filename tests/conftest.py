"""Every test starts with no settings in the environment and with nothing compiled or counted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch._dynamo.utils import counters

from fusion_pass import eligibility, launch, profitability, reference
from fusion_pass.launch import Limits
from fusion_pass.tables import MASKS, Shape, Table


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("FUSION_PASS"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _fresh_compiles() -> Iterator[None]:
    # A graph from a warm cache would never reach the pass.
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        torch._dynamo.reset()
        counters.clear()
        yield
        torch._dynamo.reset()


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the fake CUDA device is an H200, on which fusing always pays."""
    limits = Limits("cuda", 90, 132, 232448)
    monkeypatch.setattr(eligibility, "device_limits", lambda device: limits)
    ratios = {Shape(16, 2, 256, 1, 4096, 1, mask): 1.5 for mask in MASKS}
    table = Table({}, ratios, "a table of the tests", 1.0, "digest")
    monkeypatch.setattr(profitability, "table_for", lambda device, config: table)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one entry for every call of the fused operator at run time."""
    made: list[str] = []
    for module, name in ((reference, "gated_decode_attention"), (launch, "run")):
        original = getattr(module, name)

        def counting(
            *args: Any, name: str = name, original: Callable[..., Any] = original, **kwargs: Any
        ) -> Any:
            made.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, counting)
    return made
