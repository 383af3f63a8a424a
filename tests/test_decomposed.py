"""Attention that is spelled out: what is read as attention, with which meaning, and what is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

B, H, KV, S, D = 2, 8, 2, 40, 16
OPTIONS = {"fusion_pass.devices": ("cpu",), "fusion_pass.strict": True}

Spelling = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    """Query, K, V and a mask that lets each batch row see keys of its own."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    keep = torch.rand(B, 1, 1, S, generator=generator) < 0.5
    return draw(B, H, 1, D), draw(B, KV, S, D), draw(B, KV, S, D), keep, draw(B, 1, H * D)


def wide(tensor: Tensor) -> Tensor:
    return tensor[:, :, None].expand(B, KV, H // KV, S, D).reshape(B, H, S, D)


def gated(spelling: Spelling) -> Callable[..., Tensor]:
    def model(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, gate: Tensor) -> Tensor:
        output = spelling(query, key, value, keep)
        return output.transpose(1, 2).reshape(B, 1, -1) * torch.sigmoid(gate)

    return model


def bias(keep: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(keep, dtype=like.dtype).masked_fill(~keep, torch.finfo(like.dtype).min)


def eager(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """transformers' eager attention."""
    logits = query @ wide(key).transpose(2, 3) * 0.25 + bias(keep, query)
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights @ wide(value)


def math_path(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    with sdpa_kernel([SDPBackend.MATH]):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=keep, enable_gqa=True)


def filled(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    logits = (query @ wide(key).mT) / 4.0
    return logits.masked_fill(~keep, -math.inf).softmax(-1) @ wide(value)


def scaled_query(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    logits = (query * 0.25) @ wide(key).mT
    return logits.masked_fill(keep.logical_not(), -1e30).softmax(-1) @ wide(value)


def grouped(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """Five dimensions, K and V broadcast over the group."""
    logits = query.reshape(B, KV, H // KV, 1, D) @ key[:, :, None].mT * 0.25
    weights = logits.masked_fill(~keep[:, :, None], -math.inf).softmax(-1)
    return (weights @ value[:, :, None]).reshape(B, H, 1, D)


def plain(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    return (query @ wide(key).mT).softmax(-1) @ wide(value)


SPELLINGS = [eager, math_path, filled, scaled_query, grouped, plain]


def run(spelling: Spelling, args: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The result of stock and of the pass, without the patterns by which stock makes SDPA of it."""
    model = gated(spelling)
    with torch.no_grad(), torch._inductor.config.patch(pattern_matcher=False):
        stock = torch.compile(model)(*args)
        torch._dynamo.reset()
        return stock, torch.compile(model, backend="fusion_pass", options=OPTIONS)(*args)


def exact(spelling: Spelling, args: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        return gated(spelling)(*[x.double() if x.is_floating_point() else x for x in args])


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_fires(spelling: Spelling) -> None:
    args = inputs()
    stock, found = run(spelling, args)
    assert counters["fusion_pass"] == {"fused": 1}
    truth = exact(spelling, args)
    assert (found - truth).norm() <= 1.5 * (stock - truth).norm()


def scaled_last(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    logits = query.reshape(B, KV, H // KV, 1, D) @ key[:, :, None].mT * 0.25
    return (logits.softmax(-1) @ value[:, :, None]).reshape(B, H, 1, D)


def divided_last(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    logits = query.reshape(B, KV, H // KV, 1, D) @ key[:, :, None].mT / 4
    return (logits.softmax(-1) @ value[:, :, None]).reshape(B, H, 1, D)


def scaled_after_the_mask(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    logits = query.reshape(B, KV, H // KV, 1, D) @ key[:, :, None].mT
    logits = (logits + bias(keep, query)[:, :, None] * 1e-38) * 0.25
    return (logits.softmax(-1) @ value[:, :, None]).reshape(B, H, 1, D)


@pytest.mark.parametrize("spelling", [scaled_last, divided_last, scaled_after_the_mask])
def test_what_inductor_makes_of_a_scale_that_comes_last(spelling: Spelling) -> None:
    """Its own patterns move the scale past the subtraction of the maximum."""
    args = inputs()
    model = gated(spelling)
    with torch.no_grad():
        stock = torch.compile(model)(*args)
        torch._dynamo.reset()
        found = torch.compile(model, backend="fusion_pass", options=OPTIONS)(*args)
    if spelling is scaled_after_the_mask:
        assert counters["fusion_pass"] == {"declined": 1, "declined: logits-changed": 1}
        assert torch.equal(found, stock)
    else:
        assert counters["fusion_pass"] == {"fused": 1}
        truth = exact(spelling, args)
        assert (found - truth).norm() <= 1.5 * (stock - truth).norm()


def narrowed(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """In float16 the fill is -inf, where the cast rounds."""
    logits = (query @ wide(key).mT).masked_fill(~keep, -1e9).to(torch.float16)
    return logits.softmax(-1, dtype=torch.float32) @ wide(value)


def narrowed_with_sinks(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    logits = (query @ wide(key).mT).masked_fill(~keep, -1e9)
    sinks = key[0, 0, :H, 0].reshape(1, -1, 1, 1).expand(B, -1, 1, -1)
    joined = torch.cat([logits, sinks], dim=-1).to(torch.float16)
    return joined.softmax(-1, dtype=torch.float32)[..., :-1] @ wide(value)


def filled_in_float32(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """A number of no dimensions takes the dtype of the logits."""
    logits = query.half() @ wide(key).half().mT
    filled = torch.where(keep, logits, torch.full((), -1e9))
    return filled.softmax(-1, dtype=torch.float32).half() @ wide(value).half()


@pytest.mark.parametrize("narrowed", [narrowed, narrowed_with_sinks, filled_in_float32])
@pytest.mark.parametrize("is_emulated", [False, True])
def test_a_cast_that_rounds_the_logits(is_emulated: bool, narrowed: Spelling) -> None:
    """Inductor rounds to it only where it is asked to emulate eager torch."""
    query, key, value, keep, gate = inputs()
    # A row without a live key.
    keep[1] = False
    with torch._inductor.config.patch(emulate_precision_casts=is_emulated):
        stock, found = run(narrowed, (query, key, value, keep, gate))
    step = 2e-3 if narrowed is filled_in_float32 else 1e-5
    torch.testing.assert_close(found, stock, equal_nan=True, rtol=step, atol=step)
    declined = {"declined": 1, "declined: numerics": 1}
    assert counters["fusion_pass"] == (declined if is_emulated else {"fused": 1})


def narrowed_weights(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    weights = (query @ wide(key).mT).masked_fill(~keep, -1e9).softmax(-1)
    return weights.to(torch.bfloat16).float() @ wide(value)


def narrowed_before_the_cut(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """Rounds before the sink's weight is dropped."""
    logits = (query @ wide(key).mT).masked_fill(~keep, -1e9)
    sinks = key[0, 0, :H, 0].reshape(1, -1, 1, 1).expand(B, -1, 1, -1)
    weights = torch.cat([logits, sinks], dim=-1).softmax(-1).to(torch.bfloat16)
    return weights[..., :-1].float() @ wide(value)


@pytest.mark.parametrize("narrowed", [narrowed_weights, narrowed_before_the_cut])
@pytest.mark.parametrize("is_emulated", [False, True])
def test_a_cast_that_rounds_the_weights(is_emulated: bool, narrowed: Spelling) -> None:
    with torch._inductor.config.patch(emulate_precision_casts=is_emulated):
        stock, found = run(narrowed, inputs())
    torch.testing.assert_close(found, stock, rtol=1e-5, atol=1e-5)
    declined = {"declined": 1, "declined: numerics": 1}
    assert counters["fusion_pass"] == (declined if is_emulated else {"fused": 1})


def test_weights_in_the_dtype_of_values_are_rounded_by_the_kernel_too() -> None:
    with torch._inductor.config.patch(emulate_precision_casts=True):
        run(eager, inputs(torch.bfloat16))
    assert counters["fusion_pass"] == {"fused": 1}


DROPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda weights: F.dropout(weights, 0.3),
    "bernoulli": lambda weights: weights * torch.bernoulli(torch.full_like(weights, 0.7)) / 0.7,
    "bernoulli_": lambda weights: weights * torch.empty_like(weights).bernoulli_(0.7) / 0.7,
    "where": lambda weights: torch.where(torch.rand_like(weights) < 0.7, weights / 0.7, 0.0),
    "masked_fill": lambda weights: weights.masked_fill(torch.rand_like(weights) > 0.7, 0) / 0.7,
    "compared": lambda weights: weights * (torch.tensor(0.3) < torch.rand_like(weights)) / 0.7,
    "dropout2d": lambda weights: F.dropout2d(weights, 0.3),
}


@pytest.mark.parametrize("name", DROPPED)
@pytest.mark.parametrize("fallback", [False, True])
def test_weights_that_are_dropped_in_other_words(name: str, fallback: bool) -> None:
    def dropping(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
        return DROPPED[name]((query @ wide(key).mT).softmax(-1)) @ wide(value)

    with torch.no_grad(), torch._inductor.config.patch(fallback_random=fallback):
        torch.compile(gated(dropping), backend="fusion_pass", options=OPTIONS)(*inputs())
    assert counters["fusion_pass"] == {"declined": 1, "declined: dropout": 1}


def test_weights_and_that_of_a_sink_are_dropped() -> None:
    def dropping(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
        logits = query @ wide(key).mT
        weights = torch.cat((logits, logits[..., :1]), -1).softmax(-1)
        return F.dropout(weights, 0.3)[..., :-1] @ wide(value)

    with torch.no_grad():
        torch.compile(gated(dropping), backend="fusion_pass", options=OPTIONS)(*inputs())
    assert counters["fusion_pass"] == {"declined": 1, "declined: dropout": 1}


@pytest.mark.parametrize("spelled_out", [False, True])
def test_dropout_is_named(spelled_out: bool) -> None:
    def dropping(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
        if spelled_out:
            return F.dropout((query @ wide(key).mT).softmax(-1), 0.1) @ wide(value)
        return F.scaled_dot_product_attention(query, wide(key), wide(value), dropout_p=0.1)

    with torch.no_grad():
        torch.compile(gated(dropping), backend="fusion_pass", options=OPTIONS)(*inputs())
    assert counters["fusion_pass"] == {"declined": 1, "declined: dropout": 1}


@pytest.mark.parametrize("spelling", [eager, math_path, filled])
def test_fires_in_bfloat16(spelling: Spelling) -> None:
    args = inputs(torch.bfloat16)
    stock, found = run(spelling, args)
    assert counters["fusion_pass"] == {"fused": 1}
    assert (found.float() - stock.float()).norm() <= 2**-7 * stock.float().norm()


@pytest.mark.parametrize(
    ("spelling", "row"),
    [(eager, "mean"), (math_path, "zero"), (filled, "nan"), (scaled_query, "mean")],
)
def test_a_row_that_is_masked_entirely(spelling: Spelling, row: str) -> None:
    """Every producer has an answer of its own, and it is kept."""
    query, key, value, keep, gate = inputs()
    keep[1] = False
    stock, found = run(spelling, (query, key, value, keep, gate))
    assert counters["fusion_pass"] == {"fused": 1}
    torch.testing.assert_close(found, stock, equal_nan=True)
    mean = wide(value)[1].mean(1).reshape(1, -1) * torch.sigmoid(gate[1])
    expected = {"mean": mean, "zero": mean * 0, "nan": mean * math.nan}[row]
    torch.testing.assert_close(found[1], expected, equal_nan=True)
    assert found[0].isfinite().all()


@pytest.mark.parametrize("poisoned", ["query", "key"])
@pytest.mark.parametrize("way", ["masked_fill", "where", "where reversed", "added"])
def test_nan_behind_a_fill_shows_as_in_stock(way: str, poisoned: str) -> None:
    """What takes the place of the logits hides it; what is added to them does not."""

    def spelling(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
        logits, fill = query @ wide(key).mT * 0.25, torch.finfo(query.dtype).min
        if way == "masked_fill":
            logits = logits.masked_fill(~keep, fill)
        elif way == "where":
            logits = torch.where(keep, logits, fill)
        elif way == "where reversed":
            logits = torch.where(~keep, fill, logits)
        else:
            logits = logits + torch.where(keep, 0.0, fill)
        return logits.softmax(-1) @ wide(value)

    query, key, value, keep, gate = inputs()
    keep[1] = False
    (query if poisoned == "query" else key)[1] = math.nan
    stock, found = run(spelling, (query, key, value, keep, gate))
    assert counters["fusion_pass"] == {"fused": 1}
    torch.testing.assert_close(found, stock, equal_nan=True)
    assert bool(found[1].isnan().any()) is (way == "added")


def with_sinks(shifted: bool, fill: float) -> Spelling:
    """One sink a head, as gpt-oss and HY-V4 write it; K's first numbers serve as sinks."""

    def spelling(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
        logits = (query @ wide(key).mT * 0.25).masked_fill(~keep, fill)
        sinks = key[0, 0, :H, 0].reshape(1, -1, 1, 1).expand(B, -1, 1, -1)
        joined = torch.cat([logits, sinks], dim=-1)
        if shifted:
            joined = joined - joined.max(dim=-1, keepdim=True).values
        return torch.softmax(joined, dim=-1)[..., :-1] @ wide(value)

    return spelling


@pytest.mark.parametrize("sink", [-2e9, -1e9, torch.finfo(torch.float32).min, -1e5, -math.inf])
@pytest.mark.parametrize("fill", [-1e9, -65504.0])
def test_sinks_as_low_as_the_fill(fill: float, sink: float) -> None:
    query, key, value, keep, gate = inputs()
    keep[1] = False
    key[0, 0, :H, 0] = sink
    args = (query, key, value, keep, gate)
    keep[0, ..., 0] = True
    query[0] = 0.0
    stock, found = run(with_sinks(False, fill), args)
    assert counters["fusion_pass"] == {"fused": 1}
    torch.testing.assert_close(found[1], stock[1])


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("fill", [-math.inf, -1e30])
def test_sinks(shifted: bool, fill: float) -> None:
    query, key, value, keep, gate = inputs()
    keep[1] = False
    args = (query, key, value, keep, gate)
    stock, found = run(with_sinks(shifted, fill), args)
    assert counters["fusion_pass"] == {"fused": 1}
    torch.testing.assert_close(found, stock)
    assert torch.equal(found[1], torch.zeros_like(found[1]))


def wrong_dim(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """A softmax over the query tokens: ones everywhere."""
    return (query @ wide(key).mT).softmax(2) @ wide(value)


def over_heads(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    return (query @ wide(key).mT).softmax(1) @ wide(value)


def softcap(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    return (torch.tanh(query @ wide(key).mT / 30) * 30).softmax(-1) @ wide(value)


def masked_before_scaling(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    return ((query @ wide(key).mT + bias(keep, query) * 1e-38) * 0.25).softmax(-1) @ wide(value)


def two_masks(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    logits = query @ wide(key).mT + bias(keep, query) * 1e-38 + value.sum(-1)[:, :1, None]
    return logits.softmax(-1) @ wide(value)


def tensor_scale(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    return (query @ wide(key).mT * query.abs().mean()).softmax(-1) @ wide(value)


def scaled_weights(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    return ((query @ wide(key).mT).softmax(-1) * 0.5) @ wide(value)


def scaled_values(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    return (query @ wide(key).mT).softmax(-1) @ (wide(value) * 0.5)


def sinks_of_a_batch_row(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    logits = query @ wide(key).mT
    extra = query.sum(-1, keepdim=True)
    return torch.cat([logits, extra], -1).softmax(-1)[..., :-1] @ wide(value)


def first_dropped(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """The dropped weight is not the sink's."""
    logits = query @ wide(key).mT
    extra = key[0, 0, :H, 0].reshape(1, H, 1, 1).expand(B, H, 1, 1)
    return torch.cat([logits, extra], -1).softmax(-1)[..., 1:] @ wide(value)


def off_by_one(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    exp = (query @ wide(key).mT).exp()
    return (exp / (1 + exp.sum(-1, keepdim=True))) @ wide(value)


def squared(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    weights = (query @ wide(key).mT).softmax(-1)
    return (weights * weights) @ wide(value)


def in_float64(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """A fill that is finite there, and not in float32."""
    logits = (query @ wide(key).mT).double()
    filled = logits.masked_fill(~keep, torch.finfo(torch.float64).min)
    return filled.softmax(-1).to(query.dtype) @ wide(value)


def less_the_maximum_of_all(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    logits = query @ wide(key).mT
    exp = (logits - logits.amax()).exp()
    return (exp / exp.sum(-1, keepdim=True)) @ wide(value)


def sinks_less_the_maximum_of_all(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor
) -> Tensor:
    sinks = key[0, 0, :H, 0].reshape(1, -1, 1, 1).expand(B, -1, 1, -1)
    joined = torch.cat([query @ wide(key).mT, sinks], dim=-1)
    return torch.softmax(joined - joined.amax(), dim=-1)[..., :-1] @ wide(value)


def integral_sinks(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    sinks = torch.arange(H).reshape(1, -1, 1, 1).expand(B, -1, 1, -1)
    joined = torch.cat([query @ wide(key).mT, sinks], dim=-1)
    return torch.softmax(joined, dim=-1)[..., :-1] @ wide(value)


NEAR_MISSES = [
    wrong_dim,
    in_float64,
    less_the_maximum_of_all,
    sinks_less_the_maximum_of_all,
    integral_sinks,
    over_heads,
    softcap,
    masked_before_scaling,
    two_masks,
    tensor_scale,
    scaled_weights,
    sinks_of_a_batch_row,
    first_dropped,
    off_by_one,
    squared,
]


@pytest.mark.parametrize("spelling", NEAR_MISSES)
def test_near_misses_stay_as_they_are(spelling: Spelling) -> None:
    stock, found = run(spelling, inputs())
    assert counters["fusion_pass"]["fused"] == 0
    assert torch.equal(found, stock)


def test_scaled_values_are_values() -> None:
    """A constant on V is no part of the attention, but does not hide it either."""
    args = inputs()
    stock, found = run(scaled_values, args)
    torch.testing.assert_close(found, stock)


def exchanged(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """Heads and head_dim of K exchanged where both are 16."""
    return (query @ key.transpose(1, 3).mT).softmax(-1) @ value


def untransposed(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """K not transposed where S == D: a sum over keys instead of dims."""
    return (query @ key).softmax(-1) @ value


@pytest.mark.parametrize("spelling", [exchanged, untransposed])
def test_sizes_that_coincide(spelling: Spelling) -> None:
    """Hq == Hkv == S == D: whatever is made of it, it computes the same."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(B, 16, 1, 16, generator=generator)
    key, value = (torch.randn(B, 16, 16, 16, generator=generator) for _ in range(2))
    gate = torch.randn(B, 1, 256, generator=generator)
    stock, found = run(spelling, (query, key, value, torch.ones(B, 1, 1, 16) > 0, gate))
    torch.testing.assert_close(found, stock)


@torch.no_grad()
def test_weights_that_are_returned_as_well() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, gate: Tensor) -> Any:
        weights = (query @ wide(key).mT).softmax(-1)
        output = (weights @ wide(value)).transpose(1, 2).reshape(B, 1, -1)
        return output * torch.sigmoid(gate), weights

    args = inputs()
    stock = torch.compile(model)(*args)
    torch._dynamo.reset()
    found = torch.compile(model, backend="fusion_pass", options=OPTIONS)(*args)
    assert counters["fusion_pass"] == {"declined": 1, "declined: softmax-statistics-used": 1}
    assert all(torch.equal(a, b) for a, b in zip(found, stock, strict=True))


@torch.no_grad()
def test_plain_matmuls_are_nothing_to_the_pass() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).softmax(-1) + (x.mean() @ y if x.dim() == 0 else y)

    torch.compile(model, backend="fusion_pass", options=OPTIONS)(
        torch.randn(4, 4), torch.randn(4, 4)
    )
    assert not counters["fusion_pass"]
