"""Random operands of one gated decode attention, and the float64 truth about their result."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.geometry import Geometry
from fusion_pass import reference

DTYPE = torch.bfloat16
# How much worse than torch's own naive computation in bfloat16 a candidate's result may be.
TOLERANCE = 2.0


@dataclass(frozen=True)
class Operands:
    """Query (B, Hq, Q, D), key and value (B, Hkv, S, D), gate (B, Q, Hq, D or 1), mask or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    mask: Tensor | None
    scale: float

    def masked(self, mask: Tensor | None) -> Operands:
        """The same operands under another mask."""
        return replace(self, mask=mask)


def make(
    geometry: Geometry,
    batch: int,
    kv_length: int,
    device: torch.device,
    *,
    query_tokens: int = 1,
    seed: int = 0,
) -> Operands:
    """Standard normal bfloat16 operands without a mask, the same for the same arguments."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=DTYPE, generator=generator)

    heads, width = geometry.query_heads, geometry.head_dim
    return Operands(
        query=random(batch, heads, query_tokens, width),
        key=random(batch, geometry.kv_heads, kv_length, width),
        value=random(batch, geometry.kv_heads, kv_length, width),
        gate=random(batch, query_tokens, heads, 1 if geometry.head_wise_gate else width),
        mask=None,
        scale=width**-0.5,
    )


def live_mask(kv_length: int, live: int, device: torch.device) -> Tensor:
    """A boolean mask (1, 1, 1, S) of which the first `live` keys are attended to."""
    return (torch.arange(kv_length, device=device) < live)[None, None, None]


@dataclass(frozen=True)
class Truth:
    """The float64 result and the error that a candidate's may have against it."""

    output: Tensor
    bound: float

    def error(self, output: Tensor) -> float:
        """Relative L2 error of a candidate's (B, Q, Hq, D) output, flattened or not."""
        return relative_error(output.reshape(self.output.shape), self.output)


def truth(operands: Operands) -> Truth:
    """Compute the float64 result, one sequence at a time, and the bound from the naive one."""
    exact = _reference(operands, torch.float64)
    naive = _reference(operands, torch.float32)
    return Truth(exact, TOLERANCE * relative_error(naive, exact))


def relative_error(output: Tensor, exact: Tensor) -> float:
    """The L2 norm of the difference over that of `exact`."""
    return float((output.double() - exact).norm() / exact.norm())


def _reference(operands: Operands, compute_dtype: torch.dtype) -> Tensor:
    rows = []
    for row in range(operands.query.shape[0]):
        one = slice(row, row + 1)
        mask, gate = (
            x if x is None or x.shape[0] == 1 else x[one] for x in (operands.mask, operands.gate)
        )
        assert gate is not None
        rows.append(
            reference.gated_decode_attention(
                operands.query[one],
                operands.key[one],
                operands.value[one],
                gate,
                mask,
                scale=operands.scale,
                mask_fill=-torch.inf,
                masked_row="zero",
                numerics="compiled",
                compute_dtype=compute_dtype,
            )
        )
    return torch.cat(rows)
