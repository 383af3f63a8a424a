"""A cell's keys and values in shuffled pages, and who attends to them: ours and FlashInfer."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.operands import Operands
from bench.peers import FLASHINFER_WORKSPACE, Call, _find_ninja
from fusion_pass.paged import launch
from fusion_pass.paged.operands import PagedModes, PagedOperands


def in_pages(given: Operands, page_size: int, seed: int = 0) -> PagedOperands[Tensor]:
    """The operands, of one query token a sequence, over a token-major cache of shuffled pages.

    Raises ValueError unless the length is one of whole pages.
    """
    batch, kv_heads, length, width = given.key.shape
    if length % page_size:
        raise ValueError(f"{length} keys are no multiple of {page_size}")
    pages = length // page_size
    device = given.query.device
    generator = torch.Generator(device).manual_seed(seed)
    places = torch.randperm(batch * pages, device=device, generator=generator)
    k_cache, v_cache = (
        torch.empty(batch * pages, page_size, kv_heads, width, dtype=x.dtype, device=device)
        for x in (given.key, given.value)
    )
    for cache, dense in ((k_cache, given.key), (v_cache, given.value)):
        by_token = dense.transpose(1, 2).reshape(batch * pages, page_size, kv_heads, width)
        cache[places] = by_token
    lengths = [length] * batch
    return PagedOperands(
        query=given.query[:, :, 0],
        k_cache=k_cache,
        v_cache=v_cache,
        kv_indices=places.int(),
        kv_indptr=_offsets([pages] * batch, device),
        kv_lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        gate=given.gate[:, 0],
    )


def shortened(operands: PagedOperands[Tensor], lengths: Sequence[int]) -> PagedOperands[Tensor]:
    """The same cache with other lengths, each at most what the request has pages for."""
    device = operands.query.device
    operands.kv_lengths.copy_(torch.tensor(lengths, dtype=torch.int32, device=device))
    return operands


def ours(operands: PagedOperands[Tensor], modes: PagedModes) -> Call:
    """The fused kernels."""
    return lambda: launch.run(operands, modes)


def separate(operands: PagedOperands[Tensor], modes: PagedModes, gate: Any) -> Call:
    """The same kernels un-gated, then `gate(attended, gate)`."""
    ungated = PagedOperands(**{k: v for k, v in operands.given() if k != "gate"})
    plain = PagedModes(modes.scale)

    def call() -> Tensor:
        gated: Tensor = gate(launch.run(ungated, plain), operands.gate)
        return gated

    return call


def flashinfer(operands: PagedOperands[Tensor], modes: PagedModes, gate: Any) -> Call:
    """FlashInfer's paged batch decode on tensor cores, then `gate`."""
    _find_ninja()
    library: Any = importlib.import_module("flashinfer")
    page_size, kv_heads = operands.k_cache.shape[1:3]
    heads, width = operands.query.shape[1:]
    assert operands.kv_lengths is not None
    device = operands.query.device
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device),
        "NHD",
        # Its graph mode pads the grid for lengths to come; here they never change.
        use_cuda_graph=False,
        use_tensor_cores=True,
    )
    wrapper.plan(
        operands.kv_indptr,
        operands.kv_indices,
        (operands.kv_lengths - 1) % page_size + 1,
        heads,
        kv_heads,
        width,
        page_size,
        q_data_type=operands.query.dtype,
        kv_data_type=operands.k_cache.dtype,
        sm_scale=modes.scale,
    )
    caches = (operands.k_cache, operands.v_cache)

    def call() -> Tensor:
        gated: Tensor = gate(wrapper.run(operands.query, caches), operands.gate)
        return gated

    return call


def _offsets(counts: Sequence[int], device: torch.device) -> Tensor:
    """Where each of the runs of these lengths begins, and the end."""
    ends = torch.tensor(counts, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    return torch.nn.functional.pad(ends, (1, 0))
