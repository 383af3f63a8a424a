"""Fuses gated attention decode of unmodified models under torch.compile.

Importing the package registers the op `fusion_pass::gated_decode_attention`, so that a compiled
graph from a cache finds it; it imports neither triton nor Inductor and initialises no CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

import fusion_pass.ops  # noqa: F401  (registers the op)
from fusion_pass.config import Config, ConfigError

if TYPE_CHECKING:
    from fusion_pass.backend import enable
    from fusion_pass.graph_pass import GatedAttentionPass
    from fusion_pass.patterns import register_attention

__all__ = [
    "Config",
    "ConfigError",
    "GatedAttentionPass",
    "__version__",
    "enable",
    "register_attention",
]

_LAZY = {
    "GatedAttentionPass": "fusion_pass.graph_pass",
    "enable": "fusion_pass.backend",
    "register_attention": "fusion_pass.patterns",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _LAZY.keys())
