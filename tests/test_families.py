"""Every gated-attention model of transformers, unmodified, decoded on the CPU with the pass on.

One implementation of every family runs by default, and the others where they reach the pass in
another form. `TEST_FAMILIES=all` runs every one that a family supports.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.families import FAMILIES, FUSED, STEPS, WHY_NOT, Family, build, decode, table
from tests.models import in_float64

pytest.importorskip("transformers", minversion="5.17")

OPTIONS: dict[str, Any] = {"fusion_pass.devices": ("cpu",), "fusion_pass.strict": True}
ERROR_BUDGET = 1.5

# What else differs on the way to the pass: a finite mask fill over repeated K and V, a gate in the
# left operand, a float32 gate, and FlexAttention with a causal and with a sliding mask.
ALSO = {
    "qwen3_5 (vision-language)": ("eager",),
    "hrm_text": ("eager", "flex_attention"),
    "axk2": ("eager",),
    "afmoe": ("flex_attention",),
}


def cases(fused: bool) -> Iterator[Any]:
    """The combinations to run, of those that fuse or of those that do not."""
    for family in FAMILIES:
        chosen = (family.implementations[0], *ALSO.get(family.name, ()))
        if os.environ.get("TEST_FAMILIES") == "all":
            chosen = family.implementations
        for implementation in chosen:
            if (FUSED[family.name][implementation] > 0) != fused:
                continue
            name = f"{family.name}-{implementation}"
            yield pytest.param(family, implementation, id=name)


@pytest.fixture(autouse=True)
def _flex_without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers compiles FlexAttention even where the model is not compiled, and Inductor's
    # template for it on the CPU does not compile with a sliding mask (torch 2.13).
    from torch.nn.attention.flex_attention import flex_attention
    from transformers.integrations.flex_attention import WrappedFlexAttention

    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: flex_attention)


@torch.no_grad()
@pytest.mark.parametrize(("family", "implementation"), cases(fused=True))
def test_decodes(family: Family, implementation: str, calls: list[str]) -> None:
    model = build(family, implementation)
    eager_tokens, eager = decode(model)
    assert not calls

    step = torch.compile(model, backend="fusion_pass", options=OPTIONS)
    tokens, fused = decode(model, step)
    assert len(calls) == FUSED[family.name][implementation] * (STEPS - 1)
    assert counters["fusion_pass"]["declined"] == 0
    assert torch.equal(tokens, eager_tokens)

    exact = decode(in_float64(model))[1]
    assert (fused - exact).norm() <= ERROR_BUDGET * (eager - exact).norm()


@torch.no_grad()
@pytest.mark.parametrize(("family", "implementation"), cases(fused=False))
def test_left_alone(family: Family, implementation: str, calls: list[str]) -> None:
    model = build(family, implementation)
    _, stock = decode(model, torch.compile(model))
    torch._dynamo.reset()
    _, declined = decode(model, torch.compile(model, backend="fusion_pass", options=OPTIONS))
    assert not calls
    assert counters["fusion_pass"]["fused"] == 0
    assert torch.equal(declined, stock)


def test_every_combination_has_an_expectation() -> None:
    assert set(FUSED) == {family.name for family in FAMILIES}
    for family in FAMILIES:
        assert set(FUSED[family.name]) == set(family.implementations)
        all_fuse = set(FUSED[family.name].values()) == {family.gated_layers}
        assert all_fuse == (family.name not in WHY_NOT)


def test_documentation_shows_the_table() -> None:
    document = Path(__file__).parents[1] / "docs" / "models.md"
    assert table() in document.read_text(encoding="utf-8")
