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
    INTERNAL = "internal-fault"


@dataclass(frozen=True)
class Decline:
    """A refusal: its reason, and what was found in words a user can act on."""

    reason: Reason
    detail: str
