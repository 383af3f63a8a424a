"""`python -m fusion_pass tune`: measures on this GPU where fusing only the gate pays.

Stock is what `torch.compile` makes of SDPA with grouped heads and a gate, without a copy of K and
V; fused is this package's operator. Both are replayed as CUDA graphs on a cold L2, interleaved.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_pass import __version__, inductor, launch
from fusion_pass.environment import commit, device_name, nvidia_smi, release
from fusion_pass.tables import SCHEMA, Shape
from fusion_pass.tables.store import Key, user_path
from fusion_pass.timing import NULL, Arm, Clock, CudaClock, Summary, capture, interleave, with_null

ROOT = Path(__file__).parent.parent
DTYPE = torch.bfloat16
# Query heads, K/V heads, head_dim: eight, four and one query heads to a K/V head.
HEADS = ((16, 2, 256), (32, 8, 128), (16, 16, 128))
BATCHES = (1, 8, 64)
LENGTHS = (512, 4096, 32768)
FEW = tuple((batch, length) for batch in (1, 8) for length in (4096, 32768))
SECONDS_A_CELL = 0.15
BUDGET = 110.0
# Two correct bfloat16 results of one attention are about 0.4 % apart.
AGREEMENT = 4 * torch.finfo(DTYPE).eps


def shapes(quick: bool = False) -> list[Shape]:
    """The grid, the shapes that matter most first."""
    grid = [(batch, length) for length in LENGTHS for batch in BATCHES]
    if quick:
        return [Shape(*HEADS[0], *size, 1, "none") for size in grid if size[0] <= 8]
    found = [Shape(*heads, *size, 1, "none") for heads in HEADS for size in grid]
    found += [Shape(*heads, *size, 4, "none") for heads in HEADS[:2] for size in FEW]
    return found + [Shape(*HEADS[0], *size, 1, "bool") for size in FEW]


def run(quick: bool = False, output: Path | None = None, budget: float = BUDGET) -> int:
    """Measure and write the table, anew after every shape; 0 if any shape could be measured.

    Args:
        quick: six shapes only.
        output: the file to write; by default where the pass looks for it.
        budget: seconds after which no further shape is begun.

    Raises:
        SystemExit: there is no CUDA device.
    """
    device = current_gpu()
    path = output or user_path(Key.of(device_name(device)))
    clock, environment = CudaClock(device), describe(device)
    with torch.no_grad():
        cells = tune(
            shapes(quick),
            lambda shape: measure(shape, clock, device),
            lambda done, failed: write(path, environment, done, failed),
            budget,
        )
    tell(f"{path}: {len(cells)} shapes")
    return 0 if cells else 1


def current_gpu() -> torch.device:
    """The current CUDA device. Raises SystemExit if there is none."""
    if not torch.cuda.is_available():
        raise SystemExit("fusion_pass tune measures a GPU, and torch finds none here")
    return torch.device("cuda", torch.cuda.current_device())


def tune(
    grid: Sequence[Shape],
    measure: Callable[[Shape], dict[str, Any]],
    save: Callable[[list[dict[str, Any]], list[dict[str, Any]]], None],
    budget: float,
) -> list[dict[str, Any]]:
    """The cells of all shapes that could be measured within the budget, in seconds.

    `save` gets the cells so far, and why the others have no time, whenever there is one more.
    """
    begun = time.monotonic()
    done: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    for number, shape in enumerate(grid, 1):
        spent = time.monotonic() - begun
        head = f"[{number:2d}/{len(grid)}, {spent:3.0f} s] {spell(shape)}"
        if spent > budget:
            failed.append({"shape": asdict(shape), "why": f"after the budget of {budget:g} s"})
            continue
        try:
            cell = measure(shape)
        except Exception as fault:
            why = " ".join(f"{type(fault).__name__}: {fault}".split())[:300]
            failed.append({"shape": asdict(shape), "why": why})
            tell(f"{head}: {why}")
        else:
            done.append({"shape": asdict(shape), **cell})
            stock, fused = (cell[name]["median_us"] for name in ("stock", "fused"))
            tell(f"{head}: {stock:.1f} us, fused {fused:.1f} us ({stock / fused:.2f}x)")
        if done:
            save(done, failed)
    if failed:
        tell(f"not measured: {len(failed)} of {len(grid)} shapes")
    if done:
        save(done, failed)
    return done


def measure(shape: Shape, clock: Clock, device: torch.device) -> dict[str, Any]:
    """Times of stock and fused at one shape, and of fused once more as the null arm.

    Raises:
        MemoryError: the operands do not fit.
        ArithmeticError: the results differ.
    """
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    needed, free = 4 * operand_bytes(shape), torch.cuda.mem_get_info(device)[0]
    if needed > free:
        raise MemoryError(f"needs {needed >> 20} MiB of the {free >> 20} MiB that are free")
    operands = make_operands(shape, device)
    fused = capture(lambda: fused_attention(*operands))
    compiled = torch.compile(stock_attention, dynamic=False)
    stock = capture(lambda: compiled(*operands))
    for captured in (fused, stock):
        captured.output.fill_(math.nan)
        captured.replay()
    apart = relative_difference(fused.output, stock.output)
    if not apart <= AGREEMENT:
        raise ArithmeticError(f"stock and fused are {apart:.2e} apart")
    arms = [Arm("fused", fused.replay), Arm("stock", stock.replay)]
    taken = interleave(with_null(arms), clock, seconds=SECONDS_A_CELL)
    return {
        "stock": quantiles(taken["stock"]),
        "fused": quantiles(taken["fused"]),
        "null": quantiles(taken[NULL]),
    }


def operand_bytes(shape: Shape) -> int:
    """Bytes of K and V."""
    assert shape.sequences is not None
    assert shape.kv_length is not None
    return 2 * shape.sequences * shape.kv_length * shape.head_dim * DTYPE.itemsize


def make_operands(
    shape: Shape, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Random query (B, Hq, Q, D), key and value (B, Hkv, S, D), gate (B, Q, Hq, D), and a mask."""
    batch, length, width = shape.batch, shape.kv_length, shape.head_dim
    assert batch is not None
    assert length is not None
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=DTYPE, generator=generator)

    mask = None
    if shape.mask == "bool":
        mask = torch.ones((batch, 1, 1, length), dtype=torch.bool, device=device)
    return (
        random(batch, shape.query_heads, shape.query_tokens, width),
        random(batch, shape.kv_heads, length, width),
        random(batch, shape.kv_heads, length, width),
        random(batch, shape.query_tokens, shape.query_heads, width),
        mask,
    )


def stock_attention(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, mask: Tensor | None
) -> Tensor:
    """A gated attention as models write it; compiled, SDPA's kernel and one for the gate."""
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1]
    )
    return attended.transpose(1, 2) * torch.sigmoid(gate)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, mask: Tensor | None
) -> Tensor:
    """The same by the fused kernels."""
    return launch.run(
        query,
        key,
        value,
        gate,
        mask,
        scale=query.shape[3] ** -0.5,
        mask_fill=-math.inf,
        masked_row="zero",
        numerics="compiled",
    )


def relative_difference(first: Tensor, second: Tensor) -> float:
    """The L2 norm of the difference over that of `second`."""
    return float((first.float() - second.float()).norm() / second.float().norm())


def describe(device: torch.device) -> dict[str, Any]:
    """Where the measurement took place."""
    from fusion_pass.graph_pass import source_digest

    head, dirty = commit(ROOT, "bench/results")
    smi = nvidia_smi(device, ("driver_version", "clocks.max.sm", "clocks.max.mem"))
    return {
        "device": device_name(device),
        "driver": (smi or {}).get("driver_version"),
        "torch": release(torch.__version__),
        "triton": release(inductor.triton_version() or "none"),
        "cuda": torch.version.cuda,
        "fusion_pass": __version__,
        "source": source_digest()[:16],
        "commit": head,
        "dirty": dirty,
    }


def write(
    path: Path,
    environment: Mapping[str, Any],
    cells: Sequence[Mapping[str, Any]],
    failed: Sequence[Mapping[str, Any]],
) -> None:
    """Write a table, whole or not at all."""
    data = {"schema": SCHEMA, "environment": environment, "cells": cells, "failed": failed}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def quantiles(summary: Summary) -> dict[str, Any]:
    """An entry of the table, in microseconds."""
    return {
        "median_us": round(summary.median, 3),
        "p20_us": round(summary.p20, 3),
        "p80_us": round(summary.p80, 3),
        "samples": summary.samples,
    }


def spell(shape: Shape) -> str:
    """A shape in words."""
    mask = "no mask" if shape.mask == "none" else "a mask"
    return (
        f"{shape.query_heads}/{shape.kv_heads} heads of {shape.head_dim}, batch {shape.batch}, "
        f"{shape.kv_length} keys, {shape.query_tokens} tokens, {mask}"
    )


def tell(line: str) -> None:
    """A line of progress, on stderr."""
    print(line, file=sys.stderr, flush=True)
