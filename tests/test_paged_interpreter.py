"""The paged kernels under Triton's interpreter, on any machine, against the float64 reference."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion_pass import launch as dense_launch
from fusion_pass.launch import Operand
from fusion_pass.paged import launch, reference
from fusion_pass.paged.operands import PagedModes, PagedOperands
from tests.test_kernel_interpreter import interpreted_kernels  # noqa: F401  (a fixture)

pytest.importorskip("triton")

MODES = PagedModes(scale=0.25, numerics="compiled")
GARBAGE = 2**30


@pytest.fixture(scope="module", autouse=True)
def interpreted_paged(interpreted_kernels: ModuleType) -> Iterator[None]:  # noqa: F811
    """A second, interpreted copy of the paged kernels, which takes its helpers from another."""
    path = importlib.util.find_spec("fusion_pass.kernels.paged_decode").origin
    spec = importlib.util.spec_from_file_location("interpreted_paged_decode", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fusion_pass.kernels.gated_decode", interpreted_kernels)
        spec.loader.exec_module(module)
        patch.setattr(launch, "kernels", lambda: module)
        yield


@pytest.fixture(params=[math.nan, 1e30], ids=["nan", "1e30"])
def poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Fill all scratch before the launch with a value that would show in any output."""
    value: float = request.param
    monkeypatch.setattr(
        launch,
        "allocate_scratch",
        lambda size, device: torch.full(size, value, dtype=torch.float32, device=device),
    )
    return value


def make(
    lengths: Sequence[int],
    page_size: int = 16,
    *,
    tokens: Sequence[int] | None = None,
    group: int = 2,
    kv_heads: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    table: bool = False,
    spare: int = 3,
    index_dtype: torch.dtype = torch.int32,
    dead: float = math.nan,
    device: str = "cpu",
    seed: int = 0,
) -> PagedOperands[Tensor]:
    """Requests of these lengths over shuffled pages; whatever is not live is `dead` or garbage.

    `tokens` gives query tokens of each request; `spare` is the room that the indices have left.
    """
    generator = torch.Generator().manual_seed(seed)
    value_dim = head_dim if value_dim is None else value_dim
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=generator)
    indptr = torch.tensor([0, *itertools.accumulate(counts)])
    indices = torch.full((sum(counts) + spare,), GARBAGE)
    indices[: sum(counts)] = order[: sum(counts)]
    if table:
        rows = torch.full((len(lengths), max(counts, default=0) + spare), GARBAGE)
        for row, (begin, stop) in zip(rows, itertools.pairwise(indptr.tolist()), strict=True):
            row[: stop - begin] = indices[begin:stop]
    caches = []
    for width in (head_dim, value_dim):
        cache = torch.full((len(order), page_size, kv_heads, width), dead, dtype=dtype)
        for request, length in enumerate(lengths):
            own = indices[indptr[request] : indptr[request + 1]]
            for page, number in enumerate(own.tolist()):
                live = min(page_size, length - page * page_size)
                live_values = torch.randn(live, kv_heads, width, generator=generator)
                cache[number, :live] = live_values.to(dtype)
        caches.append(cache)
    total = len(lengths) if tokens is None else sum(tokens)
    heads = group * kv_heads
    offsets = torch.tensor([0, *itertools.accumulate(tokens or [])])
    operands = PagedOperands(
        query=torch.randn(total, heads, head_dim, generator=generator).to(dtype),
        k_cache=caches[0],
        v_cache=caches[1],
        kv_indices=(rows if table else indices).to(index_dtype),
        kv_indptr=None if table else indptr.to(index_dtype),
        kv_lengths=torch.tensor(lengths, dtype=index_dtype),
        query_indptr=None if tokens is None else offsets.to(index_dtype),
        gate=torch.randn(total, heads, value_dim, generator=generator).to(dtype),
    )
    return operands.map(lambda tensor: tensor.to(device))


def run(
    operands: PagedOperands[Tensor], modes: PagedModes = MODES, splits: int | None = None
) -> Tensor:
    config = None
    if splits is not None:
        problem = launch.problem_of(operands.map(Operand.of), modes)
        config = dense_launch.choose(problem, dense_launch.device_limits(operands.query.device))
        config = dataclasses.replace(config, num_splits=splits)
    return launch.run(operands, modes, config)


def check(operands: PagedOperands[Tensor], splits: int | None = None, **changes: Any) -> Tensor:
    """Compare with float64; the naive computation's own error is the yardstick."""
    modes = dataclasses.replace(MODES, **changes)
    result = run(operands, modes, splits)
    truth = reference.paged_decode_attention(operands, modes, compute_dtype=torch.float64)
    naive = reference.paged_decode_attention(operands, modes)
    assert result.shape == truth.shape
    finite = truth.isfinite()
    assert torch.equal(result.isnan(), truth.isnan())
    error = (result.double() - truth)[finite].abs()
    naive_error = (naive.double() - truth)[finite].abs()
    if error.numel():
        # The kernel sums in another order: in fp32, from weights of twice V's precision.
        dtype = operands.v_cache.dtype
        precision = max(torch.finfo(torch.float32).eps, torch.finfo(dtype).eps ** 2)
        reordering = 4 * precision * operands.v_cache.nan_to_num(0, 0, 0).abs().max()
        assert error.max() <= 1.5 * naive_error.max() + reordering
    return result


HALF = {"dtype": torch.float16}
SHAPES = [
    {"page_size": 1, "group": 1, "lengths": (1, 40), "table": True},
    {"page_size": 3, "group": 3, "lengths": (65, 7), "head_dim": 40, **HALF},
    {"page_size": 16, "group": 6, "lengths": (16, 33), "value_dim": 40},
    {"page_size": 64, "group": 8, "lengths": (130, 64), "head_dim": 96, "table": True, **HALF},
    {"page_size": 3, "group": 12, "lengths": (50, 3), "head_dim": 64, "value_dim": 16},
    {"page_size": 1, "group": 8, "lengths": (129, 17), "head_dim": 64, **HALF},
    {"page_size": 16, "group": 3, "lengths": (70, 1), "kv_heads": 1, "table": True, **HALF},
    {"page_size": 100, "group": 2, "lengths": (99, 201)},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s.values())))
def test_shapes(shape: dict[str, Any]) -> None:
    result = check(make(**shape))
    assert result.isfinite().all()
    assert (result != 0).any(dim=-1).all()


@pytest.mark.parametrize(("splits", "table"), [(1, True), (3, False), (7, True)])
def test_every_split_count_reads_only_what_was_written(
    splits: int, table: bool, poison: float
) -> None:
    result = check(make((0, 1, 90, 0), table=table, kv_heads=1), splits)
    assert (result[[0, 3]] == 0).all()
    assert (result[1:3] != 0).all()


@pytest.mark.parametrize("page_size", [1, 16])
def test_full_pages_need_no_lengths(page_size: int) -> None:
    operands = make((32, 0, 48), page_size, kv_heads=1)
    expected = check(operands, 3)
    assert torch.equal(run(dataclasses.replace(operands, kv_lengths=None), splits=3), expected)


@pytest.mark.parametrize(("splits", "table"), [(1, False), (4, True)])
def test_several_query_tokens_see_their_past_alone(splits: int, table: bool, poison: float) -> None:
    tokens = (3, 0, 1, 2, 4)
    operands = make((40, 9, 17, 2, 3), 3, tokens=tokens, group=3, kv_heads=1, table=table)
    result = check(operands, splits, max_query_tokens=4)
    # The first token of the last request comes before its first key.
    assert (result[6] == 0).all()
    assert (result[[0, 3, 4, 7]] != 0).all()


def test_more_rows_than_one_program_takes() -> None:
    operands = make((20, 33), tokens=(8, 5), group=12, kv_heads=1)
    problem = launch.problem_of(
        operands.map(Operand.of), dataclasses.replace(MODES, max_query_tokens=8)
    )
    limits = dense_launch.device_limits(torch.device("cpu"))
    assert problem.rows > dense_launch.choose(problem, limits).block_m
    check(operands, 2, max_query_tokens=8)


def test_tokens_of_no_request_give_zeros(poison: float) -> None:
    operands = make((20, 30), tokens=(1, 2))
    padded = dataclasses.replace(
        operands,
        query=torch.cat([operands.query, operands.query]),
        gate=torch.cat([operands.gate, operands.gate]),
    )
    result = check(padded, 2, max_query_tokens=2)
    assert torch.equal(result[:3], run(operands, dataclasses.replace(MODES, max_query_tokens=2), 2))
    assert (result[3:] == 0).all()


@pytest.mark.parametrize(
    ("window", "tokens"), [(1, None), (5, (2, 1, 3)), (64, (2, 1, 3)), (2**31, None)]
)
def test_window(window: int, tokens: tuple[int, ...] | None) -> None:
    lengths = (100, 1, 23)
    operands = make(lengths, 16, tokens=tokens, kv_heads=1)
    if window < 2**31:
        # What no query token of a request sees may hold anything.
        for request, length in enumerate(lengths):
            first = length - (tokens[request] if tokens else 1) - window + 1
            for key in range(max(0, first)):
                page = operands.kv_indices[operands.kv_indptr[request] + key // 16]
                operands.k_cache[page, key % 16] = math.nan
                operands.v_cache[page, key % 16] = math.nan
    changes = {"window": window, "max_query_tokens": max(tokens or [1])}
    assert check(operands, 3, **changes).isfinite().all()


def test_sinks(poison: float) -> None:
    operands = make((65, 0, 4), 3, kv_heads=1, group=4)
    sinks = torch.tensor([[-math.inf, 0], [-10, 0], [10, 0], [1e4, 0]])[:, 0]
    result = check(dataclasses.replace(operands, sinks=sinks), 2)
    assert (result[1] == 0).all()
    check(dataclasses.replace(operands, sinks=sinks.half()), 4, window=5)


@pytest.mark.parametrize(("table", "index_dtype"), [(False, torch.int64), (True, torch.int32)])
def test_changed_indices_and_lengths_in_place(table: bool, index_dtype: torch.dtype) -> None:
    shape = {"page_size": 4, "kv_heads": 1, "table": table, "index_dtype": index_dtype}
    operands = make((40, 20), spare=20, **shape)
    check(operands, 3)
    changed = make((7, 77), spare=20 if table else 0, **shape)
    same = dataclasses.replace(operands, k_cache=changed.k_cache, v_cache=changed.v_cache)
    for name in ("kv_indices", "kv_indptr", "kv_lengths"):
        held, new = getattr(same, name), getattr(changed, name)
        if held is not None:
            held[..., : min(held.shape[-1], new.shape[-1])] = new[..., : held.shape[-1]]
    expected = run(dataclasses.replace(changed, query=same.query, gate=same.gate), splits=3)
    assert torch.equal(check(same, 3), expected)


def test_a_nan_at_a_live_key_stays_in_its_request_and_head() -> None:
    operands = make((40, 20), 4)
    operands.k_cache[operands.kv_indices[3], 1, 0] = math.nan
    result = check(operands, 2)
    assert result[0, :2].isnan().all()
    assert result[0, 2:].isfinite().all()
    assert result[1].isfinite().all()


@pytest.mark.parametrize("table", [False, True])
def test_lengths_beyond_the_pages_are_cut(table: bool) -> None:
    operands = make((32, 48), 16, table=table, spare=0)
    expected = check(operands, 2)
    longer = torch.tensor([32 if table else 1000, 1000], dtype=torch.int32)
    assert torch.equal(run(dataclasses.replace(operands, kv_lengths=longer), splits=2), expected)


@pytest.mark.parametrize("length", [2**31, 2**32 + 5, 2**63 - 1, -(2**31) - 1, -(2**63)])
@pytest.mark.parametrize("table", [False, True])
def test_lengths_of_64_bits_are_cut_to_the_pages(table: bool, length: int) -> None:
    operands = make((32, 48), 16, table=table, spare=0, index_dtype=torch.int64, dead=0.0)
    if table:
        operands.kv_indices.remainder_(len(operands.k_cache))
    lengths = torch.tensor([20, length])
    check(dataclasses.replace(operands, kv_lengths=lengths), 2)
    check(dataclasses.replace(operands, kv_lengths=lengths), 2, window=5)


@pytest.mark.parametrize("bound", [2**31 + 1, 2**32 + 1, 2**63 - 1, -(2**32) + 1, -(2**63)])
@pytest.mark.parametrize("place", [1, 2])
def test_offsets_of_64_bits_are_cut_to_the_indices(bound: int, place: int) -> None:
    operands = make((32, 48), 16, spare=0, index_dtype=torch.int64)
    assert operands.kv_indptr is not None
    operands.kv_indptr[place] = bound
    check(dataclasses.replace(operands, kv_lengths=None), 2)


def test_any_strides() -> None:
    width = 16
    plain = make((37, 20), 4, kv_heads=1)
    expected = check(plain, 2)
    head_major = [cache.transpose(1, 2).contiguous() for cache in (plain.k_cache, plain.v_cache)]
    packed = torch.stack([plain.k_cache, plain.v_cache], dim=1)
    columns = plain.k_cache.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
    every_other = torch.full((2 * len(plain.kv_indices),), GARBAGE, dtype=torch.int32)
    every_other[::2] = plain.kv_indices
    wide = torch.randn(2, 2, 2 * width)
    wide[..., :width], wide[..., width:] = plain.query, plain.gate
    for changes in (
        {"k_cache": head_major[0].transpose(1, 2), "v_cache": head_major[1].transpose(1, 2)},
        {"k_cache": packed[:, 0], "v_cache": packed[:, 1]},
        {"k_cache": columns},
        {"kv_indices": every_other[::2]},
        {"query": wide[..., :width], "gate": wide[..., width:]},
        {"kv_lengths": torch.tensor([[37, 20], [0, 0]], dtype=torch.int64).T[:, 0]},
    ):
        assert torch.equal(run(dataclasses.replace(plain, **changes), splits=2), expected)
    for gate in (torch.randn(2, 2, 1), torch.randn(2, 1, width).half()):
        check(dataclasses.replace(plain, gate=gate), 2)


@pytest.mark.parametrize(
    ("numerics", "dtype"),
    [("compiled", torch.float16), ("eager", torch.float16), ("fp32", torch.float32)],
)
def test_an_open_gate_changes_no_bit(numerics: str, dtype: torch.dtype) -> None:
    """The gated kernels attend as the un-gated ones; what the gate rounds is seen separately."""
    operands = make((50, 3), tokens=(2, 1), kv_heads=1, dtype=dtype)
    modes = dataclasses.replace(MODES, max_query_tokens=2, numerics=numerics)
    plain = run(
        dataclasses.replace(operands, gate=None), dataclasses.replace(modes, numerics="none"), 3
    )
    # Its sigmoid is exactly 1 in float32.
    opened = dataclasses.replace(operands, gate=torch.full((1, 1, 1), 100.0))
    assert torch.equal(run(opened, modes, 3), plain)


@pytest.mark.parametrize("numerics", ["compiled", "eager"])
def test_gated_is_plain_attention_then_torch(numerics: str) -> None:
    operands = make((50, 3), kv_heads=1, head_dim=64, dtype=torch.float16)
    modes = dataclasses.replace(MODES, numerics=numerics)
    plain = run(dataclasses.replace(operands, gate=None), PagedModes(scale=0.25), 3)
    expected = plain * operands.gate.sigmoid()
    if numerics == "compiled":
        expected = (plain.float() * operands.gate.float().sigmoid()).half()
    result = run(operands, modes, 3)
    # The interpreter's exp is numpy's, an ulp from torch's; tests/gpu has the exact claim.
    assert (result != expected).float().mean() < 0.01
    torch.testing.assert_close(result, expected, rtol=2 * torch.finfo(torch.float16).eps, atol=0)


def test_dtypes_of_gate_sigmoid_and_output() -> None:
    half, single = torch.float16, torch.float32
    operands = make((17, 5), kv_heads=1, dtype=half)
    wide = dataclasses.replace(operands, gate=operands.gate.float())
    for gated, changes in (
        (wide, {"dtype": single}),
        (operands, {"dtype": single, "numerics": "fp32"}),
        (wide, {"numerics": "eager", "sigmoid_dtype": half, "dtype": half}),
    ):
        result = check(gated, 2, **changes)
        assert result.dtype == changes["dtype"]


def test_no_request_and_no_token() -> None:
    assert run(make(())).shape == (0, 4, 16)
    operands = make((), tokens=())
    padded = dataclasses.replace(operands, query=torch.randn(2, 4, 16), gate=torch.ones(2, 4, 16))
    assert torch.equal(run(padded), torch.zeros(2, 4, 16))
