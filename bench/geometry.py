"""Attention geometries of published gated-attention models, and the grid of batch and length."""

from __future__ import annotations

from dataclasses import dataclass

BYTES = 2  # bfloat16


@dataclass(frozen=True)
class Geometry:
    """Heads and width of one attention layer; `source` is the config that has it."""

    name: str
    query_heads: int
    kv_heads: int
    head_dim: int
    head_wise_gate: bool
    source: str

    def kv_bytes(self, batch: int, kv_length: int) -> int:
        """Bytes of K and V together, in bfloat16."""
        return 2 * batch * self.kv_heads * kv_length * self.head_dim * BYTES


GEOMETRIES = (
    Geometry(
        "qwen3_next",
        16,
        2,
        256,
        False,
        "Qwen/Qwen3-Next-80B-A3B-Instruct and Qwen/Qwen3.5-35B-A3B: the defaults of transformers' "
        "Qwen3NextConfig and Qwen3_5MoeTextConfig",
    ),
    Geometry(
        "gqa_32_8_128",
        32,
        8,
        128,
        False,
        "the heads of Qwen/Qwen3-4B (un-gated): zyzshishui/slime, scripts/models/qwen3-4B.sh",
    ),
    Geometry(
        "qwen3_5_27b",
        24,
        4,
        256,
        False,
        "Qwen/Qwen3.5-27B: THUDM/slime, scripts/models/qwen3.5-27B.sh",
    ),
    Geometry(
        "step3p7",
        64,
        8,
        128,
        True,
        "stepfun-ai/Step-3.7-Flash: the defaults of transformers' Step3p7TextConfig",
    ),
)

GRID = (
    (1, 512),
    (1, 4096),
    (1, 32768),
    (1, 131072),
    (8, 4096),
    (32, 512),
    (32, 4096),
    (64, 8192),
)
QUICK_GEOMETRIES = ("qwen3_next", "gqa_32_8_128")
QUICK_GRID = ((1, 4096), (1, 32768), (8, 4096), (32, 4096))


def named(name: str) -> Geometry:
    """The geometry of this name. Raises KeyError, listing the names, for another."""
    for geometry in GEOMETRIES:
        if geometry.name == name:
            return geometry
    raise KeyError(f"{name} is none of {', '.join(g.name for g in GEOMETRIES)}")
