"""Paged attention of whole programs on a GPU: the pattern, the gather form, and the engine."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from fusion_pass import enable
from tests.test_engine import load
from tests.test_gather import GATHERS, MASKS, case, model
from tests.test_paged_pattern import GATES, operands

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

ops = torch.ops.fusion_pass


def moved(inputs: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    return [x.to("cuda", dtype) if x.is_floating_point() else x.cuda() for x in inputs]


def compiled(function: Any, *inputs: Tensor, **settings: Any) -> tuple[Tensor, str]:
    with torch.no_grad(), enable(strict=True, **settings):
        found, codes = run_and_get_code(torch.compile(function), *inputs)
    assert counters["fusion_pass"] == {"fused": 1}
    return found, "\n".join(codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["flat", "by-head", "one-a-head", "windowed", "table"])
def test_the_pattern_is_bitwise_under_eager_numerics(name: str, dtype: torch.dtype) -> None:
    """The same kernels un-gated, then torch's sigmoid and multiplication."""
    inputs = moved(operands(dtype), dtype)
    found, code = compiled(GATES[name], *inputs, numerics="eager")
    assert torch.equal(found, GATES[name](*inputs))
    assert "torch.ops.fusion_pass" not in code
    assert len(re.findall(r"paged_decode_reduce_\d+\.run\(", code)) == 1


@pytest.mark.parametrize("gather", ["index", "index_select", "head-major", "pages-of-heads"])
@pytest.mark.parametrize("mask", ["none", "lt"])
def test_gathered_k_and_v_are_read_through_the_table(gather: str, mask: str) -> None:
    inputs = moved(case().all(), torch.float32)
    with torch.device("cuda"):
        found, code = compiled(model(GATHERS[gather], MASKS[mask]), *inputs)
        exact = model(GATHERS[gather], MASKS[mask])(
            *[x.double() if x.is_floating_point() else x for x in inputs]
        )
    torch.testing.assert_close(found, exact.float(), rtol=1e-4, atol=1e-5)
    assert "torch.ops.fusion_pass" not in code
    assert len(re.findall(r"paged_decode_split_\d+\.run\(", code)) == 1
    # No buffer of K or V as they would be gathered.
    for shape in ("3, 5, 4, 2, 16", "15, 4, 2, 16", "3, 2, 20, 16", "3, 20, 2, 16"):
        assert f"({shape})" not in code


def test_changed_lengths_under_one_cuda_graph() -> None:
    inputs = moved(case().all(), torch.float32)
    forward = model(GATHERS["index"], MASKS["lt"])
    with torch.no_grad(), torch.device("cuda"), enable(strict=True):
        step = torch.compile(forward, mode="reduce-overhead")
        for lengths in ([7, 20, 1], [1, 2, 3], [20, 20, 20], [5, 1, 19], [12, 9, 4]):
            inputs[4] = torch.tensor(lengths)
            found = step(*inputs).clone()
            torch.testing.assert_close(found, forward(*inputs), rtol=1e-3, atol=1e-4)
    assert counters["fusion_pass"] == {"fused": 1}
    assert not counters["inductor"]["cudagraph_skips"]


def test_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """One CUDA graph a batch size; `main` compares the tokens with the dense model's."""
    engine = load("engine")
    engine.main()
    told = capsys.readouterr().out
    assert f"{len(engine.BATCH_SIZES)} batch sizes" in told
    assert counters["fusion_pass"] == {"fused": engine.LAYERS * len(engine.BATCH_SIZES)}
