"""`paged_decode_attention -> sigmoid(gate) -> mul`, and operators of engines with a gated form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule, Node

import fusion_pass
from fusion_pass import GatedAttentionPass, register_attention
from fusion_pass.insertion import GatedFormError
from fusion_pass.patterns import Decline, GatedOpaque, read_opaque, registry
from tests.graphs import fake_mode, only_refusal, recognitions, run_pass, trace

aten = torch.ops.aten
ops = torch.ops.fusion_pass
R, HEADS, KV_HEADS, DIM = 3, 6, 2, 16
PAGES, PAGE_SIZE = 11, 4
PAGED = "fusion_pass.paged_decode_attention.default"
GATED = "fusion_pass.gated_paged_decode_attention.default"

Model = Callable[..., Tensor]


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Query, caches, CSR offsets and pages, lengths and gate."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    return (
        draw(R, HEADS, DIM),
        draw(PAGES, PAGE_SIZE, KV_HEADS, DIM),
        draw(PAGES, PAGE_SIZE, KV_HEADS, DIM),
        torch.tensor([0, 2, 2, 5], dtype=torch.int32),
        torch.tensor([7, 3, 0, 10, 1, 99, 99], dtype=torch.int32),
        torch.tensor([6, 0, 12], dtype=torch.int32),
        draw(R, HEADS * DIM),
    )


def attend(*inputs: Tensor, **modes: Any) -> Tensor:
    query, key, value, indptr, indices, lengths = inputs
    output: Tensor = ops.paged_decode_attention(
        query, key, value, indptr, indices, lengths, scale=0.25, **modes
    )
    return output


def plain(*inputs: Tensor) -> Tensor:
    *rest, gate = inputs
    return attend(*rest).view(R, -1) * torch.sigmoid(gate)


def traced(model: Model, *inputs: Tensor) -> GraphModule:
    mode = fake_mode()
    return trace(model, *[mode.from_tensor(x) for x in inputs or operands()])


def targets(module: GraphModule) -> list[str]:
    names = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    return [name for name in names if name.startswith("fusion_pass.")]


def fuse(model: Model, *inputs: Tensor, **settings: Any) -> GraphModule:
    module = traced(model, *inputs)
    assert run_pass(module, devices=("cpu",), **settings) == 1
    assert targets(module) == [GATED]
    return module


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As Inductor's decompositions spell it."""
    result: Tensor = torch.ops.prims.convert_element_type.default(x, dtype)
    return result


GATES: dict[str, Model] = {
    "flat": plain,
    "by-head": lambda *x: attend(*x[:-1]) * torch.sigmoid(x[-1].view(R, HEADS, DIM)),
    "transposed": lambda *x: (
        attend(*x[:-1]).transpose(1, 2) * torch.sigmoid(x[-1].view(R, HEADS, DIM).mT)
    ),
    "with-a-token-axis": lambda *x: attend(*x[:-1]).view(R, 1, -1) * x[-1].sigmoid()[:, None],
    "all-in-one": lambda *x: attend(*x[:-1]).flatten() * torch.sigmoid(x[-1].flatten()),
    "one-a-head": lambda *x: attend(*x[:-1]) * torch.sigmoid(x[-1][:, :HEADS, None]),
    "one-a-channel": lambda *x: attend(*x[:-1]) * torch.sigmoid(x[-1][0, :DIM]),
    "one-a-token": lambda *x: attend(*x[:-1]) * torch.sigmoid(x[-1][:, :1, None]),
    "half-of-a-projection": lambda *x: (
        attend(*x[:-1]) * torch.cat([x[-1], x[-1]]).view(R, HEADS, 2, DIM)[:, :, 1].sigmoid()
    ),
    "product-in-float32": lambda *x: cast(
        cast(attend(*x[:-1]).view(R, -1), torch.float32) * x[-1].sigmoid(), x[0].dtype
    ),
    "sigmoid-first": lambda *x: torch.sigmoid(x[-1]) * attend(*x[:-1]).view(R, -1),
    "spelled-out": lambda *x: attend(*x[:-1]).view(R, -1) * (1 / (1 + torch.exp(-x[-1]))),
    "windowed": lambda *x: attend(*x[:-1], window=3).view(R, -1) * torch.sigmoid(x[-1]),
    "table": lambda *x: (
        attend(*x[:3], None, x[4][:3].view(R, 1), x[5], sinks=x[0][0, :, 0]).view(R, -1)
        * torch.sigmoid(x[-1])
    ),
    "several-tokens": lambda *x: (
        attend(*x[:-1], query_indptr=torch.tensor([0, 2, 2, 3]), max_query_tokens=2).view(R, -1)
        * torch.sigmoid(x[-1])
    ),
}


@pytest.mark.parametrize("name", GATES)
def test_gates(name: str) -> None:
    inputs = operands()
    module = fuse(GATES[name])
    found, expected = module(*inputs), GATES[name](*inputs)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(found, expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["flat", "one-a-head", "product-in-float32"])
def test_eager_numerics_are_bitwise(name: str, dtype: torch.dtype) -> None:
    """The same paged attention, un-gated, then torch's sigmoid and multiplication."""
    inputs = operands(dtype)
    module = fuse(GATES[name], *inputs, numerics="eager")
    assert torch.equal(module(*inputs), GATES[name](*inputs))


SYMBOLIC: dict[str, tuple[Model, dict[str, int]]] = {
    "flat": (lambda o, gate: o.flatten(1) * torch.sigmoid(gate), {"fused": 1}),
    "by-head": (lambda o, gate: o * torch.sigmoid(gate.view(o.shape)), {"fused": 1}),
    # No operand has the size Hq * D of the product.
    "one-a-token": (
        lambda o, gate: o.flatten(1) * torch.sigmoid(gate[:, :1]),
        {"declined": 1, "declined: attention-layout": 1},
    ),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_every_size_may_be_symbolic(name: str) -> None:
    multiply, decided = SYMBOLIC[name]

    def model(*inputs: Tensor) -> Tensor:
        query, key, value, _, pages, lengths, gate = inputs
        table = pages[: query.shape[0], None]
        output = fusion_pass.paged_decode_attention(
            query, key, value, None, table, kv_lengths=lengths
        )
        return multiply(output, gate)

    counters.clear()
    torch._dynamo.reset()
    options = {"fusion_pass.devices": ("cpu",), "fusion_pass.strict": True}
    compiled = torch.compile(model, backend="fusion_pass", dynamic=True, options=options)
    inputs = operands()
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), model(*inputs))
    assert counters["fusion_pass"] == decided


def test_casts_of_the_sigmoid_are_honoured() -> None:
    def model(*inputs: Tensor) -> Tensor:
        *rest, gate = inputs
        sigmoid = cast(torch.sigmoid(cast(gate, torch.float32)), torch.float16)
        return attend(*rest).view(R, -1) * sigmoid

    inputs = operands(torch.float16)
    module = fuse(model, *inputs, numerics="eager")
    assert torch.equal(module(*inputs), model(*inputs))
    (node,) = module.graph.find_nodes(
        op="call_function", target=ops.gated_paged_decode_attention.default
    )
    assert node.kwargs["numerics"] == "eager"


def used_twice(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    *rest, gate = inputs
    output = attend(*rest).view(R, -1)
    return output * torch.sigmoid(gate), output


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "silu": (lambda *x: attend(*x[:-1]).view(R, -1) * x[-1] * x[-1].sigmoid(), "gate-not-sigmoid"),
    "tanh": (lambda *x: attend(*x[:-1]).view(R, -1) * x[-1].tanh(), "gate-not-sigmoid"),
    "used-twice": (used_twice, "output-used-elsewhere"),
    "no-gate": (lambda *x: attend(*x[:-1]).view(R, -1) + x[-1], "no-gate"),
    "sum-first": (lambda *x: attend(*x[:-1]).sum(1) * x[-1][:, :DIM].sigmoid(), "no-gate"),
    "double": (
        lambda *x: attend(*x[:-1]).view(R, -1) * cast(x[-1], torch.float64).sigmoid(),
        "gate-dtype",
    ),
    "wider": (
        lambda *x: attend(*x[:-1]).view(1, R, -1) * x[-1].sigmoid().expand(2, -1, -1),
        "gate-layout",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_those_of_the_dense_pattern(name: str) -> None:
    model, reason = REFUSED[name]
    module = traced(model)
    before, nodes = str(module.graph), list(module.graph.nodes)
    assert only_refusal(module.graph).reason.value == reason
    assert run_pass(module, devices=("cpu",)) == 0
    assert str(module.graph) == before
    assert all(a is b for a, b in zip(module.graph.nodes, nodes, strict=True))
    assert counters["fusion_pass"] == {"declined": 1, f"declined: {reason}": 1}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "device"),
        ({"devices": ("cpu",), "is_inference": False}, "training"),
        ({"devices": ("cpu",), "policy": "never"}, "unprofitable"),
    ],
)
def test_refusals_by_settings(settings: dict[str, Any], reason: str) -> None:
    module = traced(plain)
    before = str(module.graph)
    assert run_pass(module, **settings) == 0
    assert str(module.graph) == before
    assert counters["fusion_pass"] == {"declined": 1, f"declined: {reason}": 1}


def test_a_spelled_out_sigmoid_rounds_otherwise_in_eager() -> None:
    module = traced(GATES["spelled-out"])
    assert run_pass(module, devices=("cpu",), numerics="eager") == 0
    assert counters["fusion_pass"]["declined: numerics"] == 1


def test_strides_of_the_product() -> None:
    def model(*inputs: Tensor) -> Tensor:
        return aten.as_strided.default(plain(*inputs), [R], [1])

    assert run_pass(traced(model), devices=("cpu",)) == 0
    assert counters["fusion_pass"]["declined: strides-used"] == 1


@pytest.mark.parametrize("place", ["before", "between", "after"])
@pytest.mark.parametrize("which", [1, 4])
def test_writes(place: str, which: int) -> None:
    """The fused operator reads its operands where the product was, not where the attention was."""

    def write(*inputs: Tensor) -> None:
        operand = inputs[which]
        changed = operand.flip(0) if which != 4 else (10 - operand) % PAGES
        aten.copy_.default(operand, changed)

    def model(*inputs: Tensor) -> Tensor:
        *rest, gate = inputs
        if place == "before":
            write(*inputs)
        output = attend(*rest).view(R, -1)
        if place == "between":
            write(*inputs)
        product = output * torch.sigmoid(gate)
        if place == "after":
            write(*inputs)
        return product

    module = traced(model)
    allowed = place != "between"
    assert run_pass(module, devices=("cpu",)) == allowed
    if not allowed:
        assert counters["fusion_pass"]["declined: operand-mutated"] == 1
    inputs = operands()
    expected = model(*[x.clone() for x in inputs])
    torch.testing.assert_close(module(*inputs), expected)


def test_a_second_run_changes_nothing() -> None:
    module = fuse(plain)
    once = str(module.graph)
    assert run_pass(module, devices=("cpu",)) == 0
    assert str(module.graph) == once


def test_compiled_with_a_cache_that_is_written_in_the_step() -> None:
    def step(*inputs: Tensor) -> Tensor:
        query, key, value, indptr, indices, lengths, gate, new = inputs
        key[3] = new
        output = attend(query, key, value, indptr, indices, lengths)
        return output.view(R, -1) * torch.sigmoid(gate)

    inputs = (*operands(), torch.ones(PAGE_SIZE, KV_HEADS, DIM))
    copies = [x.clone() for x in inputs]
    expected = step(*copies)
    options = {"fusion_pass.devices": ("cpu",), "fusion_pass.strict": True}
    with torch.no_grad():
        compiled: Any = torch.compile(step, backend="fusion_pass", options=options)
        found, (code,) = run_and_get_code(compiled, *inputs)
    assert counters["fusion_pass"] == {"fused": 1}
    assert "fusion_pass.gated_paged_decode_attention" in code
    torch.testing.assert_close(found, expected)
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))


LIB = torch.library.Library("fusion_pass_paged_tests", "DEF")
ENGINE = {
    "attend": "(Tensor q, Tensor cache, int layer, *, float scale=1.0) -> Tensor",
    "attend_gated": "(Tensor q, Tensor gate, Tensor cache, int layer, *, float scale=1.0)"
    " -> Tensor",
    "attend_told": "(Tensor q, Tensor cache, int layer, Tensor gate, *, float scale=1.0, "
    'str numerics="compiled", ScalarType? sigmoid_dtype=None, ScalarType? dtype=None) -> Tensor',
    "attend_lse": "(Tensor q, Tensor cache, int layer, *, float scale=1.0) -> (Tensor, Tensor)",
    "two": "(Tensor q, Tensor cache, int layer, Tensor gate, *, float scale) -> (Tensor, Tensor)",
    "no_gate": "(Tensor q, Tensor cache, int layer, *, float scale=1.0) -> Tensor",
    "no_layer": "(Tensor q, Tensor cache, Tensor gate, *, float scale=1.0) -> Tensor",
    "extra": "(Tensor q, Tensor cache, int layer, int page, Tensor gate, *, float scale) -> Tensor",
    "writes": "(Tensor q, Tensor(a!) cache, int layer, Tensor gate, *, float scale) -> Tensor",
    "shrinks": "(Tensor q, Tensor cache, int layer, Tensor gate, *, float scale=1.0) -> Tensor",
    "strided": "(Tensor q, Tensor cache, int layer, Tensor gate, *, float scale=1.0) -> Tensor",
    "unfaked": "(Tensor q, Tensor cache, int layer, Tensor gate, *, float scale=1.0) -> Tensor",
    "int_gate": "(Tensor q, Tensor cache, int layer, int gate, *, float scale=1.0) -> Tensor",
    "may_gate": "(Tensor q, Tensor cache, int layer, Tensor? gate=None, *, float scale=1.0)"
    " -> Tensor",
    "optional": "(Tensor q, Tensor cache, int layer, Tensor? gate, *, float scale=1.0) -> Tensor",
    "gates": "(Tensor q, Tensor cache, int layer, Tensor[] gate, *, float scale=1.0) -> Tensor",
    "swapped": "(Tensor q, int cache, Tensor layer, Tensor gate, *, float scale=1.0) -> Tensor",
    "wider": "(Tensor? q, Tensor cache, Scalar layer, Tensor gate, *, float? scale=1.0) -> Tensor",
    "numbered": "(Tensor q, Tensor cache, int layer, Tensor gate, *, float scale=1.0, "
    "int numerics=0) -> Tensor",
    "named": "(Tensor q, Tensor cache, int layer, Tensor gate, *, float scale=1.0, "
    'str? dtype="float") -> Tensor',
    "attend_maybe": "(Tensor? q, Tensor cache, int layer, *, float scale=1.0) -> Tensor",
}


def engine_attend(q: Tensor, cache: Tensor, layer: int, *, scale: float = 1.0) -> Tensor:
    return (q * scale).softmax(-1) @ cache[layer]


def engine_gated(
    q: Tensor, gate: Tensor, cache: Tensor, layer: int, *, scale: float = 1.0
) -> Tensor:
    return engine_attend(q, cache, layer, scale=scale) * torch.sigmoid(gate)


def engine_told(
    q: Tensor, cache: Tensor, layer: int, gate: Tensor, *, scale: float = 1.0, **modes: Any
) -> Tensor:
    product = engine_gated(q, gate, cache, layer, scale=scale)
    return product.to(modes.get("dtype") or q.dtype)


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "attend": engine_attend,
    "attend_gated": engine_gated,
    "attend_told": engine_told,
    "attend_lse": lambda q, cache, layer, *, scale=1.0: (
        engine_attend(q, cache, layer, scale=scale),
        q.logsumexp(-1),
    ),
    "shrinks": lambda q, cache, layer, gate, *, scale=1.0: q[:1] * 1.0,
    "strided": lambda q, cache, layer, gate, *, scale=1.0: q.new_empty(q.shape[::-1]).t(),
}
for _name, _schema in ENGINE.items():
    LIB.define(_name + _schema)
    if _name in IMPLEMENTATIONS:
        LIB.impl(_name, IMPLEMENTATIONS[_name], "CPU")
        LIB.impl(_name, IMPLEMENTATIONS[_name], "Meta")

engine: Any = torch.ops.fusion_pass_paged_tests


@pytest.fixture
def clean() -> Iterator[None]:
    before = dict(registry._RECOGNISERS), dict(registry._ADAPTERS)
    yield
    for kept, held in zip(before, (registry._RECOGNISERS, registry._ADAPTERS), strict=True):
        held.clear()
        held.update(kept)


def engine_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    sizes = ((5, DIM), (2, DIM, DIM), (5, DIM))
    return tuple(torch.randn(size, generator=generator).to(dtype) for size in sizes)


def engine_model(q: Tensor, cache: Tensor, gate: Tensor) -> Tensor:
    output: Tensor = engine.attend(q, cache, 1, scale=0.5)
    return output * torch.sigmoid(gate)


@pytest.mark.usefixtures("clean")
class TestEngines:
    @pytest.mark.parametrize("gated", ["attend_gated", "attend_told"])
    def test_the_gated_form_takes_the_place_of_both(self, gated: str) -> None:
        register_attention(engine.attend.default, gated=getattr(engine, gated).default)
        inputs = engine_inputs()
        module = traced(engine_model, *inputs)
        assert isinstance(only_match_of(module), GatedOpaque)
        assert run_pass(module, devices=("cpu",)) == 1
        names = [node.name for node in module.graph.nodes if node.op == "call_function"]
        assert names == [gated]
        torch.testing.assert_close(module(*inputs), engine_model(*inputs))

    def test_the_output_of_several_results(self) -> None:
        register_attention(engine.attend_lse.default, gated=engine.attend_gated.default)

        def both(q: Tensor, cache: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
            output, statistics = engine.attend_lse(q, cache, 1)
            return output * torch.sigmoid(gate), statistics

        def model(q: Tensor, cache: Tensor, gate: Tensor) -> Tensor:
            return both(q, cache, gate)[0]

        inputs = engine_inputs()
        module = traced(model, *inputs)
        assert run_pass(module, devices=("cpu",)) == 1
        torch.testing.assert_close(module(*inputs), model(*inputs))
        used = traced(both, *inputs)
        assert only_refusal(used.graph).reason.value == "softmax-statistics-used"

    @pytest.mark.parametrize(
        ("gated", "numerics", "fused"),
        [
            ("attend_gated", "compiled", 1),
            ("attend_gated", "eager", 0),
            ("attend_gated", "fp32", 0),
            ("attend_told", "eager", 1),
            ("attend_told", "fp32", 1),
        ],
    )
    def test_numerics_that_the_gated_form_is_not_told(
        self, gated: str, numerics: str, fused: int
    ) -> None:
        register_attention(engine.attend.default, gated=getattr(engine, gated).default)
        module = traced(engine_model, *engine_inputs())
        assert run_pass(module, devices=("cpu",), numerics=numerics) == fused
        assert counters["fusion_pass"]["declined: numerics"] == 1 - fused

    @pytest.mark.parametrize(("gated", "fused"), [("attend_gated", 0), ("attend_told", 1)])
    def test_a_product_in_another_dtype(self, gated: str, fused: int) -> None:
        register_attention(engine.attend.default, gated=getattr(engine, gated).default)

        def model(q: Tensor, cache: Tensor, gate: Tensor) -> Tensor:
            output = cast(engine.attend(q, cache, 1), torch.float32)
            return output * torch.sigmoid(cast(gate, torch.float32))

        module = traced(model, *engine_inputs(torch.bfloat16))
        assert run_pass(module, devices=("cpu",)) == fused
        assert counters["fusion_pass"]["declined: gate-dtype"] == 1 - fused

    def test_an_adapter_may_choose_the_gated_form(self) -> None:
        def adapter(node: Node) -> Any:
            if node.args[2] != 1:
                return None
            return read_opaque(node, "engine", engine.attend_gated.default)

        register_attention(engine.attend.default, adapter)
        module = traced(engine_model, *engine_inputs())
        assert run_pass(module, devices=("cpu",)) == 1

        def unread(q: Tensor, cache: Tensor, gate: Tensor) -> Tensor:
            return engine.attend(q, cache, 0) * torch.sigmoid(gate)

        other = traced(unread, *engine_inputs())
        assert not recognitions(other.graph)

    @pytest.mark.parametrize(
        ("gated", "told"),
        [
            ("shrinks", r"shrinks.default is torch.float32 \[1, "),
            ("strided", r"strided.default is .* of strides \(1, 5\) on "),
        ],
    )
    def test_a_gated_form_of_another_result_leaves_the_graph_alone(
        self, gated: str, told: str
    ) -> None:
        register_attention(engine.attend.default, gated=getattr(engine, gated).default)
        module = traced(engine_model, *engine_inputs())
        before = str(module.graph)
        with pytest.raises(GatedFormError, match=told):
            run_pass(module, devices=("cpu",))
        assert str(module.graph) == before

    def test_a_gated_form_without_a_fake_kernel_is_told_as_its_fault(self) -> None:
        register_attention(engine.attend.default, gated=engine.unfaked.default)
        module = traced(engine_model, *engine_inputs())
        before = str(module.graph)
        (site,) = GatedAttentionPass(devices=("cpu",)).rewrite(module.graph, True).sites
        assert site.reason == "internal-fault"
        assert "unfaked.default fails under fake tensors" in site.detail
        assert "The fault is in the gated form of fusion_pass_paged_tests.attend" in site.remedy
        assert str(module.graph) == before

    def test_an_output_of_too_many_dimensions(self) -> None:
        register_attention(engine.attend.default, gated=engine.attend_gated.default)

        def model(q: Tensor, cache: Tensor, gate: Tensor) -> Tensor:
            return engine.attend(q.expand(1, 1, 1, 5, DIM), cache, 1) * torch.sigmoid(gate)

        found = only_refusal(traced(model, *engine_inputs()).graph)
        assert found.reason.value == "attention-layout"

    def test_the_uuid_tells_gated_forms_apart(self) -> None:
        seen = set()
        for gated in ("attend_gated", "attend_told"):
            register_attention(engine.attend.default, gated=getattr(engine, gated).default)
            seen.add(registry.adapters())
        assert len(seen) == 2

    @pytest.mark.parametrize(
        ("gated", "error", "message"),
        [
            ("two", ValueError, "must return one tensor"),
            ("no_gate", ValueError, "no argument `gate`"),
            ("no_layer", ValueError, "lacks the arguments layer"),
            ("extra", ValueError, "needs page"),
            ("writes", ValueError, "writes to its arguments"),
            ("int_gate", ValueError, "`Tensor gate`, not `int gate`"),
            ("may_gate", ValueError, "`Tensor gate`, not `Optional\\[Tensor\\] gate`"),
            ("optional", ValueError, "`Tensor gate`, not `Optional\\[Tensor\\] gate`"),
            ("gates", ValueError, "`Tensor gate`, not `List\\[Tensor\\] gate`"),
            ("swapped", ValueError, "`Tensor cache`, not `int cache`"),
            ("numbered", ValueError, "`str numerics`, not `int numerics`"),
            ("named", ValueError, "`Optional\\[ScalarType\\] dtype`, not `Optional\\[str\\] dt"),
        ],
    )
    def test_bad_gated_forms(self, gated: str, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            register_attention(engine.attend.default, gated=getattr(engine, gated).default)
        assert engine.attend.default not in registry._RECOGNISERS

    def test_a_gated_form_may_take_more_than_the_operator_but_not_less(self) -> None:
        register_attention(engine.attend.default, gated=engine.wider.default)
        with pytest.raises(ValueError, match="`Optional\\[Tensor\\] q`, not `Tensor q`"):
            register_attention(engine.attend_maybe.default, gated=engine.attend_gated.default)

    def test_bad_registrations(self) -> None:
        def adapter(node: Node) -> Decline | None:
            return None

        gated: Any = engine.attend_gated
        with pytest.raises(TypeError, match="either"):
            register_attention(engine.attend.default)
        with pytest.raises(TypeError, match="either"):
            register_attention(engine.attend.default, adapter, gated=gated.default)
        with pytest.raises(TypeError, match="operator overload"):
            register_attention(engine.attend.default, gated=gated)
        with pytest.raises(ValueError, match="itself"):
            register_attention(ops.paged_decode_attention.default, adapter)


def only_match_of(module: GraphModule) -> Any:
    (recognition,) = recognitions(module.graph)
    return recognition.outcome
