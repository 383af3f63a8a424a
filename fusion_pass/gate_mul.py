"""`x * sigmoid(gate)` for eager code: one kernel instead of two. Importing it imports no triton."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from fusion_pass.gate_mul_launch import MAX_DIMS, launch_of, merge
from fusion_pass.launch import DTYPE_NAMES, interpretable, start
from fusion_pass.overlap import may_share, overlaps, overlaps_itself

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _bits(*keys: DispatchKey) -> int:
    return functools.reduce(operator.or_, (DispatchKeySet(key).raw_repr() for key in keys))


# What torch dispatches a call on when nothing but a CPU's or a GPU's memory is involved.
_DIRECT = _bits(
    DispatchKey.CPU,
    DispatchKey.CUDA,
    DispatchKey.BackendSelect,
    DispatchKey.ADInplaceOrView,
    DispatchKey.AutogradCPU,
    DispatchKey.AutogradCUDA,
    DispatchKey.AutocastCPU,
    DispatchKey.AutocastCUDA,
)
_IN_MEMORY = _DIRECT | _bits(DispatchKey.Negative)


def sigmoid_gate_mul(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x * torch.sigmoid(gate)`, every rounding included, in one kernel on a GPU.

    On a GPU it is bit for bit what eager torch computes there. It falls back to torch's two
    kernels for float64, for a tensor without dimensions, where more than five dimensions are
    left after those that lie evenly in memory are merged, and on every other device; also for
    whatever is not plain memory or is watched: a subclass of `Tensor`, a lazily negated view,
    forward mode, `torch.func`, a trace, a dispatch mode, a function mode other than
    `torch.device`; and for a gradient with a `gate` made in inference mode. Under torch.compile
    it is the plain expression, of which Inductor makes one kernel itself.

    Args:
        x: any shape and strides; bfloat16, float16, float32 or float64.
        gate: before the sigmoid; broadcasts with `x`; any strides, one of the same dtypes.
        out: what to write to, of the broadcast shape and the dtype that `x * gate` has; any
            strides. It may be `x` or `gate` itself, or share their storage.

    Returns:
        `out`, or a new dense tensor: it has the strides of `x` if that is dense and of the same
        shape, and else an order of dimensions that depends on the path. Differentiable in `x` and
        `gate`, any number of times. The gradients are those of torch, but made from `gate` itself,
        where torch saves its sigmoid: writing to `gate` before the backward pass makes that raise
        torch's error "modified by an inplace operation".

    Raises:
        TypeError: an operand is no tensor, or a dtype is not supported or not that of the result.
        ValueError: shapes do not broadcast, `out` has another shape, two of its elements are one
            in memory, it is contiguous and overlaps a contiguous input at other indices, or devices
            differ.
        RuntimeError: a gradient is asked for together with `out`, or torch's operators refuse to
            write to `out`, as they do to an inference tensor outside inference mode.

        Under torch.compile it is not looked at where `out` lies, shapes that do not broadcast
        raise torch's own error, and with `fullgraph` an error reaches the caller inside one of
        the compiler's.
    """
    _check_operands(x, gate)
    if torch.compiler.is_compiling():
        if out is not None:
            _check_out(out, *_result(x, gate), x, gate)
        return _two_kernels(x, gate, out)
    shape, dtype = _result(x, gate)
    if out is not None:
        _check_out(out, shape, dtype, x, gate)
        if _is_refused(out):
            return _two_kernels(x, gate, out)
    keys = _keys(x, gate, out)
    if out is not None and not keys & ~_IN_MEMORY:
        _check_overlap(out, x, gate)
        if may_share(out, x) or may_share(out, gate):
            return out.copy_(sigmoid_gate_mul(x, gate))
    if keys & ~_DIRECT or _is_watched(x, gate, out):
        return _two_kernels(x, gate, out)
    if _has_gradient(x, gate):
        if gate.is_inference():
            # It cannot be saved for the backward pass; its sigmoid can.
            return _two_kernels(x, gate, out)
        product: Tensor = _SigmoidGateMul.apply(x, gate)  # type: ignore[no-untyped-call]
        return product
    return _compute(x, gate, out, shape, dtype)


def _check_operands(x: Tensor, gate: Tensor) -> None:
    for name, operand in (("x", x), ("gate", gate)):
        if not isinstance(operand, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(operand).__name__}")
        if operand.dtype not in FLOATING:
            raise TypeError(
                f"{name} is {operand.dtype}; cast it to bfloat16, float16, float32 or float64"
            )
    if x.device != gate.device:
        raise ValueError(f"x is on {x.device} and gate on {gate.device}; move one of them")


def _result(x: Tensor, gate: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Shape and dtype of the product."""
    try:
        same = x.shape == gate.shape
        shape = x.shape if same else torch.broadcast_shapes(x.shape, gate.shape)
    except RuntimeError as error:
        raise ValueError(
            f"gate of shape {tuple(gate.shape)} does not broadcast with x of {tuple(x.shape)}"
        ) from error
    if (x.dim() == 0) != (gate.dim() == 0):
        return shape, gate.dtype if x.dim() == 0 else x.dtype
    # Dynamo, which does not trace torch.result_type, reads this as well.
    return shape, torch.promote_types(x.dtype, gate.dtype)


def _has_gradient(x: Tensor, gate: Tensor) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or gate.requires_grad)


def _keys(*operands: Tensor | None) -> int:
    """What torch dispatches a call on for the sake of these operands."""
    keys = 0
    for operand in operands:
        if operand is not None:
            keys |= torch._C._dispatch_keys(operand).raw_repr()
    return keys


def _is_watched(*operands: Tensor | None) -> bool:
    """Whether somebody must see torch's operators, whatever memory the operands have."""
    return bool(
        torch._C._dispatch_tls_local_include_set().raw_repr() & ~_DIRECT
        or forward_ad._current_level >= 0
        or any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())
        or any(type(op) not in (Tensor, torch.nn.Parameter) for op in operands if op is not None)
    )


def _is_refused(out: Tensor) -> bool:
    """Whether torch's operators raise an error for this `out`."""
    if out.is_inference():
        return not torch.is_inference_mode_enabled()
    return out.requires_grad and torch.is_grad_enabled()


def _check_out(out: Tensor, shape: torch.Size, dtype: torch.dtype, x: Tensor, gate: Tensor) -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a tensor, not {type(out).__name__}")
    if out.dtype is not dtype:
        raise TypeError(f"out is {out.dtype}, the product {dtype}")
    if out.shape != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, the product {tuple(shape)}")
    if out.device != x.device:
        raise ValueError(f"out is on {out.device} and x on {x.device}")
    if _has_gradient(x, gate):
        raise RuntimeError(
            "sigmoid_gate_mul(out=...) has no gradient; leave out away, or use torch.no_grad()"
        )


def _check_overlap(out: Tensor, x: Tensor, gate: Tensor) -> None:
    if overlaps_itself(out):
        raise ValueError("elements of out lie over each other and would be written twice")
    for name, operand in (("x", x), ("gate", gate)):
        if overlaps(out, operand):
            raise ValueError(f"out overlaps {name} without being the same view of it")


def _compute(
    x: Tensor, gate: Tensor, out: Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    if not _has_kernel(x, gate, out):
        return _two_kernels(x, gate, out)
    product = _like(x, shape, dtype) if out is None else out
    dims = merge(shape, (x.expand(shape), gate.expand(shape), product))
    if len(dims) > MAX_DIMS:
        return _two_kernels(x, gate, product)
    if product.numel():
        start([launch_of(x, gate, product, dims)], product.device)
    if out is not None and not out.is_inference():
        # A backward pass that has saved what lay here before must fail.
        torch.autograd.graph.increment_version(out)
    return product


def _two_kernels(x: Tensor, gate: Tensor, out: Tensor | None) -> Tensor:
    return torch.mul(x, torch.sigmoid(gate), out=out)


def _has_kernel(*operands: Tensor | None) -> bool:
    for operand in operands:
        if operand is None:
            continue
        # A tensor without dimensions does not take part in the promotion of dtypes.
        if operand.dtype not in DTYPE_NAMES or operand.dim() == 0:
            return False
        if not operand.is_cuda and not (operand.is_cpu and interpretable(operand.dtype)):
            return False
    return True


def _like(x: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if x.shape == shape:
        return torch.empty_like(x, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=x.device)


class _SigmoidGateMul(torch.autograd.Function):
    """The product with its gradient, which is made of torch's operators and has one itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, gate)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return _compute(x, gate, None, *_result(x, gate))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        x, gate = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        grad_x = grad_gate = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad * sigmoid).sum_to_size(ctx.shape).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_sigmoid = (grad * x).sum_to_size(gate.shape).to(gate.dtype)
            grad_gate = torch.ops.aten.sigmoid_backward(grad_sigmoid, sigmoid)
        return grad_x, grad_gate
