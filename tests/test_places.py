"""Operands and logits that are repeated along an axis, and weights that change places."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.graphs import fake_mode, run_pass, trace

B, H, T, S, D = 2, 4, 3, 20, 16
WHOLE = {"query": (B, H, T, D), "key": (B, H, S, D), "value": (B, H, S, D)}
LOGITS = (B, H, T, S)
AXES = [axes for count in (1, 2, 4) for axes in itertools.combinations(range(4), count)]
GATES = {"whole": (B, T, H * D), "one number": (1, 1, 1)}


def as_it_is(x: Tensor) -> Tensor:
    return x


def scaled(x: Tensor) -> Tensor:
    return x * 0.5


def cast(x: Tensor) -> Tensor:
    return to(x, torch.float32)


def to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As Inductor's decompositions spell it; float64 stays as it is."""
    if torch.float64 in (x.dtype, dtype):
        return x
    result: Tensor = torch.ops.prims.convert_element_type.default(x, dtype)
    return result


def draw(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


def but(size: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if dim in axes else n for dim, n in enumerate(size))


def gated(output: Tensor, gate: Tensor) -> Tensor:
    merged = output.transpose(1, 2).flatten(2)
    return to(merged, gate.dtype) * torch.sigmoid(gate)


def check(model: Callable[..., Tensor], *inputs: Tensor) -> int:
    """How many attentions fuse, the result being right either way."""
    mode = fake_mode()
    module = trace(model, *[mode.from_tensor(x) for x in inputs])
    fused = run_pass(module, devices=("cpu",))
    found, truth = module(*inputs), model(*[x.double() for x in inputs])
    assert found.shape == truth.shape
    step = 1e-5 if found.dtype is torch.float32 else 2**-7
    torch.testing.assert_close(found.double(), truth, rtol=step, atol=step)
    return fused


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("before", [as_it_is, scaled, cast])
@pytest.mark.parametrize("repeated", WHOLE)
def test_an_operand(repeated: str, before: Callable[[Tensor], Tensor], gate: str) -> None:
    """What is before the repetition is read as part of the attention, or stays before it."""
    names = list(WHOLE)

    def model(gate: Tensor, *operands: Tensor) -> Tensor:
        # A factor of V is none of the attention.
        prepared = [x if before is scaled and i == 2 else before(x) for i, x in enumerate(operands)]
        place = names.index(repeated)
        prepared[place] = prepared[place].expand(WHOLE[repeated])
        query, key, value = prepared
        return gated(torch.softmax(query @ key.mT * 0.25, -1) @ value, gate)

    dtype = torch.bfloat16 if before is cast else torch.float32
    for axes in AXES:
        sizes = {**WHOLE, repeated: but(WHOLE[repeated], axes)}
        operands = [draw(size, dtype) for size in sizes.values()]
        fused = check(model, draw(GATES[gate], dtype), *operands)
        if before is as_it_is or (before is scaled and repeated != "key"):
            assert fused == 1, axes


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("is_after", [False, True])
def test_logits(is_after: bool, gate: str) -> None:
    """Before their softmax or after it: less is computed than an attention would."""

    def model(gate: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = query @ key.mT * 0.25
        if is_after:
            weights = weights.softmax(-1).expand(LOGITS)
        else:
            weights = weights.expand(LOGITS).softmax(-1)
        return gated(weights @ value, gate)

    keys_axis = {0: 0, 1: 1, 3: 2}
    for axes in AXES[:-1]:
        rows = tuple(axis for axis in axes if axis != 3)
        columns = tuple(keys_axis[axis] for axis in axes if axis in keys_axis)
        sizes = GATES[gate], but(WHOLE["query"], rows), but(WHOLE["key"], columns), WHOLE["value"]
        assert check(model, *[draw(size, torch.float32) for size in sizes]) == 0


def test_a_softmax_that_broadcasts() -> None:
    """Inductor's spelling of a scaled softmax, with a condition of more rows than there are."""

    def model(gate: Tensor, query: Tensor, key: Tensor, value: Tensor, choice: Tensor) -> Tensor:
        logits = torch.bmm(query, key.mT)
        doubled = logits * 2.0
        shifted = (logits - logits.amax(-1, True)) * 2.0, doubled - doubled.amax(-1, True)
        weights = torch.where(choice > 0, *shifted).exp()
        return torch.bmm(weights / weights.sum(-1, True), value) * torch.sigmoid(gate)

    sizes = (H, T, D), (1, T, D), (1, S, D), (H, S, D), (H, 1, 1)
    assert check(model, *[draw(size, torch.float32) for size in sizes]) == 0


# The weights, with that of the sink, before that is dropped; all sizes are N.
N = 4
REARRANGED: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        f"{a} for {b}": lambda w, a=a, b=b: w.transpose(a, b)[..., :-1]
        for a, b in itertools.combinations(range(4), 2)
    },
    "merged": lambda w: w.flatten(0, 1)[..., :-1].unflatten(0, (N, N)),
    "split": lambda w: w.unflatten(1, (2, 2))[..., :-1].flatten(1, 2),
    "longer": lambda w: w[:, :, None][..., :-1].squeeze(2),
    "in place": lambda w: w.transpose(0, 1).transpose(0, 1)[..., :-1],
    "after": lambda w: w[..., :-1].flatten(0, 1).unflatten(0, (N, N)),
}


@pytest.mark.parametrize("name", REARRANGED)
def test_weights_before_the_sink_is_dropped(name: str) -> None:
    def model(gate: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        sink = sinks.view(1, N, 1, 1).expand(N, N, N, 1)
        weights = torch.cat([query @ key.mT * 0.25, sink], -1).softmax(-1)
        return gated(REARRANGED[name](weights) @ value, gate)

    sizes = (N, N, N * D), (N, N, N, D), (N, N, N - 1, D), (N, N, N - 1, D), (N,)
    fused = check(model, *[draw(size, torch.float32) for size in sizes])
    assert fused == (name in ("in place", "after"))


@torch.no_grad()
def test_a_query_for_all_of_a_dynamic_batch() -> None:
    """A learned query, as of attention pooling."""

    def pooled(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        batch = key.shape[0]
        logits = (query * D**-0.5).expand(batch, H, 1, D) @ key.mT
        merged = (logits.softmax(-1) @ value).transpose(1, 2).reshape(batch, 1, H * D)
        return merged * torch.sigmoid(gate)

    options = {"fusion_pass.devices": ("cpu",), "fusion_pass.strict": True}
    compiled = torch.compile(pooled, backend="fusion_pass", options=options)
    query = draw((1, H, 1, D), torch.float32)
    for batch in (3, 5, 7):
        sizes = (batch, H, S, D), (batch, H, S, D), (batch, 1, H * D)
        rest = [draw(size, torch.float32) for size in sizes]
        torch.testing.assert_close(compiled(query, *rest), pooled(query, *rest))
    assert counters["fusion_pass"] == {"fused": 2}
