"""The two launches of the gated decode kernels.

They are built from opaque tensors and possibly symbolic sizes, so that eager execution
and Inductor's lowering share them. Importing this module does not import triton.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fusion_pass.tiling import (
    LaunchConfig,
    Limits,
    Problem,
    Unlaunchable,
    choose,
    device_limits,
    next_power_of_2,
)

__all__ = [
    "Launch",
    "LaunchConfig",
    "Limits",
    "Operand",
    "Problem",
    "Unlaunchable",
    "choose",
    "device_limits",
    "float32_precision",
    "interpretable",
    "kernels",
    "launches",
    "problem_of",
    "run",
    "scratch_sizes",
]

SCAN_ELEMENTS = 4096
_FLOAT32_MIN = torch.finfo(torch.float32).min


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


@dataclass(frozen=True)
class Launch:
    """One kernel launch: `kernel[grid](**arguments, num_warps=..., num_stages=...)`."""

    kernel: Any
    grid: tuple[Any, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int


def kernels() -> ModuleType:
    """The module of the Triton kernels, imported on first use."""
    from fusion_pass.kernels import gated_decode

    return gated_decode


def interpretable(dtype: torch.dtype) -> bool:
    """Whether the kernels run on CPU tensors of this dtype, under Triton's interpreter.

    They do not for bfloat16: the interpreter multiplies its bit patterns and truncates to it.
    """
    if dtype == torch.bfloat16:
        return False
    if os.environ.get("TRITON_INTERPRET", "0") == "0" or find_spec("triton") is None:
        return False
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(kernels().gated_decode_split, InterpretedFunction)


def mask_kind(mask: Operand | None) -> str:
    """The kernels' name of a mask operand: "none", "bool" or "float"."""
    if mask is None:
        return "none"
    return "bool" if mask.dtype == torch.bool else "float"


def problem_of(query: Operand, key: Operand, value: Operand, mask: Operand | None) -> Problem:
    """Describe a call. Only the batch and the KV length may be symbolic (TypeError otherwise)."""
    batch, query_heads, query_tokens, head_dim = query.size
    return Problem(
        batch=_static(batch),
        query_heads=int(query_heads),
        kv_heads=int(key.size[1]),
        query_tokens=int(query_tokens),
        kv_length=_static(key.size[2]),
        head_dim=int(head_dim),
        value_dim=int(value.size[3]),
        dtype=query.dtype,
        mask=mask_kind(mask),
    )


def scratch_sizes(
    config: LaunchConfig, query: Operand, value: Operand
) -> dict[str, tuple[Any, ...]]:
    """Sizes of the contiguous float32 scratch that `launches` takes, by its parameter's name."""
    rows = query.size[:3]
    return {
        "accumulator": (*rows, config.num_splits, value.size[3]),
        "statistics": (*rows, 2, config.num_splits),
    }


def float32_precision(dtype: torch.dtype, device: torch.device) -> str:
    """The `input_precision` that torch's matmul settings ask for: "tf32" or "ieee"."""
    allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    nvidia = device.type == "cuda" and torch.version.hip is None
    return "tf32" if allowed and nvidia and dtype == torch.float32 else "ieee"


def launches(
    config: LaunchConfig,
    *,
    query: Operand,
    key: Operand,
    value: Operand,
    gate: Operand,
    mask: Operand | None,
    output: Any,
    accumulator: Any,
    statistics: Any,
    scale: float,
    mask_fill: float,
    masked_row: str,
    numerics: str,
    input_precision: str = "ieee",
) -> tuple[Launch, Launch]:
    """Build the split and the reduce launch of one gated_decode_attention call.

    `output` is contiguous (B, Q, Hq, Dv); the scratch has the shapes of `scratch_sizes`. Sizes
    other than the batch and the KV length must be static.
    """
    batch, query_heads, query_tokens, head_dim = query.size
    kv_heads, value_dim = int(key.size[1]), int(value.size[3])
    group = int(query_heads) // kv_heads
    row_blocks = math.ceil(group * int(query_tokens) / config.block_m)
    common = {
        "query": query.tensor,
        "key": key.tensor,
        "value": value.tensor,
        "accumulator": accumulator,
        "statistics": statistics,
        "kv_length": _plain(key.size[2]),
        **_strides("q", "bhtd", query),
        **_strides("k", "bhnd", key),
        **_strides("v", "bhnd", value),
        "SCALE": float(scale),
        "GROUP": group,
        "QUERY_TOKENS": int(query_tokens),
        "HEAD_DIM": int(head_dim),
        "VALUE_DIM": value_dim,
        "BLOCK_D": config.block_d,
    }
    mask_rows = config.block_m if mask and _tells_rows_apart(mask, group, query_tokens) else 1
    split = Launch(
        kernel=kernels().gated_decode_split,
        grid=(_plain(batch) * kv_heads * row_blocks, config.num_splits, 1),
        arguments={
            **common,
            "mask": mask.tensor if mask else None,
            **_strides("m", "bhtn", mask),
            "MASK": mask_kind(mask),
            "MASK_ROWS": mask_rows,
            "SCAN_TILES": max(1, SCAN_ELEMENTS // (config.block_n * mask_rows)),
            "INPUT_PRECISION": input_precision,
            "KV_HEADS": kv_heads,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_V": config.block_v,
        },
        num_warps=config.split_warps,
        num_stages=config.split_stages,
    )
    fill = mask_kind(mask) == "bool" and mask_fill != -math.inf
    reduce = Launch(
        kernel=kernels().gated_decode_reduce,
        grid=(
            _plain(batch) * int(query_heads) * int(query_tokens),
            math.ceil(value_dim / config.reduce_block_v),
            1,
        ),
        arguments={
            **common,
            "gate": gate.tensor,
            "output": output,
            "num_splits": config.num_splits,
            **_strides("g", "bthd", gate),
            # -inf is no literal of generated Python, so an infinite fill is a mode instead.
            "MASK_FILL": max(float(mask_fill), _FLOAT32_MIN) if fill else 0.0,
            "MASKED_ROW": "fill" if fill else masked_row,
            "NUMERICS": numerics,
            "QUERY_HEADS": int(query_heads),
            "BLOCK_SPLITS": next_power_of_2(config.num_splits),
            "BLOCK_N": config.reduce_block_n,
            "BLOCK_V": config.reduce_block_v,
        },
        num_warps=config.reduce_warps,
        num_stages=1,
    )
    return split, reduce


def allocate_scratch(size: tuple[int, ...], device: torch.device) -> Tensor:
    """Uninitialised float32 scratch; it lives for one call."""
    return torch.empty(size, dtype=torch.float32, device=device)


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    mask_fill: float,
    masked_row: str,
    numerics: str,
    config: LaunchConfig | None = None,
) -> Tensor:
    """Run the kernels on validated operands; `config` replaces the choice of tiles and splits.

    Returns (B, Q, Hq, Dv), contiguous, in the dtype of `query`.
    """
    batch, heads, tokens, _ = query.shape
    output = query.new_empty((batch, tokens, heads, value.shape[3]))
    if output.numel() == 0:
        return output
    q, k, v = Operand.of(query), Operand.of(key), Operand.of(value)
    m = None if mask is None else Operand.of(mask)
    if config is None:
        config = choose(problem_of(q, k, v, m), device_limits(query.device))
    scratch = {
        name: allocate_scratch(size, query.device)
        for name, size in scratch_sizes(config, q, v).items()
    }
    # Triton launches on the current device, which need not be the operands'.
    guard = torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext()
    with guard:
        for launch in launches(
            config,
            query=q,
            key=k,
            value=v,
            gate=Operand.of(gate),
            mask=m,
            output=output,
            accumulator=scratch["accumulator"],
            statistics=scratch["statistics"],
            scale=scale,
            mask_fill=mask_fill,
            masked_row=masked_row,
            numerics=numerics,
            input_precision=float32_precision(query.dtype, query.device),
        ):
            launch.kernel[launch.grid](
                **launch.arguments, num_warps=launch.num_warps, num_stages=launch.num_stages
            )
    return output


def _strides(operand_letter: str, dim_letters: str, operand: Operand | None) -> dict[str, Any]:
    """Stride arguments by the kernels' names, such as stride_kn for the key's token stride."""
    steps = operand.steps if operand else (0,) * len(dim_letters)
    return {
        f"stride_{operand_letter}{dim}": _plain(step)
        for dim, step in zip(dim_letters, steps, strict=True)
    }


def _tells_rows_apart(mask: Operand, group: int, query_tokens: int) -> bool:
    """Whether rows of one KV head may see different masks."""
    _, head_step, token_step, _ = mask.steps
    return bool((group > 1 and head_step != 0) or (query_tokens > 1 and token_step != 0))


def _static(size: Any) -> int | None:
    """The int that a size is, or None if it is symbolic."""
    return int(size) if isinstance(size, int) or getattr(size, "is_Integer", False) else None


def _plain(size: Any) -> Any:
    """A size with static sympy integers turned into ints."""
    static = _static(size)
    return size if static is None else static
