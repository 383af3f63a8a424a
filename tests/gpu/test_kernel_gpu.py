"""The kernels on a GPU: every operand, rounding contract, stream and graph that they promise."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from fusion_pass import launch, lowering, ops, reference
from fusion_pass.launch import Operand

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

INF = math.inf
MODES = {"scale": 0.125, "mask_fill": -INF, "masked_row": "zero", "numerics": "compiled"}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(0)


def operands(
    generator: torch.Generator,
    batch: int = 2,
    kv_heads: int = 2,
    group: int = 8,
    tokens: int = 1,
    length: int = 777,
    head_dim: int = 128,
    value_dim: int | None = None,
    dtype: torch.dtype = BF16,
) -> list[Tensor]:
    value_dim = head_dim if value_dim is None else value_dim
    heads = kv_heads * group
    sizes = (
        (batch, heads, tokens, head_dim),
        (batch, kv_heads, length, head_dim),
        (batch, kv_heads, length, value_dim),
        (batch, tokens, heads, value_dim),
    )
    return [torch.randn(size, device="cuda", generator=generator).to(dtype) for size in sizes]


def run(
    tensors: list[Tensor], mask: Tensor | None = None, splits: int | None = None, **modes: Any
) -> Tensor:
    config = None
    if splits is not None:
        query, key, value = map(Operand.of, tensors[:3])
        masking = None if mask is None else Operand.of(mask)
        problem = launch.problem_of(query, key, value, masking)
        config = launch.choose(problem, launch.device_limits(tensors[0].device))
        config = dataclasses.replace(config, num_splits=splits)
    return launch.run(*tensors, mask, **{**MODES, **modes}, config=config)


def check(
    tensors: list[Tensor], mask: Tensor | None = None, splits: int | None = None, **modes: Any
) -> Tensor:
    """Compare with float64; the naive computation's own error is the yardstick."""
    result = run(tensors, mask, splits, **modes)
    modes = {**MODES, **modes}
    truth = reference.gated_decode_attention(*tensors, mask, **modes, compute_dtype=torch.float64)
    naive = reference.gated_decode_attention(*tensors, mask, **modes)
    finite = truth.isfinite()
    assert torch.equal(result.isnan(), truth.isnan())
    if finite.any():
        error = (result.double() - truth)[finite].abs().max()
        naive_error = (naive.double() - truth)[finite].abs().max()
        # The kernel sums in another order: in fp32, from weights of twice V's precision.
        precision = max(torch.finfo(FP32).eps, torch.finfo(tensors[2].dtype).eps ** 2)
        reordering = 4 * precision * tensors[2].nan_to_num(0, 0, 0).abs().max()
        assert error <= 1.5 * naive_error + reordering
    return result


SHAPES = [
    {"head_dim": 256, "length": 5000, "dtype": BF16},
    {"masked": True, "head_dim": 256, "length": 4096, "dtype": BF16, "batch": 8, "tokens": 4},
    {"masked": True, "head_dim": 256, "value_dim": 64, "group": 3, "length": 1025, "dtype": FP16},
    {"head_dim": 128, "group": 4, "kv_heads": 8, "length": 2049, "dtype": BF16},
    {
        "masked": True,
        "head_dim": 128,
        "group": 64,
        "tokens": 16,
        "length": 300,
        "dtype": BF16,
        "batch": 1,
    },
    {"head_dim": 192, "value_dim": 128, "group": 5, "tokens": 3, "length": 129, "dtype": FP16},
    {"masked": True, "head_dim": 96, "group": 7, "length": 1000, "dtype": FP32},
    {"head_dim": 64, "group": 1, "length": 65, "dtype": FP32, "tokens": 2},
    {"masked": True, "head_dim": 40, "group": 12, "length": 17, "dtype": BF16},
    {"head_dim": 16, "group": 6, "length": 1, "dtype": FP32},
    {"masked": True, "head_dim": 512, "group": 2, "length": 333, "dtype": BF16},
    {"head_dim": 512, "group": 2, "length": 100, "dtype": FP32},
    {
        "masked": True,
        "head_dim": 16,
        "group": 1,
        "kv_heads": 1,
        "length": 3,
        "dtype": BF16,
        "batch": 70000,
    },
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
def test_shapes(shape: dict[str, Any], generator: torch.Generator) -> None:
    sizes = dict(shape)
    masked = sizes.pop("masked", False)
    tensors = operands(generator, **sizes)
    mask = None
    if masked:
        length = tensors[1].shape[2]
        mask = torch.rand(len(tensors[0]), 1, 1, length, device="cuda", generator=generator) < 0.3
        mask[..., length // 2] = True
    check(tensors, mask)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("value_dim", [16, 40, 64])
@pytest.mark.parametrize("live", [5, 1037, 2272])
def test_many_rows_over_a_cache_of_unaligned_rows(
    live: int, value_dim: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """64 query rows a KV head, loads that cannot be asynchronous, NaN before the live keys."""
    tensors = operands(
        generator, batch=1, group=64, length=4096, head_dim=40, value_dim=value_dim, dtype=dtype
    )
    mask = (torch.arange(4096, device="cuda") >= 4096 - live)[None, None, None]
    poisoned, clean = list(tensors), list(tensors)
    for index in (1, 2):
        for filled, value in ((poisoned, math.nan), (clean, 0.0)):
            rows = torch.nn.functional.pad(tensors[index], (1, 0), value=value)[..., 1:]
            rows[..., : 4096 - live, :] = value
            filled[index] = rows
    assert torch.equal(run(poisoned, mask), check(clean, mask))


@pytest.mark.parametrize("poison", [math.nan, 1e30])
@pytest.mark.parametrize("splits", [1, 2, 7, 32, 128])
def test_split_counts_with_poisoned_scratch(
    splits: int, poison: float, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        launch,
        "allocate_scratch",
        lambda size, device: torch.full(size, poison, dtype=FP32, device=device),
    )
    for length in (1, 33, 1000):
        tensors = operands(generator, length=length)
        mask = torch.zeros(2, 1, 1, length, dtype=torch.bool, device="cuda")
        mask[0, ..., length // 3] = True
        mask[1, ..., : length // 2] = True
        check(tensors, mask, splits)


@pytest.mark.parametrize("kind", [torch.bool, BF16])
def test_masks_broadcast_over_any_dimension(kind: torch.dtype, generator: torch.Generator) -> None:
    full = (2, 16, 3, 304)
    tensors = operands(generator, tokens=3, length=304, head_dim=64)
    for size in ((1, 1, 1, 304), (2, 1, 3, 304), (1, 16, 1, 304), (2, 16, 3, 304), (2, 16, 1, 1)):
        mask = torch.rand(size, device="cuda", generator=generator) < 0.7
        mask[..., -1] = True
        if kind != torch.bool:
            bias = torch.randn(size, device="cuda", generator=generator).to(kind)
            mask = bias.masked_fill(~mask, -INF)
        assert torch.equal(check(tensors, mask), run(tensors, mask.expand(full)))


@pytest.mark.parametrize("splits", [1, 16])
def test_rows_without_a_live_key(splits: int, generator: torch.Generator) -> None:
    tensors = operands(generator, length=301)
    mask = torch.ones(2, 1, 1, 301, dtype=torch.bool, device="cuda")
    mask[1] = False
    bias = torch.zeros(mask.shape, device="cuda").masked_fill(~mask, -INF)
    for attended, row in itertools.product((mask, bias), ("zero", "nan")):
        result = check(tensors, attended, splits, masked_row=row)[1]
        assert result.isnan().all() if row == "nan" else (result == 0).all()
    filled = {"mask_fill": torch.finfo(BF16).min}
    check(tensors, mask, splits, **filled)
    check(tensors, torch.full_like(bias, torch.finfo(FP32).min), splits)
    tensors[0][1] = math.nan
    replaced = check(tensors, mask, splits, masked_row="mean", **filled)
    assert replaced[1].isfinite().all()


@pytest.mark.parametrize("splits", [1, 16])
def test_sinks(splits: int, generator: torch.Generator) -> None:
    tensors = operands(generator, length=1000)
    sinks = torch.linspace(-10, 10, 16, device="cuda")
    sinks[3] = -INF
    mask = torch.ones(2, 1, 1, 1000, dtype=torch.bool, device="cuda")
    mask[0, ..., :700] = False
    check(tensors, None, splits, sinks=sinks)
    check(tensors, mask, splits, sinks=sinks.to(BF16))
    mask[1] = False
    dead = check(tensors, mask, splits, sinks=sinks, masked_row="nan")
    assert (dead[1] == 0).all()
    check(tensors, mask, splits, sinks=sinks, mask_fill=torch.finfo(FP32).min)


@pytest.mark.parametrize(("splits", "tokens"), [(1, 3), (7, 1), (7, 3)])
def test_runs_of_full_tiles(splits: int, tokens: int, generator: torch.Generator) -> None:
    """Prefixes, windows, holes and causal ends, with garbage wherever no row looks."""
    length = 1000
    tensors = operands(generator, tokens=tokens, length=length, head_dim=64)
    position = torch.arange(length, device="cuda")
    newest = length - tokens + torch.arange(tokens, device="cuda")[:, None]
    masks = {
        "prefix": position < 600,
        "window": (position > 200) & (position < 777),
        "hole": (position < 300) | (position > 500),
        "causal": position <= newest,
        "causal window": (position <= newest) & (position > newest - 400),
        "full": position >= 0,
        "every other": position % 2 == 0,
    }
    for mask in masks.values():
        mask = mask.expand(1, 1, tokens, length)
        garbage = [tensor.clone() for tensor in tensors]
        for tensor in garbage[1:3]:
            tensor[:, :, ~mask[0, 0].any(0)] = math.nan
        expected = check(garbage, mask, splits)
        assert torch.equal(run(tensors, mask, splits), expected)
        bias = torch.zeros(mask.shape, device="cuda", dtype=BF16).masked_fill(~mask, -INF)
        check(garbage, bias, splits)


@pytest.mark.parametrize("garbage", [math.nan, INF])
def test_dead_slots_never_leak(garbage: float, generator: torch.Generator) -> None:
    tensors = operands(generator, length=1000)
    mask = torch.zeros(1, 1, 1, 1000, dtype=torch.bool, device="cuda")
    mask[..., 300:650] = True
    for tensor in tensors[1:3]:
        tensor[:, :, ~mask[0, 0, 0]] = garbage
    assert check(tensors, mask).isfinite().all()
    tensors[2][0, 0, 400] = math.nan
    assert check(tensors, mask)[0, :, :8].isnan().all()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("splits", [1, 8])
def test_huge_logits(dtype: torch.dtype, splits: int, generator: torch.Generator) -> None:
    tensors = operands(generator, length=500, head_dim=16, dtype=dtype)
    tensors[0][:] = 1
    for low, high in ((-3000.0, 3000.0), (3000.0, 3000.0), (-3000.0, -3000.0)):
        tensors[1][:] = low / 16
        tensors[1][:, :, 300] = high / 16
        assert check(tensors, None, splits, scale=1.0).isfinite().all()


def test_any_strides(generator: torch.Generator) -> None:
    def random(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", generator=generator).to(BF16)

    packed = random(2, 2, 6, 128)
    query, gate = packed[..., :64].transpose(1, 2), packed[..., 64:]
    key, value = random(2, 300, 3, 2, 2, 64)[:, :, 1].permute(2, 0, 3, 1, 4)
    check([query, key, value, gate])
    check([query, random(2, 2, 64, 300).transpose(2, 3), value, gate])
    check([query, random(2, 2, 300, 65)[..., 1:], random(2, 2, 300, 67)[..., :64], gate])
    check([query, key[:, :1].expand_as(key), value[:1].expand_as(value), gate])
    overlapping = random(4000).as_strided((2, 2, 300, 64), (7, 3, 5, 1), 11)
    check([query, overlapping, overlapping, gate])
    check([query, key, value, random(2, 2, 6, 1)])
    capacity = torch.rand(2, 6, 2, 400, device="cuda", generator=generator) < 0.5
    check([query, key, value, gate], capacity[..., 3:303])
    check([query, key, value, gate], capacity.transpose(2, 3)[:, :, 5:305].transpose(2, 3))


def _all_gates(dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """All 65,536 gates, each at one output element whose attention output is exactly V."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda")
    tensors = operands(
        generator, batch=1, kv_heads=256, group=1, length=1, head_dim=16, value_dim=256, dtype=dtype
    )
    tensors[3] = bits.view(dtype).view(1, 1, 256, 256)
    return tensors


def _bits(tensor: Tensor) -> Tensor:
    return tensor.masked_fill(tensor.isnan(), math.nan).view(torch.int16)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_gate_rounds_as_eager_torch(dtype: torch.dtype, generator: torch.Generator) -> None:
    for _ in range(4):
        tensors = _all_gates(dtype, generator)
        expected = tensors[2].transpose(1, 2) * torch.sigmoid(tensors[3])
        assert torch.equal(_bits(run(tensors, numerics="eager")), _bits(expected))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_gate_rounds_as_inductor(dtype: torch.dtype, generator: torch.Generator) -> None:
    gate = torch.compile(lambda attended, gate: attended * torch.sigmoid(gate))
    for _ in range(4):
        tensors = _all_gates(dtype, generator)
        expected = gate(tensors[2].transpose(1, 2).contiguous(), tensors[3])
        assert torch.equal(_bits(run(tensors, numerics="compiled")), _bits(expected))


@pytest.mark.parametrize("numerics", ["compiled", "eager"])
def test_every_gate_in_other_dtypes(numerics: str, generator: torch.Generator) -> None:
    tensors = _all_gates(BF16, generator)
    query, key, value, gate = tensors
    attended = value.transpose(1, 2)
    sigmoid = gate.float().sigmoid()
    expected = attended * (sigmoid if numerics == "compiled" else sigmoid.to(FP16).float())
    modes = {"numerics": numerics, "sigmoid_dtype": FP16}
    if numerics == "eager":
        for wide in (gate, gate.float()):
            result = run([query, key, value, wide], dtype=FP32, **modes)
            assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))
        result = run(tensors, dtype=FP16, **modes)
        assert torch.equal(_bits(result), _bits(expected.to(FP16)))
    else:
        # exp(x) is exp2(x * log2(e)), whose argument's rounding costs |x| * 2**-24, at most 88 of
        # them before the result is denormal; the approximation itself two units in the last place.
        result = run(tensors, dtype=FP32, **modes)
        rtol = 88 * 2**-24 + 2**-22
        torch.testing.assert_close(result, expected, rtol=rtol, atol=1e-37, equal_nan=True)


def test_identical_calls_give_identical_bits(generator: torch.Generator) -> None:
    tensors = operands(generator, batch=4, head_dim=256, length=4096)
    first = run(tensors)
    for _ in range(20):
        assert torch.equal(run(tensors), first)


def test_offsets_beyond_32_bits(generator: torch.Generator) -> None:
    if torch.cuda.get_device_properties(0).total_memory < 24 << 30:
        pytest.skip("needs 24 GB")
    small = operands(generator, batch=3, kv_heads=1, length=80, head_dim=64)
    storage = torch.empty(80 << 25, dtype=BF16, device="cuda")  # 5 GiB
    layouts = {"batch": (1 << 30, 1 << 30, 64, 1), "token": (64, 64, (1 << 25) - 1, 1)}
    for strides in layouts.values():
        far = list(small)
        for index in (1, 2):
            view = storage.as_strided(small[index].shape, strides, 4096 * index * 3)
            view.copy_(small[index])
            far[index] = view
        assert torch.equal(run(far), run(small))


def test_side_streams_with_different_data(generator: torch.Generator) -> None:
    inputs = [operands(generator, length=2000), operands(generator, length=2000)]
    expected = [run(tensors) for tensors in inputs]
    slow = torch.randn(4096, 4096, device="cuda")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for stream, tensors, collected in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                late = tensors[0] + (slow @ slow).flatten()[0] * 0
                collected.append(run([late.to(BF16), *tensors[1:]]))
    torch.cuda.synchronize()
    for collected, truth in zip(results, expected, strict=True):
        assert all(torch.equal(result, truth) for result in collected)


def test_graph_replays_follow_the_mask(generator: torch.Generator) -> None:
    tensors = operands(generator, length=4096, head_dim=256)
    mask = torch.zeros(2, 1, 1, 4096, dtype=torch.bool, device="cuda")
    run(tensors, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(tensors, mask)
    for live in (1, 17, 600, 4096, 600, 1, 0):
        mask.copy_((torch.arange(4096, device="cuda") < live).expand_as(mask))
        recycled = torch.full((1 << 24,), math.nan, device="cuda")
        del recycled
        graph.replay()
        assert torch.equal(captured, check(tensors, mask))


def test_nothing_is_written_outside_output_and_scratch(generator: torch.Generator) -> None:
    guard = 1024
    tensors = operands(generator, group=3, tokens=3, length=1000, head_dim=40)
    query, key, value, gate = map(Operand.of, tensors)
    config = launch.choose(
        launch.problem_of(query, key, value, None), launch.device_limits(tensors[0].device)
    )
    sizes = {"output": (2, 3, 6, 40), **launch.scratch_sizes(config, query, value)}
    bands, inner = {}, {}
    for name, size in sizes.items():
        dtype = BF16 if name == "output" else FP32
        count = math.prod(size)
        bands[name] = torch.full((count + 2 * guard,), 7.0, dtype=dtype, device="cuda")
        inner[name] = bands[name][guard : guard + count].view(size)
    for step in launch.launches(
        config, query=query, key=key, value=value, gate=gate, mask=None, **inner, **MODES
    ):
        step.kernel[step.grid](**step.arguments, **step.options)
    assert torch.equal(inner["output"], run(tensors))
    for band in bands.values():
        assert (band[:guard] == 7).all()
        assert (band[-guard:] == 7).all()


def test_operator_dispatches_to_the_kernels(generator: torch.Generator) -> None:
    tensors = operands(generator)
    with torch.profiler.profile() as profile:
        result = ops.gated_decode_attention(*tensors, None, scale=0.125)
        torch.cuda.synchronize()
    assert torch.equal(result, run(tensors))
    names = [event.key for event in profile.key_averages()]
    for kernel in ("gated_decode_split", "gated_decode_reduce"):
        assert any(kernel in name for name in names)


def test_inductor_launches_the_reduce_dependently(generator: torch.Generator) -> None:
    lowering.register()
    tensors = operands(generator)
    sinks = torch.linspace(-2, 2, 32, device="cuda", dtype=BF16)[::2]

    def step(sinks: Tensor, *tensors: Tensor) -> Tensor:
        return ops.gated_decode_attention(*tensors, None, sinks, scale=0.125, dtype=FP32)

    result, (code,) = run_and_get_code(torch.compile(step), sinks, *tensors)
    assert torch.equal(result, run(tensors, sinks=sinks, dtype=FP32))
    hopper = torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)
    assert code.count("'launch_pdl': True") == (1 if hopper else 0)
    if hopper:
        after = code[code.index("'launch_pdl': True") :]
        assert after.index("def gated_decode_reduce") < after.index("def call")


def test_operands_on_another_than_the_current_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        tensors = operands(torch.Generator("cuda").manual_seed(0))
        moved = [tensor.to("cuda:1") for tensor in tensors]
        assert torch.equal(run(moved).cpu(), run(tensors).cpu())
        assert torch.cuda.current_device() == 0
