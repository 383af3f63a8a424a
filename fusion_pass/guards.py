"""The guards that dense and opaque attentions share, and what guards look at besides a match."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fusion_pass.config import Config
from fusion_pass.launch import Limits
from fusion_pass.patterns import Decline, GatedAttention, GatedOpaque, Reason
from fusion_pass.storage import is_view, storage_root, storage_writers

_STRIDE_READERS = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_scatter.default,
    torch.ops.aten.as_strided_copy.default,
    torch.ops.aten.view.dtype,
)


@dataclass(frozen=True)
class Context:
    """What the guards look at besides the match: the graph, the settings and the way of running.

    `assumed` is the GPU that the graph is judged for, whatever device its tensors are on.
    """

    graph: Graph
    config: Config
    is_inference: bool
    numerics: str
    assumed: Limits | None = None

    @functools.cached_property
    def _writers(self) -> dict[Node, list[Node]]:
        return storage_writers(self.graph)

    def mutated_before(self, operand: Node, reader: Node, since: Node | None = None) -> bool:
        """Whether the storage of `operand` is written before `reader`.

        Only what is written after `since` counts, or after `operand` is made.
        """
        if not self._writers:
            return False
        first = since or operand
        writers = self._writers.get(storage_root(operand), ())
        return any(first < writer < reader for writer in writers)


def check_purpose(context: Context) -> Decline | None:
    """Whether the graph is for inference, whatever is in it."""
    if context.is_inference:
        return None
    return Decline(
        Reason.TRAINING, "a gradient may be needed; run under torch.no_grad() or inference_mode()"
    )


def unasked_device(device: torch.device, context: Context) -> Decline | None:
    """Whether the settings leave alone what runs on a device of this type, or the assumed one."""
    kind = context.assumed.kind if context.assumed else device.type
    if kind in context.config.devices:
        return None
    return Decline(
        Reason.DEVICE,
        f"it runs on {kind}; the setting devices is {', '.join(context.config.devices)}",
    )


def numerics(match: GatedAttention | GatedOpaque, context: Context) -> Decline | None:
    """What eager torch rounds at every step is not computed by the kernels."""
    if context.numerics != "eager":
        return None
    if isinstance(match, GatedAttention) and match.attention.is_narrowed:
        return Decline(
            Reason.NUMERICS,
            "a cast rounds the logits or the weights in eager torch; leave them in the dtype of "
            "their matmul, or in float32, or use the numerics compiled or fp32",
        )
    if not match.gate.sigmoid.is_spelled_out:
        return None
    return Decline(
        Reason.NUMERICS,
        "a sigmoid written as 1 / (1 + exp(-x)) rounds at every step in eager torch; write "
        "torch.sigmoid(x), or use the numerics compiled or fp32",
    )


def strides(match: GatedAttention | GatedOpaque, context: Context) -> Decline | None:
    """The result is contiguous, whatever the product's strides were."""
    pending, seen = [match.gate.product.node], set[Node]()
    while pending:
        node = pending.pop()
        for user in node.users:
            if user.target in _STRIDE_READERS:
                return Decline(Reason.STRIDES_USED, f"{user.name} reads the product by its strides")
            if user not in seen and is_view(user):
                seen.add(user)
                pending.append(user)
    return None
