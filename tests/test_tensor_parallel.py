"""Two ranks over gloo: each fuses the attention of its own heads, and computes what one would."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.graphs import Shape, attend, fake_mode, merge_heads, run_pass, trace
from tests.ranks import run_ranks
from tests.sharded import SCENARIOS, is_as_exact, observe

ROOT = Path(__file__).parent.parent
LAYERS = 2

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_gloo_available(), reason="needs torch.distributed with gloo"
)


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(observe, "cpu", seconds=600)


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_rank_fuses_its_own_heads(name: str, seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank[name]["fusion_pass"] == {"fused": SCENARIOS[name][2]}
        assert is_as_exact(rank[name])


def test_ranks_with_other_settings_share_no_code(seen: list[dict[str, Any]]) -> None:
    for index, rank in enumerate(seen):
        assert is_as_exact(rank["settings by rank"])
        calls = rank["settings by rank"]["calls"]
        assert [fused for _, fused in calls] == [enabled for enabled, _ in calls]
        assert [fused for _, fused in calls] == [index == 0, index == 1, index == 0]
        # First nobody has it, then the other rank, and last this one as well.
        assert rank["settings by rank"]["cache hits"] == [0, 1, 1]


def example(folder: Path, *options: str) -> list[dict[str, Any]]:
    """What each of two ranks of the example reports, with the kernels kept in `folder`."""
    environment = os.environ | {
        "FUSION_PASS_DEVICES": "cpu",
        "FUSION_PASS_STRICT": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        # A rank that is aborted tells where it was.
        "PYTHONFAULTHANDLER": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "caches"),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        # Layers with equal graphs would be fused once and found in the cache then.
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = ["--nproc-per-node", "2", str(ROOT / "examples" / "tensor_parallel.py")]
    result = subprocess.run(
        [*launcher, *script, "--tiny", "--steps", "5", "--report", str(folder), *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_the_example_decodes_what_one_process_does(tmp_path: Path) -> None:
    """By the model's own plan, or by hand where transformers cannot shard."""
    pytest.importorskip("transformers")
    # transformers shards with it.
    plan = "auto" if importlib.util.find_spec("accelerate") else "manual"
    ranks = example(tmp_path, "--plan", plan)
    assert [rank["fusion_pass"] for rank in ranks] == [{"fused": LAYERS}] * 2
    assert all(rank["tokens equal"] for rank in ranks)


@pytest.mark.usefixtures("h200")
def test_layers_on_two_devices_in_one_graph() -> None:
    """What tests/gpu/test_two_gpus.py runs: each layer has its operands on its own device."""

    def model(*operands: Tensor) -> Tensor:
        first = merge_heads(attend("cudnn", *operands[:3], None)) * torch.sigmoid(operands[3])
        query = operands[4] + first.view(operands[4].shape).to(operands[4].device)
        return merge_heads(attend("cudnn", query, *operands[5:7], None)) * torch.sigmoid(
            operands[7]
        )

    with fake_mode():
        operands = []
        for device in ("cuda:0", "cuda:1"):
            shape = Shape(device=device, kv_heads=8)
            operands += [shape.query(), shape.stored(), shape.stored(), shape.gate()]
        module = trace(model, *operands)
    assert run_pass(module) == 2
    assert counters["fusion_pass"] == {"fused": 2}
