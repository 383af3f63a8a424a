"""The registered operator: schema, fake, validation, tags and autograd."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from fusion_pass import inductor, ops, reference
from tests.graphs import fake_mode, symbolic

OP = torch.ops.fusion_pass.gated_decode_attention.default
MODES = {"scale": 0.25, "mask_fill": -math.inf, "masked_row": "zero", "numerics": "compiled"}


def operands(
    batch: int = 2, heads: int = 4, tokens: int = 1, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (
        (batch, tokens, heads, 16),
        (batch, 2, 20, 16),
        (batch, 2, 20, 8),
        (batch, tokens, heads, 8),
    )
    query, *rest = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return [query.transpose(1, 2), *rest]


MASKS: dict[str, Callable[[], Tensor | None]] = {
    "none": lambda: None,
    "bool": lambda: (torch.arange(20) < 13).view(1, 1, 1, 20),
    "float": lambda: torch.randn(2, 4, 1, 20, generator=torch.Generator().manual_seed(1)),
    "expanded": lambda: (torch.arange(20) < 13).expand(2, 4, 1, 20),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_opcheck(dtype: torch.dtype, mask: str) -> None:
    torch.library.opcheck(OP, (*operands(dtype=dtype), MASKS[mask]()), MODES)


def test_opcheck_with_sinks_and_dtypes() -> None:
    modes = {"sinks": torch.randn(4), "sigmoid_dtype": torch.float16, "dtype": torch.bfloat16}
    torch.library.opcheck(OP, (*operands(), MASKS["bool"]()), {**MODES, **modes})


def test_output_dtype_is_as_asked() -> None:
    tensors = operands(dtype=torch.bfloat16)
    for dtype in ops.DTYPES:
        for inputs in (tensors, [tensor.to("meta") for tensor in tensors]):
            result = ops.gated_decode_attention(*inputs, None, scale=0.25, dtype=dtype)
            assert result.dtype == dtype


@pytest.mark.parametrize(("batch", "heads", "tokens"), [(1, 2, 1), (5, 8, 2), (0, 4, 1)])
def test_fake_gives_the_real_layout(batch: int, heads: int, tokens: int) -> None:
    tensors = operands(batch, heads, tokens)
    expanded = [tensors[0], *(t[:1].expand(t.shape) if batch else t for t in tensors[1:])]
    for inputs in (tensors, expanded):
        real = OP(*inputs, None, **MODES)
        fake = OP(*(tensor.to("meta") for tensor in inputs), None, **MODES)
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("active", [False, True])
def test_a_fake_made_without_the_dispatcher_is_the_same(dynamic: bool, active: bool) -> None:
    mode = fake_mode(symbolic=True)
    tensors = [symbolic(mode, tensor, (3,) if dynamic else ()) for tensor in operands(batch=3)]
    with mode:
        expected = OP(*tensors, None, **MODES)
    with mode if active else contextlib.nullcontext():
        made = inductor.empty_fake(mode, *ops.result_of(*tensors, None, **MODES))
    assert type(made) is type(expected)
    assert isinstance(made, FakeTensor)
    assert made.fake_mode is mode
    for attribute in ("shape", "dtype", "device", "layout", "requires_grad"):
        assert getattr(made, attribute) == getattr(expected, attribute)
    assert made.stride() == expected.stride()
    assert isinstance(made.shape[0], torch.SymInt) is dynamic
    assert mode.shape_env is not None
    assert not mode.shape_env.guards


@pytest.mark.parametrize("size", [(3, 1, 32), (3, 32), (96,), (1, 3, 1, 2, 16)])
def test_a_view_made_without_the_dispatcher_is_the_same(size: tuple[int, ...]) -> None:
    mode = fake_mode()
    with mode:
        result = OP(*(mode.from_tensor(tensor) for tensor in operands(batch=3)), None, **MODES)
        expected = result.reshape(size)
    made = inductor.viewed_fake(result, size)
    assert isinstance(made, FakeTensor)
    assert made.fake_mode is mode
    for attribute in ("shape", "dtype", "device", "layout", "requires_grad"):
        assert getattr(made, attribute) == getattr(expected, attribute)
    assert made.stride() == expected.stride()
    # Inductor tells aliases by it.
    assert made.untyped_storage()._cdata == result.untyped_storage()._cdata


def test_cpu_runs_the_reference_for_bfloat16() -> None:
    tensors = operands(dtype=torch.bfloat16)
    mask = MASKS["bool"]()
    expected = reference.gated_decode_attention(*tensors, mask, **MODES)
    assert torch.equal(ops.gated_decode_attention(*tensors, mask, scale=0.25), expected)


def test_tags_are_explicit() -> None:
    assert torch.Tag.flexible_layout in OP.tags
    assert torch.Tag.pt2_compliant_tag in OP.tags
    assert not OP._schema.is_mutable


def test_backward_is_refused() -> None:
    tensors = operands()
    tensors[0].requires_grad_()
    result = OP(*tensors, None, **MODES)
    with pytest.raises(RuntimeError, match="inference only"):
        result.sum().backward()


def _replace(index: int, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    tensors = operands()
    tensors[index] = change(tensors[index])
    return tensors


INVALID: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "rank": (lambda: (*_replace(0, lambda t: t[0]), None), {}, ValueError, "query .* 4 dim"),
    "dtype": (lambda: (*_replace(0, Tensor.double), None), {}, TypeError, "query must be"),
    "mixed dtypes": (lambda: (*_replace(2, Tensor.half), None), {}, TypeError, "value is"),
    "gate dtype": (lambda: (*_replace(3, Tensor.double), None), {}, TypeError, "gate must be"),
    "heads": (lambda: (*_replace(0, lambda t: t[:, :3]), None), {}, ValueError, "multiple"),
    "head_dim": (lambda: (*_replace(1, lambda t: t[..., :8]), None), {}, ValueError, "key has"),
    "length": (lambda: (*_replace(2, lambda t: t[:, :, 1:]), None), {}, ValueError, "value has"),
    "empty": (
        lambda: (*(t[:, :, :0] if i in (1, 2) else t for i, t in enumerate(operands())), None),
        {},
        ValueError,
        "no tokens",
    ),
    "gate shape": (lambda: (*_replace(3, lambda t: t[..., :3]), None), {}, ValueError, "gate of"),
    "mask shape": (
        lambda: (*operands(), torch.ones(2, 4, 1, 19, dtype=torch.bool)),
        {},
        ValueError,
        "mask of shape",
    ),
    "mask dtype": (
        lambda: (*operands(), torch.ones(1, 1, 1, 20, dtype=torch.int32)),
        {},
        TypeError,
        "mask must be",
    ),
    "mask device": (
        lambda: (*operands(), torch.ones(1, 1, 1, 20, dtype=torch.bool, device="meta")),
        {},
        ValueError,
        "mask is on meta",
    ),
    "fill": (lambda: (*operands(), None), {"mask_fill": -1.0}, ValueError, "mask_fill"),
    "nan fill": (lambda: (*operands(), None), {"mask_fill": math.nan}, ValueError, "mask_fill"),
    "row": (lambda: (*operands(), None), {"masked_row": "least"}, ValueError, "masked_row"),
    "mean": (lambda: (*operands(), None), {"masked_row": "mean"}, ValueError, "finite mask_fill"),
    "scale": (lambda: (*operands(), None), {"scale": -math.inf}, ValueError, "scale must be"),
    "nan scale": (lambda: (*operands(), None), {"scale": math.nan}, ValueError, "scale must be"),
    "numerics": (lambda: (*operands(), None), {"numerics": "fast"}, ValueError, "numerics"),
    "sinks": (lambda: (*operands(), None), {"sinks": torch.ones(3)}, ValueError, "sinks has"),
    "sinks rank": (
        lambda: (*operands(), None),
        {"sinks": torch.ones(1, 4)},
        ValueError,
        "sinks must have 1",
    ),
    "sinks dtype": (
        lambda: (*operands(), None),
        {"sinks": torch.ones(4, dtype=torch.int32)},
        TypeError,
        "sinks must be",
    ),
    "sigmoid dtype": (
        lambda: (*operands(), None),
        {"sigmoid_dtype": torch.float64},
        TypeError,
        "sigmoid_dtype must be",
    ),
    "output dtype": (
        lambda: (*operands(), None),
        {"dtype": torch.float8_e4m3fn},
        TypeError,
        "^dtype must be",
    ),
}


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("case", INVALID)
def test_invalid_operands_are_named(case: str, fake: bool) -> None:
    build, modes, error, message = INVALID[case]
    arguments = build()
    if fake and case != "mask device":
        arguments = tuple(None if t is None else t.to("meta") for t in arguments)
        modes = {k: m.to("meta") if isinstance(m, Tensor) else m for k, m in modes.items()}
    with pytest.raises(error, match=message):
        OP(*arguments, **{**MODES, **modes})


def test_dynamic_shapes_add_no_guard_on_operands_of_one_symbol() -> None:
    tensors = operands()
    compiled = torch.compile(
        lambda *args: OP(*args, None, **MODES), backend="aot_eager", fullgraph=True, dynamic=True
    )
    expected = OP(*tensors, None, **MODES)
    assert torch.equal(compiled(*tensors), expected)
    longer = [torch.cat([t, t], dim=2) if i in (1, 2) else t for i, t in enumerate(tensors)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(compiled(*longer), OP(*longer, None, **MODES))
