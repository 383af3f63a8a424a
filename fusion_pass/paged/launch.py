"""The two launches of the paged decode kernels, for eager execution and Inductor's lowering.

Importing this module does not import triton.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from torch import Tensor

from fusion_pass.launch import (
    DTYPE_NAMES,
    Launch,
    allocate_scratch,
    float32_precision,
    label,
    start,
)
from fusion_pass.operand import Operand, passes_32_bits, plain, static, strides
from fusion_pass.paged.operands import PagedModes, PagedOperands
from fusion_pass.tiling import LaunchConfig, Problem, choose, device_limits, next_power_of_2

# No length passes 2^31, and the kernel subtracts a window from a length in 32 bits.
WIDEST_WINDOW = 2**31 - 2**16


def kernels() -> ModuleType:
    """The module of the Triton kernels, imported on first use."""
    from fusion_pass.kernels import paged_decode

    return paged_decode


def problem_of(operands: PagedOperands[Operand], modes: PagedModes) -> Problem:
    """Describe a call by what its shapes say: the lengths themselves stay on the device.

    A request counts as long as the indices have room for, on average. Only the numbers of requests
    and of pages may be symbolic (TypeError otherwise).
    """
    _, query_heads, head_dim = operands.query.size
    _, page_size, kv_heads, value_dim = operands.v_cache.size
    batch, room = static(requests(operands)), static(operands.kv_indices.size[-1])
    kv_length = None
    if batch is not None and room is not None:
        pages = room if operands.kv_indptr is None else math.ceil(room / max(1, batch))
        kv_length = max(1, pages * int(page_size))
    return Problem(
        batch=batch,
        query_heads=int(query_heads),
        kv_heads=int(kv_heads),
        query_tokens=modes.max_query_tokens,
        kv_length=kv_length,
        head_dim=int(head_dim),
        value_dim=int(value_dim),
        dtype=operands.query.dtype,
        mask="none",
        paged=True,
    )


def requests(operands: PagedOperands[Operand]) -> Any:
    """R, the number of requests, which may be symbolic."""
    if operands.kv_indptr is None:
        return operands.kv_indices.size[0]
    return operands.kv_indptr.size[0] - 1


def output_size(operands: PagedOperands[Operand]) -> tuple[Any, ...]:
    """(T, Hq, Dv)."""
    return (*operands.query.size[:2], operands.v_cache.size[3])


def scratch_sizes(
    config: LaunchConfig, operands: PagedOperands[Operand]
) -> dict[str, tuple[Any, ...]]:
    """Sizes of the contiguous float32 scratch that `launches` takes, by its parameter's name."""
    *rows, value_dim = output_size(operands)
    return {
        "accumulator": (*rows, config.num_splits, value_dim),
        "statistics": (*rows, 2, config.num_splits),
    }


def launches(
    config: LaunchConfig,
    operands: PagedOperands[Operand],
    modes: PagedModes,
    *,
    output: Any,
    accumulator: Any,
    statistics: Any,
    input_precision: str = "ieee",
) -> tuple[Launch, Launch]:
    """Build the split and the reduce launch of one call.

    `output` is contiguous (T, Hq, Dv); the scratch has the shapes of `scratch_sizes`. Sizes other
    than T, R and the numbers of pages must be static.
    """
    query, k_cache, v_cache = operands.query, operands.k_cache, operands.v_cache
    tokens, query_heads, head_dim = query.size
    page_size, kv_heads, value_dim = map(int, v_cache.size[1:])
    group = int(query_heads) // kv_heads
    row_blocks = math.ceil(group * modes.max_query_tokens / config.block_m)
    table = operands.kv_indptr is None
    common = {
        "query": query.tensor,
        "query_indptr": _tensor(operands.query_indptr),
        "accumulator": accumulator,
        "statistics": statistics,
        **strides("t", "r", operands.query_indptr),
        "VALUE_DIM": value_dim,
    }
    split = Launch(
        kernel=kernels().paged_decode_split,
        grid=(plain(requests(operands)) * kv_heads * row_blocks, config.num_splits, 1),
        arguments={
            **common,
            "key": k_cache.tensor,
            "value": v_cache.tensor,
            "kv_indptr": _tensor(operands.kv_indptr),
            "kv_indices": operands.kv_indices.tensor,
            "kv_lengths": _tensor(operands.kv_lengths),
            "capacity": plain(operands.kv_indices.size[-1]),
            **strides("q", "thd", query),
            **strides("k", "pnhd", k_cache),
            **strides("v", "pnhd", v_cache),
            "stride_ir": 0,
            **strides("i", "rp" if table else "p", operands.kv_indices),
            **strides("b", "r", operands.kv_indptr),
            **strides("l", "r", operands.kv_lengths),
            "SCALE": float(modes.scale),
            "WINDOW": min(modes.window, WIDEST_WINDOW),
            "INPUT_PRECISION": input_precision,
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "QUERY_TOKENS": modes.max_query_tokens,
            "PAGE_SIZE": page_size,
            "HEAD_DIM": int(head_dim),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_D": config.block_d,
            "BLOCK_V": config.block_v,
            "WIDE": _is_wide(k_cache, config.block_n) or _is_wide(v_cache, config.block_n),
            "DEPENDENT": config.dependent_launch,
        },
        num_warps=config.split_warps,
        num_stages=config.split_stages,
        label=label("paged_decode_split", int(head_dim), query.dtype),
        writes=("accumulator", "statistics"),
    )
    gate = operands.gate
    sigmoid_dtype = modes.sigmoid_dtype or (gate.dtype if gate else query.dtype)
    reduce = Launch(
        kernel=kernels().paged_decode_reduce,
        grid=(
            plain(tokens) * int(query_heads),
            math.ceil(value_dim / config.reduce_block_v),
            1,
        ),
        arguments={
            **common,
            "gate": _tensor(gate),
            "sinks": _tensor(operands.sinks),
            "output": output,
            "requests": plain(requests(operands)),
            "num_splits": config.num_splits,
            **strides("g", "thd", gate),
            **strides("s", "h", operands.sinks),
            "NUMERICS": modes.numerics,
            "SIGMOID_DTYPE": DTYPE_NAMES[sigmoid_dtype],
            "QUERY_HEADS": int(query_heads),
            "BLOCK_SPLITS": next_power_of_2(config.num_splits),
            "BLOCK_V": config.reduce_block_v,
            "DEPENDENT": config.dependent_launch,
        },
        num_warps=config.reduce_warps,
        num_stages=1,
        label=label("paged_decode_reduce", value_dim, query.dtype),
        writes=("output",),
        dependent=config.dependent_launch,
    )
    return split, reduce


def run(
    operands: PagedOperands[Tensor], modes: PagedModes, config: LaunchConfig | None = None
) -> Tensor:
    """Run the kernels on validated operands; `config` replaces the choice of tiles and splits.

    Returns (T, Hq, Dv), contiguous.
    """
    query = operands.query
    views = operands.map(Operand.of)
    output = query.new_empty(output_size(views), dtype=modes.dtype or query.dtype)
    if output.numel() == 0:
        return output
    if requests(views) == 0:
        return output.zero_()
    if config is None:
        config = choose(problem_of(views, modes), device_limits(query.device))
    scratch = {
        name: allocate_scratch(size, query.device)
        for name, size in scratch_sizes(config, views).items()
    }
    steps = launches(
        config,
        views,
        modes,
        output=output,
        **scratch,
        input_precision=float32_precision(query.dtype, query.device),
    )
    start(steps, query.device)
    return output


def _tensor(operand: Operand | None) -> Any:
    return None if operand is None else operand.tensor


def _is_wide(cache: Operand, block_n: int) -> bool:
    """Whether offsets within a tile that lies in one page may pass 2^31 elements."""
    order = (0, 2, 1, 3)
    by_head = Operand(
        cache.tensor,
        tuple(cache.size[dim] for dim in order),
        tuple(cache.stride[dim] for dim in order),
        cache.dtype,
    )
    return passes_32_bits(by_head, block_n)
