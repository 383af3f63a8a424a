"""Choice of tile sizes, split count and pipeline depth: pure functions of shape and device."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch

MAX_SPLITS = 128
MAX_BLOCK_M = 64
REDUCE_ELEMENTS = 8192
SUPPORTED_AMD = ("gfx942", "gfx950", "gfx1200", "gfx1201")


class Unlaunchable(RuntimeError):  # noqa: N818
    """No tile size of the gated decode kernels fits the device."""


@dataclass(frozen=True)
class Limits:
    """What a device allows: `arch` is 90 for sm_90 or "gfx942"; `shared_memory` bytes a block."""

    kind: str
    arch: int | str
    multiprocessors: int
    shared_memory: int


@dataclass(frozen=True)
class Problem:
    """Sizes that decide the tiles. `batch` and `kv_length` are None where symbolic."""

    batch: int | None
    query_heads: int
    kv_heads: int
    query_tokens: int
    kv_length: int | None
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    mask: str

    @property
    def rows(self) -> int:
        """Query rows that share one KV head."""
        return self.query_heads // self.kv_heads * self.query_tokens


@dataclass(frozen=True)
class LaunchConfig:
    """Tile sizes, split count, warps and pipeline stages of both kernels."""

    block_m: int
    block_n: int
    block_d: int
    block_v: int
    num_splits: int
    split_warps: int
    split_stages: int
    reduce_block_n: int
    reduce_block_v: int
    reduce_warps: int


def device_limits(device: torch.device) -> Limits:
    """Read a GPU's limits; for a CPU, where kernels are interpreted, those of a small GPU.

    Raises Unlaunchable for a device that the kernels are not made for.
    """
    if device.type == "cpu":
        return Limits("cuda", 80, 4, 166912)
    if device.type != "cuda":
        raise Unlaunchable(f"gated_decode_attention runs on cuda and cpu, not on {device.type}")
    properties = torch.cuda.get_device_properties(device)
    multiprocessors = properties.multi_processor_count
    if torch.version.hip is not None:
        gfx = properties.gcnArchName.split(":")[0]
        if gfx not in SUPPORTED_AMD:
            raise Unlaunchable(f"{gfx} is none of {', '.join(SUPPORTED_AMD)}")
        return Limits("hip", gfx, multiprocessors, properties.shared_memory_per_block)
    arch = properties.major * 10 + properties.minor
    if arch < 80:
        raise Unlaunchable(f"sm_{arch} is older than sm_80")
    # torch's stubs lack the attribute.
    shared_memory: int = getattr(properties, "shared_memory_per_block_optin")  # noqa: B009
    return Limits("cuda", arch, multiprocessors, shared_memory)


@functools.lru_cache(maxsize=1024)
def choose(problem: Problem, limits: Limits) -> LaunchConfig:
    """Choose tiles and splits for a problem on a device.

    Raises Unlaunchable if not even the smallest tiles fit the shared memory.
    """
    block_d = max(16, next_power_of_2(problem.head_dim))
    block_v = max(16, next_power_of_2(problem.value_dim))
    widest = max(block_d, block_v)
    # At most 64 fp32 accumulators a thread with four warps.
    most_rows = max(16, min(MAX_BLOCK_M, next_power_of_2(problem.rows), 8192 // block_v))
    block_m, block_n, stages = _fit_tiles(most_rows, block_d, block_v, problem, limits)
    num_splits = _choose_splits(block_m, block_n, problem, limits)
    reduce_block_v = max(16, min(block_v, REDUCE_ELEMENTS // next_power_of_2(num_splits)))
    return LaunchConfig(
        block_m=block_m,
        block_n=block_n,
        block_d=block_d,
        block_v=block_v,
        num_splits=num_splits,
        split_warps=4,
        split_stages=stages,
        reduce_block_n=max(1, min(32, 4096 // widest)),
        reduce_block_v=reduce_block_v,
        reduce_warps=4 if reduce_block_v * num_splits > 1024 else 1,
    )


def _fit_tiles(
    most_rows: int, block_d: int, block_v: int, problem: Problem, limits: Limits
) -> tuple[int, int, int]:
    """Return (rows, keys, pipeline stages) of a tile: 16 KiB of K, shrunk until it fits."""
    row_bytes = max(block_d, block_v) * problem.dtype.itemsize
    most_keys = min(128, max(16, 16384 // row_bytes))
    # AMD's pipeliner takes its buffers from a much smaller local memory.
    depths = (1,) if limits.kind == "hip" else (3, 2, 1)
    for block_m, stages, block_n in itertools.product(
        _halvings(most_rows), depths, _halvings(most_keys)
    ):
        needed = _shared_memory(block_m, block_n, block_d, block_v, stages, problem, limits.kind)
        if needed <= limits.shared_memory:
            return block_m, block_n, stages
    raise Unlaunchable(
        f"head_dim {problem.head_dim} and value_dim {problem.value_dim} in {problem.dtype} need "
        f"{needed} bytes of shared memory a block, and {limits.arch} has {limits.shared_memory}"
    )


def _halvings(size: int) -> list[int]:
    """The powers of two from `size` down to 16, the least that tl.dot takes."""
    return [size >> shift for shift in range((size // 16).bit_length())]


def _shared_memory(
    block_m: int,
    block_n: int,
    block_d: int,
    block_v: int,
    stages: int,
    problem: Problem,
    kind: str,
) -> int:
    """Upper estimate, in bytes, of the split kernel's shared memory; test_aot.py holds it."""
    if kind == "hip":
        # Unpipelined, K, V and the query pass through the same local memory in turn.
        tiles = max(block_m * block_d, block_n * max(block_d, block_v))
    else:
        # Hopper's asynchronous dot, which needs 64 rows, keeps one more tile alive.
        buffers = stages if block_m >= 64 else max(1, stages - 1)
        tiles = buffers * block_n * (block_d + block_v) + block_m * block_d
    mask_itemsize = {"none": 0, "bool": 1, "float": 4}[problem.mask]
    mask_and_reductions = stages * block_m * block_n * mask_itemsize + 1024
    return (tiles + block_m * block_n) * problem.dtype.itemsize + mask_and_reductions


def _choose_splits(block_m: int, block_n: int, problem: Problem, limits: Limits) -> int:
    """Enough splits to fill the device twice, bounded by the tiles and by the scratch traffic."""
    programs = (problem.batch or 1) * problem.kv_heads * math.ceil(problem.rows / block_m)
    splits = max(1, min(MAX_SPLITS, 2 * limits.multiprocessors // max(1, programs)))
    if problem.kv_length is None:
        return splits
    tiles = max(1, math.ceil(problem.kv_length / block_n))
    # The fp32 partial outputs, written and read, must not outweigh the K and V that are read.
    kv_bytes = problem.kv_length * (problem.head_dim + problem.value_dim) * problem.dtype.itemsize
    worthwhile = max(1, kv_bytes // (2 * 4 * problem.rows * max(1, problem.value_dim)))
    return min(splits, tiles, worthwhile)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n, and at least 1."""
    return 1 << max(0, n - 1).bit_length()
