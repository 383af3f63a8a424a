"""Which elements of tensors in plain memory lie over each other."""

from __future__ import annotations

from torch import Tensor


def overlaps_itself(view: Tensor) -> bool:
    """Whether a view's strides may give two of its indices one element."""
    if view.numel() == 0:
        return False
    reach = 0
    for step, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and step <= reach:
            return True
        reach += (size - 1) * step
    return False


def may_share(out: Tensor, operand: Tensor) -> bool:
    """Whether writing `out` might change elements of `operand` that are still to be read."""
    if out.numel() == 0 or operand.numel() == 0:
        return False
    same = (out.data_ptr(), out.shape, out.stride(), out.dtype) == (
        operand.data_ptr(),
        operand.shape,
        operand.stride(),
        operand.dtype,
    )
    first, last = span(out)
    start, end = span(operand)
    if same or last <= start or end <= first:
        return False
    alike = (out.shape, out.stride(), out.dtype) == (operand.shape, operand.stride(), operand.dtype)
    apart = (start - first) // out.element_size()
    return not alike or _is_reached(apart, sorted(zip(out.stride(), out.shape, strict=True)))


def span(view: Tensor) -> tuple[int, int]:
    """The addresses of a view's first byte and of the one after its last; equal if it has none."""
    if view.numel() == 0:
        return view.data_ptr(), view.data_ptr()
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


def overlaps(out: Tensor, operand: Tensor) -> bool:
    """Whether two contiguous tensors share elements at different indices."""
    if out.numel() == 0 or operand.numel() == 0:
        return False
    if not (out.is_contiguous() and operand.is_contiguous()):
        return False
    starts = [view.data_ptr() for view in (out, operand)]
    ends = [view.data_ptr() + view.numel() * view.element_size() for view in (out, operand)]
    same = starts[0] == starts[1] and (out.shape, out.dtype) == (operand.shape, operand.dtype)
    return max(starts) < min(ends) and not same
