"""The named reasons for leaving an attention as it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """Why an attention is not fused. The value is the name that reports and counters show."""

    TRAINING = "training"
    DROPOUT = "dropout"
    CAUSAL = "causal"
    NO_GATE = "no-gate"
    LEAVES_GRAPH = "output-leaves-graph"
    NOT_SIGMOID = "gate-not-sigmoid"
    GATE_LAYOUT = "gate-layout"
    GATE_DTYPE = "gate-dtype"
    OUTPUT_USED = "output-used-elsewhere"
    STATISTICS_USED = "softmax-statistics-used"
    ATTENTION_LAYOUT = "attention-layout"
    KEY_VALUE_LAYOUT = "key-value-layout"
    MASK_LAYOUT = "mask-layout"
    MASK_DTYPE = "mask-dtype"
    MASK_FILL = "mask-fill"
    SCALE = "scale"
    SINKS = "sinks"
    LOGITS = "logits-changed"
    SCORE_MOD = "score-mod"
    MASK_MOD = "mask-mod"
    BLOCK_MASK = "block-mask"
    KERNEL_OPTION = "kernel-option"
    STRIDES_USED = "strides-used"
    MUTATION = "operand-mutated"
    DEVICE = "device"
    MIXED_DEVICES = "mixed-devices"
    DTYPE = "dtype"
    NUMERICS = "numerics"
    QUERY_TOKENS = "query-tokens"
    HEAD_DIM = "head-dim"
    GROUP = "heads-per-group"
    UNPROFITABLE = "unprofitable"
    TORCH = "unknown-torch"
    INTERNAL = "internal-fault"


@dataclass(frozen=True)
class Decline:
    """A refusal: its reason, and what was found in words a user can act on.

    `found` is what stands in the place of what was expected, in one word where there is one, such
    as "silu" for a gate.
    """

    reason: Reason
    detail: str
    found: str | None = None

    @property
    def expected(self) -> str:
        """What the fusion needs there."""
        return EXPECTED.get(self.reason, "")


EXPECTED: dict[Reason, str] = {
    Reason.TRAINING: "a graph that needs no gradient",
    Reason.DROPOUT: "no dropout",
    Reason.CAUSAL: "is_causal=True without a mask, or a mask without is_causal",
    Reason.NO_GATE: "output * sigmoid(gate) as the output's only use",
    Reason.LEAVES_GRAPH: "output, gate and product in one graph",
    Reason.NOT_SIGMOID: "sigmoid(gate)",
    Reason.GATE_LAYOUT: "a gate with one value for each element, head, token or batch row",
    Reason.GATE_DTYPE: "a product in the attention's dtype or float32, and at most one rounding",
    Reason.OUTPUT_USED: "output * sigmoid(gate) as the output's only use",
    Reason.STATISTICS_USED: "no use of logsumexp, logits or weights outside the attention",
    Reason.ATTENTION_LAYOUT: "query (B, Hq, Q, D), and K and V (B, Hkv, S, D), behind any views",
    Reason.KEY_VALUE_LAYOUT: "K and V with a number of heads that divides the query's",
    Reason.MASK_LAYOUT: "a mask that broadcasts to (B, Hq, Q, S)",
    Reason.MASK_DTYPE: "a boolean, bfloat16, float16 or float32 mask",
    Reason.MASK_FILL: "hidden keys that score -inf",
    Reason.SCALE: "a constant, finite scale",
    Reason.SINKS: "one sink for each query head",
    Reason.LOGITS: "one constant scale, then one mask",
    Reason.SCORE_MOD: "a score_mod that scales by a constant, masks or adds a bias looked up",
    Reason.MASK_MOD: "a mask_mod of integers and booleans on indices and captured tensors",
    Reason.BLOCK_MASK: "lists of blocks for all, or for each, of the batch and of the heads",
    Reason.KERNEL_OPTION: "kernel options that leave the result as it is",
    Reason.STRIDES_USED: "a product that is read by its shape alone",
    Reason.MUTATION: "operands that keep their values up to the gated product",
    Reason.DEVICE: "a device of the setting devices that the kernels are made for",
    Reason.MIXED_DEVICES: "all operands on one device",
    Reason.DTYPE: "query, K and V in the same one of bfloat16, float16 and float32",
    Reason.NUMERICS: "torch.sigmoid, and no cast inside the attention",
    Reason.QUERY_TOKENS: "1 to 16 query tokens",
    Reason.HEAD_DIM: "a multiple of 8 from 16 to 512",
    Reason.GROUP: "at most 64 query heads to one K/V head",
    Reason.UNPROFITABLE: "a policy, or a measurement, by which it pays",
    Reason.TORCH: "a torch that has the private APIs of those tested",
    Reason.INTERNAL: "no fault in the pass",
}
"""What the fusion needs in the place that each reason is about."""
