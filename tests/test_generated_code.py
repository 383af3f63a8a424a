"""The code that Inductor generates for a GPU, on a machine without one, on every torch."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch._inductor.scheduler
from torch import Tensor
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode

from fusion_pass import launch, lowering
from fusion_pass.launch import Limits
from tests.graphs import fake_mode, symbolic, trace

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402

KERNELS = ["gated_decode_split", "gated_decode_reduce"]


@pytest.fixture(autouse=True)
def h200_for_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor and the launcher ask of a GPU is answered as by an H200."""

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    properties = DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=132,
        cc=90,
        major=9,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        warp_size=32,
    )
    limits = Limits("cuda", 90, 132, 232448)
    gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(), raising=False)
    monkeypatch.setattr(DeviceProperties, "create", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: gpu)
    monkeypatch.setattr(torch._inductor.scheduler, "has_triton", lambda *device: True)
    monkeypatch.setattr(launch, "device_limits", lambda device: limits)


def decode(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, mask: Tensor) -> Tensor:
    return lowering.OPERATOR(
        query,
        key,
        value,
        gate,
        mask,
        scale=1 / 16,
        mask_fill=-math.inf,
        masked_row="zero",
        numerics="compiled",
    )


def operands(mode: FakeTensorMode, dynamic: bool = False) -> list[Tensor]:
    """Query, K, V, gate and mask of Qwen3.5's geometry; `dynamic` makes the length a symbol."""
    length: Any = symbolic(mode, torch.empty(4096), (4096,)).shape[0] if dynamic else 4096
    sizes = (2, 16, 1, 256), (2, 2, length, 256), (2, 2, length, 256), (2, 1, 16, 256)
    with mode:
        made = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes]
        return [*made, torch.empty(2, 1, 1, length, dtype=torch.bool, device="cuda")]


def generated(inputs: list[Tensor], mode: FakeTensorMode) -> str:
    """The wrapper that Inductor writes for the operator on these inputs."""
    lowering.register()
    module = trace(decode, *inputs)
    graph = GraphLowering(
        module, example_inputs=inputs, shape_env=mode.shape_env, is_inference=True
    )
    with (
        V.set_debug_handler(DebugContext()),
        V.set_graph_handler(graph),
        V.set_fake_mode(mode),
        V.set_real_inputs(inputs),
    ):
        graph.run(*inputs)
        code: Any = graph.codegen()[0]
    return getattr(code, "value", code)


def launched(code: str) -> list[str]:
    return re.findall(r"(\w+?)_\d+\.run\(", code)


@pytest.mark.parametrize("length", ["static", "dynamic"])
def test_it_launches_the_kernels_itself(length: str) -> None:
    mode = fake_mode(symbolic=True)
    code = generated(operands(mode, dynamic=length == "dynamic"), mode)
    compile(code, "generated", "exec")
    assert launched(code) == KERNELS
    # Under these names a profile shows them.
    for kernel in KERNELS:
        label = f"{kernel}_d256_bf16"
        assert f"async_compile.triton('{label}'" in code
        assert f"def {label}(" in code
    assert "torch.ops.fusion_pass" not in code
    # K and V are read where they are: what is allocated is the output and float32 scratch.
    allocated = re.findall(r"empty_strided_cuda\(\((.*?)\), .*?(torch\.\w+)\)", code)
    rest = [size for size, dtype in allocated if dtype != "torch.float32"]
    assert rest == ["2, 1, 16, 256"]


def test_warps_and_launches_are_as_chosen() -> None:
    mode = fake_mode(symbolic=True)
    code = generated(operands(mode), mode)
    # Inductor drops warps and stages that are not an autotuner's configuration.
    configs = re.findall(r"configs=\[(.*?)\],\n", code)
    assert len(configs) == 2
    assert all("'num_warps'" in config and "'num_stages'" in config for config in configs)
    asked = [code[: match.start()] for match in re.finditer("'launch_pdl': True", code)]
    assert len(asked) == 1
    assert asked[0].count("async_compile.triton(") == 2
