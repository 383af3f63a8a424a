"""Random gated attentions and random near-misses: whatever is fused computes the same.

Every size is 16, or 4 for the heads that are stored, so that no shape tells a wrong program from a
right one. A program without a mutation must fuse; one with a mutation may fuse only if what it
then computes agrees with what it computed before, on concrete numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.graphs import attend, fake_mode, repeat_kv, run_pass, trace, where_mask

N, STORED = 16, 4
Step = Callable[[Tensor], Tensor]

CORES = ("fused", "softmax", "math", "grouped")
REPEATS: dict[str, Step] = {
    "repeat_kv": lambda x: repeat_kv(x, N // STORED),
    "repeat_interleave": lambda x: x.repeat_interleave(N // STORED, dim=1),
    "token major": lambda x: repeat_kv(x.transpose(1, 2).contiguous().transpose(1, 2), 4),
    "in two": lambda x: repeat_kv(repeat_kv(x, 2), 2),
}
CHAINS: dict[str, Step] = {
    "reshape": lambda x: x.transpose(1, 2).reshape(N, 1, N * N),
    "flatten": lambda x: x.permute(0, 2, 1, 3).contiguous().flatten(2),
    "keep": lambda x: x.transpose(1, 2),
    "heads first": lambda x: x.clone(),
    "two-dimensional": lambda x: x.transpose(1, 2).reshape(N, N * N),
    "odd": lambda x: x.transpose(1, 2).reshape(N, 4, 64).transpose(0, 1),
}
# Each of these changes what is computed, or must be read as what it is.
MUTATIONS: dict[str, str] = {
    "none": "",
    "query transposed": "query",
    "key transposed": "key",
    "key turned": "key",
    "value transposed": "value",
    "tiled heads": "repeat",
    "repeat of dims": "repeat",
    "softmax of rows": "weights",
    "weights doubled": "weights",
    "weights transposed": "weights",
    "output transposed": "chain",
    "output of batch": "chain",
    "gate doubled": "gate",
    "gate twice": "gate",
    "gate silu": "gate",
    "gate transposed": "gate",
    "gate negated": "gate",
    "mask transposed": "mask",
    "mask of batch": "mask",
    "mask halved": "mask",
    "logits squared": "logits",
    "logits shifted": "logits",
}
STEPS: dict[str, Step] = {
    "query transposed": lambda x: x.transpose(0, 1),
    "key transposed": lambda x: x.transpose(2, 3),
    "key turned": lambda x: x.transpose(1, 3) if x.shape[1] == N else x.flip(2),
    "value transposed": lambda x: x.transpose(2, 3),
    "tiled heads": lambda x: x.repeat(1, N // STORED, 1, 1),
    "repeat of dims": lambda x: x[..., :4].repeat_interleave(4, -1).repeat(1, 4, 1, 1),
    "softmax of rows": lambda x: x.softmax(1),
    "weights doubled": lambda x: x * 2.0,
    "weights transposed": lambda x: x.transpose(0, 1),
    "output transposed": lambda x: x.transpose(1, 3),
    "output of batch": lambda x: x.transpose(0, 1),
    "gate doubled": lambda x: torch.sigmoid(x) * 2.0,
    "gate twice": lambda x: torch.sigmoid(torch.sigmoid(x)),
    "gate silu": lambda x: x * torch.sigmoid(x),
    "gate transposed": lambda x: torch.sigmoid(x.view(N, N, N).transpose(1, 2).reshape(N, 1, -1)),
    "gate negated": lambda x: torch.sigmoid(-x),
    "mask transposed": lambda x: x.reshape(N, N).t().reshape(N, 1, 1, N),
    "mask of batch": lambda x: x.reshape(1, N, 1, N),
    "mask halved": lambda x: x.logical_or(x.flip(3)),
    "logits squared": lambda x: x * x,
    "logits shifted": lambda x: x + 1.0,
}


@dataclass(frozen=True)
class Program:
    """One random gated attention."""

    core: str
    repeat: str
    chain: str
    mask: bool
    fill: float
    swapped: bool
    mutation: str

    def mutated(self, place: str, tensor: Tensor, otherwise: Step | None = None) -> Tensor:
        if MUTATIONS[self.mutation] == place:
            return STEPS[self.mutation](tensor)
        return tensor if otherwise is None else otherwise(tensor)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor, gate: Tensor
    ) -> Tensor:
        query, key = self.mutated("query", query), self.mutated("key", key)
        value, keep = self.mutated("value", value), self.mutated("mask", keep)
        output = self.mutated("chain", self.attention(query, key, value, keep))
        output = CHAINS[self.chain](output)
        weight = self.mutated("gate", gate, torch.sigmoid).reshape(output.shape)
        return weight * output if self.swapped else output * weight

    def attention(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
        bias = where_mask(keep, query.dtype, self.fill)
        if self.core == "grouped":
            rows = query.reshape(N, STORED, 4, 1, N)
            logits = torch.matmul(rows, key.unsqueeze(2).transpose(-1, -2)) * 0.25
            logits = logits + bias.unsqueeze(2) if self.mask else logits
            weights = self.weights(logits)
            return torch.matmul(weights, value.unsqueeze(2)).reshape(N, N, 1, N)
        key, value = (self.mutated("repeat", x, REPEATS[self.repeat]) for x in (key, value))
        if self.core == "fused":
            return attend("cpu-flash", query, key, value, bias if self.mask else None)
        if self.core == "math":
            logits = torch.matmul(query * 0.5, key.transpose(2, 3) * 0.5)
        else:
            logits = torch.matmul(query, key.transpose(2, 3)) / 4.0
        return torch.matmul(self.weights(logits + bias if self.mask else logits), value)

    def weights(self, logits: Tensor) -> Tensor:
        logits = self.mutated("logits", logits)
        if self.mutation == "softmax of rows":
            return logits.softmax(1)
        return self.mutated("weights", logits.softmax(-1))

    @property
    def is_unchanged(self) -> bool:
        """Whether the mutation, if any, is in a part that this program has."""
        place = MUTATIONS[self.mutation]
        return (
            place == ""
            or (place == "mask" and not self.mask)
            or (place == "repeat" and self.core == "grouped")
            or (place in ("weights", "logits") and self.core == "fused")
        )


programs = st.builds(
    Program,
    core=st.sampled_from(CORES),
    repeat=st.sampled_from(sorted(REPEATS)),
    chain=st.sampled_from(sorted(CHAINS)),
    mask=st.booleans(),
    fill=st.sampled_from([-math.inf, -65536.0, torch.finfo(torch.float32).min]),
    swapped=st.booleans(),
    mutation=st.sampled_from(["none"] * 5 + sorted(MUTATIONS)),
)


def sizes() -> tuple[Tensor, ...]:
    return (
        torch.empty(N, N, 1, N),
        torch.empty(N, STORED, N, N),
        torch.empty(N, STORED, N, N),
        torch.empty(N, 1, 1, N, dtype=torch.bool),
        torch.empty(N, 1, N * N),
    )


def numbers() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    query, key, value, keep, gate = sizes()
    real = [torch.randn(x.shape, generator=generator) for x in (query, key, value, gate)]
    live = torch.rand(keep.shape, generator=generator) < 0.5
    # Some key is live in every row.
    live[..., 3] = True
    return [*real[:3], live, real[3]]


NUMBERS = numbers()


def is_possible(program: Program) -> bool:
    """Whether the program runs at all: some mutations do not fit some shapes."""
    try:
        program(*NUMBERS)
    except (RuntimeError, IndexError):
        return False
    return True


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(programs.filter(is_possible))
def test_fused_programs_compute_what_they_computed(program: Program) -> None:
    mode = fake_mode()
    module = trace(program, *[mode.from_tensor(x) for x in sizes()])
    expected = module(*NUMBERS)
    fused = run_pass(module, devices=("cpu",))
    found = module(*NUMBERS)
    relative, absolute = (1e-4, 1e-5) if fused else (0.0, 0.0)
    torch.testing.assert_close(found, expected, rtol=relative, atol=absolute, equal_nan=True)
    if program.is_unchanged:
        assert fused == 1
