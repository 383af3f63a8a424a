"""Everyone who can compute a gated decode attention: the fused kernels and their rivals."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.operands import Operands

Call = Callable[[], Tensor]
FA3_MODULES = ("fa3_fwd_interface", "flash_attn_interface")
FLASHINFER = "flashinfer"
FLASHINFER_PAGE = 16
FLASHINFER_WORKSPACE = 512 << 20


@dataclass(frozen=True)
class Peer:
    """One way to compute it: `build` prepares and returns the call that is timed.

    `missing` says why it cannot run here, or None.
    """

    name: str
    build: Callable[[Operands], Call]
    missing: Callable[[], str | None] = lambda: None


def _ours(operands: Operands) -> Call:
    from fusion_pass import launch

    def call() -> Tensor:
        return launch.run(
            operands.query,
            operands.key,
            operands.value,
            operands.gate,
            operands.mask,
            scale=operands.scale,
            mask_fill=-torch.inf,
            masked_row="zero",
            numerics="compiled",
        )

    return call


def _gated_sdpa(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return attended.transpose(1, 2) * torch.sigmoid(gate)


def _stock(backend: SDPBackend | None) -> Callable[[Operands], Call]:
    """Stock Inductor, which chooses SDPA's backend itself unless it is given."""

    def forced(*operands: Any) -> Tensor:
        # Around the call of a compiled function the choice would be no part of any cache's key.
        assert backend is not None
        with sdpa_kernel(backend):
            return _gated_sdpa(*operands)

    def build(operands: Operands) -> Call:
        compiled = torch.compile(_gated_sdpa if backend is None else forced, dynamic=False)
        return lambda: compiled(
            operands.query,
            operands.key,
            operands.value,
            operands.gate,
            operands.mask,
            operands.scale,
        )

    return build


def _flex(operands: Operands) -> Call:
    from torch.nn.attention.flex_attention import flex_attention

    if operands.mask is not None:
        raise NotImplementedError("FlexAttention is timed without a mask")

    def gated(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        attended = flex_attention(query, key, value, scale=operands.scale, enable_gqa=True)
        assert isinstance(attended, Tensor)
        return attended.transpose(1, 2) * torch.sigmoid(gate)

    compiled = torch.compile(gated, dynamic=False)
    return lambda: compiled(operands.query, operands.key, operands.value, operands.gate)


def _gate(attended: Tensor, gate: Tensor) -> Tensor:
    return attended * torch.sigmoid(gate)


def _flash_attention_3(operands: Operands) -> Call:
    interface: Any = importlib.import_module(_found(FA3_MODULES))
    gate = torch.compile(_gate, dynamic=False)
    query, key, value = (x.transpose(1, 2) for x in (operands.query, operands.key, operands.value))

    def call() -> Tensor:
        attended = interface.flash_attn_with_kvcache(
            query, key, value, softmax_scale=operands.scale, num_splits=0
        )
        gated: Tensor = gate(attended, operands.gate)
        return gated

    return call


def _flashinfer(operands: Operands) -> Call:
    """Batch decode over a paged copy of K and V, whose pages lie in order."""
    _find_ninja()
    flashinfer: Any = importlib.import_module("flashinfer")
    batch, heads, tokens, width = operands.query.shape
    kv_heads, length = operands.key.shape[1:3]
    if tokens != 1 or length % FLASHINFER_PAGE:
        raise NotImplementedError("one query token and whole pages alone")
    device = operands.query.device
    pages = length // FLASHINFER_PAGE
    paged = tuple(_in_pages(x) for x in (operands.key, operands.value))
    indptr = torch.arange(0, batch * pages + 1, pages, dtype=torch.int32, device=device)
    indices = torch.arange(batch * pages, dtype=torch.int32, device=device)
    last_page = torch.full((batch,), FLASHINFER_PAGE, dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device),
        "HND",
        # Its graph mode pads the grid for lengths to come; here they never change.
        use_cuda_graph=False,
        use_tensor_cores=True,
    )
    wrapper.plan(
        indptr,
        indices,
        last_page,
        heads,
        kv_heads,
        width,
        FLASHINFER_PAGE,
        q_data_type=operands.query.dtype,
        kv_data_type=operands.key.dtype,
        sm_scale=operands.scale,
    )
    gate = torch.compile(_gate, dynamic=False)
    query = operands.query[:, :, 0]

    def call() -> Tensor:
        gated: Tensor = gate(wrapper.run(query, paged)[:, None], operands.gate)
        return gated

    return call


def _find_ninja() -> None:
    """Put the programs installed beside this Python, ninja among them, on the path."""
    programs = str(Path(sys.executable).parent)
    if programs not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] += os.pathsep + programs


def _in_pages(cache: Tensor) -> Tensor:
    """(B, Hkv, S, D) as contiguous pages (B * S / page, Hkv, page, D)."""
    batch, heads, length, width = cache.shape
    split = cache.view(batch, heads, length // FLASHINFER_PAGE, FLASHINFER_PAGE, width)
    return split.transpose(1, 2).reshape(-1, heads, FLASHINFER_PAGE, width)


def _found(modules: tuple[str, ...]) -> str:
    """The first of these modules that is installed; "" if none is."""
    return next((name for name in modules if importlib.util.find_spec(name) is not None), "")


def _needs(distribution: str, *modules: str) -> Callable[[], str | None]:
    """A check that one of the modules is installed and can be imported, made once."""

    @functools.cache
    def missing() -> str | None:
        name = _found(modules)
        if not name:
            return f"{distribution} is not installed"
        try:
            importlib.import_module(name)
        except Exception as fault:
            return f"{distribution} cannot be imported: {type(fault).__name__}: {fault}"
        return None

    return missing


OURS = Peer("fused", _ours)
STOCK = Peer("stock", _stock(None))
PEERS = (
    OURS,
    STOCK,
    Peer("stock-cudnn", _stock(SDPBackend.CUDNN_ATTENTION)),
    Peer("stock-flash", _stock(SDPBackend.FLASH_ATTENTION)),
    Peer("flex", _flex),
    Peer("fa3", _flash_attention_3, _needs("fa3-fwd 0.0.3", *FA3_MODULES)),
    Peer(FLASHINFER, _flashinfer, _needs("flashinfer-python 0.5.3", "flashinfer")),
)
QUICK_PEERS = ("fused", "stock", "fa3")
