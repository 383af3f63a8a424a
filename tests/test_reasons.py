"""Every reason is provoked by a small program, which is then left exactly as it was."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensor
from torch.fx import GraphModule

from fusion_pass import GatedAttentionPass, rewrite, selfcheck
from fusion_pass.patterns import Reason
from fusion_pass.patterns.advice import ADVICE
from fusion_pass.patterns.reason import EXPECTED
from tests.declines import DECLINES, Decline
from tests.graphs import CPU, attend, fake_mode, merge_heads, placeholder, repeat_kv, trace

# What no program provokes: graphs that Inductor hands to the pass have neither writes between
# operators nor, on a CPU alone, operands of several devices.
BY_HAND = {Reason.MUTATION, Reason.MIXED_DEVICES, Reason.INTERNAL, Reason.TORCH}


def ids(case: Decline) -> str:
    return f"{case.reason.value}: {case.written}"


@pytest.mark.parametrize("case", DECLINES, ids=ids)
def test_program(case: Decline) -> None:
    found = case.run()
    (site,) = found.sites
    assert (site["fused"], site["reason"]) == (False, case.reason.value)
    assert site["detail"]
    assert found.after == found.before


def gated(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    output = attend("cpu-flash", query, repeat_kv(key, 4), repeat_kv(value, 4), None)
    return merge_heads(output) * torch.sigmoid(gate)


def written(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    output = attend("cpu-flash", query, repeat_kv(key, 4), repeat_kv(value, 4), None)
    torch.ops.aten.copy_.default(key, value)
    return merge_heads(output) * torch.sigmoid(gate)


def traced(function: Any) -> GraphModule:
    with fake_mode():
        return trace(function, CPU.query(), CPU.stored(), CPU.stored(), CPU.gate())


def declined(module: GraphModule) -> Reason:
    """Why the one attention is left alone; the graph is as it was."""
    before = str(module.graph)
    GatedAttentionPass(devices=("cpu",))(module.graph, True)
    assert str(module.graph) == before
    assert counters["fusion_pass"]["declined"] == 1
    (reason,) = [key for key in counters["fusion_pass"] if key.startswith("declined: ")]
    return Reason(reason.removeprefix("declined: "))


def test_an_operand_that_is_written_before_the_product() -> None:
    assert declined(traced(written)) is Reason.MUTATION


def test_operands_of_two_devices() -> None:
    module = traced(gated)
    gate = placeholder(module.graph, "gate")
    value = gate.meta["val"]
    gate.meta["val"] = FakeTensor(value.fake_mode, value.to("meta"), torch.device("cuda:0"))
    assert declined(module) is Reason.MIXED_DEVICES


def test_a_fault_in_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(rewrite, "fuse", fail)
    assert declined(traced(gated)) is Reason.INTERNAL


def test_a_torch_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "NEWEST_TESTED", (1, 0))
    monkeypatch.setattr(selfcheck, "problems", lambda: ("a private API is gone",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert declined(traced(gated)) is Reason.TORCH


def test_every_reason_is_provoked() -> None:
    assert {case.reason for case in DECLINES} | BY_HAND == set(Reason)


def test_every_reason_is_explained() -> None:
    assert ADVICE.keys() == set(Reason)
    assert EXPECTED.keys() == set(Reason)
    for reason, advice in ADVICE.items():
        assert advice.meaning.endswith("."), reason
        assert advice.remedy.endswith("."), reason
