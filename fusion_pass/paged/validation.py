"""What the paged operators accept: dtypes, devices and sizes, not the numbers in the tensors."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from fusion_pass.ops import DTYPES, NUMERICS
from fusion_pass.paged.operands import PagedModes, PagedOperands

MOST_QUERY_TOKENS = 16
INDEX_DTYPES = (torch.int32, torch.int64)
_LARGEST = sys.float_info.max
_DIMS = {
    "query": 3,
    "k_cache": 4,
    "v_cache": 4,
    "kv_indptr": 1,
    "kv_lengths": 1,
    "query_indptr": 1,
    "sinks": 1,
    "gate": 3,
}
_INDEX_OPERANDS = ("kv_indices", "kv_indptr", "kv_lengths", "query_indptr")


def validate(
    operands: PagedOperands[Tensor], modes: PagedModes, gate_shape: tuple[int, ...] | None = None
) -> None:
    """Raise TypeError or ValueError, naming the operand, unless the operators are defined on these.

    Sizes are compared only where both are known, so that symbolic ones get no guard. `gate_shape`
    is the gate's as the caller gave it, if that is another.
    """
    _validate_tensors(operands)
    _validate_dtypes(operands, modes)
    _validate_sizes(operands, gate_shape)
    _validate_requests(operands, modes)
    if not 0 <= modes.window < 2**63:
        raise ValueError(
            f"window must be 0, for none, or positive and below 2**63, not {modes.window}"
        )
    # Dynamo traces no math.isfinite of a symbolic number, and an integer may be beyond all floats.
    if not -_LARGEST <= modes.scale <= _LARGEST:
        raise ValueError("scale is infinite or NaN as a float: give a finite number")
    if operands.gate is not None and modes.numerics not in NUMERICS:
        raise ValueError(f"numerics must be one of {NUMERICS}, not {modes.numerics!r}")


def _validate_tensors(operands: PagedOperands[Tensor]) -> None:
    dims = {**_DIMS, "kv_indices": 2 if operands.kv_indptr is None else 1}
    for name, tensor in operands.given():
        if tensor.dim() != dims[name]:
            hint = ""
            if name == "kv_indices":
                hint = ": a block table without kv_indptr, a list of pages with it"
            raise ValueError(f"{name} must have {dims[name]} dimensions, not {tensor.dim()}{hint}")
        if tensor.device != operands.query.device:
            raise ValueError(f"{name} is on {tensor.device} and query on {operands.query.device}")


def _validate_dtypes(operands: PagedOperands[Tensor], modes: PagedModes) -> None:
    query = operands.query
    floating = {"query": query.dtype}
    for name in ("sinks", "gate"):
        if (tensor := getattr(operands, name)) is not None:
            floating[name] = tensor.dtype
    for name in ("sigmoid_dtype", "dtype"):
        if (dtype := getattr(modes, name)) is not None:
            floating[name] = dtype
    for name, dtype in floating.items():
        if dtype not in DTYPES:
            raise TypeError(f"{name} must be bfloat16, float16 or float32, not {dtype}")
    for name in ("k_cache", "v_cache"):
        if (dtype := getattr(operands, name).dtype) != query.dtype:
            raise TypeError(f"{name} is {dtype} and query is {query.dtype}")
    for name in _INDEX_OPERANDS:
        tensor = getattr(operands, name)
        if tensor is not None and tensor.dtype not in INDEX_DTYPES:
            raise TypeError(f"{name} must be int32 or int64, not {tensor.dtype}")


def _validate_sizes(operands: PagedOperands[Tensor], gate_shape: tuple[int, ...] | None) -> None:
    tokens, query_heads, head_dim = operands.query.shape
    pages, page_size, kv_heads, _ = operands.k_cache.shape
    value_dim = operands.v_cache.shape[3]
    if kv_heads < 1 or query_heads % kv_heads != 0:
        raise ValueError(
            f"query has {query_heads} heads, no multiple of k_cache's {kv_heads}: k_cache is read "
            'as (pages, page size, heads, head_dim); layout="HND" has heads before page size'
        )
    if isinstance(page_size, int) and page_size < 1:
        raise ValueError("k_cache has pages of no token")
    _expect("k_cache", operands.k_cache, (pages, page_size, kv_heads, head_dim))
    _expect("v_cache", operands.v_cache, (pages, page_size, kv_heads, value_dim))
    if operands.sinks is not None:
        _expect("sinks", operands.sinks, (query_heads,))
    gate, full = operands.gate, (tokens, query_heads, value_dim)
    if gate is not None and any(
        _differ(size, 1) and _differ(size, whole)
        for size, whole in zip(gate.shape, full, strict=True)
    ):
        given = tuple(gate.shape if gate_shape is None else gate_shape)
        raise ValueError(f"gate of shape {given} does not broadcast to {full}")


def _validate_requests(operands: PagedOperands[Tensor], modes: PagedModes) -> None:
    indptr, lengths = operands.kv_indptr, operands.kv_lengths
    if indptr is None and lengths is None:
        raise ValueError("a block table (no kv_indptr) needs kv_lengths")
    requests = operands.kv_indices.shape[0] if indptr is None else _count("kv_indptr", indptr)
    if lengths is not None and _differ(lengths.shape[0], requests):
        listed = f"kv_indptr delimits {requests} requests"
        if indptr is None:
            listed = f"kv_indices, a block table, has {requests} rows"
        raise ValueError(
            f"{listed}, and kv_lengths has {lengths.shape[0]} entries: give one a request"
        )
    if not 1 <= modes.max_query_tokens <= MOST_QUERY_TOKENS:
        raise ValueError(
            f"max_query_tokens must be 1 to {MOST_QUERY_TOKENS}, not {modes.max_query_tokens}"
        )
    if operands.query_indptr is not None:
        if _differ(_count("query_indptr", operands.query_indptr), requests):
            raise ValueError(
                f"query_indptr has shape {tuple(operands.query_indptr.shape)}, expected one entry "
                f"more than the {requests} requests"
            )
        return
    if modes.max_query_tokens != 1:
        raise ValueError("max_query_tokens above 1 needs query_indptr")
    if _differ(operands.query.shape[0], requests):
        raise ValueError(
            f"query has {operands.query.shape[0]} tokens for {requests} requests: give "
            "query_indptr, or one token a request"
        )


def _count(name: str, indptr: Tensor) -> int:
    """How many requests the offsets delimit."""
    size = indptr.shape[0]
    if isinstance(size, int) and size < 1:
        raise ValueError(f"{name} is empty: it needs one entry more than there are requests")
    return size - 1


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if any(_differ(size, wanted) for size, wanted in zip(tensor.shape, shape, strict=True)):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")


def _differ(size: int, wanted: int) -> bool:
    """Whether two sizes are known to differ. Comparing symbolic ones would add a guard."""
    return isinstance(size, int) and isinstance(wanted, int) and size != wanted
