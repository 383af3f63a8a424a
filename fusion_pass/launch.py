"""The two launches of the gated decode kernels.

They are built from opaque tensors and possibly symbolic sizes, so that eager execution
and Inductor's lowering share them. Importing this module does not import triton.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fusion_pass.operand import (
    Operand,
    mask_kind,
    mask_rows,
    passes_32_bits,
    plain,
    static,
    strides,
)
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
    "DTYPE_NAMES",
    "INTERPRETED_WITH",
    "Launch",
    "LaunchConfig",
    "Limits",
    "Operand",
    "Problem",
    "Unlaunchable",
    "choose",
    "device_limits",
    "fills",
    "float32_precision",
    "interpretable",
    "kernels",
    "label",
    "launches",
    "problem_of",
    "run",
    "scratch_sizes",
    "start",
]

INTERPRETED_WITH = ("triton", "numpy")
"""What the kernels need on a CPU; neither torch nor triton requires NumPy."""

SCAN_ELEMENTS = 4096
# A full mask at B 1, D 256, S 4096 (32 elements): 10.5 us, 10.8 in a loop; 600 of 131072 keys at
# D 128 (4096 elements): 10.7, and 10.3.
STRAIGHT_ELEMENTS = SCAN_ELEMENTS // 4
_FLOAT32_MIN = torch.finfo(torch.float32).min
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Launch:
    """One kernel launch: `kernel[grid](**arguments, **options)`.

    A profile calls it `label`; `writes` names the arguments that the kernel writes to. A
    `dependent` launch may begin before the one before it ends (`launch_pdl` of Triton).
    """

    kernel: Any
    grid: tuple[Any, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int
    label: str
    writes: tuple[str, ...]
    dependent: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Triton's launch options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return {**options, "launch_pdl": True} if self.dependent else options


def kernels() -> ModuleType:
    """The module of the Triton kernels, imported on first use."""
    from fusion_pass.kernels import gated_decode

    return gated_decode


def label(kernel: str, dim: int, dtype: torch.dtype) -> str:
    """What a profile calls a kernel for operands of this head_dim and dtype."""
    from fusion_pass.kernels import naming

    return naming.label(kernel, dim, DTYPE_NAMES[dtype])


def interpretable(*dtypes: torch.dtype) -> bool:
    """Whether the kernels, on CPU tensors, compute in these dtypes under Triton's interpreter.

    They do not in bfloat16: the interpreter multiplies its bit patterns and truncates to it.
    """
    if torch.bfloat16 in dtypes:
        return False
    if os.environ.get("TRITON_INTERPRET", "0") == "0":
        return False
    if any(find_spec(name) is None for name in INTERPRETED_WITH):
        return False
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(kernels().gated_decode_split, InterpretedFunction)


def problem_of(query: Operand, key: Operand, value: Operand, mask: Operand | None) -> Problem:
    """Describe a call. Only the batch and the KV length may be symbolic (TypeError otherwise)."""
    batch, query_heads, query_tokens, head_dim = query.size
    return Problem(
        batch=static(batch),
        query_heads=int(query_heads),
        kv_heads=int(key.size[1]),
        query_tokens=int(query_tokens),
        kv_length=static(key.size[2]),
        head_dim=int(head_dim),
        value_dim=int(value.size[3]),
        dtype=query.dtype,
        mask=mask_kind(mask),
    )


def scratch_sizes(
    config: LaunchConfig, query: Operand, value: Operand, *, fill: bool = False
) -> dict[str, tuple[Any, ...]]:
    """Sizes of the contiguous float32 scratch that `launches` takes, by its parameter's name.

    `fill` is what `fills` says of the call.
    """
    if _is_single(config, fill):
        return {}
    rows = query.size[:3]
    return {
        "accumulator": (*rows, config.num_splits, value.size[3]),
        "statistics": (*rows, 2, config.num_splits),
    }


def fills(mask: Operand | None, mask_fill: float) -> bool:
    """Whether a row without a live key attends to all keys, each shifted by a finite fill."""
    return mask_kind(mask) == "bool" and mask_fill != -math.inf


def _masked_row(masked_row: str, fill: bool, has_sinks: bool) -> str:
    """What the kernels do with a row without a live key."""
    if fill:
        return "mean" if masked_row == "mean" else "fill"
    # A sink takes all the weight of such a row.
    return "nan" if masked_row == "nan" and not has_sinks else "zero"


def _is_single(config: LaunchConfig, fill: bool) -> bool:
    """Whether the split kernel gates its own result: only the reduce can fill a masked row."""
    return config.num_splits == 1 and not fill


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
    accumulator: Any = None,
    statistics: Any = None,
    scale: float,
    mask_fill: float,
    masked_row: str,
    numerics: str,
    sinks: Operand | None = None,
    sigmoid_dtype: torch.dtype | None = None,
    input_precision: str = "ieee",
) -> tuple[Launch, ...]:
    """Build the split and the reduce launch, if any, of one gated_decode_attention call.

    `output` is contiguous (B, Q, Hq, Dv); the scratch has the shapes of `scratch_sizes`. Sizes
    other than the batch and the KV length must be static.
    """
    batch, query_heads, query_tokens, head_dim = query.size
    kv_heads, value_dim = int(key.size[1]), int(value.size[3])
    group = int(query_heads) // kv_heads
    row_blocks = math.ceil(group * int(query_tokens) / config.block_m)
    fill = fills(mask, mask_fill)
    single = _is_single(config, fill)
    common = {
        "query": query.tensor,
        "key": key.tensor,
        "value": value.tensor,
        "gate": gate.tensor,
        "sinks": sinks.tensor if sinks else None,
        "output": output,
        "accumulator": accumulator,
        "statistics": statistics,
        "kv_length": plain(key.size[2]),
        **strides("q", "bhtd", query),
        **strides("k", "bhnd", key),
        **strides("v", "bhnd", value),
        **strides("g", "bthd", gate),
        **strides("s", "h", sinks),
        "MASKED_ROW": _masked_row(masked_row, fill, sinks is not None),
        "SINKS": sinks is not None,
        "NUMERICS": numerics,
        "SIGMOID_DTYPE": DTYPE_NAMES[sigmoid_dtype or gate.dtype],
        "SCALE": float(scale),
        "GROUP": group,
        "QUERY_TOKENS": int(query_tokens),
        "HEAD_DIM": int(head_dim),
        "VALUE_DIM": value_dim,
        "BLOCK_D": config.block_d,
    }
    masked_rows, scan_rows = mask_rows(mask, config.block_m, group, int(query_tokens))
    scan_tiles, scan_once = _scan(config, scan_rows, key.size[2]) if mask else (1, True)
    split = Launch(
        kernel=kernels().gated_decode_split,
        grid=(plain(batch) * kv_heads * row_blocks, config.num_splits, 1),
        arguments={
            **common,
            "mask": mask.tensor if mask else None,
            **strides("m", "bhtn", mask),
            "MASK": mask_kind(mask),
            "MASK_ROWS": masked_rows,
            "SCAN_ROWS": scan_rows,
            "SCAN_TILES": scan_tiles,
            "SCAN_ONCE": scan_once,
            "INPUT_PRECISION": input_precision,
            "SINGLE": single,
            "KV_HEADS": kv_heads,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_V": config.block_v,
            "WIDE": passes_32_bits(key, config.block_n) or passes_32_bits(value, config.block_n),
            "DEPENDENT": config.dependent_launch,
        },
        num_warps=config.split_warps,
        num_stages=config.split_stages,
        label=label("gated_decode_split", int(head_dim), query.dtype),
        writes=("output",) if single else ("accumulator", "statistics"),
    )
    if single:
        return (split,)
    reduce = Launch(
        kernel=kernels().gated_decode_reduce,
        grid=(
            plain(batch) * int(query_heads) * int(query_tokens),
            math.ceil(value_dim / config.reduce_block_v),
            1,
        ),
        arguments={
            **common,
            "num_splits": config.num_splits,
            # -inf is no literal of generated Python, so an infinite fill is a mode instead.
            "MASK_FILL": max(float(mask_fill), _FLOAT32_MIN) if fill else 0.0,
            "QUERY_HEADS": int(query_heads),
            "BLOCK_SPLITS": next_power_of_2(config.num_splits),
            "BLOCK_N": config.reduce_block_n,
            "BLOCK_V": config.reduce_block_v,
            "DEPENDENT": config.dependent_launch,
        },
        num_warps=config.reduce_warps,
        num_stages=1,
        label=label("gated_decode_reduce", int(head_dim), query.dtype),
        writes=("output",),
        dependent=config.dependent_launch,
    )
    return split, reduce


def allocate_scratch(size: tuple[int, ...], device: torch.device) -> Tensor:
    """Uninitialised float32 scratch; it lives for one call."""
    return torch.empty(size, dtype=torch.float32, device=device)


def start(steps: Iterable[Launch], device: torch.device) -> None:
    """Launch the kernels one after the other on the device's current stream."""
    # Triton launches on the current device, which need not be the operands'.
    guard = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with guard:
        for step in steps:
            step.kernel[step.grid](**step.arguments, **step.options)


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    mask_fill: float,
    masked_row: str,
    numerics: str,
    sigmoid_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    config: LaunchConfig | None = None,
) -> Tensor:
    """Run the kernels on validated operands; `config` replaces the choice of tiles and splits.

    Returns (B, Q, Hq, Dv), contiguous, in `dtype`, which defaults to that of `query`.
    """
    batch, heads, tokens, _ = query.shape
    output = query.new_empty((batch, tokens, heads, value.shape[3]), dtype=dtype or query.dtype)
    if output.numel() == 0:
        return output
    q, k, v = Operand.of(query), Operand.of(key), Operand.of(value)
    m = None if mask is None else Operand.of(mask)
    if config is None:
        config = choose(problem_of(q, k, v, m), device_limits(query.device))
    scratch = {
        name: allocate_scratch(size, query.device)
        for name, size in scratch_sizes(config, q, v, fill=fills(m, mask_fill)).items()
    }
    steps = launches(
        config,
        query=q,
        key=k,
        value=v,
        gate=Operand.of(gate),
        mask=m,
        output=output,
        **scratch,
        scale=scale,
        mask_fill=mask_fill,
        masked_row=masked_row,
        numerics=numerics,
        sinks=None if sinks is None else Operand.of(sinks),
        sigmoid_dtype=sigmoid_dtype,
        input_precision=float32_precision(query.dtype, query.device),
    )
    start(steps, query.device)
    return output


def _scan(config: LaunchConfig, scan_rows: int, kv_length: Any) -> tuple[int, bool]:
    """How many tiles a program searches at a time for live keys; whether without a loop."""
    tile = config.block_n * scan_rows
    fitting = max(1, SCAN_ELEMENTS // tile)
    length = static(kv_length)
    if length is None:
        return fitting, False
    tiles = next_power_of_2(math.ceil(length / config.block_n / config.num_splits))
    return min(fitting, tiles), tiles * tile <= STRAIGHT_ELEMENTS
