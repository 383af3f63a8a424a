"""Recognition of gated attention in an FX graph. Nothing here changes a graph."""

from .attention import Attention, Mask, Sizes
from .gate import Gate
from .gated_attention import GatedAttention, Recognition, recognise
from .keyvalue import KeyValue
from .layout import Conversion, Factor, Layout, convert
from .reason import Decline, Reason
from .registry import may_be_attention
from .trace import Operand

__all__ = [
    "Attention",
    "Conversion",
    "Decline",
    "Factor",
    "Gate",
    "GatedAttention",
    "KeyValue",
    "Layout",
    "Mask",
    "Operand",
    "Reason",
    "Recognition",
    "Sizes",
    "convert",
    "may_be_attention",
    "recognise",
]
