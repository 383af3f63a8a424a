"""Recognition of gated attention in an FX graph. Nothing here changes a graph."""

from .attention import Attention, Mask, Sizes
from .gate import Gate
from .gated_attention import GatedAttention, GatedOpaque, Recognition, recognise
from .gather import Pages
from .keyvalue import KeyValue
from .layout import Conversion, Factor, Layout, convert
from .mask_program import ComputedMask
from .operands import read_attention
from .paged import OpaqueAttention, read_opaque
from .reason import Decline, Reason
from .registry import adapters, candidates, may_be_attention, register_attention
from .trace import Operand, arguments
from .unregistered import unregistered

__all__ = [
    "Attention",
    "ComputedMask",
    "Conversion",
    "Decline",
    "Factor",
    "Gate",
    "GatedAttention",
    "GatedOpaque",
    "KeyValue",
    "Layout",
    "Mask",
    "OpaqueAttention",
    "Operand",
    "Pages",
    "Reason",
    "Recognition",
    "Sizes",
    "adapters",
    "arguments",
    "candidates",
    "convert",
    "may_be_attention",
    "read_attention",
    "read_opaque",
    "recognise",
    "register_attention",
    "unregistered",
]
