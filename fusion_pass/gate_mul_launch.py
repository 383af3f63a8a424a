"""The one launch of `sigmoid_gate_mul`'s kernel. Importing this module imports no triton."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from fusion_pass.launch import DTYPE_NAMES, Launch

MAX_DIMS = 5
# On an H200, to eager torch: up to here 0.48 to 0.55, and 0.55 to 0.57 with the blocks of more
# elements, which at four times as many are the faster: 0.60, and 0.75 with these.
_FEW_ELEMENTS = 1 << 18


def kernels() -> ModuleType:
    """The module of the Triton kernel, imported on first use."""
    from fusion_pass.kernels import sigmoid_gate_mul

    return sigmoid_gate_mul


@dataclass(frozen=True)
class Dim:
    """One dimension of the product and the strides of x, gate and output along it."""

    size: int
    steps: tuple[int, int, int]

    def holds(self, inner: Dim) -> bool:
        """Whether this dimension goes on where `inner` ends, in all three tensors."""
        ends = (step * inner.size for step in inner.steps)
        return all(step == end for step, end in zip(self.steps, ends, strict=True))


def merge(shape: torch.Size, operands: tuple[Tensor, Tensor, Tensor]) -> list[Dim]:
    """The fewest dimensions that hold all elements, the output's largest stride first."""
    strides = zip(*(operand.stride() for operand in operands), strict=True)
    dims = [
        Dim(size, (x, gate, out))
        for size, (x, gate, out) in zip(shape, strides, strict=True)
        if size != 1
    ]
    merged: list[Dim] = []
    for dim in sorted(dims, key=lambda dim: -dim.steps[2]):
        if merged and merged[-1].holds(dim):
            merged[-1] = Dim(merged[-1].size * dim.size, dim.steps)
        else:
            merged.append(dim)
    return merged


def launch_of(x: Tensor, gate: Tensor, out: Tensor, dims: list[Dim]) -> Launch:
    """The one launch that computes the product over at most `MAX_DIMS` dimensions."""
    dims = [Dim(1, (0, 0, 0))] * (MAX_DIMS - len(dims)) + dims
    strides = {
        f"stride_{letter}{place}": dim.steps[which]
        for which, letter in enumerate("xgo")
        for place, dim in enumerate(dims)
    }
    elements = out.numel()
    few = elements <= _FEW_ELEMENTS
    block = 512 if few else 1024
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
        num_warps=8 if few else 4,
        num_stages=1,
        label="sigmoid_gate_mul",
        writes=("output",),
    )
