"""A fault inside the package costs the fusion and a warning, never the compile or the answer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensor

from fusion_pass import (
    GatedAttentionPass,
    description,
    eligibility,
    enable,
    graph_pass,
    inductor,
    launch,
    lowering,
    patterns,
    rewrite,
)
from fusion_pass.config import warn_once
from fusion_pass.launch import Limits, Unlaunchable
from tests.graphs import (
    CUDA,
    attend,
    fake_mode,
    merge_heads,
    placeholder,
    qwen,
    qwen_inputs,
    run_pass,
    trace,
)

CPU = {"fusion_pass.devices": ("cpu",)}


def gated(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    output = F.scaled_dot_product_attention(query, key, value)
    return output.transpose(1, 2).reshape(2, 1, 64) * torch.sigmoid(gate)


def operands() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = (2, 4, 1, 16), (2, 4, 40, 16), (2, 4, 40, 16), (2, 1, 64)
    return tuple(torch.randn(size, generator=generator) for size in sizes)


@pytest.fixture(scope="module")
def stock() -> Tensor:
    """What the model gives without the pass."""
    with torch.no_grad():
        result: Tensor = torch.compile(gated)(*operands())
    return result


def fail(*args: Any, **keywords: Any) -> Any:
    raise RuntimeError("injected")


def inject(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Makes one step of the pass raise."""
    module, name = {
        "recognition": (patterns, "recognise"),
        "eligibility": (eligibility, "check"),
        "planning": (rewrite, "plan"),
        "rewriting": (rewrite, "check_result"),
        "describing": (description, "describe"),
    }[where]
    monkeypatch.setattr(module, name, fail)


PLACES = (
    "recognition",
    "eligibility",
    "planning",
    "rewriting",
    "describing",
)


@torch.no_grad()
@pytest.mark.parametrize("where", PLACES)
def test_the_model_compiles_and_gives_stocks_answer(
    where: str,
    stock: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    inject(monkeypatch, where)
    with caplog.at_level(logging.WARNING, "fusion_pass"):
        found = torch.compile(gated, backend="fusion_pass", options=CPU)(*operands())
    assert torch.equal(found, stock)
    assert counters["fusion_pass"] == {"declined": 1, "declined: internal-fault": 1}
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "injected" in warning.getMessage()
    # Where it happened, for a bug report.
    assert warning.exc_info is not None


@torch.no_grad()
def test_a_fault_in_telling_costs_what_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = torch.compile(gated, backend="fusion_pass", options=CPU)(*operands())
    torch._dynamo.reset()
    monkeypatch.setattr(graph_pass, "publish", fail)
    with caplog.at_level(logging.WARNING, "fusion_pass"):
        found = torch.compile(gated, backend="fusion_pass", options=CPU)(*operands())
    assert torch.equal(found, expected)
    assert "injected" in caplog.text
    torch._dynamo.reset()
    with pytest.raises(Exception, match="injected"):
        torch.compile(gated, backend="fusion_pass", options=CPU | {"fusion_pass.strict": True})(
            *operands()
        )


@torch.no_grad()
@pytest.mark.parametrize("where", ["recognition", "eligibility", "planning", "rewriting"])
@pytest.mark.parametrize("given", ["option", "environment"])
def test_strict_raises_it(where: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, where)
    options: dict[str, Any] = dict(CPU)
    if given == "option":
        options["fusion_pass.strict"] = True
    else:
        monkeypatch.setenv("FUSION_PASS_STRICT", "1")
    with pytest.raises(Exception, match="injected"):
        torch.compile(gated, backend="fusion_pass", options=options)(*operands())


def break_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel does that needs more shared memory or registers than there are."""
    monkeypatch.setattr(lowering, "_call_operator", fail)


@torch.no_grad()
@pytest.mark.parametrize("holder", ["backend", "slot"])
def test_a_kernel_that_does_not_compile_costs_the_fusion_alone(
    holder: str,
    stock: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    break_lowering(monkeypatch)
    slot = GatedAttentionPass(devices=("cpu",)) if holder == "slot" else None
    options = CPU if holder == "backend" else {}
    with (
        caplog.at_level(logging.WARNING, "fusion_pass"),
        torch._inductor.config.patch({inductor.SLOT: slot}),
    ):
        found = torch.compile(gated, backend="fusion_pass", options=options)(*operands())
        assert inductor.current_slot() is slot
    assert torch.equal(found, stock)
    assert counters["fusion_pass"] == {"declined": 1, "declined: internal-fault": 1}
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "without the fusion" in warning.getMessage()
    assert "injected" in warning.getMessage()


@torch.no_grad()
def test_a_kernel_that_does_not_compile_is_raised_where_strict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_lowering(monkeypatch)
    options = CPU | {"fusion_pass.strict": True}
    with pytest.raises(Exception, match="injected"):
        torch.compile(gated, backend="fusion_pass", options=options)(*operands())


@torch.no_grad()
@pytest.mark.parametrize("way", ["enable", "slot"])
def test_a_kernel_that_does_not_compile_is_raised_where_the_backend_is_stocks(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass is not asked again when what it left does not compile; `FUSION_PASS=0` is stock."""
    break_lowering(monkeypatch)
    ours: Any = {inductor.SLOT: GatedAttentionPass(devices=("cpu",))} if way == "slot" else {}
    around = enable(devices=("cpu",)) if way == "enable" else nullcontext()
    with around, pytest.raises(Exception, match="injected"):
        torch.compile(gated, options=ours)(*operands())
    torch._dynamo.reset()
    monkeypatch.setenv("FUSION_PASS", "0")
    with enable(devices=("cpu",)):
        torch.compile(gated)(*operands())


@torch.no_grad()
def test_a_fault_of_the_users_own_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an attention that was fused the failure cannot be ours: nothing is tried again."""
    compiles = []

    def users(graph: Any) -> None:
        compiles.append(graph)
        fail()

    with (
        torch._inductor.config.patch({inductor.SLOT: users}),
        pytest.raises(Exception, match="injected"),
    ):
        torch.compile(gated, backend="fusion_pass", options=CPU)(*operands())
    assert len(compiles) == 1


@torch.no_grad()
def test_one_faulty_attention_does_not_cost_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    check = rewrite.check_result
    calls = []

    def fail_first(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            fail()
        check(*args)

    def twice(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        first = gated(query, key, value, gate).view(2, 4, 1, 16)
        return gated(first, key, value, gate)

    monkeypatch.setattr(rewrite, "check_result", fail_first)
    found = torch.compile(twice, backend="fusion_pass", options=CPU)(*operands())
    expected = twice(*operands())
    exact = twice(*[x.double() for x in operands()])
    assert (found - exact).norm() <= 4 * (expected - exact).norm()
    assert counters["fusion_pass"]["fused"] == 1
    assert counters["fusion_pass"]["declined: internal-fault"] == 1


@torch.no_grad()
def test_a_dump_folder_that_cannot_be_written(tmp_path: Path) -> None:
    # A file in the way stops root as well, which a folder's mode does not.
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "dump")
    warn_once.cache_clear()
    results = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            torch._dynamo.reset()
            options = CPU | {"fusion_pass.dump": folder, "fusion_pass.strict": True}
            step = torch.compile(gated, backend="fusion_pass", options=options)
            results.append(step(*operands()))
    (warning,) = [w for w in caught if "fusion_pass" in str(w.message)]
    assert folder in str(warning.message)
    assert counters["fusion_pass"] == {"fused": 2}
    torch._dynamo.reset()
    step = torch.compile(gated, backend="fusion_pass", options=CPU)
    assert all(torch.equal(result, step(*operands())) for result in results)


def declined_on(limits: Callable[[torch.device], Limits], monkeypatch: pytest.MonkeyPatch) -> str:
    """The reason for which a Qwen-like attention is left alone on a GPU with such limits."""
    monkeypatch.setattr(eligibility, "device_limits", limits)
    monkeypatch.setattr(launch, "device_limits", limits)
    with fake_mode():
        module = trace(qwen("cudnn"), *qwen_inputs(CUDA))
    before = str(module.graph)
    assert run_pass(module) == 0
    assert str(module.graph) == before
    (reason,) = [key for key in counters["fusion_pass"] if key.startswith("declined: ")]
    return reason.removeprefix("declined: ")


def test_a_gpu_that_the_kernels_are_not_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def limits(device: torch.device) -> Limits:
        raise Unlaunchable("sm_75 is older than sm_80")

    assert declined_on(limits, monkeypatch) == "device"


def test_a_gpu_with_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits("cuda", 90, 132, 16 * 1024)
    assert declined_on(lambda device: limits, monkeypatch) == "device"


@pytest.mark.usefixtures("h200")
def test_an_operand_on_another_device() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        return merge_heads(attend("cudnn", query, key, value, None)) * torch.sigmoid(gate)

    shape = replace(CUDA, kv_heads=CUDA.query_heads)
    with fake_mode() as mode:
        inputs = (shape.query(), shape.stored(), shape.stored(), shape.gate())
        module = trace(model, *inputs)
        key = placeholder(module.graph, "key")
        key.meta["val"] = FakeTensor(mode, key.meta["val"].to("meta"), torch.device("cuda:1"))
    assert run_pass(module) == 0
    assert counters["fusion_pass"]["declined: mixed-devices"] == 1
