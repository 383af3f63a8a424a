"""Tokens a second of transformers' own generate(), through one backend."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from bench import models
from tests.models import cache_argument, static_cache

BATCH = 8
PROMPT = 600
NEW_TOKENS = 64
CAPACITY = 32768
REPEATS = 3


def generate_cell(
    device: torch.device, backend: tuple[str, str], model: models.Model | None = None
) -> dict[str, Any]:
    """Generate from a prompt with a static cache, mode="reduce-overhead"; a first run compiles.

    `backend` is the candidate's name and its torch.compile backend.
    """
    from transformers import CompileConfig

    torch._dynamo.reset()
    built: Any = (model or models.named("dense")).build(device)
    cache = static_cache(built, CAPACITY)
    generator = torch.Generator(device).manual_seed(1)
    vocabulary = int(built.config.vocab_size)
    # Token 0 is padding, which generate() would mask.
    prompt = torch.randint(1, vocabulary, (BATCH, PROMPT), device=device, generator=generator)
    config = CompileConfig(backend=backend[1], mode="reduce-overhead", fullgraph=False)
    seconds = []
    for _ in range(1 + REPEATS):
        cache.reset()
        torch.cuda.synchronize()
        start = time.perf_counter()
        built.generate(
            prompt,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            compile_config=config,
            **{cache_argument(built): cache},
        )
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    taken = statistics.median(seconds[1:])
    return {
        "shape": {
            "model": "dense",
            "B": BATCH,
            "prompt": PROMPT,
            "new_tokens": NEW_TOKENS,
            "capacity": CAPACITY,
        },
        "first_s": round(seconds[0], 2),
        "median_s": round(taken, 4),
        "tokens_per_s": round(BATCH * NEW_TOKENS / taken, 1),
    }
