"""`x * sigmoid(gate)` for eager code: one kernel instead of two. Importing it imports no triton."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fusion_pass.launch import DTYPE_NAMES, Launch, interpretable, start

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MAX_DIMS = 5
_FEW_ELEMENTS = 1 << 17


def sigmoid_gate_mul(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x * torch.sigmoid(gate)`, every rounding included, in one kernel on a GPU.

    On a GPU it is bit for bit what eager torch computes there. It falls back to torch's two
    kernels for float64, for a tensor without dimensions, where more than five dimensions are
    left after those that lie evenly in memory are merged, and on every other device. Under
    torch.compile it is the plain expression, of which Inductor makes one kernel itself.

    Args:
        x: any shape and strides; bfloat16, float16, float32 or float64.
        gate: before the sigmoid; broadcasts with `x`; any strides, one of the same dtypes.
        out: what to write to, of the broadcast shape and the dtype that `x * gate` has; any
            strides. It may be `x` or `gate` itself, or share their storage.

    Returns:
        `out`, or a new tensor with the strides of `x` if that is dense and not broadcast, else
        contiguous. Differentiable in `x` and `gate` by `backward` and `torch.autograd.grad`, any
        number of times; for `torch.func` and forward mode write the plain expression.

    Raises:
        TypeError: an operand is no tensor, or a dtype is not supported or not that of the result.
        ValueError: shapes do not broadcast, `out` has another shape, two of its elements are one
            in memory, it is contiguous and overlaps a contiguous input at other indices, or devices
            differ.
        RuntimeError: a gradient is asked for together with `out`.
    """
    if torch.compiler.is_compiling():
        return _two_kernels(x, gate, out)
    shape, dtype = _result(x, gate)
    if out is not None:
        _check_out(out, shape, dtype, x, gate)
    if torch.is_grad_enabled() and (x.requires_grad or gate.requires_grad):
        if out is not None:
            raise RuntimeError(
                "sigmoid_gate_mul(out=...) has no gradient; leave out away, or use torch.no_grad()"
            )
        product: Tensor = _SigmoidGateMul.apply(x, gate)  # type: ignore[no-untyped-call]
        return product
    return _compute(x, gate, out, shape, dtype)


def kernels() -> ModuleType:
    """The module of the Triton kernel, imported on first use."""
    from fusion_pass.kernels import sigmoid_gate_mul

    return sigmoid_gate_mul


def _result(x: Tensor, gate: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Shape and dtype of the product."""
    for name, operand in (("x", x), ("gate", gate)):
        if not isinstance(operand, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(operand).__name__}")
        if operand.dtype not in FLOATING:
            raise TypeError(
                f"{name} is {operand.dtype}; cast it to bfloat16, float16, float32 or float64"
            )
    if x.device != gate.device:
        raise ValueError(f"x is on {x.device} and gate on {gate.device}; move one of them")
    try:
        shape = torch.broadcast_shapes(x.shape, gate.shape)
    except RuntimeError as error:
        raise ValueError(
            f"gate of shape {tuple(gate.shape)} does not broadcast with x of {tuple(x.shape)}"
        ) from error
    return shape, torch.result_type(x, gate)


def _check_out(out: Tensor, shape: torch.Size, dtype: torch.dtype, x: Tensor, gate: Tensor) -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a tensor, not {type(out).__name__}")
    if out.dtype is not dtype:
        raise TypeError(f"out is {out.dtype}, the product {dtype}")
    if out.shape != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, the product {tuple(shape)}")
    if out.device != x.device:
        raise ValueError(f"out is on {out.device} and x on {x.device}")
    if _overlaps_itself(out):
        raise ValueError("elements of out lie over each other and would be written twice")
    for name, operand in (("x", x), ("gate", gate)):
        if _overlaps(out, operand):
            raise ValueError(f"out overlaps {name} without being the same view of it")


def _overlaps_itself(view: Tensor) -> bool:
    """Whether a view's strides may give two of its indices one element."""
    reach = 0
    for step, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and step <= reach:
            return True
        reach += (size - 1) * step
    return False


def _may_share(out: Tensor, operand: Tensor) -> bool:
    """Whether writing `out` might change elements of `operand` that are still to be read."""
    if out.device.type == "meta" or out.numel() == 0:
        return False
    same = (out.data_ptr(), out.shape, out.stride(), out.dtype) == (
        operand.data_ptr(),
        operand.shape,
        operand.stride(),
        operand.dtype,
    )
    first, last = _span(out)
    start, end = _span(operand)
    if same or last <= start or end <= first:
        return False
    alike = (out.shape, out.stride(), out.dtype) == (operand.shape, operand.stride(), operand.dtype)
    apart = (start - first) // out.element_size()
    return not alike or _is_reached(apart, sorted(zip(out.stride(), out.shape, strict=True)))


def _span(view: Tensor) -> tuple[int, int]:
    """The addresses of a view's first byte and of the one after its last."""
    reach = sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
    return view.data_ptr(), view.data_ptr() + (reach + 1) * view.element_size()


def _is_reached(distance: int, dims: list[tuple[int, int]]) -> bool:
    """Whether steps of less than each dimension's size, either way, add up to the distance.

    `dims` are strides and sizes, each stride longer than all before it reach.
    """
    if not dims:
        return distance == 0
    *inner, (step, size) = dims
    if size == 1:
        return _is_reached(distance, inner)
    return any(
        abs(count) < size and _is_reached(distance - count * step, inner)
        for count in (distance // step, distance // step + 1)
    )


def _overlaps(out: Tensor, operand: Tensor) -> bool:
    """Whether two contiguous tensors share elements at different indices."""
    if out.device.type == "meta" or not (out.is_contiguous() and operand.is_contiguous()):
        return False
    starts = [view.data_ptr() for view in (out, operand)]
    ends = [view.data_ptr() + view.numel() * view.element_size() for view in (out, operand)]
    same = starts[0] == starts[1] and (out.shape, out.dtype) == (operand.shape, operand.dtype)
    return max(starts) < min(ends) and not same


def _compute(
    x: Tensor, gate: Tensor, out: Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    if out is not None and (_may_share(out, x) or _may_share(out, gate)):
        return out.copy_(_compute(x, gate, None, shape, dtype))
    if not _has_kernel(x, gate, out):
        return _two_kernels(x, gate, out)
    if out is None:
        out = _like(x, shape, dtype)
    dims = _merged(shape, (x.expand(shape), gate.expand(shape), out))
    if len(dims) > MAX_DIMS:
        return _two_kernels(x, gate, out)
    if out.numel():
        start([launch_of(x, gate, out, dims)], out.device)
    return out


def _two_kernels(x: Tensor, gate: Tensor, out: Tensor | None) -> Tensor:
    return torch.mul(x, torch.sigmoid(gate), out=out)


def _has_kernel(*operands: Tensor | None) -> bool:
    for operand in operands:
        if operand is None:
            continue
        plain = type(operand) in (Tensor, torch.nn.Parameter)
        # A tensor without dimensions does not take part in the promotion of dtypes.
        if not plain or operand.dtype not in DTYPE_NAMES or operand.dim() == 0:
            return False
        if not operand.is_cuda and not (operand.is_cpu and interpretable(operand.dtype)):
            return False
    return True


def _like(x: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if x.shape == shape:
        return torch.empty_like(x, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=x.device)


@dataclass(frozen=True)
class _Dim:
    """One dimension of the product and the strides of x, gate and output along it."""

    size: int
    steps: tuple[int, int, int]

    def holds(self, inner: _Dim) -> bool:
        """Whether this dimension goes on where `inner` ends, in all three tensors."""
        ends = (step * inner.size for step in inner.steps)
        return all(step == end for step, end in zip(self.steps, ends, strict=True))


def _merged(shape: torch.Size, operands: tuple[Tensor, Tensor, Tensor]) -> list[_Dim]:
    """The fewest dimensions that hold all elements, the output's largest stride first."""
    strides = zip(*(operand.stride() for operand in operands), strict=True)
    dims = [
        _Dim(size, (x, gate, out))
        for size, (x, gate, out) in zip(shape, strides, strict=True)
        if size != 1
    ]
    merged: list[_Dim] = []
    for dim in sorted(dims, key=lambda dim: -dim.steps[2]):
        if merged and merged[-1].holds(dim):
            merged[-1] = _Dim(merged[-1].size * dim.size, dim.steps)
        else:
            merged.append(dim)
    return merged


def launch_of(x: Tensor, gate: Tensor, out: Tensor, dims: list[_Dim]) -> Launch:
    """The one launch that computes the product over at most `MAX_DIMS` dimensions."""
    dims = [_Dim(1, (0, 0, 0))] * (MAX_DIMS - len(dims)) + dims
    strides = {
        f"stride_{letter}{place}": dim.steps[which]
        for which, letter in enumerate("xgo")
        for place, dim in enumerate(dims)
    }
    elements = out.numel()
    few = elements <= _FEW_ELEMENTS
    block = 256 if few else 1024
    spans = [sum((dim.size - 1) * dim.steps[which] for dim in dims) for which in range(3)]
    return Launch(
        kernel=kernels().sigmoid_gate_mul,
        grid=(math.ceil(elements / block),),
        arguments={
            "x": x,
            "gate": gate,
            "output": out,
            "elements": elements,
            **{f"size_{place}": dim.size for place, dim in enumerate(dims) if place},
            **strides,
            "SIGMOID_DTYPE": DTYPE_NAMES[gate.dtype],
            "IS_WIDE": max(*spans, elements + block) >= 2**31,
            "BLOCK": block,
        },
        num_warps=1 if few else 4,
        num_stages=1,
        label="sigmoid_gate_mul",
        writes=("output",),
    )


class _SigmoidGateMul(torch.autograd.Function):
    """The product with its gradient, which is made of torch's operators and has one itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return _compute(x, gate, None, *_result(x, gate))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        x, gate = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        grad_x = grad_gate = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad * sigmoid).sum_to_size(x.shape).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_sigmoid = (grad * x).sum_to_size(gate.shape).to(gate.dtype)
            grad_gate = grad_sigmoid * (1 - sigmoid) * sigmoid
        return grad_x, grad_gate
