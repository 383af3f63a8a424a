"""What an adapter may return, checked where it returns it."""

from __future__ import annotations

import functools
from types import NoneType
from typing import Any

import torch
from torch.fx import Node

from .attention import Attention, Mask, Sizes
from .mask_program import ComputedMask
from .paged import OpaqueAttention, check_gated
from .reason import Decline, Reason
from .trace import Operand

_FIELDS: dict[type, dict[str, tuple[type, ...]]] = {
    Attention: {
        "node": (Node,),
        "producer": (str,),
        "sizes": (Sizes,),
        "query": (Operand,),
        "key": (Operand,),
        "value": (Operand,),
        "mask": (Mask, ComputedMask, NoneType),
        "sinks": (Operand, NoneType),
        "is_causal": (bool,),
        "result": (Operand,),
        "scale": (float, int),
        "is_rounded": (bool,),
        "masked_row": (str,),
        "lowest_bias": (float, int),
        "is_narrowed": (bool,),
    },
    OpaqueAttention: {
        "node": (Node,),
        "producer": (str,),
        "axes": (tuple,),
        "result": (Operand,),
        "gated": (torch._ops.OpOverload,),
    },
    Decline: {"reason": (Reason,), "detail": (str,)},
}
_MASKED_ROWS = ("zero", "nan")

_check_gated = functools.cache(check_gated)


def checked(op: Any, found: Any) -> Attention | OpaqueAttention | Decline | None:
    """`found`, as the adapter of `op` returned it.

    Raises:
        TypeError: it is nothing that an adapter may return, or has a field of another type.
        ValueError: rows without a live key become what is not known, or its gated form cannot be
            called in the place of `op`.
    """
    if found is None:
        return None
    if type(found) not in _FIELDS:
        raise TypeError(
            f"the adapter of {op} returned {found!r}; it must return what read_attention or "
            "read_opaque gives, a Decline, or None"
        )
    for name, types in _FIELDS[type(found)].items():
        field = getattr(found, name)
        # A bool is an int.
        if not isinstance(field, types) or (isinstance(field, bool) and bool not in types):
            wanted = " or ".join(t.__name__ for t in types)
            raise TypeError(
                f"the adapter of {op} returned {type(found).__name__} with {name}={field!r}, "
                f"which is no {wanted}"
            )
    if isinstance(found, Attention) and found.masked_row not in _MASKED_ROWS:
        raise ValueError(
            f"the adapter of {op} returned Attention with masked_row={found.masked_row!r}; give "
            f"one of {', '.join(_MASKED_ROWS)}"
        )
    if isinstance(found, OpaqueAttention):
        _check_gated(op, found.gated)
    return found  # type: ignore[no-any-return]
