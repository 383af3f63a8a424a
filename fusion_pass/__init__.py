"""Fuses gated attention decode of unmodified models under torch.compile.

Importing the package registers the operators `fusion_pass::*`, so that a compiled graph from a
cache finds them; it imports neither triton nor Inductor and initialises no CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

import fusion_pass.ops
import fusion_pass.paged.ops  # noqa: F401  (registers the operators, as does fusion_pass.ops)
from fusion_pass.config import Config, ConfigError

if TYPE_CHECKING:
    from fusion_pass.backend import enable
    from fusion_pass.explainer import assert_fused, explain
    from fusion_pass.explanation import Explanation
    from fusion_pass.gate_mul import sigmoid_gate_mul
    from fusion_pass.graph_pass import GatedAttentionPass
    from fusion_pass.paged.api import paged_decode_attention
    from fusion_pass.patterns import register_attention

__all__ = [
    "Config",
    "ConfigError",
    "Explanation",
    "GatedAttentionPass",
    "__version__",
    "assert_fused",
    "enable",
    "explain",
    "paged_decode_attention",
    "register_attention",
    "sigmoid_gate_mul",
]

_LAZY = {
    "Explanation": "fusion_pass.explanation",
    "GatedAttentionPass": "fusion_pass.graph_pass",
    "assert_fused": "fusion_pass.explainer",
    "enable": "fusion_pass.backend",
    "explain": "fusion_pass.explainer",
    "paged_decode_attention": "fusion_pass.paged.api",
    "register_attention": "fusion_pass.patterns",
    "sigmoid_gate_mul": "fusion_pass.gate_mul",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _LAZY.keys())
