"""Naive reference of paged decode attention: the statement of its semantics, in torch alone."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fusion_pass import reference
from fusion_pass.paged.operands import PagedModes, PagedOperands


def paged_decode_attention(
    operands: PagedOperands[Tensor],
    modes: PagedModes,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Attention of each request's query tokens to its pages, gated if there is a gate.

    Returns (T, Hq, Dv) in `modes.dtype`, which defaults to that of the query. A token of no
    request, and one that sees no key, gives zeros. With `compute_dtype=torch.float64` nothing is
    rounded to the operands' dtype and the result is the float64 truth to measure errors against.
    """
    query, gate = operands.query, operands.gate
    size = (*query.shape[:2], operands.v_cache.shape[3])
    attended = torch.zeros(size, dtype=compute_dtype, device=query.device)
    for request, (first, stop) in enumerate(_query_ranges(operands)):
        stop = min(stop, first + modes.max_query_tokens)
        attended[first:stop] = _attend(operands, modes, request, first, stop, compute_dtype)
    if compute_dtype == torch.float64:
        return attended if gate is None else attended * gate.double().sigmoid()
    if modes.numerics != "fp32":
        attended = attended.to(query.dtype)
    if gate is None:
        return attended
    sigmoid_dtype, dtype = modes.sigmoid_dtype or gate.dtype, modes.dtype or query.dtype
    return reference.apply_gate(attended, gate, modes.numerics, sigmoid_dtype, dtype)


def pages_of(operands: PagedOperands[Tensor], request: int) -> Tensor:
    """The page numbers that the indices hold for a request, those beyond its length included."""
    if operands.kv_indptr is None:
        return operands.kv_indices[request]
    begin, stop = operands.kv_indptr[request : request + 2].tolist()
    return operands.kv_indices[max(0, begin) : max(0, stop)]


def _query_ranges(operands: PagedOperands[Tensor]) -> list[tuple[int, int]]:
    """The first query token of each request and the one after its last."""
    if operands.query_indptr is None:
        return [(token, token + 1) for token in range(operands.query.shape[0])]
    bounds = operands.query_indptr.tolist()
    return list(itertools.pairwise(bounds))


def _attend(
    operands: PagedOperands[Tensor],
    modes: PagedModes,
    request: int,
    first: int,
    stop: int,
    compute_dtype: torch.dtype,
) -> Tensor | float:
    """The output of the query tokens from `first` to `stop`, before the gate."""
    pages = pages_of(operands, request)
    page_size = operands.k_cache.shape[1]
    length = len(pages) * page_size
    if operands.kv_lengths is not None:
        length = min(length, int(operands.kv_lengths[request]))
    if length <= 0:
        return 0.0
    live = pages[: -(-length // page_size)].long()
    key, value = (
        cache[live].flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0)
        for cache in (operands.k_cache, operands.v_cache)
    )
    tokens = _query_ranges(operands)[request][1] - first
    position = torch.arange(length - tokens, length, device=key.device)[: stop - first, None]
    keys = torch.arange(length, device=key.device)
    visible = keys <= position
    if modes.window > 0:
        visible &= keys > position - modes.window
    return reference.attention(
        operands.query[first:stop].transpose(0, 1).unsqueeze(0),
        key,
        value,
        visible[None, None],
        operands.sinks,
        scale=modes.scale,
        mask_fill=-torch.inf,
        masked_row="zero",
        compute_dtype=compute_dtype,
    )[0]
