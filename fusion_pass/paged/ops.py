"""Registration of the two paged operators. Imports no triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion_pass.launch import interpretable
from fusion_pass.paged import check, launch, reference
from fusion_pass.paged.operands import PagedModes, PagedOperands, bind, bind_gated
from fusion_pass.paged.validation import validate

Bind = Callable[..., tuple[PagedOperands[Any], PagedModes]]

NAME = "fusion_pass::paged_decode_attention"
GATED_NAME = "fusion_pass::gated_paged_decode_attention"
SCHEMAS = {
    NAME: (
        "(Tensor query, Tensor k_cache, Tensor v_cache, Tensor? kv_indptr, Tensor kv_indices, "
        "Tensor? kv_lengths=None, Tensor? query_indptr=None, Tensor? sinks=None, *, "
        "float scale, int max_query_tokens=1, int window=0) -> Tensor"
    ),
    GATED_NAME: (
        "(Tensor query, Tensor k_cache, Tensor v_cache, Tensor? kv_indptr, Tensor kv_indices, "
        "Tensor gate, Tensor? kv_lengths=None, Tensor? query_indptr=None, Tensor? sinks=None, *, "
        'float scale, int max_query_tokens=1, int window=0, str numerics="compiled", '
        "ScalarType? sigmoid_dtype=None, ScalarType? dtype=None) -> Tensor"
    ),
}
BINDINGS: dict[str, Bind] = {NAME: bind, GATED_NAME: bind_gated}


def _fake(operands: PagedOperands[Tensor], modes: PagedModes) -> Tensor:
    validate(operands, modes)
    query = operands.query
    size = (*query.shape[:2], operands.v_cache.shape[3])
    return query.new_empty(size, dtype=modes.dtype or query.dtype)


def _validated(operands: PagedOperands[Tensor], modes: PagedModes) -> None:
    validate(operands, modes)
    if check.is_asked_for():
        check.check_indices(operands, modes)


def _cuda(operands: PagedOperands[Tensor], modes: PagedModes) -> Tensor:
    _validated(operands, modes)
    return launch.run(operands, modes)


def _cpu(operands: PagedOperands[Tensor], modes: PagedModes) -> Tensor:
    _validated(operands, modes)
    results = [operands.query.dtype, modes.dtype, modes.sigmoid_dtype]
    if operands.gate is not None:
        results.append(operands.gate.dtype)
    if interpretable(*(dtype for dtype in results if dtype is not None)):
        return launch.run(operands, modes)
    return reference.paged_decode_attention(operands, modes)


def _register(name: str, bound: Bind) -> None:
    # Every stride is honoured, so Inductor may lay the operands out as it likes.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    torch.library.define(name, SCHEMAS[name], tags=tags)

    def implementation(
        run: Callable[[PagedOperands[Tensor], PagedModes], Tensor],
    ) -> Callable[..., Tensor]:
        return lambda *operands, **modes: run(*bound(*operands, **modes))

    def refuse_backward(ctx: Any, grad: Tensor) -> None:
        raise RuntimeError(f"{name} is for inference only: it has no gradient")

    torch.library.register_fake(name, implementation(_fake))
    torch.library.impl(name, "CUDA", implementation(_cuda))
    torch.library.impl(name, "CPU", implementation(_cpu))
    torch.library.register_autograd(name, refuse_backward)


for _name, _bound in BINDINGS.items():
    _register(_name, _bound)
