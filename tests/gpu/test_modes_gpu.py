"""How people really use a GPU: captured graphs, streams, C++ wrappers, packages, odd layouts."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import fusion_pass
from fusion_pass import lowering
from fusion_pass.ops import gated_decode_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

HEADS, KV_HEADS, HEAD_DIM, LENGTH = 16, 2, 256, 4096
STRICT = {"fusion_pass.strict": True}
KERNELS = ("gated_decode_split", "gated_decode_reduce")
ONCE = dict.fromkeys(KERNELS, 1)


def gated(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, mask: Tensor) -> Tensor:
    """Qwen3.5's attention over given K and V: `(B, 16, 1, D)` to `(B, 1, 16 * D)`."""
    times = query.shape[1] // key.shape[1]
    wide = [x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for x in (key, value)]
    output = F.scaled_dot_product_attention(query, *wide, attn_mask=mask)
    return output.transpose(1, 2).reshape(query.shape[0], 1, -1) * torch.sigmoid(gate)


def inputs(
    live: int = 600, *, seed: int = 0, batch: int = 2, length: int = LENGTH
) -> tuple[Tensor, ...]:
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16, generator=generator)

    mask = (torch.arange(length, device="cuda") < live).repeat(batch, 1)[:, None, None]
    return (
        draw(batch, HEADS, 1, HEAD_DIM),
        draw(batch, KV_HEADS, length, HEAD_DIM),
        draw(batch, KV_HEADS, length, HEAD_DIM),
        draw(batch, 1, HEADS * HEAD_DIM),
        mask,
    )


def compiled(function: Callable[..., Any] = gated, **options: Any) -> Callable[..., Any]:
    step: Callable[..., Any] = torch.compile(
        function, backend="fusion_pass", options=STRICT | options
    )
    return step


def check(found: Tensor, function: Callable[..., Any], *args: Tensor) -> None:
    """`found` is about as close to float64 as eager torch's result is."""
    exact = function(*[x.double() if x.is_floating_point() else x for x in args])
    # Not cuDNN: it faults on operands that are not aligned to 16 bytes.
    with sdpa_kernel([SDPBackend.MATH]):
        bound = 1.5 * (function(*args) - exact).norm()
    assert found.isfinite().all()
    assert (found - exact).norm() <= bound


def launches(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """How often each of our kernels runs on the GPU in one call."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        function(*args)
        torch.cuda.synchronize()
    names = [event.name for event in seen.events()]
    return dict(Counter(ours for name in names for ours in KERNELS if name.startswith(ours)))


def warm_up(step: Callable[..., Any], *args: Any) -> None:
    """Compile and run on a side stream, as a capture wants it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(*args)
    torch.cuda.current_stream().wait_stream(side)


def litter() -> None:
    """Leave NaN in freed memory, where stale scratch would be read."""
    del [torch.full((1 << 20,), math.nan, device="cuda") for _ in range(16)][:]


# CUDA graphs.


@torch.no_grad()
def test_a_graph_captured_by_hand_follows_its_buffers() -> None:
    step, held = compiled(), inputs()
    warm_up(step, *held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step(*held)
    for seed, live in enumerate((1, 4096, 600, 17, 1)):
        for old, new in zip(held, inputs(live, seed=seed), strict=True):
            old.copy_(new)
        litter()
        graph.replay()
        check(result, gated, *held)
    assert launches(graph.replay) == ONCE


@torch.no_grad()
def test_a_captured_batch_that_is_half_padding() -> None:
    held = inputs(batch=8)
    held[4][4:] = False
    step = compiled()
    warm_up(step, *held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step(*held)
    for live in (4096, 3):
        held[4][:4] = (torch.arange(LENGTH, device="cuda") < live)[None, None, None]
        litter()
        graph.replay()
        assert result.isfinite().all()
        check(result[:4], gated, *[x[:4] for x in held])


FIRST_CALL = """
import json, torch
from fusion_pass.ops import gated_decode_attention as operator
generator = torch.Generator(device="cuda").manual_seed(0)
draw = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16, generator=generator)
args = draw(2, 16, 1, 256), draw(2, 2, 512, 256), draw(2, 2, 512, 256), draw(2, 1, 16, 256), None
torch.cuda.synchronize()

def captured():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = operator(*args, scale=0.0625)
    graph.replay()
    torch.cuda.synchronize()
    return result

answer = {}
try:
    first = captured()
except Exception as error:
    answer["refused"], first = f"{type(error).__name__}: {error}", None
expected = operator(*args, scale=0.0625)
if first is not None:
    answer["first is right"] = torch.equal(first, expected)
answer["second is right"] = torch.equal(captured(), expected)
print(json.dumps(answer))
"""


def test_the_first_call_ever_inside_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles and loads the kernels meanwhile: it works, or says so, and can be retried."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    answer = script(FIRST_CALL, folder=Path(__file__).parents[2])
    print("first call inside a capture:", answer)
    assert answer.get("first is right", True)
    assert answer["second is right"]


class Decoder(nn.Module):
    """One decode step of one layer over its own static cache."""

    def __init__(self, batch: int, length: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        size = batch, KV_HEADS, length, HEAD_DIM
        self.project = nn.Linear(128, (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.register_buffer("keys", torch.zeros(size))
        self.register_buffer("values", torch.zeros(size))

    def forward(self, hidden: Tensor, position: Tensor) -> Tensor:
        heads = self.project(hidden).view(hidden.shape[0], 1, -1, HEAD_DIM).transpose(1, 2)
        query, gate, key, value = heads.split([HEADS, HEADS, KV_HEADS, KV_HEADS], dim=1)
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value)
        mask = (torch.arange(self.keys.shape[2], device=hidden.device) <= position)[
            None, None, None
        ]
        gate = gate.transpose(1, 2).reshape(hidden.shape[0], 1, -1)
        return gated(query, self.keys, self.values, gate, mask)


@torch.no_grad()
def test_cuda_graph_trees_are_not_skipped() -> None:
    """A static cache that is written at every step, and a second geometry that is captured anew."""
    for batch, length in ((2, 512), (3, 1024)):
        model = Decoder(batch, length).to("cuda", torch.bfloat16)
        twin = Decoder(batch, length).to("cuda", torch.bfloat16)
        exact = Decoder(batch, length).to("cuda", torch.float64)
        exact.load_state_dict(model.state_dict())
        with fusion_pass.enable(strict=True):
            step = torch.compile(model, mode="reduce-overhead")
            errors, bounds = [], []
            for index in range(10):
                torch.compiler.cudagraph_mark_step_begin()
                hidden = torch.randn(batch, 1, 128, device="cuda", dtype=torch.bfloat16)
                position = torch.tensor([index], device="cuda")
                found = step(hidden, position).clone()
                wanted = exact(hidden.double(), position)
                errors.append((found - wanted).norm())
                bounds.append((twin(hidden, position) - wanted).norm())
                litter()
            assert sum(errors) <= 1.5 * sum(bounds)
            torch.compiler.cudagraph_mark_step_begin()
            assert launches(step, hidden, position) == ONCE
    assert counters["fusion_pass"] == {"fused": 2}
    assert not counters["inductor"]["cudagraph_skips"]


def of_counted_rows(*held: Tensor) -> Tensor:
    """The attention of as many rows of a batch as are `True` in the last operand."""
    *whole, active = held
    rows = int(active.sum().item())
    torch._check(rows >= 2)
    torch._check(rows <= 8)
    return gated(*(x.narrow(0, 0, rows) for x in whole))


@torch.no_grad()
def test_the_gpu_counts_the_rows() -> None:
    """How large a buffer is is known in the middle of the step.

    Not in CUDA graphs: Inductor's, parted where the host reads the number, hand None to the second
    part, with and without the pass (torch 2.11 to 2.13).
    """
    step, held = compiled(of_counted_rows), inputs(batch=8)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for rows in (3, 8, 2, 3, 3):
            active = torch.arange(8, device="cuda") < rows
            check(step(*held, active), of_counted_rows, *held, active)
    assert counters["fusion_pass"] == {"fused": 1}


# Streams and devices.


@torch.no_grad()
def test_a_side_stream_with_a_slow_producer() -> None:
    step = compiled()
    sets = [inputs(seed=seed) for seed in range(2)]
    expected = [step(*args) for args in sets]
    held = [x.clone() for x in sets[0]]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    results = []
    with torch.cuda.stream(side):
        for turn in range(100):
            # Launched on another stream, the kernels would read what was there before.
            torch.cuda._sleep(100_000)
            for old, new in zip(held, sets[turn % 2], strict=True):
                old.copy_(new)
            results.append(step(*held) + 0.0)
    torch.cuda.current_stream().wait_stream(side)
    assert all(torch.equal(x, expected[turn % 2]) for turn, x in enumerate(results))


@torch.no_grad()
@pytest.mark.parametrize("way", ["compiled", "operator"])
def test_two_streams_at_once(way: str) -> None:
    def operator(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, mask: Tensor) -> Tensor:
        gate = gate.view(2, 1, HEADS, HEAD_DIM)
        return gated_decode_attention(query, key, value, gate, mask, scale=1 / 16)

    step = compiled() if way == "compiled" else operator
    sets = [inputs(seed=seed, live=live) for seed, live in enumerate((600, 4096))]
    expected = [step(*args) for args in sets]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    results: list[list[Tensor]] = [[], []]
    for _ in range(100):
        for stream, args, seen in zip(streams, sets, results, strict=True):
            with torch.cuda.stream(stream):
                seen.append(step(*args))
    torch.cuda.synchronize()
    for seen, wanted in zip(results, expected, strict=True):
        assert all(torch.equal(x, wanted) for x in seen)


@torch.no_grad()
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_operands_on_a_gpu_that_is_not_the_current_one() -> None:
    args = [x.to("cuda:1") for x in inputs()]
    gate = args[3].view(2, 1, HEADS, HEAD_DIM)
    torch.cuda.set_device(0)
    found = gated_decode_attention(*args[:3], gate, args[4], scale=1 / 16)
    check(found.view(2, 1, -1), gated, *args)
    step = compiled()
    check(step(*args), gated, *args)
    # The same code for the other one, after the first.
    own = inputs()
    check(step(*own), gated, *own)
    assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="cuda:1"):
        gated_decode_attention(own[0], *args[1:3], gate, args[4], scale=1 / 16)


# Wrappers and packages.

QUICK_CPP = {"aot_inductor.compile_wrapper_opt_level": "O0"}


@torch.no_grad()
def test_cpp_wrapper_launches_the_kernels() -> None:
    args = inputs()
    with torch._inductor.config.patch(QUICK_CPP):
        step = compiled(cpp_wrapper=True)
        check(step(*args), gated, *args)
    assert counters["fusion_pass"] == {"fused": 1}
    assert launches(step, *args) == ONCE


MAKE_PACKAGE = """
import json, sys, torch
from torch import nn
from torch._dynamo.utils import counters
import fusion_pass
from tests.gpu.test_modes_gpu import QUICK_CPP, check, gated, inputs

package, data, dynamic = sys.argv[1], sys.argv[2], sys.argv[3] == "dynamic"

class Model(nn.Module):
    def forward(self, *args):
        return gated(*args)

# What export finds out by itself: SDPA wants a multiple of 16, and a Dim cannot say what the
# strides of a repeat guard.
free = torch.export.Dim.AUTO
shapes = ((None, {2: free}, {2: free}, None, {3: free}),) if dynamic else None
with torch.no_grad():
    program = torch.export.export(Model(), inputs(), dynamic_shapes=shapes)
    with torch._inductor.config.patch(QUICK_CPP), fusion_pass.enable(strict=True):
        torch._inductor.aoti_compile_and_package(program, package_path=package)
    step = torch._inductor.aoti_load_package(package)
    calls = []
    for length in (4096, 1008) if dynamic else (4096,):
        args = inputs(length=length)
        calls.append((args, step(*args)))
        check(calls[-1][1], gated, *args)
torch.save(calls, data)
print(json.dumps(counters["fusion_pass"]))
"""

FROM_PACKAGE = """
import json, sys, torch
from torch.profiler import ProfilerActivity, profile
package, data = sys.argv[1:]
step = torch._inductor.aoti_load_package(package)
equal = [torch.equal(step(*args), expected) for args, expected in torch.load(data)]
args = torch.load(data)[0][0]
with profile(activities=[ProfilerActivity.CUDA]) as seen:
    step(*args)
    torch.cuda.synchronize()
names = [event.name for event in seen.events()]
print(json.dumps({
    "equal": all(equal),
    "imported": "fusion_pass" in sys.modules,
    "launches": [sum(name.startswith(ours) for name in names)
                 for ours in ("gated_decode_split", "gated_decode_reduce")],
}))
"""


def script(source: str, *arguments: str, folder: Path) -> Any:
    """What a Python process of its own prints last, as JSON; a crash costs that process alone."""
    result = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", source, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stderr}"
    return json.loads(result.stdout.splitlines()[-1])


STOCK_PACKAGE = """
import sys, torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x + 1

package = sys.argv[1]
program = torch.export.export(Model(), (torch.zeros(2),))
torch._inductor.aoti_compile_and_package(program, package_path=package)
print(torch._inductor.aoti_load_package(package)(torch.zeros(2)).tolist())
"""


@pytest.fixture(scope="module")
def _packages_load(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where torch's own package of `x + 1` on the CPU does not survive being loaded.

    So it is where g++ links libstdc++ statically: std::regex, by which a package reads its device,
    then crashes beside torch's own. LD_PRELOAD of libstdc++.so.6 helps.
    """
    folder = tmp_path_factory.mktemp("stock")
    command = [sys.executable, "-c", STOCK_PACKAGE, str(folder / "stock.pt2")]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode < 0:
        pytest.skip(f"a package of torch alone dies here of signal {-result.returncode}")


@pytest.mark.usefixtures("_packages_load")
@pytest.mark.parametrize("shapes", ["static", "dynamic"])
def test_a_package_holds_the_kernels(shapes: str, tmp_path: Path) -> None:
    """It runs in a process that has never heard of fusion_pass.

    The C++ launcher sets no launch attribute (from torch 2.15 on only if asked): the reduce starts
    when the split has ended, and its wait for it has nothing to wait for.
    """
    files = str(tmp_path / "model.pt2"), str(tmp_path / "data.pt")
    root = Path(__file__).parents[2]
    assert script(MAKE_PACKAGE, *files, shapes, folder=root) == {"fused": 1}
    answer = script(FROM_PACKAGE, *files, folder=tmp_path)
    assert answer == {"equal": True, "imported": False, "launches": [1, 1]}


# Layouts and memory.


@torch.no_grad()
@pytest.mark.parametrize("padding", [True, False], ids=["padded", "unpadded"])
def test_operands_that_inductor_lays_out(padding: bool) -> None:
    """Matmuls of odd widths, whose rows Inductor may pad, and pointwise over transposed tensors."""

    def model(
        hidden: Tensor, into_query: Tensor, into_gate: Tensor, prefix: Tensor, into_key: Tensor,
        value: Tensor, mask: Tensor,
    ) -> Tensor:  # fmt: skip
        query = (hidden @ into_query)[..., 1:4097].view(2, 1, HEADS, HEAD_DIM).transpose(1, 2)
        gate = (hidden @ into_gate)[..., :4096]
        key = (prefix @ into_key).view(2, 777, KV_HEADS, 257)[..., :HEAD_DIM].transpose(1, 2)
        value = torch.sin(value.permute(3, 1, 2, 0)).permute(3, 1, 2, 0)
        return gated(query, key, value, gate, mask)

    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        noise = torch.randn(*size, device="cuda", dtype=torch.bfloat16, generator=generator)
        return noise * scale

    args = (
        draw(2, 1, 64),
        draw(64, 4099, scale=0.125),
        draw(64, 4097, scale=0.125),
        draw(2, 777, 64),
        draw(64, KV_HEADS * 257, scale=0.125),
        draw(2, KV_HEADS, 777, HEAD_DIM),
        (torch.arange(777, device="cuda") < 700).repeat(2, 1)[:, None, None],
    )
    step = compiled(model, comprehensive_padding=padding)
    check(step(*args), model, *args)
    assert counters["fusion_pass"] == {"fused": 1}
    assert launches(step, *args) == ONCE


def stored(layout: str) -> tuple[Tensor, Tensor]:
    """K and V `(2, 2, 4096, 256)` as views of caches of several kinds."""
    generator = torch.Generator(device="cuda").manual_seed(3)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16, generator=generator)

    if layout == "contiguous":
        return draw(2, 2, LENGTH, 256), draw(2, 2, LENGTH, 256)
    if layout == "tokens-first":
        return draw(2, LENGTH, 2, 256).transpose(1, 2), draw(2, LENGTH, 2, 256).transpose(1, 2)
    if layout == "interleaved":
        key, value = draw(2, LENGTH, 3, 2, 2, 256)[:, :, 1].unbind(2)
        return key.transpose(1, 2), value.transpose(1, 2)
    assert layout == "shared-by-the-batch"
    return draw(1, 2, LENGTH, 256).expand(2, -1, -1, -1), draw(1, 2, LENGTH, 256).expand(
        2, -1, -1, -1
    )


def peak(step: Callable[..., Any], *args: Tensor) -> int:
    """Bytes that a call needs at most beyond what is allocated before it."""
    step(*args)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(*args)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@torch.no_grad()
@pytest.mark.parametrize(
    "layout", ["contiguous", "tokens-first", "interleaved", "shared-by-the-batch"]
)
def test_k_and_v_are_read_where_they_are(layout: str) -> None:
    query, *_, gate, mask = inputs()
    args = (query, *stored(layout), gate, mask)
    copies = [x.clone() for x in args]
    one_of_them = 2 * KV_HEADS * LENGTH * HEAD_DIM * 2
    step = compiled()
    # What remains is the fp32 scratch of the splits; a copy of K or V alone would be over this.
    assert peak(step, *args) < one_of_them / 2
    check(step(*args), gated, *args)
    assert all(torch.equal(x, copy) for x, copy in zip(args, copies, strict=True))
    if layout == "contiguous":
        torch._dynamo.reset()
        assert peak(torch.compile(gated), *args) > one_of_them


# Faults.


@torch.no_grad()
def test_a_kernel_that_needs_more_than_the_gpu_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args = inputs()
    stock = torch.compile(gated)(*args)
    torch._dynamo.reset()
    choose = lowering.launch.choose

    def too_large(*problem: Any) -> Any:
        return dataclasses.replace(choose(*problem), block_n=256, split_stages=3)

    monkeypatch.setattr(lowering.launch, "choose", too_large)
    with caplog.at_level(logging.WARNING, "fusion_pass"):
        found = torch.compile(gated, backend="fusion_pass")(*args)
    assert torch.equal(found, stock)
    assert counters["fusion_pass"] == {"declined": 1, "declined: internal-fault": 1}
    assert "without the fusion" in caplog.text
