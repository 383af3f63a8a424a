"""From torch.compile to numbers on the CPU: what fires, what declines, and that stock agrees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

OPTIONS = {"fusion_pass.devices": ("cpu",), "fusion_pass.strict": True}


class GatedAttention(nn.Module):
    """Attention over a given K and V, gated as Qwen3.5 gates it; `activation` may be wrong."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.sigmoid) -> None:
        super().__init__()
        self.activation = activation
        self.project = nn.Linear(64, 4 * 2 * 16, bias=False)

    def forward(
        self, hidden: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        batch, tokens, _ = hidden.shape
        query, gate = self.project(hidden).view(batch, tokens, 4, 32).chunk(2, dim=-1)
        wide = [x.repeat_interleave(2, dim=1) for x in (key, value)]
        output = F.scaled_dot_product_attention(query.transpose(1, 2), *wide, attn_mask=mask)
        output = output.transpose(1, 2).reshape(batch, tokens, -1)
        gated: Tensor = output * self.activation(gate.reshape(batch, tokens, -1))
        return gated


def inputs(length: int = 40, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    draw = [
        torch.randn(s, generator=generator) for s in ((batch, 1, 64), *2 * [(batch, 2, length, 16)])
    ]
    return draw[0], draw[1], draw[2]


def compiled(model: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="fusion_pass", options=OPTIONS, **keywords)


def error(found: Tensor, model: nn.Module, *args: Any) -> float:
    exact = model.double()(*[x.double() if x.is_floating_point() else x for x in args])
    model.float()
    return float((found - exact).norm() / exact.norm())


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
def test_fires_and_is_as_accurate_as_stock(masked: bool) -> None:
    model = GatedAttention()
    mask = (torch.arange(40) < 17)[None, None, None, :].expand(2, 1, 1, 40)
    args = (*inputs(), mask) if masked else inputs()
    stock = torch.compile(model)(*args)
    torch._dynamo.reset()
    found = compiled(model)(*args)
    assert counters["fusion_pass"] == {"fused": 1}
    assert found.shape == stock.shape
    assert found.stride() == stock.stride()
    assert error(found, model, *args) <= 1.5 * error(stock, model, *args)


@torch.no_grad()
@pytest.mark.parametrize(
    ("activation", "reason"),
    [
        (F.silu, "gate-not-sigmoid"),
        (torch.tanh, "gate-not-sigmoid"),
        (F.hardsigmoid, "gate-not-sigmoid"),
        (lambda gate: 2.0 * torch.sigmoid(gate), "gate-not-sigmoid"),
        (lambda gate: 1.0 - torch.sigmoid(gate), "gate-not-sigmoid"),
        (lambda gate: torch.sigmoid(gate).sqrt(), "gate-not-sigmoid"),
    ],
)
def test_what_is_declined_is_bitwise_stock(
    activation: Callable[[Tensor], Tensor], reason: str
) -> None:
    model = GatedAttention(activation)
    stock = torch.compile(model)(*inputs())
    torch._dynamo.reset()
    found = compiled(model)(*inputs())
    assert counters["fusion_pass"] == {"declined": 1, f"declined: {reason}": 1}
    assert torch.equal(found, stock)


def test_training_declines_with_the_same_gradients() -> None:
    model = GatedAttention()
    gradients = []
    for make in (torch.compile, compiled):
        torch._dynamo.reset()
        model.zero_grad()
        make(model)(*inputs()).square().sum().backward()
        gradients.append(model.project.weight.grad)
    assert counters["fusion_pass"] == {"declined": 1, "declined: training": 1}
    assert gradients[0] is not None
    assert torch.equal(gradients[0], gradients[1])


def test_the_same_function_without_and_with_gradients() -> None:
    model = GatedAttention()
    step = compiled(model)
    with torch.no_grad():
        step(*inputs())
    assert counters["fusion_pass"]["fused"] == 1
    step(*inputs()).sum().backward()
    assert counters["fusion_pass"]["declined: training"] == 1
    assert model.project.weight.grad is not None


@torch.inference_mode()
def test_inference_mode() -> None:
    compiled(GatedAttention())(*inputs())
    assert counters["fusion_pass"] == {"fused": 1}


@torch.no_grad()
def test_automatic_dynamic_compiles_no_more_often_than_stock() -> None:
    model = GatedAttention()
    compiles = []
    for make in (torch.compile, compiled):
        torch._dynamo.reset()
        counters.clear()
        step = make(model)
        for length in (1, 2, 3, 5, 8, 100, 101, 300):
            args = inputs(length)
            found = step(*args)
            assert error(found, model, *args) < 1e-5
        compiles.append(counters["stats"]["unique_graphs"])
    assert compiles[1] == compiles[0]
    assert counters["fusion_pass"]["fused"] == compiles[1]


@torch.no_grad()
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
def test_marked_dynamic_dims(dims: tuple[int, ...]) -> None:
    """Each input has its own symbols: nothing may rest on their being one and the same."""
    model = GatedAttention()
    step = compiled(model)
    for length, batch in ((40, 2), (41, 3), (90, 5)):
        args = inputs(length, batch)
        for tensor in args[1:]:
            for dim in dims:
                torch._dynamo.mark_dynamic(tensor, 2 * dim)
        if 0 in dims:
            torch._dynamo.mark_dynamic(args[0], 0)
        assert error(step(*args), model, *args) < 1e-5
    assert counters["fusion_pass"]["fused"] == counters["stats"]["unique_graphs"]


@torch.no_grad()
def test_dump(tmp_path: Path) -> None:
    options = {**OPTIONS, "fusion_pass.dump": str(tmp_path)}
    torch.compile(GatedAttention(), backend="fusion_pass", options=options)(*inputs())
    before, after, report = (
        next(tmp_path.glob(f"*.{suffix}")).read_text()
        for suffix in ("before.txt", "after.txt", "report.json")
    )
    assert "sigmoid" in before
    assert "gated_decode_attention" not in before
    assert "gated_decode_attention" in after
    assert "sigmoid" not in after
    (site,) = json.loads(report)["sites"]
    assert site["fused"]
    assert site["key"] == "float32[2, 2, 40, 16]"
    assert Path(__file__).name in site["source"]


class FastAttention(nn.Module):
    """gpt-fast's attention with a gate: its own cache, a row of a mask, enable_gqa."""

    def __init__(self, length: int = 40) -> None:
        super().__init__()
        self.project = nn.Linear(64, (2 * 4 + 2 * 2) * 16, bias=False)
        self.register_buffer("keys", torch.zeros(1, 2, length, 16))
        self.register_buffer("values", torch.zeros(1, 2, length, 16))
        self.register_buffer("causal", torch.ones(length, length).tril() > 0)

    def forward(self, hidden: Tensor, position: Tensor) -> Tensor:
        sizes = [64, 32, 32, 64]
        query, key, value, gate = self.project(hidden).split(sizes, dim=-1)
        query = query.view(1, 1, 4, 16).transpose(1, 2)
        self.keys[:, :, position] = key.view(1, 1, 2, 16).transpose(1, 2)
        self.values[:, :, position] = value.view(1, 1, 2, 16).transpose(1, 2)
        output = F.scaled_dot_product_attention(
            query,
            self.keys,
            self.values,
            attn_mask=self.causal[None, None, position],
            enable_gqa=True,
        )
        gated: Tensor = output.transpose(1, 2).reshape(1, 1, 64) * torch.sigmoid(gate)
        return gated


@torch.no_grad()
def test_a_hand_written_decode_loop() -> None:
    expected, found = FastAttention(), FastAttention()
    found.load_state_dict(expected.state_dict())
    step = compiled(found, fullgraph=True)
    generator = torch.Generator().manual_seed(3)
    for index in range(6):
        args = (torch.randn(1, 1, 64, generator=generator), torch.tensor([index]))
        torch.testing.assert_close(step(*args), expected(*args))
    assert counters["fusion_pass"] == {"fused": 1}
    assert torch.equal(found.keys, expected.keys)
