"""A third party's attention operator, made known by an adapter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import Node

from fusion_pass import GatedAttentionPass, patterns, register_attention
from fusion_pass.patterns import (
    Attention,
    Decline,
    Layout,
    Operand,
    Reason,
    read_attention,
    registry,
)

OPTIONS = {"fusion_pass.devices": ("cpu",), "fusion_pass.strict": True}


@torch.library.custom_op("fusion_pass_tests::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """An engine's attention over `(B, H, S, D)`; a window of 0 is none."""
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    return torch.empty_like(query)


OP = torch.ops.fusion_pass_tests.attend.default


def adapter(node: Node) -> Attention | Decline:
    query, key, value, window = node.args
    if window != 0:
        return Decline(Reason.ATTENTION_LAYOUT, "the engine's windows are not read")
    return read_attention(node, "engine", query=query, key=key, value=value, output=node)


def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, window: int) -> Tensor:
    output = attend(query, key, value, window).transpose(1, 2).reshape(2, 1, -1)
    return output * torch.sigmoid(gate)


def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 4, 1, 16), (2, 2, 24, 16), (2, 2, 24, 16), (2, 1, 64))
    return tuple(torch.randn(size, generator=generator) for size in sizes)


@pytest.fixture
def registered() -> Iterator[None]:
    register_attention(OP, adapter)
    yield
    del registry._RECOGNISERS[OP], registry._ADAPTERS[OP]


def run(window: int) -> Tensor:
    with torch.no_grad():
        found: Tensor = torch.compile(model, backend="fusion_pass", options=OPTIONS)(
            *inputs(), window
        )
    return found


def test_unknown_operators_are_left_alone() -> None:
    run(0)
    assert not counters["fusion_pass"]


@pytest.mark.usefixtures("registered")
def test_a_registered_operator_fuses() -> None:
    found = run(0)
    assert counters["fusion_pass"] == {"fused": 1}
    torch.testing.assert_close(found, model(*inputs(), 0))


@pytest.mark.usefixtures("registered")
def test_the_adapters_refusal_is_reported() -> None:
    assert torch.equal(run(5), model(*inputs(), 5))
    assert counters["fusion_pass"] == {"declined": 1, "declined: attention-layout": 1}


def test_operands_that_lack_an_axis_are_no_attention() -> None:
    """An adapter that looked behind a repetition."""

    def adapter(node: Node) -> Attention | Decline:
        query, key, value, _ = node.args
        found = read_attention(node, "engine", query=query, key=key, value=value, output=node)
        assert isinstance(found, Attention)
        assert isinstance(query, Node)
        single = Operand(query.all_input_nodes[0], Layout(((), *found.query.layout.dims[1:])))
        return dataclasses.replace(found, query=single)

    def repeated(query: Tensor, *rest: Any) -> Tensor:
        return model(query[:1].expand(2, -1, -1, -1), *rest)

    register_attention(OP, adapter)
    try:
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            compiled = torch.compile(repeated, backend="fusion_pass", options=OPTIONS)
            torch.testing.assert_close(compiled(*inputs(), 0), repeated(*inputs(), 0))
    finally:
        del registry._RECOGNISERS[OP], registry._ADAPTERS[OP]
    assert counters["fusion_pass"] == {"declined": 1, "declined: attention-layout": 1}


def test_the_uuid_knows_of_adapters() -> None:
    before = GatedAttentionPass().uuid()
    register_attention(OP, adapter)
    try:
        assert patterns.adapters()[0][0] == str(OP)
        assert GatedAttentionPass().uuid() != before
    finally:
        del registry._RECOGNISERS[OP], registry._ADAPTERS[OP]
    assert GatedAttentionPass().uuid() == before


def test_an_adapter_from_no_file_is_known_by_its_code() -> None:
    found = []
    for text in ("lambda node: [1, None]", "lambda node: [1, None]", "lambda node: [2, None]"):
        found.append(registry._fingerprint(eval(compile(text, "<shell>", "eval"))))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("op", "function", "error"),
    [
        (torch.ops.aten.mm, adapter, TypeError),
        ("engine::attend", adapter, TypeError),
        (OP, 3, TypeError),
        (torch.ops.aten._scaled_dot_product_cudnn_attention.default, adapter, ValueError),
    ],
)
def test_bad_registrations(op: Any, function: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        register_attention(op, function)
