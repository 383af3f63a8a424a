"""The operands and modes of the two paged operators, whatever stands for a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class PagedOperands(Generic[T]):
    """Tensors, or what stands for them, of one call; a None is not given.

    Attributes:
        query: (T, Hq, D), the query tokens of all requests in order.
        k_cache: (P, page_size, Hkv, D).
        v_cache: (P, page_size, Hkv, Dv).
        kv_indices: page numbers, (capacity,) with `kv_indptr`, a table (R, M) without.
        kv_indptr: (R + 1,), where the page numbers of each request begin and end.
        kv_lengths: (R,), live tokens of each request.
        query_indptr: (R + 1,), where the query tokens of each request begin and end.
        sinks: (Hq,), one more logit a head.
        gate: broadcastable to (T, Hq, Dv); None for the un-gated operator.
    """

    query: T
    k_cache: T
    v_cache: T
    kv_indices: T
    kv_indptr: T | None = None
    kv_lengths: T | None = None
    query_indptr: T | None = None
    sinks: T | None = None
    gate: T | None = None

    def map(self, convert: Callable[[T], U]) -> PagedOperands[U]:
        """The same operands, each that is given converted."""
        return PagedOperands(**{name: convert(operand) for name, operand in self.given()})

    def given(self) -> Iterator[tuple[str, T]]:
        """Name and value of each operand that is not None."""
        for field in fields(self):
            operand = getattr(self, field.name)
            if operand is not None:
                yield field.name, operand


@dataclass(frozen=True)
class PagedModes:
    """What a call does beside its operands; `numerics` is "none" without a gate."""

    scale: float
    max_query_tokens: int = 1
    window: int = 0
    numerics: str = "none"
    sigmoid_dtype: torch.dtype | None = None
    dtype: torch.dtype | None = None


def bind(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    kv_indptr: Any,
    kv_indices: Any,
    kv_lengths: Any = None,
    query_indptr: Any = None,
    sinks: Any = None,
    **modes: Any,
) -> tuple[PagedOperands[Any], PagedModes]:
    """The arguments of `fusion_pass::paged_decode_attention` by name."""
    operands = PagedOperands(
        query, k_cache, v_cache, kv_indices, kv_indptr, kv_lengths, query_indptr, sinks
    )
    return operands, PagedModes(**modes)


def bind_gated(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    kv_indptr: Any,
    kv_indices: Any,
    gate: Any,
    kv_lengths: Any = None,
    query_indptr: Any = None,
    sinks: Any = None,
    *,
    numerics: str = "compiled",
    **modes: Any,
) -> tuple[PagedOperands[Any], PagedModes]:
    """The arguments of `fusion_pass::gated_paged_decode_attention` by name."""
    operands = PagedOperands(
        query, k_cache, v_cache, kv_indices, kv_indptr, kv_lengths, query_indptr, sinks, gate
    )
    return operands, PagedModes(numerics=numerics, **modes)
