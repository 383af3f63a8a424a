"""What an adapter may return, checked where it returns it."""

from __future__ import annotations

import functools
import itertools
from dataclasses import fields
from operator import getitem
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch.fx import Node

from .attention import Attention
from .paged import OpaqueAttention, check_gated
from .reason import Decline

_RETURNED = (Attention, OpaqueAttention, Decline)
_MASKED_ROWS = ("zero", "nan")

_check_gated = functools.cache(check_gated)


def checked(node: Node, found: Any) -> Attention | OpaqueAttention | Decline | None:
    """`found`, as the adapter of the operator that `node` calls returned it.

    Raises:
        TypeError: it is nothing that an adapter may return, or has a field of another type.
        ValueError: it is about another call, is causal beside a mask, rows without a live key
            become what is not known, or its gated form cannot be called in the place of the
            operator.
    """
    if found is None:
        return None
    op: Any = node.target
    returned: type = type(found)
    if returned not in _RETURNED:
        raise TypeError(
            f"the adapter of {op} returned {found!r}; it must return what read_attention or "
            "read_opaque gives, a Decline, or None"
        )
    for name, types in _types(returned).items():
        field = getattr(found, name)
        # A bool is an int.
        if not isinstance(field, types) or (isinstance(field, bool) and bool not in types):
            wanted = " or ".join(t.__name__ for t in types)
            raise TypeError(
                f"the adapter of {op} returned {returned.__name__} with {name}={field!r}, "
                f"which is no {wanted}"
            )
    if isinstance(found, Attention) and found.masked_row not in _MASKED_ROWS:
        raise ValueError(
            f"the adapter of {op} returned Attention with masked_row={found.masked_row!r}; give "
            f"one of {', '.join(_MASKED_ROWS)}"
        )
    if isinstance(found, Attention) and found.is_causal and found.mask is not None:
        raise ValueError(f"the adapter of {op} returned Attention with is_causal beside a mask")
    if isinstance(found, OpaqueAttention):
        _check_gated(op, found.gated)
    if not isinstance(found, Decline) and not _is_of(node, found):
        raise ValueError(
            f"the adapter of {op} returned {returned.__name__} of {found.node.name} with the "
            f"result {found.result.node.name}, for the call {node.name}"
        )
    return found  # type: ignore[no-any-return]


def _is_of(node: Node, found: Attention | OpaqueAttention) -> bool:
    """Whether `found` is about `node`; a gated form takes the place of the very result."""
    if found.node is not node:
        return False
    if isinstance(found, Attention):
        return True
    result = found.result.node
    return result is node or (result.target is getitem and result.args[0] is node)


@functools.cache
def _types(returned: type) -> dict[str, tuple[type, ...]]:
    """The classes that a field of `returned` may be of; those of its annotations."""
    hints = get_type_hints(returned)
    return {field.name: _classes(hints[field.name]) for field in fields(returned)}


def _classes(hint: Any) -> tuple[type, ...]:
    if get_origin(hint) in (Union, UnionType):
        return tuple(itertools.chain.from_iterable(map(_classes, get_args(hint))))
    plain: type = get_origin(hint) or hint
    # As in annotations, an int is a float.
    return (float, int) if plain is float else (plain,)
