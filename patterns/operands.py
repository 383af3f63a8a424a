"""Reading an attention from operands whose four dimensions have a known order, such as SDPA's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from .attention import Attention, Mask, Sizes
from .layout import Layout, Size, differ
from .reason import Decline, Reason
from .trace import FLOATING, Operand, has_tensor, shape, tensor

MASK_DTYPES = (torch.bool, *FLOATING)
# Where batch, heads, tokens and dim are.
_PLACES = {"BHSD": (0, 1, 2, 3), "BSHD": (0, 2, 1, 3)}
LOWEST_BIAS = torch.finfo(torch.float32).min


def read_attention(
    node: Node,
    producer: str,
    *,
    query: Any,
    key: Any,
    value: Any,
    output: Node,
    mask: Any = None,
    is_causal: bool = False,
    scale: Any = None,
    masked_row: str = "zero",
    lowest_bias: float = LOWEST_BIAS,
    layout: str = "BHSD",
) -> Attention | Decline:
    """The attention of an operator that has SDPA's meaning.

    Args:
        node: the call of the operator.
        producer: what to call it in a report.
        query: `(B, Hq, Q, D)`, a node.
        key, value: `(B, Hkv, S, D)` and `(B, Hkv, S, Dv)`, nodes. Hkv divides Hq, and query head
            `h` reads head `h // (Hq // Hkv)`.
        output: `(B, Hq, Q, Dv)`, the node that holds the result, in the dtype of the query.
        mask: None, or a node that is broadcast from the right to `(B, Hq, Q, S)`: boolean (True
            attends) or floating (added to the scaled logits).
        is_causal: query token `i` sees the keys `0` to `i`; not beside a mask.
        scale: factor of the logits; None is `1 / sqrt(D)`.
        masked_row: `"zero"` or `"nan"`, the result of a row whose logits are all -inf.
        lowest_bias: what is added to a logit counts as -inf below this.
        layout: "BHSD", or "BSHD" if query, K, V and output have the tokens before the heads, such
            as `(B, Q, Hq, D)`. The sizes cannot tell, so that the wrong one gives wrong results.

    Returns:
        The attention, or why it is none; never raises on what a graph may hold.

    Raises:
        ValueError: there is no such layout.
    """
    if layout not in _PLACES:
        raise ValueError(f"layout must be one of {', '.join(_PLACES)}, not {layout!r}")
    places = _PLACES[layout]
    sizes = _sizes(query, key, value, places)
    if sizes is None:
        return Decline(Reason.ATTENTION_LAYOUT, _misfit(node, layout, query, key, value))
    if not _is_result(output, sizes, places):
        return Decline(
            Reason.ATTENTION_LAYOUT, f"the output {output} has not the shape of {node.name}'s query"
        )
    factor = _scale(scale, sizes.head_dim)
    if factor is None:
        return Decline(Reason.SCALE, f"the scale is {scale}, not a constant")
    masking = _mask(sizes, mask)
    if isinstance(masking, Decline):
        return masking
    if is_causal and masking is not None:
        return Decline(Reason.CAUSAL, "is_causal=True together with a mask")
    if tensor(output).dtype != tensor(query).dtype:
        return Decline(
            Reason.DTYPE, f"the output is {tensor(output).dtype}, the query {tensor(query).dtype}"
        )
    return Attention(
        node=node,
        producer=producer,
        sizes=sizes,
        query=Operand(query, _placed(sizes.layout("batch", "head", "query", "dim"), places)),
        key=Operand(key, _stored(sizes, key, places)),
        value=Operand(value, _stored(sizes, value, places)),
        mask=masking,
        sinks=None,
        is_causal=is_causal,
        result=Operand(
            output, _placed(sizes.layout("batch", "head", "query", "value_dim"), places)
        ),
        scale=factor,
        is_rounded=True,
        masked_row=masked_row,
        lowest_bias=lowest_bias,
    )


def _sizes(query: object, key: object, value: object, places: tuple[int, ...]) -> Sizes | None:
    operands = [node for node in (query, key, value) if isinstance(node, Node)]
    is_whole = len(operands) == 3
    if not is_whole or not all(has_tensor(node) and len(shape(node)) == 4 for node in operands):
        return None
    own, *stored = ([shape(node)[place] for place in places] for node in operands)
    batch, heads, tokens, head_dim = own
    length, value_dim = stored[0][2], stored[1][3]
    if differ(stored[0][3], head_dim) or differ(stored[1][2], length):
        return None
    for rows, shared, *_ in stored:
        # FlexAttention broadcasts one K over the batch, as that of a paged cache.
        if (differ(rows, batch) and differ(rows, 1)) or not _divides(shared, heads):
            return None
    return Sizes(batch, heads, tokens, length, head_dim, value_dim)


def _misfit(node: Node, layout: str, *operands: object) -> str:
    """Why the operands of `node` are not those of an attention."""
    known = [operand for operand in operands if isinstance(operand, Node) and has_tensor(operand)]
    place = layout.index("H")
    heads = {shape(operand)[place] for operand in known if len(shape(operand)) == 4}
    symbols = sorted(str(size) for size in heads if not isinstance(size, int))
    if symbols:
        return (
            f"the number of heads of {node.name} is a symbol ({', '.join(symbols)}); only the "
            "batch and the length may be"
        )
    names = {"B": "batch", "H": "heads", "S": "tokens", "D": "dim"}
    dims = ", ".join(names[letter] for letter in layout)
    return (
        f"query, key and value of {node.name} are not ({dims}) with key and value heads that "
        "divide the query's"
    )


def _placed(layout: Layout, places: tuple[int, ...]) -> Layout:
    """A layout of batch, heads, tokens and dim in the order of `places`; it is its own inverse."""
    return Layout(tuple(layout.dims[place] for place in places))


def _is_result(output: Node, sizes: Sizes, places: tuple[int, ...]) -> bool:
    if not has_tensor(output) or len(shape(output)) != len(places):
        return False
    whole = (sizes.batch, sizes.query_heads, sizes.query_tokens, sizes.value_dim)
    own = (shape(output)[place] for place in places)
    return not any(differ(*pair) for pair in zip(own, whole, strict=True))


def _divides(stored: Size, heads: Size) -> bool:
    known = isinstance(stored, int) and isinstance(heads, int)
    return known and stored > 0 and heads % stored == 0


def _stored(sizes: Sizes, node: Node, places: tuple[int, ...]) -> Layout:
    """The layout of K or V, whose heads may be fewer than the query's."""
    batch, heads, length, dim = (shape(node)[place] for place in places)
    stride = int(sizes.query_heads) // int(heads)
    dims = (("batch", batch, 1), ("head", heads, stride), ("key", length, 1), ("dim", dim, 1))
    return _placed(Layout.of(dims), places)


def _scale(given: Any, head_dim: Size) -> float | None:
    if given is None:
        return 1 / math.sqrt(head_dim) if isinstance(head_dim, int) else None
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        return None
    try:
        return float(given)
    except OverflowError:
        return None


def _mask(sizes: Sizes, node: Any) -> Mask | Decline | None:
    """A mask that is broadcast from the right to (B, Hq, Q, S)."""
    if node is None:
        return None
    axes = ("batch", "head", "query", "key")
    whole = (sizes.batch, sizes.query_heads, sizes.query_tokens, sizes.kv_length)
    own = shape(node) if has_tensor(node) else ()
    offset = len(whole) - len(own)
    if (
        not has_tensor(node)
        or offset < 0
        or any(
            differ(size, 1) and differ(size, full)
            for size, full in zip(own, whole[offset:], strict=True)
        )
    ):
        return Decline(
            Reason.MASK_LAYOUT,
            f"the mask {node} does not broadcast to (batch, heads, query tokens, keys)",
        )
    if tensor(node).dtype not in MASK_DTYPES:
        return Decline(
            Reason.MASK_DTYPE,
            f"the mask {node} is {tensor(node).dtype}; boolean or floating is read",
        )
    named = zip(axes[offset:], own, strict=True)
    return Mask(Operand(node, Layout.of((axis, size, 1) for axis, size in named)))
