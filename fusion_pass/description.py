"""What is told of one attention: a `Site` made of what recognition read."""

from __future__ import annotations

import traceback
from dataclasses import replace

import torch
from torch.fx import Node

from fusion_pass.insertion import GatedFormError
from fusion_pass.launch import LaunchConfig
from fusion_pass.patterns import (
    Attention,
    ComputedMask,
    Decline,
    GatedAttention,
    GatedOpaque,
    KeyValue,
    Mask,
    OpaqueAttention,
    Reason,
    Recognition,
    adapters,
    recognise,
)
from fusion_pass.patterns.advice import ADVICE
from fusion_pass.patterns.gather import GATHERS, trace_pages
from fusion_pass.patterns.keyvalue import trace_key_value
from fusion_pass.patterns.layout import same
from fusion_pass.patterns.mask import trace_mask
from fusion_pass.patterns.registry import recognise_attention
from fusion_pass.patterns.trace import has_tensor, origins, tensor
from fusion_pass.provenance import frames, module_path
from fusion_pass.report import Site, TensorInfo
from fusion_pass.savings import kernel_plan

Outcome = GatedAttention | GatedOpaque | Decline


def unknown(node: Node) -> Site:
    """An attention of which nothing is known but its node."""
    target = str(node.target)
    return Site(node.name, target, False, None, "", "", "", "", None, None, None)


def describe(found: Recognition) -> Site:
    """The attention and its operands before any rewriting, not fused so far."""
    attention, outcome = found.attention, found.outcome
    mask = _mask(attention, outcome) if isinstance(attention, Attention) else None
    tensors = _tensors(attention, outcome, mask)
    spelled = {name: spell(info) for name, info in tensors.items()}
    calls = frames(found.node)
    match = outcome if isinstance(outcome, GatedAttention) else None
    return Site(
        attention=found.node.name,
        producer=attention.producer if attention else str(found.node.target),
        fused=False,
        reason=None,
        detail="",
        query=spelled.get("query", ""),
        key=spelled.get("key", ""),
        value=spelled.get("value", ""),
        gate=spelled.get("gate"),
        mask=", ".join(map(_spell_node, match.mask.inputs)) if match and match.mask else None,
        source=calls[-1].partition(" in ")[0] if calls else None,
        module=module_path(found.node),
        frames=calls,
        tensors=tensors,
        mask_kind=_mask_kind(attention, mask) if isinstance(attention, Attention) else None,
        gate_kind=_gate_kind(outcome),
    )


def declined(site: Site, refusal: Decline) -> Site:
    """`site` as left alone for `refusal`."""
    advice = ADVICE.get(refusal.reason)
    return replace(
        site,
        reason=refusal.reason.value,
        detail=refusal.detail,
        expected=refusal.expected,
        remedy=advice.remedy if advice else None,
    )


def faulted(site: Site, node: Node, fault: Exception) -> Site:
    """`site` as left alone because of `fault`, which may be that of what `node` is known by."""
    found = declined(site, Decline(Reason.INTERNAL, f"{type(fault).__name__}: {fault}"))
    if isinstance(fault, GatedFormError):
        culprit, remedy = "gated form", "give it a fake kernel that gives what the gated form gives"
    elif _is_of_adapter(node, fault):
        culprit, remedy = "registered adapter", "fix it"
    else:
        return found
    remedy = f"The fault is in the {culprit} of {node.target}: {remedy}"
    return replace(found, remedy=f"{remedy}; FUSION_PASS_STRICT=1 raises it.")


def _is_of_adapter(node: Node, fault: Exception) -> bool:
    """Whether the adapter of the operator of `node` raised `fault`, or returned what led to it."""
    if str(node.target) not in dict(adapters()):
        return False
    frames = traceback.walk_tb(fault.__traceback__)
    return any(frame.f_code is recognise_attention.__code__ for frame, _ in frames)


def other_product(node: Node) -> Node | None:
    """The multiplication of the attention `node` by what is no sigmoid.

    None unless it is declined for such a factor, and the factor is a tensor.
    """
    found = recognise(node)
    if found is None or found.attention is None or not isinstance(found.outcome, Decline):
        return None
    if found.outcome.reason is not Reason.NOT_SIGMOID:
        return None
    # The reason tells that single uses lead there.
    arriving = found.attention.result.node
    while len(arriving.users) == 1:
        (user,) = arriving.users
        if user.target is torch.ops.aten.mul.Tensor:
            return user if len(user.all_input_nodes) > 1 else None
        arriving = user
    return None


def fused(site: Site, match: GatedAttention, ground: str, config: LaunchConfig | None) -> Site:
    """`site` as fused on `ground`, by kernels of `config` if any run.

    It must be called before the graph is rewritten.
    """
    kernel = kernel_plan(match, config) if config is not None else None
    return replace(site, fused=True, ground=f"{ground}{_from_copy(match)}", kernel=kernel)


def _from_copy(match: GatedAttention) -> str:
    """What is added to the ground where K and V are gathered, and read from what was gathered."""
    *_, first = origins(match.key_value.key)
    if first.node.target not in GATHERS:
        return ""
    attention = match.attention
    cause = ""
    if attention.is_causal or not same(attention.sizes.query_tokens, 1):
        cause = ": a table is read for one query token, and not with is_causal"
    elif match.pages is None and trace_pages(attention, match.key_value, None) is not None:
        cause = ": the mask is not plainly a length for each row"
    return f"; K and V are read from the gathered copy{cause}"


def _mask(attention: Attention, outcome: Outcome) -> Mask | ComputedMask | None:
    return outcome.mask if isinstance(outcome, GatedAttention) else trace_mask(attention)


def _stored(attention: Attention, outcome: Outcome) -> KeyValue | Attention:
    """K and V before any repetition; as the attention reads them where that cannot be told."""
    if isinstance(outcome, GatedAttention):
        return outcome.key_value
    traced = trace_key_value(attention)
    return attention if isinstance(traced, Decline) else traced


def _tensors(
    attention: Attention | OpaqueAttention | None,
    outcome: Outcome,
    mask: Mask | ComputedMask | None,
) -> dict[str, TensorInfo]:
    """The operands by name, as far as they were read; K and V as they are stored."""
    nodes: dict[str, Node] = {}
    if isinstance(attention, Attention):
        stored = _stored(attention, outcome)
        nodes |= {
            "query": attention.query.node,
            "key": stored.key.node,
            "value": stored.value.node,
        }
        if isinstance(mask, Mask):
            nodes["mask"] = mask.operand.node
        if attention.sinks:
            nodes["sinks"] = attention.sinks.node
    if attention:
        nodes["output"] = attention.result.node
    if not isinstance(outcome, Decline):
        nodes["gate"] = outcome.gate.sigmoid.argument.node
    return {name: _info(node) for name, node in nodes.items() if has_tensor(node)}


def _info(node: Node) -> TensorInfo:
    value = tensor(node)
    return TensorInfo(
        _spell_dtype(value.dtype),
        tuple(map(_plain, value.shape)),
        tuple(map(_plain, value.stride())),
    )


def _plain(size: object) -> int | str:
    return size if isinstance(size, int) else str(size)


def _spell_dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def spell(info: TensorInfo) -> str:
    """As in "bfloat16[8, 16, 1, 256]"."""
    return f"{info.dtype}[{', '.join(map(str, info.shape))}]"


def _spell_node(node: Node) -> str:
    return spell(_info(node)) if has_tensor(node) else ""


def _mask_kind(attention: Attention, mask: Mask | ComputedMask | None) -> str:
    if attention.is_causal:
        return "causal"
    if isinstance(mask, ComputedMask):
        return "computed"
    if mask is None:
        return "none"
    return "boolean" if mask.is_boolean else "additive"


def _gate_kind(outcome: Outcome) -> str | None:
    """What the output is multiplied by; None if it has no gate, or none was looked for."""
    if not isinstance(outcome, Decline):
        return "sigmoid"
    return outcome.found if outcome.reason is Reason.NOT_SIGMOID else None
