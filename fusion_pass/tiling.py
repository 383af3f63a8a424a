"""Choice of tile sizes, split count and pipeline depth: pure functions of shape and device."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch

MAX_SPLITS = 128
# 64 rows become Hopper's asynchronous dot, and a soak on an H200 found one such tile wrong.
MAX_BLOCK_M = 32
REDUCE_ELEMENTS = 8192
LOGITS = 2048
KIB = 1024
LONG_CONTEXT = 1 << 20
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
    """Sizes that decide the tiles. `batch` and `kv_length` are None where symbolic.

    `paged` keys are found by the numbers of their pages.
    """

    batch: int | None
    query_heads: int
    kv_heads: int
    query_tokens: int
    kv_length: int | None
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    mask: str
    paged: bool = False

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
    dependent_launch: bool


def device_limits(device: torch.device) -> Limits:
    """Read a GPU's limits; for a CPU, where kernels are interpreted, those of a small GPU.

    Raises Unlaunchable for a device that the kernels are not made for.
    """
    if device.type == "cpu":
        return Limits("cuda", 80, 4, 166912)
    if device.type != "cuda":
        raise Unlaunchable(f"gated_decode_attention runs on cuda and cpu, not on {device.type}")
    index = torch.cuda.current_device() if device.index is None else device.index
    return _gpu_limits(index)


# Every eager call asks, and torch takes longer to answer than the choice of tiles takes.
@functools.cache
def _gpu_limits(index: int) -> Limits:
    properties = torch.cuda.get_device_properties(index)
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


@dataclass(frozen=True)
class _Tiling:
    """How the split kernel works: bytes of a K tile, warps, most pipeline stages, splits."""

    tile_bytes: int
    warps: int
    stages: int
    num_splits: int


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
    tiling = _choose_tiling(most_rows, widest, problem, limits)
    block_m, block_n, stages = _fit_tiles(most_rows, block_d, block_v, tiling, problem, limits)
    num_splits = tiling.num_splits
    if problem.kv_length is not None:
        num_splits = min(num_splits, max(1, math.ceil(problem.kv_length / block_n)))
    reduce_block_v, reduce_warps = _choose_reduce(block_v, num_splits, problem, limits)
    return LaunchConfig(
        block_m=block_m,
        block_n=block_n,
        block_d=block_d,
        block_v=block_v,
        num_splits=num_splits,
        split_warps=tiling.warps,
        split_stages=stages,
        reduce_block_n=max(1, min(32, 4096 // widest)),
        reduce_block_v=reduce_block_v,
        reduce_warps=reduce_warps,
        dependent_launch=limits.kind == "cuda" and int(limits.arch) >= 90,
    )


def _choose_tiling(rows: int, widest: int, problem: Problem, limits: Limits) -> _Tiling:
    """The shape of the split kernel's work, fitted to an H200.

    Measured on 32 cells (four geometries; 1 MB to 2.1 GB of K and V; bfloat16) as the replay of a
    graph, in microseconds: two programs an SM of two warps and 8 KiB tiles were within 2 % of the
    best of 17 shapes wherever no rule below applies.
    """
    programs = (problem.batch or 1) * problem.kv_heads * math.ceil(problem.rows / rows)
    device = limits.multiprocessors
    one_each = max(1, min(MAX_SPLITS, device // max(1, programs)))
    two_each = max(1, min(MAX_SPLITS, 2 * device // max(1, programs)))
    worthwhile = _worthwhile_splits(problem)
    if limits.kind == "hip":
        return _Tiling(16 * KIB, 4, 1, min(two_each, worthwhile))
    row_bytes = widest * problem.dtype.itemsize
    wide_tiles = _tiles_each(32 * KIB, row_bytes, one_each, problem)
    # Under a mask the widest tiles spill registers: Q 4, causal, B 8, S 32768: 214, not 149.
    wide = problem.mask == "none"
    if rows > 16:
        # Q 4, D 256, S 32768: B 1 26.9, B 8 136; with two of 8 KiB tiles an SM 30.4 and 161.
        if wide and rows == 32 and wide_tiles >= 4:
            return _Tiling(32 * KIB, 4, 3, one_each)
        return _Tiling(16 * KIB, 4, 3, two_each if two_each <= worthwhile else one_each)
    if problem.paged:
        return _choose_paged_tiling(row_bytes, programs, problem, device)
    if _tiles_each(8 * KIB, row_bytes, two_each, problem) > 512 and problem.mask != "none":
        # More programs share the search for live keys: D 128, B 8, S 131072, 600 live: 17.9, not
        # 20.
        return _Tiling(8 * KIB, 2, 3, min(MAX_SPLITS, 2 * two_each))
    if device < programs <= 2 * device and _evenness(programs, device) >= 0.75:
        # One split each, all resident. D 128, B 32: S 512 22.6, S 4096 124; with 8 KiB 23.3, 127.
        return _Tiling(16 * KIB, 4, 3, 1)
    if wide and _evenness(programs, device) > 0.9 and wide_tiles >= 8:
        # D 128, B 64, S 8192: 481, and 490 with 8 KiB; D 256, B 32, S 4096: 127, and 132.
        return _Tiling(32 * KIB, 4, 3, one_each)
    return _Tiling(8 * KIB, 2, 3, _even_splits(two_each, programs, device))


def _choose_paged_tiling(row_bytes: int, programs: int, problem: Problem, device: int) -> _Tiling:
    """Eight warps an SM, twice those of dense keys: there is more to compute between loads.

    D 256, B 1, S 32768, pages of 16: two programs of four warps an SM 25.9, of two warps 31.0;
    D 128: four programs of two warps 40.8, two of them 43.4, two of four warps 43.4.
    """
    two_each = max(1, min(MAX_SPLITS, 2 * device // programs))
    four_each = 4 * device // programs
    narrow = row_bytes <= 256 and four_each <= MAX_SPLITS
    if narrow or _tiles_each(16 * KIB, row_bytes, two_each, problem) < 2:
        each = max(1, four_each) if narrow else two_each
        return _Tiling(8 * KIB, 2, 3, _even_splits(each, programs, device))
    return _Tiling(16 * KIB, 4, 3, _even_splits(two_each, programs, device))


def _evenness(programs: int, device: int) -> float:
    """The programs of an average SM as a part of those of the SM with the most."""
    return programs / (device * math.ceil(programs / device))


def _even_splits(least: int, programs: int, device: int) -> int:
    """The least number of splits that loads the SMs evenly, if their programs stay resident.

    S 4096: D 128, B 17: 3 splits 73.4, 1 split 85.3; D 256, B 70: 145 and 163.
    """
    if programs > 2 * device:
        return 1
    for num_splits in range(least, 5 * device // programs + 1):
        if _evenness(programs * num_splits, device) >= 0.77:
            return min(MAX_SPLITS, num_splits)
    return least


def _tiles_each(tile_bytes: int, row_bytes: int, num_splits: int, problem: Problem) -> int:
    """Tiles of K in each of the splits."""
    return (problem.kv_length or LONG_CONTEXT) // num_splits * row_bytes // tile_bytes


def _worthwhile_splits(problem: Problem) -> int:
    """Splits whose partial outputs, written and read, take an eighth of the bytes of K and V."""
    if problem.kv_length is None:
        return MAX_SPLITS
    kv_bytes = problem.kv_length * (problem.head_dim + problem.value_dim) * problem.dtype.itemsize
    partial_bytes = 2 * 4 * problem.rows * max(1, problem.value_dim)
    return max(1, kv_bytes // (8 * partial_bytes))


def _choose_reduce(
    block_v: int, num_splits: int, problem: Problem, limits: Limits
) -> tuple[int, int]:
    """Return the columns and the warps of a program of the reduce kernel.

    As many programs as may be resident at once, each of few warps: B 32, S 512, D 256, 4 splits:
    16.5 with 256 columns, 18.8 with 32; B 1, 32 splits: 7.8 with 32 columns in one warp, 8.2 with
    64 in four.
    """
    rows = (problem.batch or 1) * problem.query_heads * problem.query_tokens
    splits = next_power_of_2(num_splits)
    chunks = next_power_of_2(4 * limits.multiprocessors // max(1, rows) + 1) // 2
    columns = block_v // max(1, chunks)
    columns = max(16, min(block_v, max(32, columns), REDUCE_ELEMENTS // splits))
    return columns, max(1, min(4, columns * splits // 2048))


def _fit_tiles(
    most_rows: int,
    block_d: int,
    block_v: int,
    tiling: _Tiling,
    problem: Problem,
    limits: Limits,
) -> tuple[int, int, int]:
    """Return (rows, keys, pipeline stages) of a tile, shrunk until it fits."""
    row_bytes = max(block_d, block_v) * problem.dtype.itemsize
    # More logits than those of 32 rows by 64 keys spill registers.
    most_keys = min(128, LOGITS // most_rows, max(16, tiling.tile_bytes // row_bytes))
    depths = range(tiling.stages, 0, -1)
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
        tiles = max(1, stages - 1) * block_n * (block_d + block_v) + block_m * block_d
    mask_itemsize = {"none": 0, "bool": 1, "float": 4}[problem.mask]
    mask_and_reductions = stages * block_m * block_n * mask_itemsize + 1024
    return (tiles + block_m * block_n) * problem.dtype.itemsize + mask_and_reductions


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n, and at least 1."""
    return 1 << max(0, n - 1).bit_length()
