"""A toy engine's attention, which keeps its own cache, and the gated kernel it hands to the pass.

What the operator does with its cache no graph tells: it is known by a handle alone. The pass need
not know either. It is told of the gated form and puts that in the place of operator and gate.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import fusion_pass

HEADS, HEAD_DIM = 4, 32
device = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Cache:
    """Keys and values (H, S, D) of each sequence, by its number."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


caches: dict[int, Cache] = {}
calls: list[str] = []


def attention(query: Tensor, sequences: list[int], handle: int) -> Tensor:
    """(B, H, D) of the engine's kernel: every row attends to all of its sequence."""
    held = caches[handle]
    rows = [
        F.scaled_dot_product_attention(row[:, None], held.keys[number], held.values[number])
        for row, number in zip(query, sequences, strict=True)
    ]
    return torch.stack(rows)[:, :, 0]


@torch.library.custom_op("toy_engine::attend", mutates_args=())
def attend(query: Tensor, sequences: list[int], handle: int) -> Tensor:
    calls.append("attend")
    return attention(query, sequences, handle)


@torch.library.custom_op("toy_engine::gated_attend", mutates_args=())
def gated_attend(query: Tensor, sequences: list[int], handle: int, gate: Tensor) -> Tensor:
    """The same with a gate, in one kernel; here in eager torch, rounded as Inductor rounds it."""
    calls.append("gated_attend")
    output = attention(query, sequences, handle)
    return (output.float() * torch.sigmoid(gate.float())).to(query.dtype)


@attend.register_fake
def _(query: Tensor, sequences: list[int], handle: int) -> Tensor:
    return query.new_empty(query.shape)


@gated_attend.register_fake
def _(query: Tensor, sequences: list[int], handle: int, gate: Tensor) -> Tensor:
    return query.new_empty(query.shape)


def layer(query: Tensor, gate: Tensor, sequences: list[int], handle: int) -> Tensor:
    """A gated attention as a model writes it, (B, H * D)."""
    output = torch.ops.toy_engine.attend(query, sequences, handle)
    return output.flatten(1) * torch.sigmoid(gate)


@torch.inference_mode()
def main() -> None:
    # Before the first compilation. Both have the same arguments, and one of them a gate.
    fusion_pass.register_attention(
        torch.ops.toy_engine.attend.default, gated=torch.ops.toy_engine.gated_attend.default
    )
    torch.manual_seed(0)
    cache = caches[7] = Cache()
    for number, length in ((0, 5), (1, 40), (2, 17)):
        size = (HEADS, length, HEAD_DIM)
        cache.keys[number] = torch.randn(size, device=device)
        cache.values[number] = torch.randn(size, device=device)
    query = torch.randn(3, HEADS, HEAD_DIM, device=device)
    gate = torch.randn(3, HEADS * HEAD_DIM, device=device)

    found = {}
    for is_on in (False, True):
        torch._dynamo.reset()
        with fusion_pass.enable(devices=(device,)) if is_on else contextlib.nullcontext():
            calls.clear()
            found[is_on] = torch.compile(layer)(query, gate, [2, 0, 1], 7)
        assert calls == ["gated_attend" if is_on else "attend"]
    torch.testing.assert_close(found[True], found[False])
    print("counters:", dict(counters["fusion_pass"]))
    assert counters["fusion_pass"] == {"fused": 1}


if __name__ == "__main__":
    # What comes from Inductor's cache is not counted.
    torch.compiler.config.force_disable_caches = True
    main()
