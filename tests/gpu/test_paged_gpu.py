"""The paged kernels on a GPU: exactness, CUDA graphs with changing contents, and Inductor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import fusion_pass
from fusion_pass import lowering
from fusion_pass.paged import check as paged_check
from fusion_pass.paged import launch
from fusion_pass.paged.operands import PagedModes, PagedOperands
from tests.test_paged_interpreter import check, make, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EAGER = PagedModes(scale=0.25, numerics="eager")
ONE, FOUR = (512,), (512, 495, 478, 461)

SHAPES: list[dict[str, Any]] = [
    {"lengths": (5000, 1), "page_size": 1, "group": 8, "head_dim": 256, "dtype": BF16},
    {"lengths": FOUR, "page_size": 16, "group": 8, "head_dim": 256, "dtype": BF16},
    {"lengths": (4096,) * 40, "page_size": 16, "group": 8, "head_dim": 256, "dtype": BF16},
    {"lengths": (3000, 0, 7), "page_size": 64, "group": 4, "head_dim": 128, "table": True},
    {"lengths": FOUR, "page_size": 16, "kv_heads": 8, "group": 4, "head_dim": 128, "dtype": BF16},
    {"lengths": (777, 64), "page_size": 3, "group": 3, "head_dim": 192, "value_dim": 128},
    {"lengths": FOUR, "page_size": 3, "group": 12, "head_dim": 96, "dtype": FP16, "table": True},
    {"lengths": (1, 33), "page_size": 100, "group": 1, "head_dim": 40, "dtype": FP16},
    {"lengths": (600,), "page_size": 16, "group": 6, "head_dim": 512, "dtype": BF16},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s.values())))
def test_shapes(shape: dict[str, Any]) -> None:
    check(make(**shape, device="cuda"))


@pytest.mark.parametrize("poison", [math.nan, 1e30])
@pytest.mark.parametrize("splits", [1, 2, 7, 32, 128])
def test_split_counts_with_poisoned_scratch(
    splits: int, poison: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        launch,
        "allocate_scratch",
        lambda size, device: torch.full(size, poison, dtype=FP32, device=device),
    )
    for table in (False, True):
        operands = make((0, 1, 900, 33), table=table, dtype=BF16, head_dim=64, device="cuda")
        assert (check(operands, splits)[0] == 0).all()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("window", [0, 1, 100])
def test_several_query_tokens(window: int, dtype: torch.dtype) -> None:
    tokens = (16, 0, 1, 7, 4)
    lengths = (1000, 9, 300, 7, 3)
    operands = make(lengths, 16, tokens=tokens, group=8, head_dim=128, dtype=dtype, device="cuda")
    check(operands, max_query_tokens=16, window=window)
    padded = dataclasses.replace(
        operands,
        query=torch.cat([operands.query] * 2),
        gate=torch.cat([operands.gate] * 2),
        sinks=torch.linspace(-3, 3, 16, device="cuda"),
    )
    assert (check(padded, max_query_tokens=16, window=window)[28:] == 0).all()


def plain(operands: PagedOperands[Tensor], modes: PagedModes) -> Tensor:
    """The same kernels un-gated, then torch's sigmoid and multiply, which round as they do."""
    modes = dataclasses.replace(modes, numerics="none")
    return run(dataclasses.replace(operands, gate=None), modes) * torch.sigmoid(operands.gate)


@pytest.mark.parametrize("lengths", [ONE, FOUR], ids=["B1", "B4"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("group", [1, 3, 6, 8, 12])
def test_fused_equals_plain_then_torch(
    group: int, dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    for page_size, window, sinks in ((1, 0, False), (16, 100, False), (64, 0, True)):
        operands = make(lengths, page_size, group=group, head_dim=128, dtype=dtype, device="cuda")
        if sinks:
            logits = torch.linspace(-2, 4, 2 * group, device="cuda", dtype=dtype)
            operands = dataclasses.replace(operands, sinks=logits)
        modes = dataclasses.replace(EAGER, window=window)
        assert torch.equal(run(operands, modes), plain(operands, modes))


def refill(operands: PagedOperands[Tensor], lengths: Sequence[int], seed: int) -> None:
    """Other requests in the same memory, within the capacity that it has."""
    pages, page_size = operands.k_cache.shape[:2]
    new = make(lengths, page_size, head_dim=128, dtype=BF16, group=8, spare=0, seed=seed)
    assert len(new.k_cache) <= pages
    operands.query.copy_(new.query)
    operands.gate.copy_(new.gate)
    for cache, content in ((operands.k_cache, new.k_cache), (operands.v_cache, new.v_cache)):
        cache.fill_(math.nan)
        cache[: len(content)] = content.cuda()
    operands.kv_indices.fill_(2**30)
    operands.kv_indices[: len(new.kv_indices)] = new.kv_indices.cuda()
    operands.kv_indptr.copy_(new.kv_indptr)
    operands.kv_lengths.copy_(new.kv_lengths)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("lengths", [ONE, FOUR], ids=["B1", "B4"])
def test_one_graph_serves_every_length(lengths: tuple[int, ...], page_size: int) -> None:
    batch = len(lengths)
    operands = make((1024,) * batch, page_size, head_dim=128, dtype=BF16, group=8, device="cuda")
    refill(operands, lengths, seed=1)
    run(operands, EAGER)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(operands, EAGER)
    contents = (lengths, (1024,) * batch, (0,) * batch, (3, *(900,) * (batch - 1)), lengths)
    for seed, content in enumerate(contents, start=1):
        refill(operands, content, seed)
        output.fill_(math.nan)
        graph.replay()
        assert torch.equal(output, plain(operands, EAGER))
        assert torch.equal(output, check(operands, numerics="eager"))


def test_nothing_waits_for_the_device() -> None:
    operands = make(FOUR, tokens=(2, 1, 1, 3), head_dim=64, dtype=BF16, device="cuda")
    modes = dataclasses.replace(EAGER, max_query_tokens=3)
    expected = run(operands, modes)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = run(operands, modes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(result, expected)


def test_identical_calls_give_identical_bits() -> None:
    operands = make((3000, 2000), page_size=1, head_dim=256, group=8, dtype=BF16, device="cuda")
    first = run(operands)
    for _ in range(20):
        assert torch.equal(run(operands), first)


@pytest.mark.parametrize("page_size", [4, 64])
def test_page_offsets_beyond_32_bits(page_size: int) -> None:
    if torch.cuda.get_device_properties(0).total_memory < 32 << 30:
        pytest.skip("needs 32 GB")
    operands = make((200, 100), page_size, head_dim=64, dtype=BF16, device="cuda")
    pages = len(operands.k_cache)
    stride = (9 << 30) // 2 // pages // 64 * 64
    storage = torch.empty(pages * stride, dtype=BF16, device="cuda")  # 9 GiB
    far = storage.as_strided(operands.k_cache.shape, (stride, *operands.k_cache.stride()[1:]))
    far.copy_(operands.k_cache)
    assert (pages - 1) * stride > 2**31
    assert torch.equal(run(dataclasses.replace(operands, k_cache=far)), run(operands))


def arguments(operands: PagedOperands[Tensor]) -> dict[str, Any]:
    return {"kv_indptr": None, **dict(operands.given())}


def gated(**given: Any) -> Tensor:
    return fusion_pass.paged_decode_attention(**given, scale=0.25)


@pytest.mark.parametrize("form", ["csr", "table", "several tokens", "un-gated"])
def test_inductor_launches_the_kernels(form: str) -> None:
    lowering.register()
    tokens = (2, 1, 1, 3) if form == "several tokens" else None
    operands = make(
        FOUR, tokens=tokens, table=form == "table", head_dim=128, dtype=BF16, device="cuda"
    )
    given = arguments(operands)
    if tokens:
        given["max_query_tokens"] = 3
    if form == "un-gated":
        del given["gate"]
    result, (code,) = run_and_get_code(torch.compile(gated, fullgraph=True), **given)
    assert torch.equal(result, gated(**given))
    lines = [line for line in code.splitlines() if not line.lstrip().startswith("#")]
    for kernel in ("paged_decode_split", "paged_decode_reduce"):
        assert sum(f"def {kernel}_d128_bf16(" in line for line in lines) == 1
    assert not any("torch.ops.fusion_pass" in line for line in lines)


def _change_in_place(given: dict[str, Any]) -> None:
    given["kv_lengths"].sub_(100)


@pytest.mark.parametrize(
    "options", [{"mode": "reduce-overhead"}, {"dynamic": True}], ids=lambda o: next(iter(o))
)
def test_inductor_reads_changed_lengths(options: dict[str, Any]) -> None:
    lowering.register()
    given = arguments(make(FOUR, head_dim=128, dtype=BF16, device="cuda"))
    compiled: Callable[..., Tensor] = torch.compile(gated, **options)
    for _ in range(4):
        assert torch.equal(compiled(**given), gated(**given))
        _change_in_place(given)


def test_a_cache_updated_in_the_same_graph() -> None:
    lowering.register()
    given = arguments(make(FOUR, head_dim=128, dtype=BF16, device="cuda"))
    last = given["kv_lengths"] - 1
    pages = given["kv_indices"][(given["kv_indptr"][:-1] + last // 16).long()].long()
    new = torch.full((4, 2, 128), 3.0, dtype=BF16, device="cuda")

    def step(k_cache: Tensor, **rest: Any) -> Tensor:
        k_cache.index_put_((pages, (last % 16).long()), new)
        return gated(k_cache=k_cache, **rest)

    own = {**given, "k_cache": given["k_cache"].clone()}
    expected = step(**given)
    assert torch.equal(torch.compile(step)(**own), expected)
    assert torch.equal(own["k_cache"].nan_to_num(7), given["k_cache"].nan_to_num(7))


def test_checks_name_what_points_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(paged_check.VARIABLE, "1")
    lowering.register()
    given = arguments(make(FOUR, head_dim=64, dtype=BF16, device="cuda"))
    given["kv_indices"][3] = 2**20
    for call in (gated, torch.compile(gated)):
        with pytest.raises(IndexError, match="request 0 page 1048576 as entry 3"):
            call(**given)


def test_operands_on_another_than_the_current_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    operands = make(FOUR, head_dim=64, dtype=BF16, device="cuda:0")
    moved = operands.map(lambda tensor: tensor.to("cuda:1"))
    assert torch.equal(run(moved).cpu(), run(operands).cpu())
    assert torch.cuda.current_device() == 0
