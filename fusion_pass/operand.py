"""Operands of the kernels: opaque tensors whose sizes and strides may be symbolic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion_pass.tiling import next_power_of_2


@dataclass(frozen=True)
class Operand:
    """A tensor (or a stand-in) with its sizes and strides in elements, ints or sympy expressions.

    A tensor with a storage offset is passed as a pointer to its first element.
    """

    tensor: Any
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Operand:
        return cls(tensor, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def steps(self) -> tuple[Any, ...]:
        """Strides with 0 for each dimension of size 1, which thereby broadcasts."""
        return tuple(0 if s == 1 else d for s, d in zip(self.size, self.stride, strict=True))


def mask_kind(mask: Operand | None) -> str:
    """The kernels' name of a mask operand: "none", "bool" or "float"."""
    if mask is None:
        return "none"
    return "bool" if mask.dtype == torch.bool else "float"


def strides(operand_letter: str, dim_letters: str, operand: Operand | None) -> dict[str, Any]:
    """Stride arguments by the kernels' names, such as stride_kn for the key's token stride."""
    steps = operand.steps if operand else (0,) * len(dim_letters)
    return {
        f"stride_{operand_letter}{dim}": plain(step)
        for dim, step in zip(dim_letters, steps, strict=True)
    }


def mask_rows(mask: Operand | None, block_m: int, group: int, query_tokens: int) -> tuple[int, int]:
    """Mask rows that one program applies, and those in which it looks for live tiles."""
    if mask is None:
        return 1, 1
    _, head_step, token_step, _ = mask.steps
    if group > 1 and head_step != 0:
        return block_m, block_m
    if query_tokens == 1 or token_step == 0:
        return 1, 1
    return block_m, next_power_of_2(query_tokens)


def passes_32_bits(operand: Operand, block_n: int) -> bool:
    """Whether offsets within a tile of block_n keys may pass 2^31 elements."""
    *_, token_step, dim_step = operand.steps
    token, dim, width = static(token_step), static(dim_step), static(operand.size[3])
    if token is None or dim is None or width is None:
        return True
    return block_n * token + next_power_of_2(width) * dim >= 2**31


def static(size: Any) -> int | None:
    """The int that a size is, or None if it is symbolic."""
    return int(size) if isinstance(size, int) or getattr(size, "is_Integer", False) else None


def plain(size: Any) -> Any:
    """A size with static sympy integers turned into ints."""
    known = static(size)
    return size if known is None else known
