"""Whether the kernel can run a recognised gated attention. Each guard gives a reason or nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx import Node

from fusion_pass import inductor
from fusion_pass.guards import Context, numerics, strides, unasked_device
from fusion_pass.launch import (
    LaunchConfig,
    Problem,
    Unlaunchable,
    choose,
    device_limits,
)
from fusion_pass.patterns import Decline, GatedAttention, Mask, Reason
from fusion_pass.patterns.trace import tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_QUERY_TOKENS = 16
MAX_GROUP = 64
MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 16, 512, 8


def operands(match: GatedAttention) -> list[Node]:
    """Every node that the fused operator would read."""
    found = [
        match.attention.query.node,
        match.key_value.key.node,
        match.key_value.value.node,
        match.gate.sigmoid.argument.node,
    ]
    found += match.mask.inputs if match.mask else ()
    return found + ([match.attention.sinks.node] if match.attention.sinks else [])


def check(match: GatedAttention, context: Context) -> Decline | None:
    """The first reason why the kernel cannot run `match`, or None if it can."""
    for guard in _GUARDS:
        if refusal := guard(match, context):
            return refusal
    return None


def _out_of_place(match: GatedAttention, context: Context) -> Decline | None:
    """Only an adapter can name an operand that is not there yet or any more, or elsewhere."""
    product = match.gate.product.node
    for node in operands(match):
        is_erased = node.prev.next is not node
        if is_erased or node.graph is not context.graph or not node < product:
            return Decline(
                Reason.ATTENTION_LAYOUT,
                f"{node.name}, which {match.attention.producer} names as an operand, is not "
                f"computed before {product.name}",
            )
    return None


def _mixed_devices(match: GatedAttention, context: Context) -> Decline | None:
    devices = sorted({str(tensor(node).device) for node in operands(match)})
    if len(devices) == 1:
        return None
    return Decline(Reason.MIXED_DEVICES, f"the operands are on {', '.join(devices)}")


def _device(match: GatedAttention, context: Context) -> Decline | None:
    device = tensor(match.attention.query.node).device
    if refusal := unasked_device(device, context):
        return refusal
    if context.assumed is None and device.type == "cpu":
        return _ahead_of_time()
    try:
        kernel_config(match, context)
    except Unlaunchable as unsupported:
        return Decline(Reason.DEVICE, str(unsupported))
    return None


def _ahead_of_time() -> Decline | None:
    if not inductor.compiles_ahead_of_time():
        return None
    return Decline(
        Reason.DEVICE, "a package for the CPU cannot hold the operator, which is Python there"
    )


def kernel_config(match: GatedAttention, context: Context) -> LaunchConfig | None:
    """The kernels' configuration for `match` on its GPU or the assumed one; None on a CPU.

    Raises:
        Unlaunchable: the kernels are not made for the GPU.
    """
    device = tensor(match.attention.query.node).device
    if context.assumed is None and device.type == "cpu":
        return None
    return choose(_problem(match), context.assumed or device_limits(device))


def _problem(match: GatedAttention) -> Problem:
    """What the choice of tiles rests on; a size that is not known is None."""
    sizes = match.attention.sizes
    batch, kv_length = (
        size if isinstance(size, int) else None for size in (sizes.batch, sizes.kv_length)
    )
    masks = {tensor(node).dtype is torch.bool for node in match.mask.inputs} if match.mask else {}
    return Problem(
        batch=batch,
        query_heads=int(sizes.query_heads),
        kv_heads=match.key_value.heads,
        query_tokens=int(sizes.query_tokens),
        kv_length=kv_length,
        head_dim=int(sizes.head_dim),
        value_dim=int(sizes.value_dim),
        dtype=tensor(match.attention.query.node).dtype,
        mask="none" if not masks else "bool" if True in masks else "float",
    )


def _dtype(match: GatedAttention, context: Context) -> Decline | None:
    attention = match.attention
    stored = match.key_value
    read = (attention.query, stored.key, stored.value)
    found = {tensor(operand.node).dtype for operand in read}
    if len(found) == 1 and found <= set(DTYPES):
        return None
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
    return Decline(
        Reason.DTYPE,
        f"query, key and value are {names}; one of bfloat16, float16, float32 is needed",
    )


def _sinks_dtype(match: GatedAttention, context: Context) -> Decline | None:
    sinks = match.attention.sinks
    if sinks is None or tensor(sinks.node).dtype in DTYPES:
        return None
    dtype = tensor(sinks.node).dtype
    return Decline(Reason.SINKS, f"the sinks are {dtype}; one of {DTYPES} is read")


def _mask_dtype(match: GatedAttention, context: Context) -> Decline | None:
    if not isinstance(match.mask, Mask):
        return None
    dtype = tensor(match.mask.operand.node).dtype
    if dtype in (torch.bool, *DTYPES):
        return None
    return Decline(Reason.MASK_DTYPE, f"the mask is {dtype}; boolean, or one of {DTYPES}, is read")


def _scale(match: GatedAttention, context: Context) -> Decline | None:
    scale = match.attention.scale
    if math.isfinite(scale):
        return None
    return Decline(Reason.SCALE, f"the scale is {scale}, not finite")


def _query_tokens(match: GatedAttention, context: Context) -> Decline | None:
    tokens = match.attention.sizes.query_tokens
    if isinstance(tokens, int) and 1 <= tokens <= MAX_QUERY_TOKENS:
        return None
    found = f"{tokens} query tokens"
    if not isinstance(tokens, int):
        found = f"the number of query tokens, {tokens}, is symbolic"
    most = f"the decode kernel takes at most {MAX_QUERY_TOKENS}"
    return Decline(Reason.QUERY_TOKENS, f"{found}; {most}")


def _keys(match: GatedAttention, context: Context) -> Decline | None:
    length = match.attention.sizes.kv_length
    if not isinstance(length, int) or length > 0:
        return None
    return Decline(Reason.KEY_VALUE_LAYOUT, "K and V have no tokens")


def _head_dim(match: GatedAttention, context: Context) -> Decline | None:
    for dim in (match.attention.sizes.head_dim, match.attention.sizes.value_dim):
        whole = isinstance(dim, int) and dim % HEAD_DIM_STEP == 0
        if not (whole and MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM):
            return Decline(
                Reason.HEAD_DIM,
                f"head_dim {dim} is not a multiple of {HEAD_DIM_STEP} "
                f"from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}",
            )
    return None


def _group(match: GatedAttention, context: Context) -> Decline | None:
    heads = match.attention.sizes.query_heads
    if isinstance(heads, int) and heads // match.key_value.heads <= MAX_GROUP:
        return None
    return Decline(
        Reason.GROUP,
        f"{heads} query heads share {match.key_value.heads} K/V heads; "
        f"at most {MAX_GROUP} may share one",
    )


def _mutation(match: GatedAttention, context: Context) -> Decline | None:
    for operand in operands(match):
        if context.mutated_before(operand, match.gate.product.node):
            return Decline(
                Reason.MUTATION, f"{operand.name} is written in place before the gated product"
            )
    return None


_GUARDS: tuple[Callable[[GatedAttention, Context], Decline | None], ...] = (
    _out_of_place,
    _mixed_devices,
    _dtype,
    _mask_dtype,
    _sinks_dtype,
    _scale,
    _query_tokens,
    _keys,
    _head_dim,
    _group,
    _device,
    numerics,
    strides,
    _mutation,
)
