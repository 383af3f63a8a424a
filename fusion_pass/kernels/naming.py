"""Names by which a profile tells the kernels apart."""

from collections.abc import Callable
from typing import Any


def label(kernel: str, dim: int, dtype: str) -> str:
    """A kernel's name with its head_dim and dtype, such as gated_decode_split_d256_bf16."""
    return f"{kernel}_d{dim}_{dtype}"


def named(kernel: str, dim: str = "HEAD_DIM") -> Callable[[Any], str]:
    """The `repr` of a kernel for triton.jit: its label, from its constant `dim` and its query."""

    def name(specialization: Any) -> str:
        pointer = specialization.signature["query"]
        return label(kernel, specialization.constants[dim], pointer.removeprefix("*"))

    return name
