"""The kernels under Triton's interpreter, on any machine, against the float64 reference."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import reading
from fusion_pass import launch, reference
from fusion_pass.launch import Operand

triton = pytest.importorskip("triton")

INF = math.inf
MODES = {"scale": 0.25, "mask_fill": -INF, "masked_row": "zero", "numerics": "compiled"}


def _load_interpreted(name: str) -> ModuleType:
    path = importlib.util.find_spec(name).origin
    spec = importlib.util.spec_from_file_location(f"interpreted_{name.replace('.', '_')}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _language_restored() -> Iterator[None]:
    """Undo the interpreter's changes of triton.language, of which it leaves some behind."""
    from triton import language

    classes = [member for member in vars(language.core).values() if isinstance(member, type)]
    owners = [language, language.core, language.math, language.standard, *classes]
    before = [(owner, dict(vars(owner))) for owner in owners]
    yield
    for owner, members in before:
        for name, member in members.items():
            if vars(owner).get(name) is not member:
                setattr(owner, name, member)


@pytest.fixture(scope="module", autouse=True)
def interpreted_kernels() -> Iterator[ModuleType]:
    """A second, interpreted copy of the kernels in place of the compiled one."""
    from triton.language import standard
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    original = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor: type, *scope: Any) -> None:
        original(tensor, *scope)
        # Triton 3.6 gives numpy's int() an array of one element, which numpy 2.4 refuses.
        tensor.__index__ = lambda self: int(self.handle.data.item())

    with _language_restored(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        # Triton decides at import whether its own helpers, tl.max and others, are interpreted.
        for name, function in list(vars(standard).items()):
            if isinstance(function, JITFunction):
                interpreted = InterpretedFunction(function.fn)
                patch.setattr(standard, name, interpreted)
                if hasattr(triton.language, name):
                    patch.setattr(triton.language, name, interpreted)
        patch.setattr(interpreter, "_patch_lang_tensor", _patch_lang_tensor)
        module = _load_interpreted("fusion_pass.kernels.gated_decode")
        patch.setattr(launch, "kernels", lambda: module)
        yield module


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


def operands(
    batch: int = 2,
    kv_heads: int = 2,
    group: int = 2,
    tokens: int = 1,
    length: int = 65,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Tensor]:
    """Random query, key, value and gate whose every (batch, head, position) differs."""
    generator = torch.Generator().manual_seed(seed)
    value_dim = head_dim if value_dim is None else value_dim
    heads = kv_heads * group
    sizes = (
        (batch, heads, tokens, head_dim),
        (batch, kv_heads, length, head_dim),
        (batch, kv_heads, length, value_dim),
        (batch, tokens, heads, value_dim),
    )
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def run(
    tensors: list[Tensor], mask: Tensor | None = None, splits: int | None = None, **modes: Any
) -> Tensor:
    query, key, value = map(Operand.of, tensors[:3])
    masking = None if mask is None else Operand.of(mask)
    problem = launch.problem_of(query, key, value, masking)
    config = launch.choose(problem, launch.device_limits(torch.device("cpu")))
    if splits is not None:
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
    error = (result.double() - truth)[finite].abs()
    naive_error = (naive.double() - truth)[finite].abs()
    if error.numel():
        # The kernel sums in another order: in fp32, from weights of twice V's precision.
        precision = max(torch.finfo(torch.float32).eps, torch.finfo(tensors[2].dtype).eps ** 2)
        reordering = 4 * precision * tensors[2].nan_to_num(0, 0, 0).abs().max()
        assert error.max() <= 1.5 * naive_error.max() + reordering
    return result


SHAPES = [
    {"group": 1, "head_dim": 16, "tokens": 1, "length": 1},
    {"group": 3, "head_dim": 40, "tokens": 3, "length": 15},
    {"group": 8, "head_dim": 64, "tokens": 1, "length": 16},
    {"group": 1, "head_dim": 96, "tokens": 3, "length": 17},
    {"group": 3, "head_dim": 64, "value_dim": 40, "tokens": 1, "length": 63},
    {"group": 8, "head_dim": 40, "value_dim": 96, "tokens": 3, "length": 129},
    {"group": 1, "head_dim": 64, "value_dim": 16, "tokens": 1, "length": 300},
    {"group": 24, "head_dim": 16, "tokens": 3, "length": 65, "batch": 1},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s.values())))
def test_shapes(shape: dict[str, int], dtype: torch.dtype) -> None:
    check(operands(**shape, dtype=dtype))


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("length", [1, 17, 300])
def test_every_split_count_reads_only_what_was_written(
    splits: int, length: int, poison: float
) -> None:
    tensors = operands(length=length, head_dim=64)
    mask = torch.rand(2, 1, 1, length, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0, ..., : length - 1] = False
    mask[:, ..., -1] = True
    check(tensors, mask, splits)


@pytest.mark.parametrize("numerics", ["compiled", "eager", "fp32"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_one_split_gates_its_result_as_the_reduce_does(numerics: str, with_sinks: bool) -> None:
    tensors = operands(tokens=3, length=40, head_dim=40, dtype=torch.float16)
    sinks = torch.tensor([1.0, -2.0, 30.0, -INF]) if with_sinks else None
    mask = torch.rand(2, 1, 3, 40, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[..., 0] = True
    # A finite fill, of which no row here has need, is what the reduce is still launched for.
    one, two = (
        run(tensors, mask, 1, sinks=sinks, numerics=numerics, mask_fill=fill)
        for fill in (-INF, -65536.0)
    )
    assert torch.equal(one, two)
    check(tensors, mask, 1, sinks=sinks, numerics=numerics)


@pytest.mark.parametrize(("kind", "splits"), [("bool", 3), ("float", 1), ("half", 3)])
def test_masks_broadcast_over_any_dimension(kind: str, splits: int) -> None:
    batch, heads, tokens, length = 2, 2, 2, 33
    tensors = operands(batch, kv_heads=1, group=2, tokens=tokens, length=length)
    generator = torch.Generator().manual_seed(2)
    for size in itertools.product((batch,), (1, heads), (1, tokens), (1, length)):
        mask = torch.rand(size, generator=generator) < 0.7
        mask[..., -1] = True
        if kind != "bool":
            bias = torch.randn(size, generator=generator).masked_fill(~mask, -INF)
            mask = bias.half() if kind == "half" else bias
        expected = check(tensors, mask, splits)
        expanded = mask.expand(batch, heads, tokens, length)
        assert torch.equal(run(tensors, expanded, splits), expected)


def test_sliced_and_transposed_masks() -> None:
    tensors = operands(tokens=3, length=65)
    generator = torch.Generator().manual_seed(3)
    capacity = torch.rand(2, 4, 3, 100, generator=generator) < 0.6
    check(tensors, capacity[..., 7:72])
    check(tensors, (torch.rand(65, 3, 4, 2, generator=generator) < 0.6).permute(3, 2, 1, 0))
    check(tensors, capacity[:, 1:2, :, ::3].repeat(1, 1, 1, 2)[..., 1:66])


@pytest.mark.parametrize("window", [1, 5, 64])
def test_sliding_window(window: int) -> None:
    length = 130
    position = torch.arange(length)
    mask = (position > 99 - window) & (position <= 99)
    tensors = operands(length=length, head_dim=16, value_dim=144)
    tensors[2][:] = torch.eye(length, 144)
    tensors[3][:] = 40.0
    weights = check(tensors, mask.expand(1, 1, 1, length))[..., :length]
    assert torch.equal(weights != 0, mask.expand_as(weights))


MASKS = {
    "all": lambda keys, tokens: keys >= 0,
    "none": lambda keys, tokens: keys < 0,
    "prefix": lambda keys, tokens: keys < 90,
    "window": lambda keys, tokens: (keys > 30) & (keys < 131),
    "suffix": lambda keys, tokens: keys > 69,
    "causal": lambda keys, tokens: keys <= 100 + tokens,
    "holes": lambda keys, tokens: (keys + tokens) % 7 > 0,
    "two runs": lambda keys, tokens: (keys < 40) | (keys > 99),
}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shape", MASKS)
def test_a_mask_searched_in_parts_leaves_the_same_keys(
    shape: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tiles of a program in one look, in a loop, or tile by tile; 133 keys end within one."""
    tensors = operands(tokens=3, length=133)
    live = MASKS[shape](torch.arange(133), torch.arange(3)[:, None]).expand(2, 1, 3, 133)
    for tensor in tensors[1:3]:
        tensor[:, :, ~live[0, 0].any(0)] = math.nan
    at_once = check(tensors, live, splits)
    monkeypatch.setattr(launch, "STRAIGHT_ELEMENTS", 0)
    assert torch.equal(run(tensors, live, splits), at_once)
    monkeypatch.setattr(launch, "SCAN_ELEMENTS", 1)
    assert torch.equal(run(tensors, live, splits), at_once)


@pytest.mark.parametrize("garbage", [math.nan, INF])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_dead_slots_never_leak(garbage: float, kind: str) -> None:
    tensors = operands(length=100, tokens=3)
    live = torch.zeros(1, 1, 1, 100, dtype=torch.bool)
    live[..., 40:77] = True
    for tensor in tensors[1:3]:
        tensor[:, :, ~live[0, 0, 0]] = garbage
    mask = live if kind == "bool" else torch.zeros(live.shape).masked_fill(~live, -INF)
    assert check(tensors, mask, 3).isfinite().all()


def test_nan_at_a_live_key_spreads() -> None:
    tensors = operands(length=40)
    tensors[1][0, 0, 5] = math.nan
    result = check(tensors)
    assert result[0, :, :2].isnan().all()
    assert result[0, :, 2:].isfinite().all()


@pytest.mark.parametrize("masked_row", ["zero", "nan"])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("splits", [1, 7])
def test_masked_row_without_fill(masked_row: str, kind: str, splits: int, poison: float) -> None:
    tensors = operands(length=65, tokens=3)
    live = torch.ones(2, 1, 3, 65, dtype=torch.bool)
    live[1, :, 1] = False
    mask = live if kind == "bool" else torch.zeros(live.shape).masked_fill(~live, -INF)
    result = check(tensors, mask, splits, masked_row=masked_row)
    row = result[1, 1]
    assert row.isnan().all() if masked_row == "nan" else (row == 0).all()


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("length", [1, 33, 65])
def test_masked_row_with_a_finite_fill_is_the_mean_of_all_values(fill: float, length: int) -> None:
    tensors = operands(length=length, head_dim=40)
    tensors[3][:] = 40.0
    mask = torch.zeros(2, 1, 1, length, dtype=torch.bool)
    mask[0] = True
    result = check(tensors, mask, 2, mask_fill=fill)
    mean = tensors[2][1].mean(dim=1).repeat_interleave(2, dim=0)
    torch.testing.assert_close(result[1, 0], mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("sink", [None, 0.5, -INF])
@pytest.mark.parametrize("poisoned", [0, 1])
def test_a_fill_in_the_place_of_the_logits_hides_them(
    poisoned: int, sink: float | None, splits: int
) -> None:
    tensors = operands(length=33)
    mask = torch.ones(2, 1, 1, 33, dtype=torch.bool)
    mask[1] = False
    tensors[poisoned][1] = math.nan
    sinks = None if sink is None else torch.full((4,), sink)
    modes = {"sinks": sinks, "mask_fill": torch.finfo(torch.float32).min, "masked_row": "mean"}
    result = check(tensors, mask, splits, **modes)
    mean = tensors[2][1].mean(dim=1).repeat_interleave(2, dim=0) * tensors[3][1, 0].sigmoid()
    expected = mean * 0 if sink == 0.5 else mean
    torch.testing.assert_close(result[1, 0], expected, rtol=1e-5, atol=1e-6)
    # Where it is added, it does not.
    assert check(tensors, mask, splits, **{**modes, "masked_row": "zero"})[1].isnan().all()


def test_masked_row_with_a_small_fill_keeps_its_logits() -> None:
    tensors = operands(length=33)
    mask = torch.zeros(2, 1, 1, 33, dtype=torch.bool)
    result = run(tensors, mask, mask_fill=-65536.0)
    truth = reference.gated_decode_attention(
        *tensors, mask, **{**MODES, "mask_fill": -65536.0}, compute_dtype=torch.float64
    )
    # At 65536 float32 logits are 2**-7 apart, and so rounded by half of that.
    bound = 2 * (math.exp(2**-8) - 1) * tensors[2].abs().max()
    assert (result - truth).abs().max() <= bound


def test_float_mask_of_the_lowest_values_is_live() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensors = operands(length=65)
        mask = torch.full((2, 1, 1, 65), torch.finfo(dtype).min, dtype=dtype)
        mask[0, ..., :30] = 0
        check(tensors, mask, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("splits", [1, 3])
def test_huge_logits(dtype: torch.dtype, splits: int) -> None:
    tensors = operands(length=100, head_dim=16, dtype=dtype)
    query, key = tensors[:2]
    query[:] = 1
    for low, high in ((-3000.0, 3000.0), (3000.0, 3000.0), (-3000.0, -3000.0)):
        key[:] = low / 16
        key[:, :, 70] = high / 16
        assert check(tensors, None, splits, scale=1.0).isfinite().all()


def test_any_strides() -> None:
    batch, kv_heads, group, tokens, length, dim = 2, 2, 3, 2, 37, 16
    heads = kv_heads * group
    generator = torch.Generator().manual_seed(4)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    packed = random(batch, tokens, heads, 2 * dim)
    query, gate = packed[..., :dim].transpose(1, 2), packed[..., dim:]
    cache = random(batch, length, 3, 2, kv_heads, dim)
    key, value = cache[:, :, 1].permute(2, 0, 3, 1, 4)
    check([query, key, value, gate])
    check([query, random(batch, kv_heads, dim, length).transpose(2, 3), value, gate])
    check([query[..., :1].expand_as(query), key[:, :1].expand_as(key), value, gate])
    overlapping = random(1000).as_strided((batch, kv_heads, length, dim), (7, 3, 5, 1), 11)
    check([query, overlapping, overlapping, gate])
    check([query, key, value, random(batch, tokens, heads, 1)])
    check([query, key, value, random(1, 1, 1, dim)])
    check([query, key, value, gate.half()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("numerics", ["compiled", "eager", "fp32"])
def test_numerics_contract(numerics: str, dtype: torch.dtype) -> None:
    """With one key the attention output is the value, so the gate alone rounds."""
    tensors = operands(length=1, head_dim=64, batch=4, dtype=dtype)
    tensors[3] *= 4
    result = run(tensors, numerics=numerics)
    expected = reference.gated_decode_attention(*tensors, None, **{**MODES, "numerics": numerics})
    # The interpreter's exp is numpy's, an ulp from torch's: more than 1 % of changed
    # roundings, or one by more than a unit in the last place, would be another contract.
    different = result != expected
    if dtype == torch.float16:
        assert different.float().mean() < 0.01
    torch.testing.assert_close(result, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("fill", [-INF, -65536.0, torch.finfo(torch.float32).min])
def test_sinks(fill: float, splits: int, poison: float) -> None:
    tensors = operands(length=65)
    sinks = torch.tensor([[-INF, 0], [-10, 0], [10, 0], [1e4, 0]])[:, 0]
    mask = torch.ones(2, 1, 1, 65, dtype=torch.bool)
    mask[1] = False
    check(tensors, None, splits, sinks=sinks)
    result = check(tensors, mask, splits, sinks=sinks, mask_fill=fill, masked_row="nan")
    assert fill != -INF or (result[1] == 0).all()
    # Only the last of these tiles, and so of the splits, has live keys.
    tail = torch.nn.functional.pad(mask[:1, ..., :9], (291, 0))
    check(operands(length=300), tail, 4, sinks=sinks.half())


@pytest.mark.parametrize("numerics", ["compiled", "eager", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes_of_gate_sigmoid_and_output(numerics: str, dtype: torch.dtype) -> None:
    tensors = operands(length=1, head_dim=64, dtype=dtype)
    half, single = torch.float16, torch.float32
    for gate, sigmoid, output in (
        (half, single, single),
        (single, half, half),
        (half, half, single),
    ):
        tensors[3] = tensors[3].to(gate)
        modes = {**MODES, "numerics": numerics, "sigmoid_dtype": sigmoid, "dtype": output}
        result = run(tensors, **modes)
        expected = reference.gated_decode_attention(*tensors, None, **modes)
        assert result.dtype == output
        # A unit in the last place of what rounds last, as in test_numerics_contract.
        rounded = half in (output, sigmoid if numerics == "eager" else output)
        eps = torch.finfo(half if rounded else single).eps
        torch.testing.assert_close(result, expected, rtol=4 * eps, atol=0)
        assert (result != expected).float().mean() < (0.01 if output == half else 1)


@pytest.mark.parametrize("splits", [1, 3])
def test_weights_carry_more_than_the_dtype_of_value(splits: int) -> None:
    # A long uniform row: rounded to float16 the weights of all keys would err alike.
    tensors = operands(length=300, head_dim=16, group=1, dtype=torch.float16)
    tensors[0][:] = 0.03
    tensors[3] = torch.full_like(tensors[3], 40.0, dtype=torch.float32)
    tensors[2].abs_()
    modes = {**MODES, "numerics": "fp32", "dtype": torch.float32}
    result = run(tensors, None, splits, **modes)
    truth = reference.gated_decode_attention(*tensors, None, **modes, compute_dtype=torch.float64)
    assert ((result - truth).abs() / truth).max() < 2**-18


def test_split_counts_agree() -> None:
    tensors = operands(length=300, head_dim=64)
    results = [run(tensors, splits=splits) for splits in (1, 2, 3, 7, 8)]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-6)


def test_zero_size_batch() -> None:
    result = run(operands(batch=0))
    assert result.shape == (0, 1, 4, 16)


@pytest.mark.parametrize("tensor", [0, 1])
def test_what_times_the_reading_of_k_and_v_reads_all_of_both(tensor: int) -> None:
    seek = _load_interpreted("bench.probe_kernels").seek
    for place in (0, 63, 64, 500, 998, 999):
        both = torch.zeros(2, 1000, dtype=torch.int32)
        both[tensor, place] = reading.NEEDLE
        found = torch.zeros(64, dtype=torch.int32)
        seek[(3,)](*both, found, reading.NEEDLE, 1000, 64)
        assert found.tolist().count(reading.NEEDLE) == 1
