"""Unmodified transformers models on the CPU, decoded with the pass off and on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.models import FAMILIES, build, dynamic_cache, greedy, in_float64, static_cache

transformers = pytest.importorskip("transformers")

LAYERS = 2
STEPS = 5
OPTIONS = {"fusion_pass.devices": ("cpu",), "fusion_pass.strict": True}
CACHES = {"static": lambda model: static_cache(model, 64), "dynamic": dynamic_cache}


def prompt() -> Tensor:
    # Longer than the query tokens that fuse, so that the prefill does not count.
    return torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", CACHES)
def test_decoding_by_hand(family: str, cache: str, calls: list[str]) -> None:
    model = build(family, num_hidden_layers=LAYERS)
    make = CACHES[cache]
    stock_tokens, stock = greedy(model, prompt(), STEPS, make(model), torch.compile(model))
    assert not calls

    torch._dynamo.reset()
    step = torch.compile(model, backend="fusion_pass", options=OPTIONS)
    tokens, fused = greedy(model, prompt(), STEPS, make(model), step)
    # A growing cache is compiled for its first length and then for any.
    compiles = {"static": 1, "dynamic": 2}[cache]
    assert counters["fusion_pass"] == {"fused": LAYERS * compiles}
    assert len(calls) == LAYERS * (STEPS - 1)
    assert torch.equal(tokens, stock_tokens)

    exact = greedy(in_float64(model), prompt(), STEPS, make(model))[1]
    assert (fused - exact).norm() <= 1.5 * (stock - exact).norm()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_generate(
    family: str, cache: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import CompileConfig

    monkeypatch.setenv("FUSION_PASS_DEVICES", "cpu")
    monkeypatch.setenv("FUSION_PASS_STRICT", "1")

    model = build(family, num_hidden_layers=LAYERS)
    settings: dict[str, Any] = {
        "max_new_tokens": STEPS,
        "min_new_tokens": STEPS,
        "do_sample": False,
    }
    expected = model.generate(prompt(), **settings)
    assert not calls
    config = CompileConfig(backend="fusion_pass", mode="reduce-overhead")
    config._compile_all_devices = True
    if cache == "dynamic":
        # transformers compiles with static caches alone; the model is compiled by hand here.
        model.forward = torch.compile(model.forward, backend="fusion_pass")
        found = model.generate(prompt(), **settings)
    else:
        found = model.generate(
            prompt(), cache_implementation="static", compile_config=config, **settings
        )
    assert torch.equal(found, expected)
    assert counters["fusion_pass"]["fused"] >= LAYERS
    assert counters["fusion_pass"]["declined: internal-fault"] == 0
    assert len(calls) == LAYERS * (STEPS - 1)


@torch.no_grad()
def test_off_switch(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    monkeypatch.setenv("FUSION_PASS", "0")
    model = build("qwen3_5", num_hidden_layers=LAYERS)
    step = torch.compile(model, backend="fusion_pass", options=OPTIONS)
    greedy(model, prompt(), 2, static_cache(model, 64), step)
    assert not calls
    assert not counters["fusion_pass"]
