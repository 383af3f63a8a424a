"""Two GPUs: ranks over NCCL, layers on two devices of one process, and the device not current."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from fusion_pass.ops import gated_decode_attention
from tests.ranks import run_ranks
from tests.sharded import SCENARIOS, is_as_exact, observe

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

ROOT = Path(__file__).parent.parent.parent
STRICT = {"fusion_pass.strict": True}
HEADS, KV_HEADS, HEAD_DIM, LENGTH, BATCH = 16, 2, 256, 1024, 2
STEPS, MODEL_LAYERS = 4, 2
OVERLAP = "reorder_for_compute_comm_overlap"


@pytest.fixture(autouse=True)
def _first_gpu_stays_current() -> Iterator[None]:
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0


# Ranks.


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(observe, "cuda", seconds=120)


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_rank_fuses_its_own_heads(name: str, seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank[name]["fusion_pass"] == {"fused": SCENARIOS[name][2]}
        assert is_as_exact(rank[name])


def test_ranks_with_other_settings_share_no_code(seen: list[dict[str, Any]]) -> None:
    for index, rank in enumerate(seen):
        assert is_as_exact(rank["settings by rank"])
        calls = rank["settings by rank"]["calls"]
        assert [fused for _, fused in calls] == [index == 0, index == 1, index == 0]


def test_the_example_decodes_what_one_gpu_does(tmp_path: Path) -> None:
    """Float32, in which equally good sums of the ranks' parts choose the same tokens."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = ["--nproc-per-node", "2", str(ROOT / "examples" / "tensor_parallel.py")]
    result = subprocess.run(
        [*launcher, *script, "--report", str(tmp_path)],
        # NVLink multicast stays off as the machine's environment has it.
        env=os.environ
        | {
            "FUSION_PASS_STRICT": "1",
            "PYTHONPATH": str(ROOT),
            # Layers with equal graphs would be fused once and found in the cache then.
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    for rank in range(2):
        answer = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert answer["fusion_pass"] == {"fused": 4}
        assert answer["tokens equal"]


@torch.no_grad()
def decode_in_bfloat16(way: str, device: torch.device) -> dict[str, Any]:
    """Norms of the errors of the logits of a sharded model, by stock and by one way to fuse it."""
    from examples.tensor_parallel import build, decode, shard_by_hand

    whole = build(device, torch.bfloat16, num_hidden_layers=MODEL_LAYERS)
    prompt = torch.randint(1, 256, (BATCH, 20), generator=torch.Generator().manual_seed(1))
    prompt = prompt.to(device)
    exact_model = copy.deepcopy(whole).double()
    forced, exact = decode(exact_model, exact_model, prompt, STEPS)
    sharded = shard_by_hand(whole, init_device_mesh("cuda", (dist.get_world_size(),)))
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "stock": ("inductor", {}),
        "fused": ("fusion_pass", STRICT),
        "captured": ("fusion_pass", STRICT | {"triton.cudagraphs": True, OVERLAP: True}),
    }
    seen: dict[str, Any] = {}
    for name in ("stock", way):
        backend, options = ways[name]
        torch._dynamo.reset()
        counters.clear()
        uncached = torch._inductor.config.patch(fx_graph_cache=False)
        with uncached, torch._functorch.config.patch(enable_autograd_cache=False):
            step = torch.compile(sharded, backend=backend, options=options)
            _, logits = decode(sharded, cloned(step), prompt, STEPS, forced=forced)
        # The first logits are the prefill's, which is not compiled.
        seen[name] = {
            "error": float((logits - exact)[:, 1:].norm()),
            "fused": counters["fusion_pass"]["fused"],
            "skips": counters["inductor"]["cudagraph_skips"],
        }
        dist.barrier()
    return seen


def cloned(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` with results that the next step does not overwrite."""

    def call(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        output = step(*args, **kwargs)
        output.logits = output.logits.clone()
        return output

    return call


@pytest.mark.parametrize("way", ["fused", "captured"])
def test_the_logits_are_as_exact_as_stocks(way: str) -> None:
    pytest.importorskip("transformers")
    for rank in run_ranks(partial(decode_in_bfloat16, way), "cuda", seconds=95):
        print(rank)
        assert rank["stock"]["fused"] == 0
        assert rank[way]["fused"] == MODEL_LAYERS
        assert rank[way]["error"] <= 1.5 * rank["stock"]["error"]


# Two devices in one process.


def gated(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    """Qwen3.5's attention: `(B, Hq, 1, D)` to `(B, 1, Hq * D)`."""
    times = query.shape[1] // key.shape[1]
    wide = [x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for x in (key, value)]
    output = F.scaled_dot_product_attention(query, *wide)
    return output.transpose(1, 2).reshape(query.shape[0], 1, -1) * torch.sigmoid(gate)


def inputs(device: str, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    stored = (BATCH, KV_HEADS, LENGTH, HEAD_DIM)
    sizes = (BATCH, HEADS, 1, HEAD_DIM), stored, stored, (BATCH, 1, HEADS * HEAD_DIM)
    drawn = [torch.randn(size, generator=generator).bfloat16() for size in sizes]
    return tuple(x.to(device) for x in drawn)


def compiled(function: Callable[..., Any] = gated) -> Callable[..., Any]:
    step: Callable[..., Any] = torch.compile(function, backend="fusion_pass", options=STRICT)
    return step


def check(found: Tensor, function: Callable[..., Any], *args: Tensor) -> None:
    """`found` is where the inputs are, and as close to float64 as eager torch's result is."""
    exact = function(*[x.double() for x in args])
    assert found.device == exact.device
    assert (found - exact).norm() <= 1.5 * (function(*args) - exact).norm()


@torch.no_grad()
def test_the_operator_on_the_gpu_that_is_not_current() -> None:
    args = inputs("cuda:1")
    query, key, value, gate = args
    found = gated_decode_attention(
        query, key, value, gate.view(BATCH, 1, HEADS, HEAD_DIM), None, scale=HEAD_DIM**-0.5
    )
    check(found.view(BATCH, 1, -1), gated, *args)


@torch.no_grad()
@pytest.mark.parametrize("order", [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")])
def test_one_function_on_one_gpu_then_on_the_other(order: tuple[str, str]) -> None:
    step = compiled()
    for device in (*order, *order):
        args = inputs(device)
        check(step(*args), gated, *args)
    assert counters["fusion_pass"] == {"fused": 2}


@torch.no_grad()
def test_current_device_one_and_operands_on_zero() -> None:
    args = inputs("cuda:0")
    step = compiled()
    with torch.cuda.device(1):
        check(step(*args), gated, *args)
        assert torch.cuda.current_device() == 1


def two_layers(*operands: Tensor) -> Tensor:
    """A layer on the device of the first four operands, then one on that of the last four."""
    first = gated(*operands[:4])
    query = operands[4] + first.view(operands[4].shape).to(operands[4].device)
    return gated(query, *operands[5:])


@torch.no_grad()
@pytest.mark.parametrize("cudagraphs", [False, True], ids=["plain", "cudagraphs"])
def test_layers_on_two_gpus_in_one_graph(cudagraphs: bool) -> None:
    args = (*inputs("cuda:0"), *inputs("cuda:1", seed=1))
    step: Callable[..., Tensor] = torch.compile(
        two_layers,
        backend="fusion_pass",
        fullgraph=True,
        options=STRICT | {"triton.cudagraphs": cudagraphs},
    )
    for _ in range(3):
        check(step(*args), two_layers, *args)
    assert counters["fusion_pass"] == {"fused": 2}


class Stage(nn.Module):
    """One pipeline stage with its own K and V."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.project = nn.Linear(128, 2 * HEADS * HEAD_DIM, bias=False)
        self.output = nn.Linear(HEADS * HEAD_DIM, 128, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(BATCH, KV_HEADS, LENGTH, HEAD_DIM))

    def forward(self, hidden: Tensor) -> Tensor:
        query, gate = self.project(hidden).chunk(2, -1)
        query = query.view(BATCH, 1, HEADS, HEAD_DIM).transpose(1, 2)
        result: Tensor = self.output(gated(query, self.keys, self.values, gate))
        return result


@torch.no_grad()
def test_pipeline_stages_on_two_gpus() -> None:
    """Each stage is a graph of its own; the second gets what the first made."""
    stages = [Stage(seed).to(f"cuda:{seed}", torch.bfloat16) for seed in range(2)]
    exact = [copy.deepcopy(stage).double() for stage in stages]
    steps = [compiled(stage) for stage in stages]

    def run(layers: Any, hidden: Tensor) -> Tensor:
        return layers[1](layers[0](hidden).to("cuda:1"))

    found, eager, wanted = [], [], []
    for _ in range(3):
        hidden = torch.randn(BATCH, 1, 128, device="cuda:0", dtype=torch.bfloat16)
        found.append(run(steps, hidden))
        eager.append(run(stages, hidden))
        wanted.append(run(exact, hidden.double()))
    errors = [(torch.stack(x) - torch.stack(wanted)).norm() for x in (found, eager)]
    assert errors[0] <= 1.5 * errors[1]
    assert counters["fusion_pass"] == {"fused": 2}


@torch.no_grad()
def test_operands_on_two_gpus_are_refused() -> None:
    """As torch refuses them; a gate that is moved within the graph is none of these."""
    near, far = inputs("cuda:0"), inputs("cuda:1")
    with pytest.raises(ValueError, match="cuda:1"):
        gated_decode_attention(
            near[0],
            far[1],
            far[2],
            near[3].view(BATCH, 1, HEADS, HEAD_DIM),
            None,
            scale=HEAD_DIM**-0.5,
        )
    with pytest.raises(Exception, match="cuda"):
        compiled()(near[0], far[1], far[2], near[3])

    def moved(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        return gated(query, key, value, gate.to(query.device))

    torch._dynamo.reset()
    counters.clear()
    found = compiled(moved)(*near[:3], far[3])
    check(found, moved, *near[:3], far[3])
    assert counters["fusion_pass"] == {"fused": 1}
