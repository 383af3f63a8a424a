"""The ways in, each with the pass on and off, and the private torch names that they rest on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass

import fusion_pass
from fusion_pass import ConfigError, GatedAttentionPass, inductor
from fusion_pass.inductor import InferenceGraphPass, PassChain

CPU = {"fusion_pass.devices": ("cpu",)}
Function = Callable[..., Tensor]


def gated(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    attended = F.scaled_dot_product_attention(query, key, value)
    attended = attended.transpose(1, 2).reshape(query.shape[0], query.shape[2], -1)
    return attended * torch.sigmoid(gate)


def operands(length: int = 32) -> tuple[Tensor, ...]:
    torch.manual_seed(length)
    return (
        torch.randn(2, 4, 1, 16),
        torch.randn(2, 4, length, 16),
        torch.randn(2, 4, length, 16),
        torch.randn(2, 1, 64),
    )


def run(step: Function, length: int = 32) -> int:
    """Checks `step` against eager and returns how many attentions were fused on the way."""
    before = fused()
    with torch.no_grad():
        torch.testing.assert_close(step(*operands(length)), gated(*operands(length)))
    return fused() - before


def fused() -> int:
    return counters["fusion_pass"]["fused"]


class Recorder(CustomGraphPass):
    """A user's pass that notes the targets it sees."""

    def __init__(self, uuid: object = "recorder") -> None:
        self.seen: list[set[str]] = []
        self._uuid = uuid

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen.append({str(node.target) for node in graph.nodes})

    def uuid(self) -> object:
        return self._uuid


class Asking(InferenceGraphPass):
    """A user's pass that wants to know whether the graph is for inference."""

    def __init__(self) -> None:
        self.told: list[bool | None] = []

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        self.told.append(is_inference)

    def uuid(self) -> str:
        return "asking"


def saw_attention(recorder: Recorder) -> bool:
    """Whether a user's pass ran once, on the graph as it was before the fusion."""
    (targets,) = recorder.seen
    return any("scaled_dot_product" in target for target in targets)


@pytest.fixture
def slot() -> Iterator[Callable[[object], None]]:
    """Puts something into Inductor's global slot, as a user would."""
    with torch._inductor.config.patch({inductor.SLOT: inductor.current_slot()}):
        yield lambda held: setattr(torch._inductor.config, inductor.SLOT, held)


# The backend, by name.


def test_backend_is_found_without_an_import() -> None:
    program = """
import sys, torch, torch.nn.functional as F
from torch._dynamo.utils import counters
def gated(q, g):
    return F.scaled_dot_product_attention(q, q, q) * torch.sigmoid(g)
assert "fusion_pass" not in sys.modules
with torch.no_grad():
    step = torch.compile(gated, backend="fusion_pass")
    step(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16))
print("fused", counters["fusion_pass"]["fused"])
"""
    # Away from the repository, so that only the installed package can be found.
    settings = {"FUSION_PASS_DEVICES": "cpu", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | settings,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "fused 1"


@pytest.mark.parametrize(
    "arguments",
    [
        {"options": CPU},
        {"options": CPU, "fullgraph": True},
        {"options": CPU, "dynamic": False},
        {"options": CPU | {"max_autotune": False, "epilogue-fusion": False}},
    ],
    ids=["options", "fullgraph", "static", "inductor-options"],
)
def test_backend_fuses(arguments: dict[str, Any]) -> None:
    assert run(torch.compile(gated, backend="fusion_pass", **arguments)) == 1


def test_backend_leaves_a_device_alone_that_it_was_not_given() -> None:
    assert run(torch.compile(gated, backend="fusion_pass")) == 0


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_backend_takes_a_mode(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_PASS_DEVICES", "cpu")
    assert run(torch.compile(gated, backend="fusion_pass", mode=mode)) == 1


def test_mode_reaches_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_PASS_DEVICES", "cpu")
    recorder = _ConfigRecorder("coordinate_descent_tuning")
    with torch._inductor.config.patch({inductor.SLOT: recorder}):
        run(torch.compile(gated, backend="fusion_pass", mode="max-autotune-no-cudagraphs"))
        torch._dynamo.reset()
        run(torch.compile(gated, backend="fusion_pass"))
    assert recorder.values == [True, False]


def test_option_reaches_inductor() -> None:
    recorder = _ConfigRecorder("epilogue_fusion")
    with torch._inductor.config.patch({inductor.SLOT: recorder}):
        run(torch.compile(gated, backend="fusion_pass", options=CPU | {"epilogue_fusion": False}))
        torch._dynamo.reset()
        run(torch.compile(gated, backend="fusion_pass", options=CPU))
    assert recorder.values == [False, True]


class _ConfigRecorder(Recorder):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.values: list[object] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.values.append(getattr(torch._inductor.config, self.name))


@pytest.mark.parametrize(("dynamic", "compiles"), [(True, 1), (False, 2)])
def test_dynamic_is_as_inductors(dynamic: bool, compiles: int) -> None:
    for backend, options in (("inductor", {}), ("fusion_pass", dict(CPU))):
        torch._dynamo.reset()
        counters.clear()
        step = torch.compile(gated, backend=backend, dynamic=dynamic, options=options)
        run(step, 32)
        run(step, 48)
        assert counters["stats"]["unique_graphs"] == compiles


def test_fullgraph_is_as_inductors() -> None:
    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    for backend in ("inductor", "fusion_pass"):
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(breaks, backend=backend, fullgraph=True)(torch.ones(2))
        torch.compile(breaks, backend=backend)(torch.ones(2))


@pytest.mark.parametrize(
    "arguments",
    [{"options": {"no_such_option": 1}}, {"options": {"dce": "yes"}}, {"mode": "fastest"}],
    ids=["unknown-option", "wrong-type", "unknown-mode"],
)
def test_what_inductor_refuses_is_refused_in_its_words(arguments: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError) as stock:
        torch.compile(gated, **arguments)
    with pytest.raises(RuntimeError) as ours:
        torch.compile(gated, backend="fusion_pass", **arguments)(*operands())
    assert str(stock.value) in str(ours.value)


@pytest.mark.parametrize(
    ("option", "value"), [("fusion_pass.device", "cpu"), ("fusion_pass.devices", "cpu")]
)
def test_bad_setting_is_refused(option: str, value: object) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as refusal:
        torch.compile(gated, backend="fusion_pass", options={option: value})(*operands())
    assert isinstance(refusal.value.inner_exception, ConfigError)


def test_off_compiles_as_stock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    stock = torch._TorchCompileInductorWrapper.__call__

    def record(compiler: Any, *arguments: Any, **keywords: Any) -> Any:
        seen.append(dict(compiler.config))
        return stock(compiler, *arguments, **keywords)

    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", record)
    options = CPU | {"fusion_pass.enabled": False}
    assert run(torch.compile(gated, backend="fusion_pass", options=options)) == 0
    torch._dynamo.reset()
    monkeypatch.setenv("FUSION_PASS", "0")
    assert run(torch.compile(gated, backend="fusion_pass", options=CPU)) == 0
    torch._dynamo.reset()
    monkeypatch.delenv("FUSION_PASS")
    assert run(torch.compile(gated, backend="fusion_pass", options=CPU)) == 1
    assert seen[:2] == [{}, {}]
    assert list(seen[2]) == [inductor.SLOT]


def test_reset_is_the_backends() -> None:
    step = torch.compile(gated, backend="fusion_pass", options=CPU)
    run(step)
    torch.compiler.reset()
    assert run(step) == 1


def test_reset_drops_recorded_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.cudagraph_trees as trees

    calls: list[None] = []
    monkeypatch.setattr(trees, "reset_cudagraph_trees", lambda: calls.append(None))
    run(torch.compile(gated, backend="fusion_pass", options=CPU))
    torch.compiler.reset()
    assert calls


# A user's own pass.


def test_pass_in_the_global_slot_still_runs(slot: Callable[[object], None]) -> None:
    recorder = Recorder()
    slot(recorder)
    assert run(torch.compile(gated, backend="fusion_pass", options=CPU)) == 1
    assert saw_attention(recorder)
    assert inductor.current_slot() is recorder


def test_pass_in_the_options_still_runs_and_replaces_the_global_one(
    slot: Callable[[object], None],
) -> None:
    recorder, replaced = Recorder(), Recorder()
    slot(replaced)
    options = CPU | {inductor.SLOT: recorder}
    assert run(torch.compile(gated, backend="fusion_pass", options=options)) == 1
    assert saw_attention(recorder)
    assert replaced.seen == []


def test_plain_callable_still_runs(slot: Callable[[object], None]) -> None:
    graphs: list[torch.fx.Graph] = []
    slot(graphs.append)
    assert run(torch.compile(gated, backend="fusion_pass", options=CPU)) == 1
    assert len(graphs) == 1


def test_several_passes_run_in_order(slot: Callable[[object], None]) -> None:
    order: list[str] = []
    slot([lambda graph: order.append("first"), lambda graph: order.append("second")])
    assert run(torch.compile(gated, backend="fusion_pass", options=CPU)) == 1
    assert order == ["first", "second"]


@pytest.mark.parametrize("gradient", [False, True])
def test_passes_are_told_of_inference(gradient: bool, slot: Callable[[object], None]) -> None:
    asking = Asking()
    slot([asking, lambda graph: None])
    step = torch.compile(gated, backend="fusion_pass", options=CPU)
    result = step(*(operand.requires_grad_(gradient) for operand in operands()))
    if gradient:
        result.sum().backward()
    assert asking.told == ([False, False] if gradient else [True])
    assert fused() == (0 if gradient else 1)


# Stock Inductor with the pass in its slot, and enable().


def test_pass_in_stock_inductor() -> None:
    options = {inductor.SLOT: GatedAttentionPass(devices=("cpu",))}
    assert run(torch.compile(gated, options=options)) == 1


def test_pass_in_stock_inductor_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_PASS", "0")
    options = {inductor.SLOT: GatedAttentionPass(devices=("cpu",))}
    assert run(torch.compile(gated, options=options)) == 0


def test_enable_reaches_a_stock_compile_and_only_inside() -> None:
    before = inductor.current_slot()
    with fusion_pass.enable(devices=("cpu",)):
        assert run(torch.compile(gated)) == 1
    assert inductor.current_slot() is before
    torch._dynamo.reset()
    assert run(torch.compile(gated)) == 0


def test_enable_runs_the_users_pass_first_and_restores_it(slot: Callable[[object], None]) -> None:
    recorder = Recorder()
    slot(recorder)
    with fusion_pass.enable(devices=("cpu",)):
        assert run(torch.compile(gated)) == 1
    assert saw_attention(recorder)
    assert inductor.current_slot() is recorder


def test_enable_restores_after_an_exception(slot: Callable[[object], None]) -> None:
    held = [Recorder()]
    slot(held)
    with pytest.raises(KeyError), fusion_pass.enable(devices=("cpu",)):
        raise KeyError
    assert inductor.current_slot() is held


def test_inner_enable_replaces_the_outer() -> None:
    with fusion_pass.enable(devices=("cpu",), numerics="fp32"):
        outer = inductor.current_slot()
        with fusion_pass.enable(devices=("cpu",), numerics="eager"):
            (member,) = inductor.flatten(inductor.current_slot())
            assert member.config.numerics == "eager"
            assert run(torch.compile(gated)) == 1
        assert inductor.current_slot() is outer
        torch._dynamo.reset()
        with fusion_pass.enable(enabled=False):
            assert run(torch.compile(gated)) == 0
        assert inductor.current_slot() is outer


def test_enable_validates_before_it_is_entered() -> None:
    with pytest.raises(ConfigError):
        fusion_pass.enable(device="cpu")


def test_enable_that_is_off_leaves_the_slot_alone(
    slot: Callable[[object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [Recorder()]
    slot(held)
    with fusion_pass.enable(enabled=False):
        assert inductor.current_slot() is held
    monkeypatch.setenv("FUSION_PASS", "0")
    with fusion_pass.enable(devices=("cpu",)):
        assert inductor.current_slot() is held


def test_backend_inside_enable_keeps_its_settings_unless_given_its_own() -> None:
    with fusion_pass.enable(devices=("cpu",)):
        assert run(torch.compile(gated, backend="fusion_pass")) == 1
        torch._dynamo.reset()
        options = {"fusion_pass.devices": ("cuda",)}
        assert run(torch.compile(gated, backend="fusion_pass", options=options)) == 0
        torch._dynamo.reset()
        options = {"fusion_pass.enabled": False}
        assert run(torch.compile(gated, backend="fusion_pass", options=options)) == 0


# PassChain, and what it rests on.


def test_chain_identity_holds_every_members() -> None:
    assert PassChain(Recorder("a"), Recorder("b")).uuid() == ("a", "b")
    assert PassChain(Recorder("a"), [Recorder("b"), PassChain(Recorder("c"))]).uuid() == (
        "a",
        "b",
        "c",
    )


@pytest.mark.parametrize("nameless", [Recorder(None), lambda graph: None])
def test_chain_with_a_nameless_member_has_no_identity(nameless: object) -> None:
    assert PassChain(Recorder("a"), nameless).uuid() is None


def test_private_names_that_the_ways_in_rest_on() -> None:
    assert hasattr(torch._inductor.config, inductor.SLOT)
    assert isinstance(torch._inductor.config.emulate_precision_casts, bool)
    compiler = inductor.stock_compiler("reduce-overhead", {"dce": False})
    assert compiler.config == {"triton.cudagraphs": True, "dce": False}
    assert callable(compiler)
    assert callable(compiler.reset)
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    assert callable(reset_cudagraph_trees)
    with inductor.patched_slot("held"):
        assert inductor.current_slot() == "held"
    assert inductor.current_slot() is None
    assert inductor.traced_for_inference()
