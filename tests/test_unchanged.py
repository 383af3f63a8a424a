"""Models without a gate compile to stock's very code with the pass on."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import fusion_pass
from fusion_pass.demo_model import repeat_kv, rotate

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 64, 4, 2, 16, 32


class LlamaAttention(nn.Module):
    """A decode step over a static cache, as Llama's is, with or without a gate at its end."""

    def __init__(self, gate: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.gate_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False) if gate else None
        self.register_buffer("keys", torch.zeros(2, KV_HEADS, CAPACITY, HEAD_DIM))
        self.register_buffer("values", torch.zeros(2, KV_HEADS, CAPACITY, HEAD_DIM))

    def forward(self, hidden: Tensor) -> Tensor:
        position = torch.tensor([3])
        query = rotate(self.heads(self.q_proj, hidden), position)
        self.keys.index_copy_(2, position, rotate(self.heads(self.k_proj, hidden), position))
        self.values.index_copy_(2, position, self.heads(self.v_proj, hidden))
        attended = F.scaled_dot_product_attention(
            query,
            repeat_kv(self.keys, HEADS // KV_HEADS),
            repeat_kv(self.values, HEADS // KV_HEADS),
            attn_mask=(torch.arange(CAPACITY) <= position)[None, None, None],
        )
        attended = attended.transpose(1, 2).reshape(2, 1, -1)
        if self.gate_proj is not None:
            attended = attended * torch.sigmoid(self.gate_proj(hidden))
        return self.o_proj(attended)

    @staticmethod
    def heads(projection: nn.Module, hidden: Tensor) -> Tensor:
        return projection(hidden).view(2, 1, -1, HEAD_DIM).transpose(1, 2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 128), nn.SiLU(), nn.Linear(128, HIDDEN), nn.Sigmoid())


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


def code(model: nn.Module, example: Tensor) -> list[str]:
    """The modules that Inductor generates for `model`, without their running numbers."""
    torch._dynamo.reset()
    with torch.no_grad():
        _, sources = run_and_get_code(torch.compile(model.eval(), fullgraph=True), example)
    return [re.sub(r"^# AOT ID: .*\n", "", source) for source in sources]


def stock_and_fused_code(
    make: Callable[[], nn.Module], example: Tensor
) -> tuple[list[str], list[str]]:
    torch.manual_seed(0)
    model = make()
    stock = code(model, example)
    with fusion_pass.enable(devices=("cpu",), strict=True):
        return stock, code(model, example)


@pytest.mark.parametrize(
    ("make", "example", "attentions"),
    [
        (lambda: LlamaAttention(gate=False), torch.ones(2, 1, HIDDEN), 1),
        (mlp, torch.ones(2, HIDDEN), 0),
        (cnn, torch.ones(1, 3, 16, 16), 0),
    ],
    ids=["llama", "mlp", "cnn"],
)
def test_code_is_stocks(make: Callable[[], nn.Module], example: Tensor, attentions: int) -> None:
    stock, with_pass = stock_and_fused_code(make, example)
    assert stock
    assert with_pass == stock
    assert counters["fusion_pass"]["fused"] == 0
    assert counters["fusion_pass"]["declined"] == attentions


def test_code_is_not_stocks_where_there_is_a_gate() -> None:
    stock, with_pass = stock_and_fused_code(
        lambda: LlamaAttention(gate=True), torch.ones(2, 1, HIDDEN)
    )
    assert with_pass != stock
    assert "gated_decode_attention" in with_pass[0]
    assert counters["fusion_pass"]["fused"] == 1
