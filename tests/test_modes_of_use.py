"""How people really use torch.compile, on the CPU: each way fuses, or declines as stock."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import Graph
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fusion_pass
from fusion_pass import GatedAttentionPass, inductor
from fusion_pass.inductor import PassChain
from fusion_pass.ops import gated_decode_attention
from tests.graphs import fake_mode, trace

OPTIONS = {"fusion_pass.devices": ("cpu",), "fusion_pass.strict": True}
POST_SLOT = "post_grad_custom_post_pass"
Function = Callable[..., Any]


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`(B, H, 1, D)` and `(B, H, S, D)` to `(B, 1, H * D)`."""
    output = F.scaled_dot_product_attention(query, key, value)
    return output.transpose(1, 2).reshape(query.shape[0], 1, -1)


def gated(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    return attend(query, key, value) * torch.sigmoid(gate)


def operands(dtype: torch.dtype = torch.float32, length: int = 40) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    sizes = (2, 4, 1, 16), (2, 4, length, 16), (2, 4, length, 16), (2, 1, 64)
    return tuple(torch.randn(size, generator=generator).to(dtype) for size in sizes)


def compiled(function: Function, **options: Any) -> Function:
    step: Function = torch.compile(function, backend="fusion_pass", options=OPTIONS | options)
    return step


def doubled(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def check(step: Function, function: Function, *inputs: Any) -> None:
    """`step` computes what `function` does, about as close to float64 as eager torch comes."""
    copies = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
    expected = function(*inputs)
    exact = function(*[doubled(x) for x in inputs])
    found = step(*inputs)
    for value, copy in zip(inputs, copies, strict=True):
        assert not isinstance(value, Tensor) or torch.equal(value, copy)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    bound = 4 * (expected - exact).abs().max() + torch.finfo(found.dtype).eps
    assert (found - exact).abs().max() <= bound


def told() -> dict[str, int]:
    """What the pass counted so far; the counters start again."""
    return dict(counters.pop("fusion_pass", {}))


def declines_as_stock(function: Function, *inputs: Any) -> dict[str, int]:
    """Compiles `function` with and without the pass; the results must be bitwise equal."""
    stock = torch.compile(function)(*inputs)
    torch._dynamo.reset()
    told()
    found = compiled(function)(*inputs)
    assert torch.equal(found, stock)
    return told()


# Contexts and settings around the compile.


@torch.no_grad()
def test_autocast_on_and_off_between_calls() -> None:
    step, stock = compiled(gated), torch.compile(gated)
    inputs = operands()
    exact = gated(*[x.double() for x in inputs])
    results = []
    for enabled in (False, True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            found, expected = step(*inputs), stock(*inputs)
        # Under autocast the attention is bfloat16 and its gate float32, and so is the result.
        assert found.dtype == expected.dtype == torch.float32
        assert (found - exact).norm() <= 2 * (expected - exact).norm()
        results.append(found)
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[1])
    assert told() == {"fused": 2}


@torch.no_grad()
def test_checkpoint_without_gradients() -> None:
    def model(*inputs: Tensor) -> Tensor:
        result: Tensor = checkpoint(gated, *inputs, use_reentrant=False)
        return result

    check(compiled(model), gated, *operands())
    assert told() == {"fused": 1}


def test_checkpoint_with_gradients_is_left_alone() -> None:
    def model(*inputs: Tensor) -> Tensor:
        result: Tensor = checkpoint(gated, *inputs, use_reentrant=False)
        return result

    gradients = []
    for make in (torch.compile, compiled):
        torch._dynamo.reset()
        told()
        inputs = [x.requires_grad_() for x in operands()]
        make(model)(*inputs).square().sum().backward()
        gradients.append([x.grad for x in inputs])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    # Recomputation wraps the attention in an operator of its own that keeps the random state.
    assert "fused" not in told()


@torch.no_grad()
def test_emulated_precision_casts_round_as_eager_does() -> None:
    inputs = operands(torch.bfloat16)
    found = compiled(gated, emulate_precision_casts=True)(*inputs)
    assert told() == {"fused": 1}
    query, key, value, gate = inputs
    gate = gate.view(2, 1, 4, 16)
    by_numerics = {
        numerics: gated_decode_attention(
            query, key, value, gate, None, scale=0.25, numerics=numerics
        ).view(2, 1, 64)
        for numerics in ("eager", "compiled")
    }
    assert torch.equal(found, by_numerics["eager"])
    assert not torch.equal(found, by_numerics["compiled"])


@torch.no_grad()
def test_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        step = compiled(gated)
        check(step, gated, *operands())
        assert torch.equal(step(*operands()), step(*operands()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert told() == {"fused": 1}


@torch.no_grad()
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("inside", [False, True], ids=["around the call", "in the model"])
def test_a_backend_of_sdpa_that_is_forced_is_replaced_too(
    backend: SDPBackend, inside: bool
) -> None:
    def model(*inputs: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return gated(*inputs)

    step = compiled(model if inside else gated)
    with nullcontext() if inside else sdpa_kernel(backend):
        check(step, gated, *operands())
    assert told() == {"fused": 1}


class Projected(nn.Module):
    """Query and gate from one projection, over a given K and V."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 128, bias=False)

    def forward(self, hidden: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, gate = self.project(hidden).view(-1, 1, 4, 32).chunk(2, dim=-1)
        return gated(query.transpose(1, 2), key, value, gate.reshape(-1, 1, 64))


def projected() -> tuple[Projected, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Projected().eval(), (torch.randn(2, 1, 64), *operands()[1:3])


@torch.no_grad()
def test_freezing() -> None:
    model, inputs = projected()
    found = compiled(model, freezing=True)(*inputs)
    assert told() == {"fused": 1}
    exact = model.double()(*[x.double() for x in inputs])
    expected = model.float()(*inputs)
    assert (found - exact).norm() <= 4 * (expected - exact).norm()


@torch.no_grad()
def test_lite_mode_fuses_nothing_and_runs() -> None:
    if "lite" not in torch._inductor.list_mode_options():
        pytest.skip("this torch has no lite mode")
    with fusion_pass.enable(devices=("cpu",), strict=True):
        check(torch.compile(gated, mode="lite"), gated, *operands())
    assert told() == {}


# Where the attention is: subgraphs, regions, several graphs.


@torch.no_grad()
def test_a_graph_break_between_the_attention_and_its_gate() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        output = attend(query, key, value)
        torch._dynamo.graph_break()
        return output * torch.sigmoid(gate)

    seen = declines_as_stock(model, *operands())
    assert seen == {"declined": 1, "declined: output-leaves-graph": 1}


@torch.no_grad()
def test_a_graph_break_between_the_sigmoid_and_the_product() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        output, weight = attend(query, key, value), torch.sigmoid(gate)
        torch._dynamo.graph_break()
        return output * weight

    seen = declines_as_stock(model, *operands())
    assert seen == {"declined": 1, "declined: output-leaves-graph": 1}


@torch.no_grad()
def test_the_branches_of_a_cond() -> None:
    def model(which: Tensor, *inputs: Tensor) -> Tensor:
        result: Tensor = torch.cond(
            which, lambda *args: gated(*args), lambda *args: 2.0 * gated(*args), inputs
        )
        return result

    step = compiled(model)
    for which in (torch.tensor(True), torch.tensor(False)):
        check(step, model, which, *operands())
    assert told() == {"fused": 2}


@torch.no_grad()
def test_a_nested_compile_region() -> None:
    if not hasattr(torch.compiler, "nested_compile_region"):
        pytest.skip("this torch has no nested_compile_region")
    region = torch.compiler.nested_compile_region(gated)

    def layers(layer: Function) -> Function:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            for _ in range(3):
                query = layer(query, key, value, gate).view(2, 4, 1, 16)
            return query

        return model

    check(compiled(layers(region)), layers(gated), *operands())
    # Traced and compiled once, called three times.
    assert told() == {"fused": 1}


@torch.no_grad()
def test_regional_compilation() -> None:
    """Each layer is compiled by itself, as transformers and diffusers do; the code is shared."""
    model, (hidden, key, value) = projected()
    layers = [model, Projected(), Projected()]
    for layer in layers:
        layer.compile(backend="fusion_pass", options=OPTIONS)
    for layer in layers:
        hidden = layer(hidden, key, value)
    assert counters["stats"]["unique_graphs"] == told()["fused"] == 1


@torch.no_grad()
def test_an_exported_program() -> None:
    class Model(nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return gated(*inputs)

    program = torch.export.export(Model(), operands())
    check(compiled(program.module()), gated, *operands())
    assert told() == {"fused": 1}


@contextmanager
def quick_cpp() -> Iterator[None]:
    """C++ is compiled for the answer, not for speed."""
    settings = {
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "aot_inductor.precompile_headers": False,
        "cpp_cache_precompile_headers": False,
    }
    with torch._inductor.config.patch(settings):
        yield


@torch.no_grad()
def test_cpp_wrapper() -> None:
    with quick_cpp():
        check(compiled(gated, cpp_wrapper=True), gated, *operands())
    assert told() == {"fused": 1}


@torch.no_grad()
def test_aot_inductor_package(tmp_path: Path) -> None:
    """A package for the CPU loads and runs: it holds stock's code, since it would have to call the
    operator's Python implementation, with -inf in a JSON file that its loader cannot read."""

    class Model(nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return gated(*inputs)

    program = torch.export.export(Model(), operands())
    path = str(tmp_path / "model.pt2")
    with quick_cpp(), fusion_pass.enable(devices=("cpu",)):
        torch._inductor.aoti_compile_and_package(program, package_path=path)
    check(torch._inductor.aoti_load_package(path), gated, *operands())
    assert told().get("fused", 0) == 0


# Operands of other ranks and none, that share memory, lie strangely, or are written.


@torch.no_grad()
@pytest.mark.parametrize("leading", [(4,), (2, 3, 4)], ids=["3-D", "5-D"])
def test_other_ranks(leading: tuple[int, ...]) -> None:
    def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value) * torch.sigmoid(gate)

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*leading, tokens, 16, generator=generator) for tokens in (1, 40, 40, 1)]
    check(compiled(model), model, *inputs)
    assert told().get("declined: internal-fault", 0) == 0


@torch.no_grad()
@pytest.mark.parametrize("empty", ["batch", "length"])
def test_empty_operands(empty: str) -> None:
    query, key, value, gate = operands()
    if empty == "batch":
        query, key, value, gate = query[:0], key[:0], value[:0], gate[:0]
    else:
        key, value = key[:, :, :0], value[:, :, :0]

    def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        output = F.scaled_dot_product_attention(query, key, value)
        return output.transpose(1, 2).reshape(query.shape[0], 1, 64) * torch.sigmoid(gate)

    expected = model(query, key, value, gate)
    found = compiled(model)(query, key, value, gate)
    assert found.shape == expected.shape
    assert torch.equal(found, expected)
    assert told().get("declined: internal-fault", 0) == 0


@torch.no_grad()
def test_k_is_v() -> None:
    def model(query: Tensor, stored: Tensor, gate: Tensor) -> Tensor:
        return gated(query, stored, stored, gate)

    query, stored, _, gate = operands()
    check(compiled(model), model, query, stored, gate)
    assert told() == {"fused": 1}


@torch.no_grad()
def test_the_gate_shares_the_querys_storage() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return gated(query, key, value, query.reshape(2, 1, 64))

    check(compiled(model), model, *operands()[:3])
    assert told() == {"fused": 1}


@torch.no_grad()
def test_views_of_one_packed_tensor() -> None:
    def model(packed: Tensor) -> Tensor:
        query, key, value, gate = packed.unbind(1)
        return gated(query[:, :, -1:], key, value, gate[:, :, -1].reshape(2, 1, 64))

    packed = torch.randn(2, 4, 4, 40, 16, generator=torch.Generator().manual_seed(0))
    check(compiled(model), model, packed)
    assert told() == {"fused": 1}


@torch.no_grad()
def test_operands_whose_producers_may_be_laid_out_freely() -> None:
    """Pointwise over transposed tensors, a matmul's odd width, and a cache that grew by `cat`."""

    def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        query = torch.sin(query.transpose(1, 2)).transpose(1, 2)
        key = torch.cat([key, query.expand(-1, 4, -1, -1)], dim=2)
        value = torch.cos(value.permute(3, 2, 1, 0)).permute(3, 2, 1, 0)
        value = torch.cat([value, query], dim=2)
        return gated(query, key, value, (gate @ weight)[..., 1:65])

    weight = torch.randn(64, 67, generator=torch.Generator().manual_seed(1))
    check(compiled(model), model, *operands(), weight)
    assert told() == {"fused": 1}


@torch.no_grad()
def test_the_result_is_written_in_place_later() -> None:
    def model(*inputs: Tensor) -> Tensor:
        return gated(*inputs).add_(1.0).mul_(2.0)

    check(compiled(model), model, *operands())
    assert told() == {"fused": 1}


@torch.no_grad()
def test_an_operand_is_written_in_place_later() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        result = gated(query, key, value, gate)
        key.zero_()
        return result

    inputs = operands()
    expected = gated(*inputs)
    bound = 8 * torch.finfo(torch.float32).eps * expected.abs().max()
    assert (compiled(model)(*inputs) - expected).abs().max() <= bound
    assert not inputs[1].any()
    assert told() == {"fused": 1}


# Beside other passes, other threads and other graphs.


class Recorder(inductor.CustomGraphPass):
    """A user's pass that notes in a shared list that it ran, and whether it saw the operator."""

    def __init__(self, name: str, ran: list[tuple[str, bool]]) -> None:
        self.name, self.ran = name, ran

    def __call__(self, graph: Graph) -> None:
        self.ran.append((self.name, "gated_decode_attention" in str(graph)))

    def uuid(self) -> str:
        return self.name


@torch.no_grad()
def test_the_users_passes_run_before_and_after() -> None:
    """The order: the user's pre-pass, the fusion, the user's post-pass."""
    ran: list[tuple[str, bool]] = []
    users = {inductor.SLOT: Recorder("pre", ran), POST_SLOT: Recorder("post", ran)}
    with torch._inductor.config.patch(users):
        check(compiled(gated), gated, *operands())
        assert ran == [("pre", False), ("post", True)]
        assert inductor.current_slot() is users[inductor.SLOT]
        ran.clear()
        torch._dynamo.reset()
        with fusion_pass.enable(devices=("cpu",)), fusion_pass.enable(devices=("cpu",)):
            check(torch.compile(gated), gated, *operands())
        assert ran == [("pre", False), ("post", True)]
        assert inductor.current_slot() is users[inductor.SLOT]
        ran.clear()
        torch._dynamo.reset()
        check(torch.compile(gated), gated, *operands())
        assert ran == [("pre", False), ("post", False)]
    assert told() == {"fused": 2}


@torch.no_grad()
def test_a_pass_put_into_the_slot_inside_enable_takes_the_slot() -> None:
    """The slot is Inductor's: who assigns it last has it. The backend adds the fusion again."""
    ran: list[tuple[str, bool]] = []
    with fusion_pass.enable(devices=("cpu",)):
        with torch._inductor.config.patch({inductor.SLOT: Recorder("late", ran)}):
            torch.compile(gated)(*operands())
            assert told() == {}
            torch._dynamo.reset()
            compiled(gated)(*operands())
            assert told() == {"fused": 1}
        torch._dynamo.reset()
        torch.compile(gated)(*operands())
        assert told() == {"fused": 1}
    assert ran == [("late", False), ("late", False)]


def test_a_pass_that_is_there_twice_fuses_once() -> None:
    with fake_mode():
        module = trace(gated, *operands())
    ours = GatedAttentionPass(devices=("cpu",), strict=True)
    PassChain(ours, ours)(module.graph, True)
    assert told() == {"fused": 1}


def test_threads_that_compile_at_once() -> None:
    start = threading.Barrier(4)

    def work(length: int) -> bool:
        def own(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            return gated(query, key, value, gate) + float(length)

        start.wait(timeout=60)
        # Inductor's settings are each thread's own, so that those of the test hold only in it.
        no_cache = torch._inductor.config.patch(fx_graph_cache=False)
        # Up to torch 2.13 a thread takes the trace of another for one that it is called in.
        during_trace = torch._dynamo.config.patch(force_compile_during_fx_trace=True)
        no_autograd_cache = torch._functorch.config.patch(enable_autograd_cache=False)
        with torch.no_grad(), no_cache, no_autograd_cache, during_trace:
            check(compiled(own), own, *operands(length=length))
        return True

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, (16, 24, 32, 40))) == [True] * 4
    assert told()["fused"] == counters["stats"]["unique_graphs"]


def test_enable_reaches_other_threads_only_where_inductors_settings_do() -> None:
    before = inductor.current_slot()
    with ThreadPoolExecutor(1) as pool, torch._inductor.config.patch(max_fusion_size=7):
        shared = pool.submit(lambda: torch._inductor.config.max_fusion_size).result() == 7
        with fusion_pass.enable(devices=("cpu",)):
            held = inductor.current_slot()
            assert held is not before
            assert pool.submit(inductor.current_slot).result() is (held if shared else before)


def quickest(graph: torch.fx.Graph, clock: Callable[[], float]) -> float:
    """The seconds of the quickest of 20 passes over a graph that stays as it is."""
    ours = GatedAttentionPass()
    seconds = []
    for _ in range(20):
        start = clock()
        ours(graph, True)
        seconds.append(clock() - start)
    return min(seconds)


def test_a_graph_without_attention_costs_less_than_a_millisecond() -> None:
    def deep(x: Tensor) -> Tensor:
        for _ in range(100):
            x = torch.tanh(x * 1.01) + x.transpose(0, 1).reshape(8, 8)
        return x

    with fake_mode():
        graph = trace(deep, torch.empty(8, 8)).graph
    assert len(graph.nodes) > 300
    before = str(graph)
    assert quickest(graph, time.perf_counter) < 1e-3
    assert str(graph) == before
    assert told() == {}


def test_an_attention_on_a_device_that_is_not_enabled_costs_less_than_a_millisecond() -> None:
    def layer(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        output = gated(query, key, value, gate)
        for _ in range(20):
            output = torch.tanh(output * 1.01) + output
        return output

    with fake_mode():
        graph = trace(layer, *operands()).graph
    assert len(graph.nodes) > 60
    before = str(graph)
    assert quickest(graph, time.thread_time) < 1e-3
    assert str(graph) == before
    assert told() == {"declined": 20, "declined: device": 20}


def test_every_test_that_the_documentation_names_exists() -> None:
    folder = Path(__file__).parent
    document = (folder.parent / "docs" / "reports.md").read_text()
    sources = {path.name: path.read_text() for path in folder.rglob("test_*.py")}
    named = re.findall(r"`((?:gpu/)?(?:test_\w+\.py)?(?:(?:::|^)?\w+)*)`", document)
    tests = [name for name in named if name.startswith(("test_", "gpu/"))]
    assert len(tests) > 80
    for name in tests:
        file, *rest = name.split("::") if ".py" in name else (None, name)
        where = "".join(sources.values()) if file is None else sources[Path(file).name]
        missing = [part for part in rest if not re.search(rf"(def|class) {part}\b", where)]
        assert not missing, name
