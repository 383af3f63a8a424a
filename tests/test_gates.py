"""Every way to write the gate, on numbers: fired, and no less accurate than stock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

B, H, S, D = 2, 4, 24, 16
OPTIONS = {"fusion_pass.devices": ("cpu",), "fusion_pass.strict": True}

Write = Callable[[Tensor, Tensor], Tensor]


def heads(output: Tensor) -> Tensor:
    return output.transpose(1, 2)


def flat(output: Tensor) -> Tensor:
    return heads(output).reshape(output.shape[0], output.shape[2], -1)


SPELLINGS: dict[str, Write] = {
    "flat": lambda o, g: flat(o) * torch.sigmoid(g),
    "swapped": lambda o, g: torch.sigmoid(g) * flat(o),
    "before the reshape": lambda o, g: (heads(o) * g.view(B, -1, H, D).sigmoid()).flatten(2),
    "in (B, H, Q, D)": lambda o, g: o * heads(g.view(B, -1, H, D)).sigmoid(),
    "sigmoid, then views": lambda o, g: heads(o) * torch.sigmoid(g).view(B, -1, H, D),
    "one a head": lambda o, g: heads(o) * g[..., :H].unsqueeze(-1).sigmoid(),
    "one a head, repeated": lambda o, g: flat(o) * g[..., :H].sigmoid().repeat_interleave(D, -1),
    "one a token": lambda o, g: flat(o) * torch.sigmoid(g[..., :1]),
    "one a dim": lambda o, g: heads(o) * torch.sigmoid(g[:1, :1, :D].view(1, 1, 1, D)),
    "expanded": lambda o, g: flat(o) * torch.sigmoid(g[:, :1].expand(-1, o.shape[2], -1)),
    "sigmoid in float32": lambda o, g: flat(o) * torch.sigmoid(g.float()).to(o.dtype),
    "product in float32": lambda o, g: (flat(o) * torch.sigmoid(g.float())).to(o.dtype),
    "all in float32": lambda o, g: (flat(o).float() * torch.sigmoid(g.float())).to(o.dtype),
    "left in float32": lambda o, g: flat(o) * torch.sigmoid(g.float()),
    "spelled out": lambda o, g: flat(o) * (1 / (1 + torch.exp(-g))),
    "F.sigmoid": lambda o, g: flat(o) * F.sigmoid(g),
}


def inputs(dtype: torch.dtype, tokens: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    sizes = ((B, H, tokens, D), (B, H, S, D), (B, H, S, D), (B, tokens, H * D))
    return tuple(torch.randn(size, generator=generator).to(dtype) for size in sizes)


def gated(write: Write, is_causal: bool = False) -> Callable[..., Tensor]:
    def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        return write(output, gate)

    return model


def compare(model: Callable[..., Tensor], args: tuple[Tensor, ...]) -> None:
    """Fires; same shape and dtype as stock; as close to float64 as stock."""
    with torch.no_grad():
        stock = torch.compile(model)(*args)
        torch._dynamo.reset()
        found = torch.compile(model, backend="fusion_pass", options=OPTIONS)(*args)
    assert counters["fusion_pass"] == {"fused": 1}
    assert (found.shape, found.dtype) == (stock.shape, stock.dtype)
    exact = model(*[x.double() for x in args]).double()
    assert (found - exact).norm() <= 1.5 * (stock - exact).norm()


IN_FLOAT32 = [name for name in SPELLINGS if "float32" in name]


@pytest.mark.parametrize("spelling", sorted(SPELLINGS.keys() - set(IN_FLOAT32)))
def test_spelling(spelling: str) -> None:
    compare(gated(SPELLINGS[spelling]), inputs(torch.float32, 1))


@torch.no_grad()
@pytest.mark.parametrize("spelling", IN_FLOAT32)
def test_spelling_in_bfloat16(spelling: str) -> None:
    """The exact result is the flat gate's: these would pass through float32 in float64 as well."""
    args = inputs(torch.bfloat16, 1)
    model = gated(SPELLINGS[spelling])
    stock = torch.compile(model)(*args)
    torch._dynamo.reset()
    found = torch.compile(model, backend="fusion_pass", options=OPTIONS)(*args)
    assert counters["fusion_pass"] == {"fused": 1}
    assert (found.shape, found.dtype) == (stock.shape, stock.dtype)
    exact = gated(SPELLINGS["flat"])(*[x.double() for x in args])
    assert (found - exact).norm() <= 1.5 * (stock - exact).norm()


@pytest.mark.parametrize("tokens", [1, 2, 5, 16])
def test_query_tokens(tokens: int) -> None:
    compare(gated(SPELLINGS["flat"]), inputs(torch.float32, tokens))


@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_causal_is_upper_left(tokens: int) -> None:
    compare(gated(SPELLINGS["flat"], is_causal=True), inputs(torch.float32, tokens))


@torch.no_grad()
def test_one_causal_token_sees_the_first_key_alone() -> None:
    args = inputs(torch.float32, 1)
    model = gated(lambda o, g: o * torch.sigmoid(g.view(B, H, 1, D)), is_causal=True)
    found = torch.compile(model, backend="fusion_pass", options=OPTIONS)(*args)
    assert counters["fusion_pass"] == {"fused": 1}
    expected = args[2][:, :, :1] * torch.sigmoid(args[3].view(B, H, 1, D))
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_eager_numerics_round_as_written() -> None:
    """S == 1, so that the attention output is V itself and every rounding is the gate's."""
    query, key, value, gate = inputs(torch.bfloat16, 1)
    args = (query, key[:, :, :1], value[:, :, :1], gate)
    options = {**OPTIONS, "fusion_pass.numerics": "eager"}
    for name in ("flat", "sigmoid in float32", "product in float32", "left in float32"):
        torch._dynamo.reset()
        counters.clear()
        model = gated(SPELLINGS[name])
        found = torch.compile(model, backend="fusion_pass", options=options)(*args)
        assert counters["fusion_pass"] == {"fused": 1}
        assert torch.equal(found, model(*args)), name


@torch.no_grad()
def test_eager_numerics_decline_a_sigmoid_that_is_spelled_out() -> None:
    args = inputs(torch.bfloat16, 1)
    options = {**OPTIONS, "fusion_pass.numerics": "eager"}
    torch.compile(gated(SPELLINGS["spelled out"]), backend="fusion_pass", options=options)(*args)
    assert counters["fusion_pass"] == {"declined": 1, "declined: numerics": 1}
