"""Tile choice as a pure function, and the launches built from concrete and symbolic sizes."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import sympy
import torch

from fusion_pass import launch
from fusion_pass.launch import LaunchConfig, Limits, Operand, Problem, Unlaunchable

H200 = Limits("cuda", 90, 132, 232448)
PROBLEM = Problem(1, 16, 2, 1, 32768, 256, 256, torch.bfloat16, "bool")


def choose(limits: Limits = H200, **changes: object) -> LaunchConfig:
    return launch.choose(dataclasses.replace(PROBLEM, **changes), limits)


@pytest.mark.parametrize("shared_memory", [64, 99, 163, 227])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_cover_the_problem(dtype: torch.dtype, shared_memory: int) -> None:
    limits = Limits("cuda", 90, 132, shared_memory * 1024)
    for head_dim, group, tokens in itertools.product((16, 40, 192, 256), (1, 3, 64), (1, 16)):
        config = choose(
            limits,
            dtype=dtype,
            head_dim=head_dim,
            query_heads=2 * group,
            query_tokens=tokens,
        )
        assert config.block_d >= head_dim
        assert 16 <= config.block_n <= 128
        assert 16 <= config.block_m <= 32
        assert config.block_m <= max(16, 8192 // config.block_v)
        for size in (config.block_m, config.block_n, config.block_d, config.reduce_block_v):
            assert size & (size - 1) == 0


def test_shared_memory_that_fits_nothing_is_refused() -> None:
    with pytest.raises(Unlaunchable, match=r"head_dim 256 .* shared memory"):
        choose(Limits("cuda", 90, 132, 16 * 1024))


def test_rows_of_a_kv_head_share_one_tile() -> None:
    assert choose(query_heads=6, query_tokens=8).block_m == 32
    # No more: 64 rows would become Hopper's asynchronous dot.
    assert choose(query_heads=128, head_dim=128, value_dim=128).block_m == 32


def test_splits_fill_the_device_twice() -> None:
    for batch, length in itertools.product((1, 8, 32), (512, 4096)):
        programs, tiles = 2 * batch, length // 16
        assert choose(batch=batch, kv_length=length).num_splits == min(128, 264 // programs, tiles)


def test_splits_load_all_multiprocessors_evenly() -> None:
    for batch, splits in ((36, 3), (50, 5), (68, 3), (70, 3), (80, 2), (100, 1), (136, 1)):
        assert choose(batch=batch, kv_length=4096).num_splits == splits
    assert choose(batch=133, kv_length=8192, mask="none").block_n == 16
    assert choose(batch=256, kv_length=8192, mask="none").block_n == 64


def test_the_search_for_live_keys_is_shared_by_more() -> None:
    masked, plain = (
        choose(batch=32, kv_length=131072, mask=mask).num_splits for mask in ("bool", "none")
    )
    assert (masked, plain) == (8, 4)


def test_several_query_tokens_fill_the_device_once() -> None:
    for mask, block_n in (("none", 64), ("bool", 32)):
        config = choose(batch=1, kv_length=32768, query_tokens=4, mask=mask)
        assert (config.block_m, config.block_n, config.num_splits) == (32, block_n, 66)


def test_programs_that_fill_the_device_are_not_split() -> None:
    for batch in (64, 65, 66, 100, 132, 133, 1000):
        assert choose(batch=batch, kv_length=8192, mask="none").num_splits == 1
    assert choose(batch=64, mask="none").block_n > choose(batch=32, mask="none").block_n
    assert choose(batch=64).block_n == choose(batch=32).block_n
    assert choose(batch=128, kv_length=512).block_n == 2 * choose(batch=32).block_n


def test_one_split_needs_no_reduce_and_no_scratch_unless_rows_are_filled() -> None:
    mask = _operand(128, 1, 1, 512, dtype=torch.bool)
    query, config = _operand(128, 16, 1, 256), choose(batch=128, kv_length=512)
    for masking, mask_fill, fill in (
        (mask, -math.inf, False),
        (None, -65536.0, False),
        (mask, -65536.0, True),
    ):
        steps = _launches(128, 512, masking, mask_fill)
        assert [step.kernel.__name__ for step in steps][1:] == ["gated_decode_reduce"] * fill
        assert steps[0].arguments["SINGLE"] is not fill
        assert launch.fills(masking, mask_fill) is fill
        assert bool(launch.scratch_sizes(config, query, query, fill=fill)) is fill


@pytest.mark.parametrize("batch", [1, 8, 64, 4096])
@pytest.mark.parametrize("length", [1, 100, 4096, None])
def test_reduce_programs_cover_the_row(batch: int, length: int | None) -> None:
    config = choose(batch=batch, kv_length=length)
    assert 16 <= config.reduce_block_v <= 256
    assert config.reduce_block_v * config.num_splits <= 8192
    assert config.reduce_warps in (1, 2, 4)
    # One warp keeps at most this many elements in registers.
    assert config.reduce_block_v * config.num_splits / config.reduce_warps <= 4096


def test_dependent_launch_needs_a_hopper() -> None:
    assert choose().dependent_launch
    assert not choose(Limits("cuda", 89, 128, 99 * 1024)).dependent_launch
    assert not choose(Limits("hip", "gfx942", 304, 65536)).dependent_launch


@pytest.mark.parametrize("length", [1, 2, 31, 33, 512, 1000])
def test_no_more_splits_than_tiles(length: int) -> None:
    config = choose(kv_length=length)
    assert 1 <= config.num_splits <= math.ceil(length / config.block_n)


def test_heavy_scratch_leaves_one_program_an_sm() -> None:
    config = choose(query_heads=128, query_tokens=16, kv_length=1024)
    # One program an SM, however large.
    assert config.num_splits <= 132 // (2 * math.ceil(64 * 16 / config.block_m))


def test_symbolic_sizes_are_taken_for_a_long_context_of_one_sequence() -> None:
    assert choose(batch=None, kv_length=None) == choose(batch=1, kv_length=1 << 20)
    assert choose(kv_length=None).num_splits == 128


def test_amd_is_not_pipelined() -> None:
    assert choose(Limits("hip", "gfx942", 304, 65536)).split_stages == 1


def test_choice_is_independent_of_call_order() -> None:
    assert choose(batch=3) == choose(batch=3)
    assert hash(PROBLEM) == hash(dataclasses.replace(PROBLEM))


def _operand(*size: object, dtype: torch.dtype = torch.bfloat16) -> Operand:
    stride: list[object] = [1]
    for extent in reversed(size[1:]):
        stride.insert(0, stride[0] * extent)
    return Operand("pointer", size, tuple(stride), dtype)


def _launches(
    batch: object, length: object, mask: Operand | None, mask_fill: float = -math.inf
) -> tuple[launch.Launch, ...]:
    pytest.importorskip("triton")
    query = _operand(batch, 16, 1, 256)
    key = _operand(batch, 2, length, 256)
    config = launch.choose(launch.problem_of(query, key, key, mask), H200)
    return launch.launches(
        config,
        query=query,
        key=key,
        value=key,
        gate=_operand(batch, 1, 16, 1),
        mask=mask,
        output="output",
        accumulator="accumulator",
        statistics="statistics",
        scale=0.0625,
        mask_fill=mask_fill,
        masked_row="nan",
        numerics="compiled",
    )


def test_launches_take_symbolic_sizes() -> None:
    batch, length = sympy.symbols("s0 s1", integer=True, positive=True)
    mask = _operand(batch, 1, 1, length, dtype=torch.bool)
    split, reduce = _launches(batch, length, mask)
    assert split.grid == (2 * batch, 128, 1)
    assert reduce.grid[0] == 16 * batch
    assert split.arguments["kv_length"] == length
    assert split.arguments["stride_kb"] == 512 * length
    sizes = launch.scratch_sizes(choose(), _operand(batch, 16, 1, 256), _operand(1, 2, 3, 256))
    assert sizes["statistics"] == (batch, 16, 1, 2, 128)


def test_sympy_integers_become_ints() -> None:
    one = sympy.Integer(1)
    split, _ = _launches(one, sympy.Integer(512), None)
    assert type(split.arguments["kv_length"]) is int
    assert type(split.grid[0]) is int


def test_broadcast_dimensions_get_stride_zero() -> None:
    mask = Operand("mask", (4, 1, 1, 512), (512, 77, 99, 1), torch.bool)
    split, reduce = _launches(4, 512, mask)
    strides = [split.arguments[f"stride_m{dim}"] for dim in "bhtn"]
    assert strides == [512, 0, 0, 1]
    assert split.arguments["MASK_ROWS"] == 1
    assert reduce.arguments["stride_gd"] == 0


def test_expanded_mask_counts_as_one_row_and_a_mask_a_head_does_not() -> None:
    expanded = Operand("mask", (4, 16, 1, 512), (512, 0, 512, 1), torch.bool)
    assert _launches(4, 512, expanded)[0].arguments["MASK_ROWS"] == 1
    per_head = _operand(4, 16, 1, 512, dtype=torch.bool)
    assert _launches(4, 512, per_head)[0].arguments["MASK_ROWS"] == 16


def test_infinite_fill_is_a_mode_and_no_number() -> None:
    mask = _operand(4, 1, 1, 512, dtype=torch.bool)
    for step in _launches(4, 512, mask):
        constants = [value for value in step.arguments.values() if isinstance(value, float)]
        assert all(map(math.isfinite, constants))
    assert _launches(4, 512, mask)[1].arguments["MASKED_ROW"] == "nan"


def test_float32_precision_follows_torch() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        allowed = "ieee" if torch.version.hip else "tf32"
        assert launch.float32_precision(torch.float32, cuda) == allowed
        assert launch.float32_precision(torch.bfloat16, cuda) == "ieee"
        assert launch.float32_precision(torch.float32, cpu) == "ieee"
        torch.set_float32_matmul_precision("highest")
        assert launch.float32_precision(torch.float32, cuda) == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)


def test_unknown_device_is_refused() -> None:
    with pytest.raises(Unlaunchable, match="meta"):
        launch.device_limits(torch.device("meta"))
