"""The paged operators as one function with defaults, for engines and eager code."""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import torch
from torch import Tensor

from fusion_pass.paged import check, ops  # noqa: F401  (registers the operators)
from fusion_pass.paged.operands import PagedModes, PagedOperands
from fusion_pass.paged.validation import MOST_QUERY_TOKENS, validate

LAYOUTS = ("NHD", "HND")


def paged_decode_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor | None,
    kv_indices: Tensor,
    *,
    kv_lengths: Tensor | None = None,
    query_indptr: Tensor | None = None,
    gate: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: str = "NHD",
    scale: float | None = None,
    max_query_tokens: int | None = None,
    window: int = 0,
    numerics: str = "compiled",
    sigmoid_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    check_indices: bool = False,
) -> Tensor:
    """Attention of R requests' query tokens to a paged KV cache, times a gate's sigmoid if given.

    Lengths and page numbers are read on the device: nothing waits for it, and one captured CUDA
    graph serves every content of the index tensors.

    Args:
        query: (T, Hq, D), bfloat16, float16 or float32, called dtype T below: the query tokens of
            all requests in order, one a request without `query_indptr`. Any strides.
        k_cache: (P, page_size, Hkv, D) of dtype T in the layout "NHD", (P, Hkv, page_size, D) in
            "HND", or (P, Hkv, D) for pages of one token. Any strides. Query head h reads KV head
            h // (Hq // Hkv).
        v_cache: as `k_cache`, with Dv for D.
        kv_indptr: (R + 1,), int32 or int64: the pages of request r are `kv_indices` from
            `kv_indptr[r]` to `kv_indptr[r + 1]`. None: `kv_indices` is a block table.
        kv_indices: (capacity,), or (R, M) as a block table; int32 or int64 page numbers. What lies
            beyond the live pages is not looked at.
        kv_lengths: (R,), int32 or int64: live tokens of each request; needed for a block table.
            More than its pages hold count as all of them. None: all pages are full.
        query_indptr: (R + 1,), int32 or int64: where the query tokens of each request begin; they
            are its last tokens, and each sees those before it and itself. Tokens of no request
            give zeros, and so do those that come before the first key, where a request has more
            query tokens than keys.
        gate: broadcastable to (T, Hq, Dv), before the sigmoid; bfloat16, float16 or float32. Any
            strides.
        sinks: (Hq,): one more logit a head, neither scaled nor masked, that takes weight and has no
            value.
        layout: "NHD" or "HND", of both caches.
        scale: the logits are scale * (q . k); by default D ** -0.5.
        max_query_tokens: the most query tokens of one request, 1 to 16; by default 1, and 16 with
            `query_indptr`. Fewer cost less. What a request has beyond it is not computed, and
            holds anything.
        window: a query token sees its last `window` keys, itself included; 0 for all.
        numerics, sigmoid_dtype, dtype: how the gate rounds and what it gives, as for
            `fusion_pass.ops.gated_decode_attention`; only with a gate.
        check_indices: raise IndexError for a number that points outside, and for a request of more
            than `max_query_tokens`, which waits for the device. For eager calls: it breaks a graph
            that is compiled. There `FUSION_PASS_CHECK_INDICES=1` asks for it, in every graph
            compiled under it, and in every eager call.

    Returns:
        (T, Hq, Dv), contiguous, of `dtype` or dtype T. A request of length zero gives zeros.

    Raises:
        TypeError: an operand is no tensor, or of a dtype that is not supported; a mode is no
            number where it must be, or a tensor that holds one.
        ValueError: sizes do not agree, devices differ, a mode is unknown or out of range, `scale`
            is not finite, or D is 0 and there is no `scale`.
        IndexError: `check_indices`, and a page number, a length or an offset points outside, or a
            request has too many query tokens.
        RuntimeError: in a backward pass, for there is no gradient.
    """
    _expect_tensor("query", query)
    _expect_tensor("kv_indices", kv_indices)
    operands = PagedOperands(
        query,
        _in_token_order("k_cache", k_cache, layout),
        _in_token_order("v_cache", v_cache, layout),
        kv_indices,
        kv_indptr,
        kv_lengths,
        query_indptr,
        sinks,
        gate,
    )
    for name, tensor in operands.given():
        _expect_tensor(name, tensor)
    if gate is not None and gate.dim() < 3:
        operands = replace(operands, gate=gate[(None,) * (3 - gate.dim())])
    if query.dim() != 3:
        raise ValueError(
            f"query must have 3 dimensions, (tokens, heads, head_dim), not {query.dim()}"
        )
    modes = PagedModes(
        _default_scale(query) if scale is None else _number("scale", scale),
        _most_tokens(query_indptr, max_query_tokens),
        _integer("window", window),
    )
    if gate is not None:
        modes = replace(modes, numerics=numerics, sigmoid_dtype=sigmoid_dtype, dtype=dtype)
    elif numerics != "compiled" or sigmoid_dtype is not None or dtype is not None:
        raise ValueError("numerics, sigmoid_dtype and dtype are the gate's: give a gate with them")
    validate(operands, modes, None if gate is None else gate.shape)
    if check_indices:
        check.check_indices(operands, modes)
    return _call(operands, modes)


def _call(operands: PagedOperands[Tensor], modes: PagedModes) -> Tensor:
    caches = (operands.query, operands.k_cache, operands.v_cache)
    pages = (operands.kv_indptr, operands.kv_indices)
    rest = (operands.kv_lengths, operands.query_indptr, operands.sinks)
    result: Tensor
    if operands.gate is None:
        result = torch.ops.fusion_pass.paged_decode_attention.default(
            *caches,
            *pages,
            *rest,
            scale=modes.scale,
            max_query_tokens=modes.max_query_tokens,
            window=modes.window,
        )
    else:
        result = torch.ops.fusion_pass.gated_paged_decode_attention.default(
            *caches,
            *pages,
            operands.gate,
            *rest,
            scale=modes.scale,
            max_query_tokens=modes.max_query_tokens,
            window=modes.window,
            numerics=modes.numerics,
            sigmoid_dtype=modes.sigmoid_dtype,
            dtype=modes.dtype,
        )
    return result


def _in_token_order(name: str, cache: Tensor, layout: str) -> Tensor:
    """The cache as (P, page_size, Hkv, D), a view."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, not {layout!r}")
    _expect_tensor(name, cache)
    if cache.dim() == 3:
        return cache.unsqueeze(1)
    if cache.dim() != 4:
        raise ValueError(f"{name} must have 3 or 4 dimensions, not {cache.dim()}")
    return cache if layout == "NHD" else cache.transpose(1, 2)


def _most_tokens(query_indptr: Tensor | None, given: object) -> int:
    """`max_query_tokens`, by default what is right for any request that is taken."""
    if given is not None:
        return _integer("max_query_tokens", given)
    return 1 if query_indptr is None else MOST_QUERY_TOKENS


def _default_scale(query: Tensor) -> float:
    head_dim = query.shape[-1]
    if head_dim == 0:
        raise ValueError("query has head dimension 0: give scale")
    scale: float = float(head_dim) ** -0.5
    return scale


def _number(name: str, value: object) -> float:
    if isinstance(value, Tensor) or not hasattr(type(value), "__float__"):
        raise _wrong_type(name, "a number or None", value)
    if isinstance(value, (float, int)):
        return value
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
    except TypeError as error:
        raise _wrong_type(name, "a number or None", value) from error


def _integer(name: str, value: object) -> int:
    if isinstance(value, (bool, Tensor)) or not hasattr(type(value), "__index__"):
        raise _wrong_type(name, "an integer", value)
    if isinstance(value, (int, torch.SymInt)):
        return value  # type: ignore[return-value]
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise _wrong_type(name, "an integer", value) from error


def _wrong_type(name: str, wanted: str, value: object) -> TypeError:
    hint = "; give its item()" if isinstance(value, Tensor) else ""
    return TypeError(f"{name} must be {wanted}, not {type(value).__name__}{hint}")


def _expect_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")
