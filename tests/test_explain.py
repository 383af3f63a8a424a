"""`explain`: what it finds in programs of every kind, that it changes nothing, what it prints."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.fx import Node
from torch.nn.attention.flex_attention import flex_attention

import fusion_pass
from fusion_pass import (
    Config,
    Explanation,
    assert_fused,
    description,
    explain,
    explanation,
    profitability,
    provenance,
    register_attention,
)
from fusion_pass.demo_model import Decoder, Sizes
from fusion_pass.explanation import ExplainedGraph, ExplainedSite
from fusion_pass.patterns import Attention, Decline, Reason, read_attention, registry
from fusion_pass.patterns.reason import EXPECTED

B, H, HKV, S, D = 2, 4, 2, 48, 32
SIZES = Sizes(
    batch=B,
    layers=2,
    hidden=32,
    query_heads=H,
    kv_heads=HKV,
    head_dim=D,
    capacity=S,
    vocabulary=64,
)

Program = Callable[..., Tensor]


def inputs(
    device: str = "cpu", dtype: torch.dtype = torch.bfloat16, length: int = S
) -> tuple[Tensor, ...]:
    """Query, K, V, a boolean mask and a gate."""
    sizes = ((B, H, 1, D), (B, HKV, length, D), (B, HKV, length, D))
    query, key, value = (torch.zeros(size, dtype=dtype, device=device) for size in sizes)
    keep = torch.ones(B, 1, 1, length, dtype=torch.bool, device=device)
    return query, key, value, keep, torch.zeros(B, 1, H * D, dtype=dtype, device=device)


def attend(query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
    """(B, 1, H * D), before the gate."""
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=keep, enable_gqa=True)
    return output.transpose(1, 2).reshape(query.shape[0], 1, -1)


@torch.library.custom_op("fusion_pass_tests::unknown", mutates_args=())
def unknown(x: Tensor, factor: int) -> Tensor:
    """Something of an engine's."""
    return x * factor


@unknown.register_fake
def _(x: Tensor, factor: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fusion_pass_tests::unknown_into", mutates_args=("output",))
def unknown_into(output: Tensor, x: Tensor) -> None:
    """The same, written to what it is given."""
    output.copy_(x)


def gated_by(activation: Callable[[Tensor], Tensor]) -> Program:
    def program(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, gate: Tensor) -> Tensor:
        return attend(query, key, value, keep) * activation(gate)

    return program


def program(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, gate: Tensor) -> Tensor:
    return attend(query, key, value, keep) * torch.sigmoid(gate)


def in_two_graphs(*operands: Tensor) -> Tensor:
    first = program(*operands)
    torch._dynamo.graph_break()
    return program(*operands) + first


def placed(*operands: Tensor, device: str, expected: int = 0) -> Tensor:
    assert device == "mine"
    return program(*operands)


class Placed(nn.Module):
    """What `explain` takes by name, its forward does too."""

    def forward(self, *operands: Tensor, device: str, expected: int = 0) -> Tensor:
        assert expected == 7
        return placed(*operands, device=device)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU makes of SDPA depends on its kind."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def only(found: Explanation) -> ExplainedSite:
    (site,) = found.sites
    return site


class TestWhatIsFound:
    def test_everything_about_a_fusion(self) -> None:
        found = explain(program, *inputs(), device="cuda")
        site = only(found)
        assert (site.fused, site.producer, site.reason) == (True, "cpu-flash", None)
        assert (site.mask_kind, site.gate_kind) == ("boolean", "sigmoid")
        assert site.tensors["query"].shape == (B, H, 1, D)
        assert site.tensors["key"].shape == site.tensors["value"].shape == (B, HKV, S, D)
        assert site.tensors["key"].stride == (HKV * S * D, S * D, D, 1)
        assert site.tensors["mask"].dtype == "bool"
        assert site.tensors["gate"].dtype == "bfloat16"
        assert [frame.rpartition(" in ")[2] for frame in site.frames] == ["program", "attend"]
        assert site.source is not None
        assert site.source.startswith(f"{__file__}:")
        assert site.kernel is not None
        assert site.kernel.config["block_d"] == D
        assert site.ground == "structural: the mask tells the dead keys of a static cache"
        assert found.all_fused

    @pytest.mark.parametrize(("length", "is_split"), [(S, False), (4096, True)])
    def test_bytes_and_launches_of_one_without_copies(self, length: int, is_split: bool) -> None:
        found = explain(program, *inputs(length=length), device="cuda")
        kernel = only(found).kernel
        assert kernel is not None
        splits = kernel.config["num_splits"]
        assert (splits > 1) is is_split
        assert f"kernel: {splits} split{'s' if is_split else ''}, tiles" in str(found)
        assert re.search(r"reads a step: .* after, less where the mask hides whole", str(found))
        once = 2 * (B * H * D) + 2 * 2 * (B * HKV * length * D) + B * length + 2 * (B * H * D)
        assert kernel.bytes_before == once + 2 * (B * H * D)
        partials = B * H * splits * (D + 2) * 4
        assert kernel.bytes_after == once + is_split * partials
        launches = 1 + is_split
        assert (kernel.launches_before, kernel.launches_after) == (2, launches)
        assert kernel.launches_saved == 2 - launches

    @pytest.mark.parametrize("fill", [float("-inf"), -65504.0])
    def test_a_finite_fill_needs_the_second_launch(self, fill: float) -> None:
        def filled(*operands: Tensor) -> Tensor:
            query, key, value, keep, gate = operands
            bias = torch.where(keep, 0.0, fill).to(query.dtype)
            return program(query, key, value, bias, gate)

        kernel = only(explain(filled, *inputs(dtype=torch.float16), device="cuda")).kernel
        assert kernel is not None
        assert kernel.config["num_splits"] == 1
        once = 2 * 2 * (B * H * D) + 2 * 2 * (B * HKV * S * D) + B * S
        is_finite = fill != float("-inf")
        assert kernel.launches_after == 1 + is_finite
        assert kernel.bytes_after == once + is_finite * B * H * (D + 2) * 4

    def test_bytes_and_launches_of_repeated_k_and_v(self) -> None:
        def repeating(*operands: Tensor) -> Tensor:
            query, key, value, keep, gate = operands
            wide = [states.repeat_interleave(H // HKV, 1) for states in (key, value)]
            return program(query, *wide, keep, gate)

        site = only(explain(repeating, *inputs(), device="cuda"))
        assert site.tensors["key"].shape == (B, HKV, S, D)
        kernel, plain = site.kernel, only(explain(program, *inputs(), device="cuda")).kernel
        assert kernel is not None
        assert plain is not None
        assert kernel.bytes_before is not None
        assert plain.bytes_before is not None
        stored = 2 * 2 * (B * HKV * S * D)
        assert kernel.bytes_before == plain.bytes_before + (H // HKV) * stored
        assert kernel.bytes_after == plain.bytes_after
        assert kernel.launches_saved == 3

    @pytest.mark.parametrize(
        ("case", "told"),
        [
            ("length", "the pages are read where they are"),
            (
                "window",
                "read from the gathered copy: the mask is not plainly a length for each row",
            ),
            ("tokens", "gathered copy: a table is read for one query token"),
            ("tables", "read from the gathered copy"),
        ],
    )
    def test_which_is_read_of_pages_and_their_copy(self, case: str, told: str) -> None:
        def gathered(query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
            tables = table, table.flip(1) if case == "tables" else table
            key, value = (cache[which].flatten(1, 2).transpose(1, 2) for which in tables)
            position = torch.arange(key.shape[2])
            keep = position < lengths
            if case == "window":
                keep = (lengths - position) > 0
            output = F.scaled_dot_product_attention(query, key, value, keep, enable_gqa=True)
            return output * torch.sigmoid(query)

        tokens = 2 if case == "tokens" else 1
        operands = torch.zeros(B, H, tokens, D), torch.zeros(6, 8, HKV, D)
        indices = torch.zeros(B, 3, dtype=torch.int64), torch.ones(B, 1, 1, 1, dtype=torch.int64)
        site = only(explain(gathered, *operands, *indices, device="cuda"))
        assert site.fused
        assert told in site.ground
        assert ("read from" in site.ground) != ("the pages are read" in site.ground)

    def test_modules_by_their_path(self) -> None:
        model = Decoder(SIZES).to(torch.bfloat16)
        token, position = torch.zeros(B, dtype=torch.int64), torch.tensor([3])
        found = explain(model, token, position=position, device="cuda")
        paths = [f"layers.{layer}.attention" for layer in range(2)]
        assert [site.module for site in found.sites] == paths
        assert str(found).count("layers.*.attention x2") == 1
        assert found.fused == 2
        assert not model.layers[0].attention.key_cache.any()

    @pytest.mark.parametrize(
        ("activation", "name"),
        [
            (F.silu, "silu"),
            (F.gelu, "gelu"),
            (lambda gate: F.gelu(gate, approximate="tanh"), "gelu"),
            (torch.tanh, "tanh"),
            (lambda gate: (1 + torch.tanh(gate / 2)) / 2, "tanh with a factor or an offset"),
            (torch.erf, "erf"),
            (lambda gate: (1 + torch.erf(gate)) * 0.5, "erf with a factor or an offset"),
            (lambda gate: F.hardsigmoid(gate) * 2, "hardsigmoid"),
            (F.relu, "relu"),
            (F.softplus, "softplus"),
            (F.mish, "mish"),
            (F.hardsigmoid, "hardsigmoid"),
            (F.hardswish, "hardswish"),
            (F.elu, "elu, selu or celu"),
            (F.selu, "elu, selu or celu"),
            (F.relu6, "a clamp"),
            (F.logsigmoid, "logsigmoid"),
            (F.tanhshrink, "tanhshrink"),
            (lambda gate: F.relu(gate) ** 2, "relu to a power"),
            (lambda gate: gate * torch.sigmoid(1.702 * gate), "a silu of a scaled argument"),
            (torch.exp, "exp"),
            (lambda gate: gate.softmax(-1), "softmax"),
            (lambda gate: 2 * torch.sigmoid(gate), "a sigmoid with a factor"),
            (lambda gate: 1 + torch.sigmoid(gate), "a sigmoid with an offset"),
            (lambda gate: gate, "no activation"),
            (torch.sin, None),
        ],
    )
    def test_the_name_of_another_gate(
        self, activation: Callable[[Tensor], Tensor], name: str | None
    ) -> None:
        site = only(explain(gated_by(activation), *inputs(), device="cuda"))
        assert (site.reason, site.gate_kind) == ("gate-not-sigmoid", name)
        assert site.detail.startswith(f"the gate is {name}: " if name else "the output is")
        assert re.search(r"multiplied by \w+ \((aten\.[\w.]+|an input)\), which is no", site.detail)
        assert site.expected == "sigmoid(gate)"
        assert site.remedy
        # What would be read is known all the same.
        assert site.tensors["key"].shape == (B, HKV, S, D)
        assert site.mask_kind == "boolean"

    @pytest.mark.parametrize("fallback", [False, True])
    @pytest.mark.parametrize(
        "dropped",
        [
            lambda output, gate: F.dropout(output, 0.1) * torch.sigmoid(gate),
            lambda output, gate: output * F.dropout(torch.sigmoid(gate), 0.1),
            lambda output, gate: F.dropout1d(output, 0.1) * torch.sigmoid(gate),
            lambda output, gate: F.alpha_dropout(output, 0.1, training=True) * torch.sigmoid(gate),
            lambda output, gate: (
                torch.where(torch.rand(output.shape) > 0.1, output, 0) * torch.sigmoid(gate)
            ),
        ],
    )
    def test_dropout_of_output_or_gate(
        self,
        dropped: Callable[[Tensor, Tensor], Tensor],
        fallback: bool,
    ) -> None:
        def program(*operands: Tensor) -> Tensor:
            return dropped(attend(*operands[:4]), operands[4])

        with torch._inductor.config.patch(fallback_random=fallback):
            site = only(explain(program, *inputs(), device="cuda"))
        assert (site.reason, site.expected) == ("dropout", "no dropout")
        assert "at random" in site.detail
        assert "eval mode" in (site.remedy or "")

    def test_dropout_inside_the_gates_sigmoid_is_no_matter(self) -> None:
        def program(*operands: Tensor) -> Tensor:
            return attend(*operands[:4]) * torch.sigmoid(F.dropout(operands[4], 0.1))

        assert only(explain(program, *inputs(), device="cuda")).fused

    def test_the_line_of_another_gate(self) -> None:
        def program(*operands: Tensor) -> Tensor:
            output = attend(*operands[:4])
            return output * F.silu(operands[4])

        found = explain(program, *inputs(), device="cuda")
        site, line = only(found), program.__code__.co_firstlineno + 2
        assert site.gate_source == f"{__file__}:{line}"
        assert site.source != site.gate_source
        assert re.search(rf"at: .*test_explain\.py:{line}$", str(found), re.MULTILINE)

    def test_a_gate_that_a_graph_break_hides_is_asked_for(self) -> None:
        def broken(*operands: Tensor) -> Tensor:
            output = attend(*operands[:4])
            torch._dynamo.graph_break()
            return program(*operands) + output * torch.sigmoid(operands[4])

        found = explain(broken, *inputs(), device="cuda")
        assert sorted(str(site.reason) for site in found.sites) == ["None", "output-leaves-graph"]
        assert not found.all_fused
        with pytest.raises(AssertionError, match="1 of 2"):
            assert_fused(broken, *inputs(), device="cuda")

    def test_an_attention_without_gate_is_reported_and_is_not_asked_for(self) -> None:
        def half(*operands: Tensor) -> Tensor:
            return program(*operands) + (attend(*operands[:4]) + operands[4])

        found = explain(half, *inputs(), device="cuda")
        assert [site.reason for site in found.sites] == [None, "no-gate"]
        assert (found.fused, found.gated, len(found.sites)) == (1, 1, 2)
        assert found.all_fused
        assert found.summary().endswith("; 1 without a gate")

    def test_graph_breaks(self) -> None:
        found = explain(in_two_graphs, *inputs(), device="cuda")
        assert [graph.fused for graph in found.graphs] == [1, 1]

    def test_inference_mode(self) -> None:
        with torch.inference_mode():
            assert explain(program, *inputs(), device="cuda").fused == 1

    def test_subgraphs_of_flex_attention(self) -> None:
        def flex(*operands: Tensor) -> Tensor:
            query, key, value, _, gate = operands
            output = flex_attention(query, key, value, enable_gqa=True)
            assert isinstance(output, Tensor)
            return output.transpose(1, 2).flatten(2) * torch.sigmoid(gate)

        found = explain(flex, *inputs(), device="cuda")
        assert [graph.fused for graph in found.graphs] == [1]
        assert only(found).producer == "flex"

    def test_symbolic_sizes(self) -> None:
        found = explain(program, *inputs(), device="cuda", dynamic=True)
        # The number of heads is a symbol then.
        assert only(found).reason == "attention-layout"
        json.dumps(found.to_dict())

    def test_marks_of_dynamic_sizes_hold(self) -> None:
        query, key, value, keep, gate = inputs()
        for states in (key, value):
            torch._dynamo.mark_dynamic(states, 2)
        torch._dynamo.mark_dynamic(keep, 3)
        site = only(explain(program, query, key, value, keep, gate, device="cuda"))
        batch, _, length, _ = site.tensors["key"].shape
        assert batch == B
        assert isinstance(length, str)
        assert site.kernel is None or site.kernel.bytes_before is None

    def test_what_cannot_be_known_without_data_stops_the_trace(self) -> None:
        def reading(*operands: Tensor) -> Tensor:
            output = program(*operands)
            if output.sum().item() > 0:
                output = output + 1
            return program(*operands) + output

        found = explain(reading, *inputs(), device="cuda")
        assert found.fused >= 1
        assert found.stopped is not None
        assert not found.all_fused
        assert "stopped early" in str(found)

    @pytest.mark.parametrize("is_gated", [True, False])
    def test_an_operator_that_nobody_registered(self, is_gated: bool) -> None:
        def program(x: Tensor, gate: Tensor) -> Tensor:
            output = unknown(x, 2).transpose(0, 1)
            return output * (torch.sigmoid(gate.float()).t() if is_gated else gate.t())

        with torch.no_grad():
            found = explain(program, torch.ones(3, 4), torch.ones(3, 4), device="cuda")
        assert not found.sites
        named = [note for note in found.notes if "fusion_pass_tests.unknown.default" in note]
        assert len(named) == is_gated
        assert all("fusion_pass.register_attention" in note for note in named)

    def test_one_that_writes_to_its_argument(self) -> None:
        def program(x: Tensor, gate: Tensor) -> Tensor:
            output = torch.empty_like(x)
            unknown_into(output, x)
            return output.transpose(0, 1) * torch.sigmoid(gate).t()

        found = explain(program, torch.ones(3, 4), torch.ones(3, 4), device="cuda")
        (told,) = [note for note in found.notes if "fusion_pass_tests.unknown_into.def" in note]
        assert "register_attention makes it known, wrapped so that it returns its result" in told

    @pytest.mark.parametrize("is_gated", [True, False])
    def test_a_gate_that_the_program_gives_to_the_operator(self, is_gated: bool) -> None:
        def program(query: Tensor, cache: Tensor, table: Tensor, gate: Tensor) -> Tensor:
            given = {"gate": gate} if is_gated else {}
            output = fusion_pass.paged_decode_attention(
                query, cache, cache, None, table, kv_lengths=table[:, 0], **given
            )
            return output if is_gated else output * torch.sigmoid(gate)

        query, cache = torch.ones(2, 4, 16), torch.ones(3, 4, 2, 16)
        table = torch.zeros(2, 1, dtype=torch.int32)
        with torch.no_grad():
            found = explain(program, query, cache, table, query, device="cuda")
        assert found.fused == (not is_gated)
        assert not any("SDPA" in note for note in found.notes)
        told = "gated_paged_decode_attention.default is called by the program itself"
        assert any(told in note for note in found.notes) == is_gated
        # The line is the program's, not one of fusion_pass's own.
        for site in found.sites:
            assert site.source is not None
            assert site.source.startswith(__file__)

    def test_nothing_to_trace(self) -> None:
        found = explain(lambda number: number + 1, 1)
        assert found.graphs == ()
        assert not found.all_fused
        assert "no graph was traced" in str(found)


class TestDevices:
    def test_an_assumed_gpu_is_named(self) -> None:
        found = explain(program, *inputs(), device="cuda")
        assert found.is_assumed
        assert found.device == "NVIDIA H200"
        assert "an NVIDIA H200 (sm_90" in found.notes[0]
        assert "NVIDIA H200 (assumed)" in str(found)

    @pytest.mark.parametrize("device", ["meta", "fake cuda"])
    def test_tensors_without_data_are_meant_for_a_gpu(self, device: str) -> None:
        with FakeTensorMode():
            fake = inputs("cuda")
        found = explain(program, *(inputs("meta") if device == "meta" else fake))
        assert found.fused == 1
        assert found.is_assumed

    def test_a_cpu_is_rewritten_only_if_asked_for(self) -> None:
        found = explain(program, *inputs())
        assert only(found).reason == "device"
        assert (only(found).remedy or "").startswith('pass device="cuda" to judge for a GPU')
        told = only(explain(program, *inputs(), device="cpu")).remedy
        assert told
        assert 'device="cuda"' not in told
        assert any('device="cuda"' in note for note in found.notes)
        asked = explain(program, *inputs(), config=Config(devices=("cpu",)))
        assert asked.fused == 1
        assert only(asked).kernel is None
        assert asked.device == "CPU"

    def test_an_unknown_device(self) -> None:
        with pytest.raises(ValueError, match="tpu"):
            explain(program, *inputs(), device="tpu")

    def test_what_pays_on_any_gpu_is_not_assumed_to(self) -> None:
        def maskless(*operands: Tensor) -> Tensor:
            query, key, value, _, gate = operands
            return attend(query, key, value, None) * torch.sigmoid(gate)

        assumed = explain(maskless, *inputs(), device="cuda")
        assert only(assumed).assumed
        assert only(assumed).ground == profitability.ASSUMED
        assert re.search(r"  fused\*$", str(assumed), re.MULTILINE)
        assert "* whether it pays is assumed: decided on the GPU" in str(assumed)
        assert [[site["assumed"] for site in graph] for graph in assumed.to_dict()["graphs"]] == [
            [True]
        ]
        assert assumed.all_fused
        structural = explain(program, *inputs(), device="cuda")
        assert not only(structural).assumed
        assert "*" not in str(structural)
        always = explain(maskless, *inputs(), device="cuda", config=Config(policy="always"))
        assert not only(always).assumed

    def test_a_table_that_is_not_there_warns_without_a_gpu_too(self, tmp_path: Path) -> None:
        config = Config(table=str(tmp_path / "absent.json"))
        with pytest.warns(RuntimeWarning, match=r"finds no table .*absent\.json") as warned:
            assert explain(in_two_graphs, *inputs(), device="cuda", config=config).fused == 2
        assert len([one for one in warned if "finds no table" in str(one.message)]) == 1


class TestSwitchedOff:
    @pytest.fixture(autouse=True)
    def _off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FUSION_PASS", "0")

    def test_nothing_is_fused_and_what_would_be_is_told(self) -> None:
        found = explain(program, *inputs(), device="cuda")
        assert (found.enabled, found.fused, found.fused_otherwise) == (False, 0, 1)
        assert not found.all_fused
        assert found.summary() == "switched off: 0 fused; 1 would be"
        assert "declined: switched-off (switched on: fused)" in str(found)
        data = found.to_dict()
        assert (data["enabled"], data["fused"], data["fused_otherwise"]) == (False, 0, 1)
        ((site,),) = data["graphs"]
        assert (site["fused"], site["reason"], site["otherwise"]["fused"]) == (
            False,
            "switched-off",
            True,
        )

    def test_what_would_not_fuse_either_keeps_its_reason(self) -> None:
        found = explain(gated_by(F.silu), *inputs(), device="cuda")
        assert only(found).reason == "gate-not-sigmoid"
        assert found.summary() == "switched off: 0 fused; 0 would be"

    @pytest.mark.parametrize("expected", [None, 0, 1])
    def test_no_assertion_holds(self, expected: int | None) -> None:
        with pytest.raises(AssertionError, match=r"switched off \(FUSION_PASS=0"):
            assert_fused(program, *inputs(), device="cuda", expected=expected)


@torch.library.custom_op("fusion_pass_tests::explained", mutates_args=())
def engine_attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """An engine's attention over `(B, H, S, D)`."""
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


@engine_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(query)


class TestFaults:
    OP = torch.ops.fusion_pass_tests.explained.default
    TOLD = "The fault is in the registered adapter of fusion_pass_tests.explained.default: fix it"

    @pytest.fixture(autouse=True)
    def _unregister(self) -> Iterator[None]:
        yield
        del registry._RECOGNISERS[self.OP], registry._ADAPTERS[self.OP]

    def explain(self, adapter: Callable[[Node], Attention | Decline]) -> ExplainedSite:
        register_attention(self.OP, adapter)

        def program(query: Tensor, key: Tensor, value: Tensor, _: Tensor, gate: Tensor) -> Tensor:
            output = engine_attend(query, key, value).transpose(1, 2).flatten(2)
            return output * torch.sigmoid(gate)

        return only(explain(program, *inputs(), device="cuda"))

    def test_an_adapter_that_raises_is_named(self) -> None:
        def adapter(node: Node) -> Attention | Decline:
            raise KeyError("window")

        site = self.explain(adapter)
        assert (site.reason, site.detail) == ("internal-fault", "KeyError: 'window'")
        assert (site.remedy or "").startswith(self.TOLD)

    @pytest.mark.parametrize("returned", [3, Attention, (None,), False])
    def test_an_adapter_that_returns_no_attention_is_named(self, returned: Any) -> None:
        site = self.explain(lambda node: returned)
        assert site.reason == "internal-fault"
        assert site.detail.startswith("TypeError: the adapter of fusion_pass_tests.explained.")
        assert f"returned {returned!r}; it must return what read_attention" in site.detail
        assert (site.remedy or "").startswith(self.TOLD)

    def test_an_adapter_is_not_blamed_for_what_follows_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def adapter(node: Node) -> Attention | Decline:
            query, key, value = node.args
            return read_attention(node, "engine", query=query, key=key, value=value, output=node)

        assert self.explain(adapter).fused

        def fail(*_: object) -> None:
            raise KeyError("window")

        monkeypatch.setattr(description, "describe", fail)
        site = self.explain(adapter)
        assert site.reason == "internal-fault"
        assert "adapter" not in (site.remedy or "adapter")


class TestTraining:
    """Without torch.no_grad() on parameters: what most users try first."""

    def explain(self, function: Program) -> Explanation:
        first, *rest = inputs()
        with torch.enable_grad():
            return explain(function, first.requires_grad_(), *rest, device="cuda")

    def test_everything_is_told_and_what_it_would_be_without(self) -> None:
        found = self.explain(program)
        site, plain = only(found), only(explain(program, *inputs(), device="cuda"))
        assert (site.reason, site.fused, site.kernel) == ("training", False, None)
        for name in ("producer", "tensors", "mask_kind", "gate_kind", "module", "source", "frames"):
            assert getattr(site, name) == getattr(plain, name)
        assert site.otherwise == plain
        assert not found.all_fused
        assert (found.fused, found.fused_otherwise, found.gated) == (0, 1, 1)
        assert "declined: training (without gradients: fused)" in str(found)
        assert any("second trace under torch.no_grad()" in note for note in found.notes)
        ((data,),) = found.to_dict()["graphs"]
        assert data["otherwise"]["fused"] is True

    def test_the_next_reason(self) -> None:
        found = self.explain(gated_by(F.silu))
        assert "training (without gradients: declined: gate-not-sigmoid)" in str(found)
        assert "the gate is silu" in str(found)
        assert found.fused_otherwise == 0

    def test_one_without_a_gate_is_not_asked_for(self) -> None:
        def half(*operands: Tensor) -> Tensor:
            return program(*operands) + (attend(operands[0] + 1, *operands[1:4]) + 1)

        found = self.explain(half)
        assert [site.reason for site in found.sites] == ["training"] * 2
        assert (found.fused_otherwise, found.gated) == (1, 1)

    def test_each_graph_by_itself(self) -> None:
        def partly(*operands: Tensor) -> Tensor:
            with torch.no_grad():
                first = program(*operands)
            torch._dynamo.graph_break()
            return program(*operands) + first

        assert [site.reason for site in self.explain(partly).sites] == [None, "training"]

    def test_a_program_that_needs_gradients(self) -> None:
        def differentiating(*operands: Tensor) -> Tensor:
            output = program(*operands)
            torch._dynamo.graph_break()
            if not output.requires_grad:
                raise RuntimeError("a gradient is needed")
            return output

        found = self.explain(differentiating)
        assert only(found).otherwise is None
        assert any("torch.no_grad() fails: RuntimeError" in note for note in found.notes)

    def test_a_cpu_that_is_not_asked_for_comes_next(self) -> None:
        query, *rest = inputs()
        with torch.enable_grad():
            site = only(explain(program, query.requires_grad_(), *rest))
        assert site.otherwise is not None
        assert site.otherwise.reason == "device"
        assert (site.otherwise.remedy or "").startswith('pass device="cuda"')


class TestWhatIsGiven:
    def test_compiled_functions_methods_and_modules(self) -> None:
        class Model(nn.Module):
            def forward(self, *operands: Tensor) -> Tensor:
                return program(*operands)

        model = Model()
        for given in (
            torch.compile(program),
            torch.compile(model),
            model.forward,
            torch.compile(model.forward),
        ):
            assert explain(given, *inputs(), device="cuda").fused == 1

    @pytest.mark.parametrize("is_compiled", [False, True])
    @pytest.mark.parametrize("function", [placed, Placed()])
    def test_a_parameter_named_like_an_option_is_ambiguous(
        self, function: Any, is_compiled: bool
    ) -> None:
        if is_compiled:
            function = torch.compile(function)
        for device in ("cuda", None):
            with pytest.raises(TypeError, match=r"device is an option of explain and a parameter"):
                explain(function, *inputs(), device=device)
        with pytest.raises(TypeError, match=r"expected is .* assert_fused\(functools\.partial"):
            assert_fused(function, *inputs(), expected=1)
        bound = functools.partial(function, device="mine", expected=7)
        assert assert_fused(bound, *inputs(), device="cuda", expected=1).device != "CPU"

    def test_every_way_to_the_same_parameters_is_ambiguous(self) -> None:
        class Overriding(Placed):
            def __call__(self, *operands: Any, device: str | None = None) -> Any:
                return super().__call__(*operands)

        model = Placed()
        for function in (
            model.__call__,
            torch.compile(model).__call__,
            torch.compile(model).forward,
            functools.wraps(placed)(lambda *args, **kwargs: placed(*args, **kwargs)),
            Overriding(),
        ):
            with pytest.raises(TypeError, match=r"device is an option of explain"):
                explain(function, *inputs(), device="cuda")
            with pytest.raises(TypeError, match=r"device is an option of assert_fused"):
                assert_fused(function, *inputs(), device="cuda")

    def test_what_a_wrapper_does_not_take_is_not_ambiguous(self) -> None:
        @functools.wraps(placed)
        def wrapper(*operands: Tensor) -> Any:
            return placed(*operands, device="mine")

        assert explain(wrapper, *inputs(), device="cuda").fused == 1

    def test_what_a_wrapped_method_is_given_by_position_is_given(self) -> None:
        def inner(self: object, device: str, *operands: Tensor) -> Any:
            return placed(*operands, device=device)

        class Model:
            @functools.wraps(inner)
            def step(self, *args: Any, **kwargs: Any) -> Any:
                return inner(self, *args, **kwargs)

        assert explain(Model().step, "mine", *inputs(), device="cuda").fused == 1

    def test_a_signature_may_raise(self) -> None:
        class Odd:
            @property
            def __signature__(self) -> Any:
                raise RuntimeError("odd")

            def __call__(self, *operands: Tensor) -> Tensor:
                return program(*operands)

        assert explain(Odd(), *inputs(), device="cuda").fused == 1

    @pytest.mark.parametrize("expected", [True, "1", 1.0])
    def test_a_number_that_is_none(self, expected: Any) -> None:
        with pytest.raises(TypeError, match="expected must be a number of attentions"):
            assert_fused(program, *inputs(), expected=expected)

    def test_a_parameter_named_like_an_option_may_be_given_by_position(self) -> None:
        def step(*operands: Any, device: str) -> Tensor:
            return placed(*operands, device=device)

        def positional(device: str, query: Tensor, *rest: Tensor) -> Tensor:
            return step(query, *rest, device=device)

        assert explain(positional, "mine", *inputs(), device="cuda").fused == 1
        assert explain(functools.partial(positional, "mine"), *inputs(), device="cuda").fused == 1

    def test_an_option_is_not_among_what_keywords_take(self) -> None:
        def step(*operands: Tensor, **rest: Any) -> Tensor:
            assert rest == {}
            return program(*operands)

        assert explain(step, *inputs(), device="cuda").fused == 1

    def test_what_has_no_signature(self) -> None:
        assert not explain(torch.sigmoid, inputs()[0], device="cuda").graphs

    def test_what_cannot_be_copied(self) -> None:
        with pytest.raises(TypeError, match=r"cannot be copied.*lock"):
            explain(lambda query, lock: query, inputs()[0], threading.Lock())

    def test_tensors_that_share_memory_still_do(self) -> None:
        def tied(first: Tensor, second: Tensor) -> Tensor:
            assert first is second
            return first + second

        query = inputs()[0]
        found = explain(tied, query, query, device="cuda")
        assert not any("no graph was traced" in note for note in found.notes)

    def test_a_pass_of_the_users_runs_first(self) -> None:
        seen: list[str] = []

        class Users(torch._inductor.custom_graph_pass.CustomGraphPass):
            def __call__(self, graph: torch.fx.Graph) -> None:
                seen.append(str(graph))

            def uuid(self) -> str:
                return "a user's"

        with torch._inductor.config.patch(post_grad_custom_pre_pass=Users()):
            assert explain(program, *inputs(), device="cuda").fused == 1
        assert len(seen) == 1
        assert "gated_decode_attention" not in seen[0]


class TestNothingChanges:
    def test_no_code_is_generated_and_nothing_is_counted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("code was generated")

        monkeypatch.setattr(torch._inductor.graph.GraphLowering, "run", refuse)
        assert explain(program, *inputs(), device="cuda").fused == 1
        assert not counters["fusion_pass"]

    def test_arguments_keep_their_data(self) -> None:
        def writing(cache: Tensor, *operands: Tensor) -> Tensor:
            cache.add_(1)
            torch._dynamo.graph_break()
            return program(*operands)

        cache = torch.zeros(3)
        assert explain(writing, cache, *inputs(), device="cuda").fused == 1
        assert not cache.any()

    def test_a_compile_after_it_is_as_without(self) -> None:
        for _ in range(torch._dynamo.config.recompile_limit + 1):
            assert explain(program, *inputs(), config=Config(devices=("cpu",))).fused == 1
        options = {"fusion_pass.devices": ("cpu",)}
        compiled = torch.compile(program, backend="fusion_pass", options=options, fullgraph=True)
        operands = inputs(dtype=torch.float32)
        torch.testing.assert_close(compiled(*operands), program(*operands))
        assert counters["fusion_pass"] == {"fused": 1}

    def test_what_was_compiled_before_stays(self) -> None:
        compiled = torch.compile(program, backend="eager")
        compiled(*inputs())
        frames = counters["stats"]["unique_graphs"]
        explain(program, *inputs(), device="cuda")
        traced = counters["stats"]["unique_graphs"]
        compiled(*inputs())
        assert counters["stats"]["unique_graphs"] == traced == frames


class TestAssertFused:
    def test_every_gated_attention(self) -> None:
        assert assert_fused(program, *inputs(), device="cuda").fused == 1
        with pytest.raises(AssertionError, match="the gate is silu"):
            assert_fused(gated_by(F.silu), *inputs(), device="cuda")

    def test_a_number(self) -> None:
        assert_fused(in_two_graphs, *inputs(), device="cuda", expected=2)
        assert_fused(gated_by(F.silu), *inputs(), device="cuda", expected=0)
        with pytest.raises(AssertionError, match="attentions that would be fused: 1, not 2"):
            assert_fused(program, *inputs(), device="cuda", expected=2)

    @pytest.mark.parametrize("expected", [None, 1])
    def test_on_the_cpu_the_device_to_pass_is_named(self, expected: int | None) -> None:
        with pytest.raises(AssertionError, match=r'^.*; pass device="cuda" to judge'):
            assert_fused(program, *inputs(), expected=expected)


SITE = ExplainedSite(
    attention="sdpa",
    producer="cudnn",
    fused=False,
    reason="gate-not-sigmoid",
    detail="the gate is <silu>",
    query="",
    key="",
    value="",
    gate=None,
    mask=None,
    source="/some/where/models/qwen/modeling.py:7",
    module="model.layers.0.<b>attn</b>",
    expected="sigmoid(gate)",
)


def explained(*sites: ExplainedSite) -> Explanation:
    return Explanation((ExplainedGraph(sites),), "NVIDIA H200", False, (), None)


class TestForms:
    def test_json_is_stable(self) -> None:
        data = explained(SITE, replace(SITE, fused=True, reason=None)).to_dict()
        assert list(data) == [
            "schema",
            "fusion_pass",
            "torch",
            "enabled",
            "device",
            "assumed",
            "notes",
            "stopped",
            "fused",
            "fused_otherwise",
            "gated",
            "graphs",
        ]
        assert data["schema"] == explanation.SCHEMA == 2
        assert data["fusion_pass"] == fusion_pass.__version__
        assert (data["fused"], data["gated"]) == (1, 2)
        assert data["graphs"][0][0]["module"] == SITE.module
        assert json.loads(json.dumps(data)) == data | {
            "graphs": json.loads(json.dumps(data["graphs"]))
        }

    def test_layers_that_differ_in_their_number_share_a_row(self) -> None:
        layers = [replace(SITE, module=f"model.layers.{n}.attn") for n in range(64)]
        other = replace(SITE, module="model.layers.64.attn", detail="another", reason="scale")
        text = str(explained(*layers, other))
        assert text.count("model.layers.*.attn x64") == 1
        assert text.count("model.layers.64.attn") == 1
        assert text.count("modeling.py:7") == 2
        assert "models/qwen/modeling.py:7" in text
        assert "0 of 65 gated attentions would be fused" in text

    def test_a_page_holds_the_table_escaped_and_loads_nothing(self) -> None:
        page = explained(SITE).to_html()
        assert "<b>" not in page
        assert "&lt;b&gt;attn" in page
        assert "the gate is &lt;silu&gt;" in page
        assert "http" not in page

    def test_no_attention(self) -> None:
        found = explained()
        assert not found.all_fused
        assert "no attention was found" in str(found)
        assert "<table>" not in found.to_html()


@pytest.mark.parametrize(
    ("spelled", "path"),
    [
        ("L['self'].model.layers.3.self_attn", "model.layers.3.self_attn"),
        ("L['args'][0].model.layers.3.self_attn", "model.layers.3.self_attn"),
        ("L['self']._modules['layers']._modules['3']", "layers.3"),
        ("L['self'].layers[3].attention", "layers.3.attention"),
        ("L['self'].experts['left']", "experts.left"),
        ("L['self']", None),
    ],
)
def test_module_paths(spelled: str, path: str | None) -> None:
    node = torch.fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"outer": ("L['self']", nn.Module), "one": (spelled, nn.Module)}
    assert provenance.module_path(node) == path


def test_a_node_that_tells_nothing() -> None:
    node = torch.fx.Graph().placeholder("x")
    assert provenance.module_path(node) is None
    assert provenance.frames(node) == ()


def test_what_was_found_may_be_left_out() -> None:
    assert Decline(Reason.SCALE, "detail").found is None
    assert Decline(Reason.SCALE, "detail").expected == EXPECTED[Reason.SCALE]
