"""A third party's attention operator, made known by an adapter."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import Graph, Node

from fusion_pass import GatedAttentionPass, patterns, register_attention
from fusion_pass.patterns import (
    Attention,
    Decline,
    Layout,
    Mask,
    Operand,
    Reason,
    arguments,
    read_attention,
    read_opaque,
    registry,
)
from fusion_pass.patterns.fingerprint import Identity
from tests.graphs import fake_mode, trace

OPTIONS = {"fusion_pass.devices": ("cpu",), "fusion_pass.strict": True}


@torch.library.custom_op("fusion_pass_tests::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """An engine's attention over `(B, H, S, D)`; a window of 0 is none."""
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    return torch.empty_like(query)


@torch.library.custom_op("fusion_pass_tests::attend_gated", mutates_args=())
def attend_gated(query: Tensor, key: Tensor, value: Tensor, window: int, gate: Tensor) -> Tensor:
    return attend(query, key, value, window) * torch.sigmoid(gate)


OP = torch.ops.fusion_pass_tests.attend.default
GATED = torch.ops.fusion_pass_tests.attend_gated.default


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


def traced() -> Graph:
    """The graph of the model."""
    mode = fake_mode()
    fakes = [mode.from_tensor(tensor) for tensor in inputs()]
    return trace(functools.partial(model, window=0), *fakes).graph


@contextlib.contextmanager
def registering(adapter: Callable[[Node], Any], op: Any = OP) -> Iterator[None]:
    register_attention(op, adapter)
    try:
        yield
    finally:
        del registry._RECOGNISERS[op], registry._ADAPTERS[op]


@pytest.fixture
def registered() -> Iterator[None]:
    with registering(adapter):
        yield


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

    with registering(adapter):
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            compiled = torch.compile(repeated, backend="fusion_pass", options=OPTIONS)
            torch.testing.assert_close(compiled(*inputs(), 0), repeated(*inputs(), 0))
    assert counters["fusion_pass"] == {"declined": 1, "declined: attention-layout": 1}


@pytest.mark.parametrize("place", ["another graph", "after the product"])
@pytest.mark.parametrize("name", ["query", "key", "value", "mask", "sinks"])
def test_an_operand_that_is_not_there_yet(name: str, place: str) -> None:
    """An adapter that names the wrong node does not break the graph."""
    sizes = {"query": (2, 4, 1, 16), "mask": (2, 1, 1, 24), "sinks": (4,)}
    layouts = {
        "query": Layout.of((("batch", 2, 1), ("head", 4, 1), ("query", 1, 1), ("dim", 16, 1))),
        "mask": Layout.of((("batch", 2, 1), ("head", 1, 1), ("query", 1, 1), ("key", 24, 1))),
        "sinks": Layout.of((("head", 4, 1),)),
    }
    stored = Layout.of((("batch", 2, 1), ("head", 2, 2), ("key", 24, 1), ("dim", 16, 1)))

    def naming(node: Node) -> Attention | Decline:
        found = adapter(node)
        assert isinstance(found, Attention)
        graph = Graph() if place == "another graph" else node.graph
        with graph.inserting_before():
            given = graph.placeholder("given")
        given.meta["val"] = node.meta["val"].new_empty(sizes.get(name, (2, 2, 24, 16)))
        operand = Operand(given, layouts.get(name, stored))
        if place == "after the product":
            next(iter(graph.find_nodes(op="output"))).prepend(given)
        return dataclasses.replace(found, **{name: Mask(operand) if name == "mask" else operand})

    with registering(naming):
        graph = traced()
        before = [node.target for node in graph.nodes if node.op == "call_function"]
        report = GatedAttentionPass(devices=("cpu",)).rewrite(graph, True)
    (site,) = report.sites
    assert site.reason == Reason.ATTENTION_LAYOUT.value
    assert "given, which engine names as an operand, is not computed before mul" in site.detail
    assert [node.target for node in graph.nodes if node.op == "call_function"] == before


WRONG: dict[str, Callable[[Attention], Any]] = {
    "a number": lambda found: 3,
    "its class": lambda found: Attention,
    "a reason by name": lambda found: Decline("scale", "why"),  # type: ignore[arg-type]
    "a number for a reason": lambda found: Decline(Reason.SCALE, 5),  # type: ignore[arg-type]
    "a nameless producer": lambda found: dataclasses.replace(found, producer=5),
    "no sizes": lambda found: dataclasses.replace(found, sizes=None),
    "no query": lambda found: dataclasses.replace(found, query=found.query.node),
    "a causality of words": lambda found: dataclasses.replace(found, is_causal="no"),
    "a scale of True": lambda found: dataclasses.replace(found, scale=True),
    "an unknown row": lambda found: dataclasses.replace(found, masked_row="foo"),
    "a mask by number": lambda found: dataclasses.replace(found, mask=3),
    "sinks by number": lambda found: dataclasses.replace(found, sinks=3),
    "the operator as its gated form": lambda found: read_opaque(found.node, "engine", OP),
    "another call": lambda found: dataclasses.replace(found, node=found.query.node),
    "a gated form of another value": lambda found: read_opaque(
        found.node, "engine", GATED, output=found.query.node
    ),
    "no gated form": lambda found: read_opaque(found.node, "engine", None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_what_an_adapter_may_not_return(name: str) -> None:
    def wrong(node: Node) -> Any:
        found = adapter(node)
        assert isinstance(found, Attention)
        return WRONG[name](found)

    with registering(wrong):
        graph = traced()
        (site,) = GatedAttentionPass(devices=("cpu",)).rewrite(graph, True).sites
    assert site.reason == Reason.INTERNAL.value
    assert str(OP) in site.detail
    assert site.remedy.startswith(f"The fault is in the registered adapter of {OP}")


@pytest.mark.parametrize(
    "given", [{"key": None}, {"query": 3}, {"scale": 10**400}, {"scale": True}]
)
def test_operands_that_are_no_tensors_are_no_attention(given: dict[str, Any]) -> None:
    (node,) = traced().find_nodes(op="call_function", target=OP)
    query, key, value, _ = node.args
    operands = {"query": query, "key": key, "value": value, **given}
    assert isinstance(read_attention(node, "engine", **operands, output=node), Decline)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("key", (2, 2, 24, 32)),
        ("value", (2, 2, 23, 16)),
        ("value", (2, 3, 24, 16)),
        ("output", (2, 4, 2, 16)),
        ("output", (2, 64)),
    ],
)
def test_sizes_that_are_no_attentions(name: str, size: tuple[int, ...]) -> None:
    graph = traced()
    (node,) = graph.find_nodes(op="call_function", target=OP)
    query, key, value, _ = node.args
    operands = {"query": query, "key": key, "value": value, "output": node}
    assert isinstance(read_attention(node, "engine", **operands), Attention)
    with graph.inserting_before():
        other = graph.placeholder("other")
    other.meta["val"] = node.meta["val"].new_empty(size)
    assert isinstance(read_attention(node, "engine", **operands | {name: other}), Decline)


@torch.library.custom_op("fusion_pass_tests::attend_bshd", mutates_args=())
def attend_bshd(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float = 0.5
) -> Tensor:
    """FlashAttention's layout: `(B, Q, Hq, D)` of `(B, S, Hkv, D)`."""
    operands = (x.transpose(1, 2) for x in (query, key, value))
    output = F.scaled_dot_product_attention(*operands, attn_mask=mask, scale=scale, enable_gqa=True)
    return output.transpose(1, 2).contiguous()


@attend_bshd.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float = 0.5
) -> Tensor:
    return torch.empty_like(query)


BSHD = torch.ops.fusion_pass_tests.attend_bshd.default


def read_bshd(node: Node) -> Attention | Decline:
    return read_attention(node, "engine", **arguments(node), output=node, layout="BSHD")


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [0.5, 0.25])
def test_tokens_before_heads(tokens: int, masked: bool, scale: float) -> None:
    """The numbers of tokens and heads fit either way round."""

    def layer(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, mask: Tensor) -> Tensor:
        output = attend_bshd(query, key, value, mask if masked else None, scale)
        return output.reshape(2, tokens, -1) * torch.sigmoid(gate)

    generator = torch.Generator().manual_seed(0)
    sizes = ((2, tokens, 4, 16), (2, 4, 2, 16), (2, 4, 2, 16), (2, tokens, 64))
    operands = [torch.randn(size, generator=generator) for size in sizes]
    operands.append(torch.rand((2, 1, tokens, 4), generator=generator) > 0.2)
    with registering(read_bshd, BSHD), torch.no_grad():
        found = torch.compile(layer, backend="fusion_pass", options=OPTIONS)(*operands)
    assert counters["fusion_pass"] == {"fused": 1}
    torch.testing.assert_close(found, layer(*operands))


def read_with(node: Node, **others: Any) -> Attention | Decline:
    query, key, value, _ = node.args
    operands = {"query": query, "key": key, "value": value, "output": node}
    return read_attention(node, "engine", **operands | others)


def given(node: Node, size: tuple[int, ...], dtype: torch.dtype) -> Node:
    """An input of the graph of `node`, before everything else."""
    with node.graph.inserting_before(next(iter(node.graph.nodes))):
        added = node.graph.placeholder("given")
    added.meta["val"] = node.meta["val"].new_empty(size, dtype=dtype)
    return added


def test_what_read_attention_does_not_take() -> None:
    (node,) = traced().find_nodes(op="call_function", target=OP)
    mask = given(node, (2, 1, 1, 24), torch.bool)
    assert isinstance(read_with(node, mask=mask), Attention)
    assert isinstance(read_with(node, is_causal=True), Attention)
    found = read_with(node, mask=mask, is_causal=True)
    assert isinstance(found, Decline)
    assert found.reason is Reason.CAUSAL
    found = read_with(node, output=given(node, (2, 4, 1, 16), torch.float64))
    assert isinstance(found, Decline)
    assert found.reason is Reason.DTYPE


def test_a_causal_mask_beside_another_is_the_adapters_fault() -> None:
    def both(node: Node) -> Attention | Decline:
        found = read_with(node, mask=given(node, (2, 1, 1, 24), torch.bool))
        assert isinstance(found, Attention)
        return dataclasses.replace(found, is_causal=True)

    with registering(both):
        (site,) = GatedAttentionPass(devices=("cpu",)).rewrite(traced(), True).sites
    assert site.reason == Reason.INTERNAL.value
    assert "is_causal beside a mask" in site.detail


def test_no_keys() -> None:
    def layer(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        return attend(query, key[:, :, :0], value[:, :, :0], 0).flatten(1)[:, None] * gate.sigmoid()

    mode = fake_mode()
    with registering(adapter):
        graph = trace(layer, *map(mode.from_tensor, inputs())).graph
        report = GatedAttentionPass(devices=("cpu",), strict=True).rewrite(graph, True)
    (site,) = report.sites
    assert (site.reason, site.detail) == ("key-value-layout", "K and V have no tokens")


def test_a_layout_that_there_is_not() -> None:
    (node,) = traced().find_nodes(op="call_function", target=OP)
    query, key, value, _ = node.args
    with pytest.raises(ValueError, match="layout must be one of BHSD, BSHD, not 'SBHD'"):
        read_attention(
            node, "engine", query=query, key=key, value=value, output=node, layout="SBHD"
        )


def test_the_uuid_knows_of_adapters() -> None:
    before = GatedAttentionPass().uuid()
    with registering(adapter):
        assert patterns.adapters()[0][0] == str(OP)
        assert GatedAttentionPass().uuid() != before
    assert GatedAttentionPass().uuid() == before


def test_an_adapter_from_no_file_is_known_by_its_code() -> None:
    found = []
    for text in ("lambda node: [1, None]", "lambda node: [1, None]", "lambda node: [2, None]"):
        found.append(fingerprint(eval(compile(text, "<shell>", "eval"))))
    assert found[0] == found[1] != found[2]


def scaled(node: Node, scale: float = 1.0) -> Attention | Decline:
    query, key, value, _ = node.args
    return read_attention(
        node, "engine", query=query, key=key, value=value, output=node, scale=scale
    )


def closure(scale: object, other: object = None) -> Callable[[Node], object]:
    return lambda node: (scaled, scale, other)


class Engine:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def read(self, node: Node) -> Attention | Decline:
        return scaled(node, self.scale)

    @staticmethod
    def plain(node: Node) -> Attention | Decline:
        return scaled(node)

    @classmethod
    def bound(cls, node: Node) -> Attention | Decline:
        return scaled(node)


def fingerprint(function: Any) -> str | None:
    return Identity(function).fingerprint()


def attributed(scale: float) -> Callable[[Node], object]:
    def read(node: Node) -> object:
        return scaled(node)

    read.scale = scale  # type: ignore[attr-defined]
    return read


def unassigned(first: bool) -> Callable[[Node], object]:
    """A function with two free variables, of which one has no value yet."""

    def read(node: Node) -> object:
        return one, two

    if first:
        two = 1
    else:
        one = 1
    return read


def defaulted(scale: float) -> Callable[[Node], object]:
    def read(node: Node, factor: float = scale, *, other: float = scale) -> object:
        return scaled(node, factor * other)

    return read


def made(text: str) -> Callable[[Node], object]:
    """A function that no file holds."""
    names: dict[str, Any] = {}
    exec(compile(text, "<shell>", "exec"), names)
    function: Callable[[Node], object] = names["read"]
    return function


KNOWN: dict[str, Callable[[], object]] = {
    "a function": lambda: scaled,
    "another function": lambda: adapter,
    "a static method": lambda: Engine.plain,
    "a partial": lambda: functools.partial(scaled, scale=0.1),
    "another partial": lambda: functools.partial(scaled, scale=2.0),
    "by position": lambda: functools.partial(scaled, 0.1),
    "a closure": lambda: closure(0.1),
    "another closure": lambda: closure(2.0),
    "zero": lambda: closure(0.0),
    "negative zero": lambda: closure(-0.0),
    "an integer": lambda: closure(1),
    "a boolean": lambda: closure(True),
    "text": lambda: closure("1"),
    "bytes": lambda: closure(b"1"),
    "a tuple": lambda: closure((1, (2,))),
    "a flat tuple": lambda: closure((1, 2)),
    "a set": lambda: closure(frozenset((2, 1))),
    "a dtype": lambda: closure(torch.float32),
    "an operator": lambda: closure(OP),
    "a module": lambda: closure(math),
    "a set of text": lambda: closure(frozenset("abcdefgh")),
    "an attribute": lambda: attributed(0.1),
    "another attribute": lambda: attributed(2.0),
    "the first unassigned": lambda: unassigned(False),
    "the second unassigned": lambda: unassigned(True),
    "in a try": lambda: made("def read(n):\n try: n.a; n.b\n except E: pass"),
    "after a try": lambda: made("def read(n):\n try: n.a\n except E: pass\n n.b"),
    "one argument": lambda: made("def read(n): return n"),
    "any arguments": lambda: made("def read(*n): return n"),
    "by keyword": lambda: made("def read(*, n): return n"),
    "a function of C": lambda: closure(math.sin),
    "another of C": lambda: closure(math.cos),
    "a default of a function bound": lambda: closure(functools.partial(scaled, (0.1,)), (0.1,)),
    "another of a function bound": lambda: closure(functools.partial(scaled, (0.1,)), (2.0,)),
    "partials": lambda: closure(*(functools.partial(scaled, scale=x) for x in (0.1, 0.1))),
    "other partials": lambda: closure(*(functools.partial(scaled, scale=x) for x in (0.1, 2.0))),
    "defaults": lambda: closure(*(defaulted(x) for x in (0.1, 0.1))),
    "other defaults": lambda: closure(*(defaulted(x) for x in (0.1, 2.0))),
    "one twice": lambda: closure(closure(1), closure(2)),
    "two": lambda: closure(closure(2), closure(1)),
}
UNKNOWN: dict[str, Callable[[], object]] = {
    "a class": lambda: closure(Engine),
    "a class's method": lambda: Engine.bound,
    "a member": lambda: closure(Reason.SCALE),
    "a module of one's own": lambda: closure(types.ModuleType("math")),
    "a number of many digits": lambda: closure(10**5000),
    "an attribute that is an object": lambda: attributed([1]),  # type: ignore[arg-type]
    "a method": lambda: Engine(0.1).read,
    "an object": lambda: closure(Engine(0.1)),
    "a list": lambda: closure([1]),
    "in a tuple": lambda: closure((1, [1])),
    "a tensor": lambda: closure(torch.zeros(1)),
    "in a partial": lambda: functools.partial(scaled, scale=torch.zeros(1)),
    "a method of C": lambda: closure("text".upper),
}


def test_what_an_adapter_is_bound_to_is_part_of_its_fingerprint() -> None:
    found = {name: fingerprint(make()) for name, make in KNOWN.items()}
    assert None not in found.values()
    assert len(set(found.values())) == len(KNOWN)
    assert found == {name: fingerprint(make()) for name, make in KNOWN.items()}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_has_no_fingerprint_switches_the_cache_off(name: str) -> None:
    given: Any = UNKNOWN[name]()
    assert fingerprint(given) is None
    with registering(given):
        assert GatedAttentionPass().uuid() is None
    assert GatedAttentionPass().uuid() is not None


def test_a_function_that_reaches_itself_has_no_fingerprint() -> None:
    def read(node: Node) -> object:
        return read(node) if node.users else None

    def first(node: Node) -> object:
        return second(node) if node.users else None

    def second(node: Node) -> object:
        return first(node)

    assert fingerprint(read) is fingerprint(first) is fingerprint(closure(second)) is None


def test_what_is_bound_later_counts() -> None:
    scale = 0.1

    def read(node: Node, factor: float = 1.0) -> object:
        return scaled(node, scale * factor)

    identity, seen = Identity(read), set[str | None]()
    seen.add(identity.fingerprint())
    scale = 2.0
    seen.add(identity.fingerprint())
    read.__defaults__ = (3.0,)
    seen.add(identity.fingerprint())
    assert len(seen) == 3
    assert None not in seen


def test_many_decorators_and_nested_tuples_take_no_time() -> None:
    function: Any = scaled
    pair: Any = ()
    for _ in range(60):
        function = functools.wraps(function)(functools.partial(lambda f, n: f(n), function))
        pair = (pair, pair)
    assert fingerprint(closure(pair)) is not None

    def decorated(inner: Any) -> Any:
        @functools.wraps(inner)
        def outer(node: Node) -> Any:
            return inner(node)

        return outer

    function = scaled
    for _ in range(60):
        function = decorated(function)
    assert fingerprint(function) not in (None, fingerprint(scaled))


def test_another_process_has_the_same_identity(tmp_path: Path) -> None:
    file = tmp_path / "adapting.py"
    file.write_text('def read(node):\n    return node.name in {"a", "b", "c", "d", "e"}\n')
    program = (
        "from adapting import read\n"
        "from fusion_pass.patterns.fingerprint import Identity\n"
        "print(Identity(read).fingerprint())"
    )
    found = set()
    for seed in "123":
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-c", program]
        found.add(subprocess.check_output(command, env=environment, text=True).strip())
    assert len(found) == 1
    assert "None" not in found


@pytest.mark.parametrize(
    "make",
    [
        lambda scale: functools.partial(scaled, scale=scale),
        lambda scale: lambda node: scaled(node, scale),
        lambda scale: Engine(scale).read,
    ],
    ids=["partial", "closure", "method"],
)
def test_adapters_of_one_function_share_no_code(
    make: Callable[[float], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    for scale in (0.1, 2.0):
        torch._dynamo.reset()
        with torch._inductor.config.patch(fx_graph_cache=True), registering(make(scale)):
            found.append(run(0))
    query, key, value, gate = inputs()
    for scale, got in zip((0.1, 2.0), found, strict=True):
        output = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, scale=scale)
        expected = output.transpose(1, 2).reshape(2, 1, -1) * torch.sigmoid(gate)
        torch.testing.assert_close(got, expected)


def test_an_operand_that_an_earlier_fusion_removed() -> None:
    """Two layers share K and V, and the second's adapter remembers the first's."""
    seen: list[Any] = []

    def remembering(node: Node) -> Attention | Decline:
        query, key, value, _ = node.args
        seen.append((key, value))
        key, value = seen[0]
        return read_attention(node, "engine", query=query, key=key, value=value, output=node)

    def layers(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        for _ in range(2):
            wide = (x.repeat_interleave(2, 1) for x in (key, value))
            query = model(query, *wide, gate, 0).view(query.shape) + 1
        return query

    mode = fake_mode()
    with registering(remembering):
        graph = trace(layers, *map(mode.from_tensor, inputs())).graph
        report = GatedAttentionPass(devices=("cpu",), strict=True).rewrite(graph, True)
    assert [site.fused for site in report.sites] == [True, False]
    assert report.sites[1].reason == Reason.ATTENTION_LAYOUT.value
    graph.lint()


@pytest.mark.parametrize(
    ("op", "function", "error"),
    [
        (torch.ops.aten.mm, adapter, TypeError),
        ("engine::attend", adapter, TypeError),
        (OP, 3, TypeError),
        (torch.ops.aten._scaled_dot_product_cudnn_attention.default, adapter, ValueError),
        (torch.ops.aten.copy_.default, adapter, ValueError),
        (torch.ops.aten.mm.out, adapter, ValueError),
    ],
)
def test_bad_registrations(op: Any, function: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        register_attention(op, function)
    assert op not in registry._ADAPTERS
