"""Unmodified models on a GPU: everything fuses, as accurate as stock, as native Triton launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from fusion_pass import GatedAttentionPass, enable
from tests.models import FAMILIES, build, dynamic_cache, greedy, in_float64, static_cache

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GEOMETRY: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 512,
}


def launches(function: Any, *args: Any, **keywords: Any) -> Counter[str]:
    """How often each of our kernels runs on the GPU in one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function(*args, **keywords)
        torch.cuda.synchronize()
    names = (event.name for event in profile.events())
    ours = ("gated_decode_split", "gated_decode_reduce")
    return Counter(kernel for name in names for kernel in ours if name.startswith(kernel))


class GatedAttention(nn.Module):
    """Qwen3.5's attention over given K and V."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, mask: Tensor | None
    ) -> Tensor:
        times = query.shape[1] // key.shape[1]
        wide = [x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for x in (key, value)]
        output = F.scaled_dot_product_attention(query, *wide, attn_mask=mask)
        output = output.transpose(1, 2).reshape(query.shape[0], 1, -1)
        return output * torch.sigmoid(gate)


def inputs(dtype: torch.dtype, length: int = 4096, live: int | None = 600) -> list[Any]:
    generator = torch.Generator(device="cuda").manual_seed(1)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=dtype, generator=generator)

    mask = None
    if live is not None:
        mask = (torch.arange(length, device="cuda") < live).expand(2, 1, 1, length)
    return [
        draw(2, 16, 1, 256),
        draw(2, 2, length, 256),
        draw(2, 2, length, 256),
        draw(2, 1, 16 * 256),
        mask,
    ]


def error(found: Tensor, args: list[Any]) -> float:
    exact = GatedAttention()(
        *[x.double() if x is not None and x.is_floating_point() else x for x in args]
    )
    return float((found.double() - exact).norm() / exact.norm())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("live", [None, 1, 600, 4096])
def test_error_is_at_most_stocks(dtype: torch.dtype, live: int | None) -> None:
    args = inputs(dtype, live=live)
    stock = torch.compile(GatedAttention())(*args)
    torch._dynamo.reset()
    found = torch.compile(GatedAttention(), backend="fusion_pass")(*args)
    assert counters["fusion_pass"] == {"fused": 1}
    # A hundredth for the luck of single roundings.
    assert error(found, args) <= 1.01 * error(stock, args)


@torch.no_grad()
@pytest.mark.parametrize("live", [None, 600])
def test_the_generated_code_launches_the_kernels_itself(live: int | None) -> None:
    step = torch.compile(GatedAttention(), backend="fusion_pass")
    args = inputs(torch.bfloat16, live=live)
    _, (code,) = run_and_get_code(step, *args)
    assert "torch.ops.fusion_pass" not in code
    assert code.count("gated_decode_split_0.run(") == 1
    assert code.count("gated_decode_reduce_1.run(") == 1
    # K and V are read where they are: no buffer of their size is made.
    assert "(2, 16, 4096, 256)" not in code
    assert "(2, 2, 8, 4096, 256)" not in code
    # Inductor drops warps and stages that are not an autotuner's configuration.
    assert "'num_warps'" in code
    assert "configs=[]" not in code
    assert launches(step, *args) == {"gated_decode_split": 1, "gated_decode_reduce": 1}


@torch.no_grad()
def test_inputs_stay_as_they_were() -> None:
    args = inputs(torch.bfloat16)
    copies = [x.clone() for x in args]
    torch.compile(GatedAttention(), backend="fusion_pass")(*args)
    assert all(torch.equal(x, copy) for x, copy in zip(args, copies, strict=True))


@torch.no_grad()
def test_other_ways_in() -> None:
    args = inputs(torch.bfloat16)
    expected = torch.compile(GatedAttention(), backend="fusion_pass")(*args)
    torch._dynamo.reset()
    options: dict[str, Any] = {"post_grad_custom_pre_pass": GatedAttentionPass()}
    assert torch.equal(torch.compile(GatedAttention(), options=options)(*args), expected)
    torch._dynamo.reset()
    with enable():
        assert torch.equal(torch.compile(GatedAttention())(*args), expected)
    assert counters["fusion_pass"] == {"fused": 3}


@torch.no_grad()
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(mode: str) -> None:
    step = torch.compile(GatedAttention(), backend="fusion_pass", mode=mode)
    for seed_length in (4096, 4096, 4096):
        args = inputs(torch.bfloat16, seed_length)
        found = step(*args).clone()
        assert error(found, args) < 4e-3
    assert counters["fusion_pass"]["fused"] == 1
    assert not counters["inductor"]["cudagraph_skips"]


@torch.no_grad()
def test_dynamic_length() -> None:
    step = torch.compile(GatedAttention(), backend="fusion_pass", dynamic=True)
    for length in (7, 100, 1000, 5000):
        args = inputs(torch.bfloat16, length, live=None)
        assert error(step(*args), args) < 4e-3
    assert counters["stats"]["unique_graphs"] <= 2


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_decoding_by_hand(family: str, cache: str) -> None:
    model = build(family, **GEOMETRY).to("cuda", torch.bfloat16)
    prompt = torch.randint(0, 512, (2, 9), device="cuda")

    def make() -> Any:
        return static_cache(model, 128) if cache == "static" else dynamic_cache(model)

    _, stock = greedy(model, prompt, 2, make(), torch.compile(model))
    torch._dynamo.reset()
    step = torch.compile(model, backend="fusion_pass")
    _, fused = greedy(model, prompt, 2, make(), step)
    assert counters["fusion_pass"] == {"fused": 2}
    exact = greedy(in_float64(model), prompt, 2, make())[1]
    assert fused.isfinite().all()
    assert (fused - exact).norm() <= 1.5 * (stock - exact).norm()


@torch.no_grad()
def test_generate_with_a_static_cache_and_cuda_graphs() -> None:
    from transformers import CompileConfig

    prompt = torch.randint(0, 512, (2, 9), device="cuda")
    settings: dict[str, Any] = {
        "max_new_tokens": 8,
        "min_new_tokens": 8,
        "do_sample": False,
        "cache_implementation": "static",
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    results = {}
    for backend in ("inductor", "fusion_pass"):
        torch._dynamo.reset()
        counters.clear()
        # A model keeps what it has compiled, whatever the configuration of a later call.
        model = build("qwen3_5", **GEOMETRY, num_hidden_layers=4).to("cuda", torch.bfloat16)
        config = CompileConfig(backend=backend, mode="reduce-overhead")
        results[backend] = model.generate(prompt, compile_config=config, **settings)
        assert counters["fusion_pass"]["fused"] == (4 if backend == "fusion_pass" else 0)
    fused = torch.stack(results["fusion_pass"].logits)
    assert fused.isfinite().all()
    assert torch.equal(results["fusion_pass"].sequences, results["inductor"].sequences)
