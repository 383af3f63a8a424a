"""Debugging aid: page numbers, lengths and offsets against what they point into.

The kernels trust them. `FUSION_PASS_CHECK_INDICES=1` checks them before every eager call, and in
every graph that is compiled under it; the check waits for the device.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from fusion_pass.paged.operands import PagedModes, PagedOperands

VARIABLE = "FUSION_PASS_CHECK_INDICES"


def is_asked_for() -> bool:
    """Whether the environment asks for the checks."""
    return os.environ.get(VARIABLE, "").strip().lower() in ("1", "true", "yes", "on")


def check_indices(operands: PagedOperands[Tensor], modes: PagedModes) -> None:
    """Raise IndexError, naming request and entry, if a number points outside. Waits for the device.

    Does nothing while a CUDA graph is captured, when nothing can be read.
    """
    if operands.query.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    _check_queries(operands, modes)
    page_size, num_pages = operands.k_cache.shape[1], operands.k_cache.shape[0]
    indices = operands.kv_indices.cpu()
    for request, (begin, stop) in enumerate(_page_ranges(operands)):
        pages = indices[request] if operands.kv_indptr is None else indices[begin:stop]
        length = len(pages) * page_size
        if operands.kv_lengths is not None:
            length = int(operands.kv_lengths[request])
            if not 0 <= length <= len(pages) * page_size:
                raise IndexError(
                    f"kv_lengths[{request}] is {length}, but request {request} has {len(pages)} "
                    f"pages of {page_size} tokens"
                )
        live = pages[: -(-length // page_size)]
        for entry in ((live < 0) | (live >= num_pages)).nonzero().flatten().tolist():
            raise IndexError(
                f"kv_indices gives request {request} page {int(live[entry])} as entry {entry}, but "
                f"the cache has {num_pages} pages"
            )


def _page_ranges(operands: PagedOperands[Tensor]) -> list[tuple[int, int]]:
    """Where the page numbers of each request begin and end."""
    capacity = operands.kv_indices.shape[-1]
    if operands.kv_indptr is None:
        return [(0, capacity)] * operands.kv_indices.shape[0]
    bounds = operands.kv_indptr.tolist()
    _check_bounds("kv_indptr", bounds, capacity, "kv_indices has {} entries")
    return list(itertools.pairwise(bounds))


def _check_queries(operands: PagedOperands[Tensor], modes: PagedModes) -> None:
    if operands.query_indptr is None:
        return
    bounds = operands.query_indptr.tolist()
    _check_bounds("query_indptr", bounds, operands.query.shape[0], "query has {} tokens")
    for request, (begin, stop) in enumerate(itertools.pairwise(bounds)):
        if stop - begin > modes.max_query_tokens:
            raise IndexError(
                f"query_indptr gives request {request} {stop - begin} query tokens, but "
                f"max_query_tokens is {modes.max_query_tokens}"
            )


def _check_bounds(name: str, bounds: Sequence[int], limit: int, what: str) -> None:
    """Each bound must be at least the one before it, and none may pass `limit`."""
    for request, (begin, stop) in enumerate(itertools.pairwise(bounds)):
        if not 0 <= begin <= stop <= limit:
            raise IndexError(
                f"{name} gives request {request} the range {begin} to {stop}, but "
                + what.format(limit)
            )
