"""The pass on whole graphs: what it leaves, what it writes, that both compute the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import GraphModule

import fusion_pass
from fusion_pass import ConfigError, GatedAttentionPass, eligibility, launch, rewrite
from fusion_pass.launch import Limits, Unlaunchable
from tests.graphs import (
    CPU,
    CUDA,
    Shape,
    attend,
    fake_mode,
    merge_heads,
    qwen,
    qwen_inputs,
    repeat_kv,
    run_pass,
    symbolic,
    trace,
    where_mask,
)


class TestRewrite:
    @pytest.mark.usefixtures("h200")
    def test_the_result_keeps_dtype_shape_device_and_source(self) -> None:
        with fake_mode():
            module = trace(qwen("cudnn"), *qwen_inputs(CUDA))
        (product,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
        product.meta["stack_trace"] = 'File "model.py", line 7, in forward'
        expected = product.meta["val"]
        assert run_pass(module) == 1
        result = module.graph.output_node().args[0]
        assert isinstance(result, torch.fx.Node)
        found = result.meta["val"]
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())
        assert (found.dtype, found.device) == (expected.dtype, expected.device)
        assert result.meta["stack_trace"] == product.meta["stack_trace"]

    @pytest.mark.usefixtures("h200")
    def test_a_second_run_changes_nothing(self) -> None:
        with fake_mode():
            module = trace(qwen("cudnn"), *qwen_inputs(CUDA))
        assert run_pass(module) == 1
        once = str(module.graph)
        assert run_pass(module) == 0
        assert str(module.graph) == once

    @pytest.mark.usefixtures("h200")
    def test_an_attention_that_reads_a_fused_one(self) -> None:
        def twice(*operands: Tensor) -> Tensor:
            query, key, value, keep, fused = operands
            first = qwen("cudnn")(*operands).view(query.shape).contiguous()
            return qwen("cudnn")(first, key, value, keep, fused)

        with fake_mode():
            module = trace(twice, *qwen_inputs(CUDA))
        assert run_pass(module) == 2

    def test_an_attention_whose_k_and_v_are_a_fused_one(self) -> None:
        """What it reads is made by the pass itself, after the graph was first looked at."""

        def twice(*operands: Tensor) -> Tensor:
            query, _, _, keep, fused = operands
            first = qwen("cpu-flash")(*operands).view(2, 8, 1, 16)
            torch.ops.aten.copy_.default(fused, fused)
            output = attend("cpu-flash", query, first, first, where_mask(keep, query.dtype))
            return merge_heads(output) * torch.sigmoid(merge_heads(query))

        with fake_mode():
            query, key, value, _, fused = qwen_inputs(CPU)
            keep = CPU.empty(2, 1, 1, 1, dtype=torch.bool)
            module = trace(twice, query, key, value, keep, fused)
        assert run_pass(module, devices=("cpu",)) == 2

    @pytest.mark.usefixtures("h200")
    def test_a_gate_made_after_the_attention(self) -> None:
        def late(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
            output = merge_heads(attend("cudnn", query, key, value, None))
            return output * torch.sigmoid(merge_heads(query) @ weight)

        with fake_mode():
            module = trace(late, *qwen_inputs(CUDA)[:3], CUDA.empty(4096, 4096))
        assert run_pass(module) == 1

    def test_symbolic_batch_and_length_add_no_guards(self) -> None:
        sizes = qwen_inputs(replace(CPU, batch=3, kv_length=50))
        mode = fake_mode(symbolic=True)
        module = trace(qwen("cpu-flash"), *[symbolic(mode, x, (3, 50)) for x in sizes])
        assert mode.shape_env is not None
        guards = len(mode.shape_env.guards)
        assert run_pass(module, devices=("cpu",)) == 1
        assert len(mode.shape_env.guards) == guards


class TestGuards:
    def declined(self, shape: Shape = CUDA, is_inference: bool = True, **options: Any) -> str:
        """The one reason for which the pass leaves Qwen's attention, and the graph, alone."""
        with fake_mode():
            producer = "cpu-flash" if shape.device == "cpu" else "cudnn"
            module = trace(qwen(producer), *qwen_inputs(shape))
        before, nodes = str(module.graph), list(module.graph.nodes)
        assert run_pass(module, is_inference=is_inference, **options) == 0
        assert str(module.graph) == before
        assert all(a is b for a, b in zip(module.graph.nodes, nodes, strict=True))
        (reason,) = [key for key in counters["fusion_pass"] if key.startswith("declined: ")]
        return reason.removeprefix("declined: ")

    @pytest.mark.usefixtures("h200")
    def test_training(self) -> None:
        assert self.declined(is_inference=False) == "training"

    def test_a_device_that_was_not_asked_for(self) -> None:
        assert self.declined(CPU) == "device"

    def test_a_device_that_the_kernel_does_not_run_on(self, monkeypatch: Any) -> None:
        def too_old(device: torch.device) -> Limits:
            raise Unlaunchable("sm_75 is older than sm_80")

        monkeypatch.setattr(eligibility, "device_limits", too_old)
        assert self.declined() == "device"

    def test_cpu_when_asked_for(self) -> None:
        with fake_mode():
            module = trace(qwen("cpu-flash"), *qwen_inputs(CPU))
        assert run_pass(module, devices=("cpu",)) == 1

    @pytest.mark.usefixtures("h200")
    @pytest.mark.parametrize("tokens", [17, 128])
    def test_more_query_tokens(self, tokens: int) -> None:
        assert self.declined(replace(CUDA, query_tokens=tokens)) == "query-tokens"

    @pytest.mark.parametrize("head_dim", [8, 20, 520])
    def test_head_dim(self, head_dim: int) -> None:
        assert self.declined(replace(CPU, head_dim=head_dim), devices=("cpu",)) == "head-dim"

    def test_heads_per_group(self) -> None:
        shape = replace(CPU, query_heads=130, kv_heads=2)
        assert self.declined(shape, devices=("cpu",)) == "heads-per-group"

    def test_dtype(self) -> None:
        assert self.declined(replace(CPU, dtype=torch.float64), devices=("cpu",)) == "dtype"

    def test_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FUSION_PASS", "0")
        with fake_mode():
            module = trace(qwen("cpu-flash"), *qwen_inputs(CPU))
        before = str(module.graph)
        assert run_pass(module, devices=("cpu",)) == 0
        assert str(module.graph) == before

    def test_an_operand_written_in_place(self) -> None:
        def mutating(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            output = attend("cpu-flash", query, repeat_kv(key, 4), repeat_kv(value, 4), None)
            torch.ops.aten.copy_.default(key, value)
            return merge_heads(output) * torch.sigmoid(gate)

        with fake_mode():
            module = trace(mutating, *qwen_inputs(CPU)[:3], CPU.gate())
        assert run_pass(module, devices=("cpu",)) == 0
        assert counters["fusion_pass"]["declined: operand-mutated"] == 1

    def test_an_operand_written_after_the_product(self) -> None:
        def mutating(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            output = attend("cpu-flash", query, repeat_kv(key, 4), repeat_kv(value, 4), None)
            gated = merge_heads(output) * torch.sigmoid(gate)
            torch.ops.aten.copy_.default(key, value)
            return gated

        with fake_mode():
            module = trace(mutating, *qwen_inputs(CPU)[:3], CPU.gate())
        assert run_pass(module, devices=("cpu",)) == 1


class TestFaults:
    def broken(self, monkeypatch: pytest.MonkeyPatch, name: str) -> GraphModule:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("injected")

        monkeypatch.setattr(rewrite, name, fail)
        with fake_mode():
            return trace(qwen("cpu-flash"), *qwen_inputs(CPU))

    @pytest.mark.parametrize("where", ["plan", "check_result", "_stored"])
    def test_the_graph_is_restored_and_the_fault_logged(
        self,
        where: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        module = self.broken(monkeypatch, where)
        before = str(module.graph)
        with caplog.at_level(logging.WARNING, "fusion_pass"):
            GatedAttentionPass(devices=("cpu",))(module.graph, True)
        assert str(module.graph) == before
        module.graph.lint()
        assert counters["fusion_pass"]["declined: internal-fault"] == 1
        assert "injected" in caplog.text
        assert "Traceback" in caplog.text

    def test_strict_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = self.broken(monkeypatch, "check_result")
        before = str(module.graph)
        with pytest.raises(RuntimeError, match="injected"):
            GatedAttentionPass(devices=("cpu",), strict=True)(module.graph, True)
        assert str(module.graph) == before


class TestUuid:
    def test_equal_settings_give_equal_ids(self) -> None:
        settings = {"devices": ("cpu", "cuda")}, {"devices": ("cuda", "cpu", "cuda")}
        first, second = (GatedAttentionPass(**each).uuid() for each in settings)
        assert first == second

    @pytest.mark.parametrize("settings", [{"dump": "folder"}, {"log": "info"}])
    def test_telling_switches_the_caches_off(self, settings: dict[str, Any]) -> None:
        assert GatedAttentionPass(**settings).uuid() is None

    @pytest.mark.parametrize(
        "settings", [{"devices": ("cpu",)}, {"numerics": "eager"}, {"strict": True}]
    )
    def test_settings_that_change_the_rewrite_change_it(self, settings: dict[str, Any]) -> None:
        assert GatedAttentionPass().uuid() != GatedAttentionPass(**settings).uuid()

    def test_a_config_or_settings_not_both(self) -> None:
        with pytest.raises(ConfigError):
            GatedAttentionPass(fusion_pass.Config(), numerics="eager")


def filled(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Random numbers, and True for half of a boolean, in tensors of the same sizes."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.rand(x.shape, generator=generator) < 0.5
        if x.dtype is torch.bool
        else torch.randn(x.shape, generator=generator)
        for x in tensors
    ]


def agree(function: Callable[..., Tensor], *sizes: Tensor) -> None:
    """Trace, rewrite one attention, and execute both graphs on random numbers."""
    mode = fake_mode()
    module = trace(function, *[mode.from_tensor(x) for x in sizes])
    reals = filled(sizes)
    expected = module(*reals)
    exact = function(*[x.double() if x.is_floating_point() else x for x in reals])
    assert run_pass(module, devices=("cpu",)) == 1
    found = module(*reals)
    assert found.shape == expected.shape
    # The reference accumulates in another order than the attention that it replaces.
    bound = 4 * (expected - exact).abs().max() + torch.finfo(torch.float32).eps
    assert (found - exact).abs().max() <= bound


class TestNumbers:
    @pytest.mark.parametrize("batch", [1, 2, 8])
    @pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (6, 2), (1, 1)])
    def test_batch_and_heads(self, batch: int, heads: tuple[int, int]) -> None:
        shape = replace(CPU, batch=batch, query_heads=heads[0], kv_heads=heads[1])
        agree(qwen("cpu-flash"), *qwen_inputs(shape))

    def test_sizes_that_coincide(self) -> None:
        shape = replace(CPU, batch=16, query_heads=16, kv_heads=16, kv_length=16)
        agree(qwen("cpu-flash"), *qwen_inputs(shape))

    @pytest.mark.parametrize("layout", ["bqhd", "bhqd", "permuted"])
    def test_gate_layouts(self, layout: str) -> None:
        def forward(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            output = attend("cpu-flash", query, repeat_kv(key, 4), repeat_kv(value, 4), None)
            gate = gate.view(2, 1, 8, 16)
            if layout == "bqhd":
                return output.transpose(1, 2) * torch.sigmoid(gate)
            if layout == "bhqd":
                return output * torch.sigmoid(gate.transpose(1, 2))
            wrong = output.permute(0, 2, 3, 1).reshape(2, 1, 128)
            return wrong * torch.sigmoid(gate).reshape(2, 1, 128)

        agree(forward, *qwen_inputs(CPU)[:3], CPU.gate())

    def test_one_k_for_the_whole_batch(self) -> None:
        def forward(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            shared = [x.expand(2, 8, 48, 16) for x in (key, value)]
            output = attend("cpu-flash", query, *shared, None)
            return merge_heads(output) * torch.sigmoid(gate)

        single = replace(CPU, batch=1, kv_heads=8)
        agree(forward, CPU.query(), single.stored(), single.stored(), CPU.gate())


AXES = (2, 8, 1, 16)


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[str, tuple[int, ...]]]:
    """Random views of an attention output (B, H, Q, D)."""
    shape, steps = AXES, []
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            order = tuple(draw(st.permutations(range(len(shape)))))
            steps.append(("permute", order))
            shape = tuple(shape[i] for i in order)
        else:
            shape = draw(
                st.sampled_from(
                    [
                        (2, 1, 128),
                        (16, 16),
                        (2, 8, 16),
                        (256,),
                        (2, 1, 8, 16),
                        (2, 8, 1, 16),
                        (4, 4, 16),
                        (2, 8, 4, 4),
                        (32, 8),
                    ]
                )
            )
            steps.append(("reshape", shape))
    return steps


@settings(max_examples=60, deadline=None)
@given(chains())
def test_random_chains_fire_and_agree(steps: list[tuple[str, tuple[int, ...]]]) -> None:
    """Whatever rearranges the output, the fused graph computes what the graph computed."""

    def forward(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        output = attend("cpu-flash", query, repeat_kv(key, 4), repeat_kv(value, 4), None)
        for name, argument in steps:
            output = getattr(output, name)(argument)
        return output * torch.sigmoid(gate.reshape(output.shape))

    agree(forward, *qwen_inputs(CPU)[:3], CPU.gate())


def test_launch_is_where_eligibility_gets_its_limits() -> None:
    assert eligibility.device_limits is launch.device_limits
