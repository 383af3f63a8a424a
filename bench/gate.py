"""What fusing the gate alone is worth: `python -m bench.gate [--quick]`.

The same kernels, gated in their reduction, against un-gated ones followed by a separate
sigmoid-multiply, eager or compiled. At 512 tokens, as FreeToken's pull request measured it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import geometry, operands
from bench.entries import Entry
from bench.kernel import compare, shape_entry
from bench.operands import Operands
from bench.peers import OURS, Call, Peer
from bench.session import Session, parser

KV_LENGTH = 512
BATCHES = (1, 4)
GEOMETRY = geometry.GEOMETRIES[0]
# Its sigmoid is exactly 1 in float32, and broadcast it costs one load.
OPEN_GATE = 100.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both batches; returns the exit status."""
    session = Session.begin("gate", parser("gate", __doc__, 120).parse_args(argv))
    session.each(BATCHES, partial(measure, session), describe, "gate")
    return session.finish()


def measure(session: Session, batch: int) -> dict[str, Any]:
    """The fused gate, the two separate ones, and the un-gated kernels."""
    given = operands.make(GEOMETRY, batch, KV_LENGTH, session.device)
    exact = operands.truth(given)
    open_gate = torch.full((1, 1, 1, 1), OPEN_GATE, dtype=given.gate.dtype, device=session.device)
    ungated = replace(given, gate=open_gate)
    compiled = torch.compile(sigmoid_multiply, dynamic=False)
    peers = (
        OURS,
        Peer("separate, eager", partial(separate, open_gate, sigmoid_multiply)),
        Peer("separate, compiled", partial(separate, open_gate, compiled)),
    )
    compared = [Entry(peer.name, peer, given, exact) for peer in peers]
    compared.append(Entry("un-gated", OURS, ungated, operands.truth(ungated)))
    return compare(session, compared)


def sigmoid_multiply(attended: Tensor, gate: Tensor) -> Tensor:
    """The gate as models write it."""
    return attended * torch.sigmoid(gate)


def separate(open_gate: Tensor, gate: Any, given: Operands) -> Call:
    """The un-gated kernels, then `gate`."""
    attend = OURS.build(replace(given, gate=open_gate))

    def call() -> Tensor:
        gated: Tensor = gate(attend(), given.gate)
        return gated

    return call


def describe(batch: int) -> dict[str, Any]:
    """The cell's kind and shape."""
    return {"kind": "gate", "shape": {**shape_entry(GEOMETRY, batch), "S": KV_LENGTH}}


if __name__ == "__main__":
    raise SystemExit(main())
