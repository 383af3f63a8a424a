"""Recognition of gated attention in an FX graph. Nothing here changes a graph."""

from .attention import Attention, is_attention
from .gate import Gate
from .gated_attention import GatedAttention, Recognition, recognise
from .keyvalue import KeyValue
from .layout import Conversion, Factor, Layout, convert
from .mask import Mask
from .reason import Decline, Reason
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
    "convert",
    "is_attention",
    "recognise",
]
