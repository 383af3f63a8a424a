"""Host time of a decode step without CUDA graphs: `python -m bench.host [--quick]`.

How long the call of a compiled step takes to return, and to be done, stock against the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from bench import models
from bench.model import BACKENDS, LIVE, warm
from bench.models import Decode
from bench.results import candidates
from bench.session import Session, parser
from fusion_pass.timing import Arm, WallClock, interleave, with_nulls

LAYERS = (8,)
BATCH, CAPACITY = 1, 4096
ROUNDS, QUICK_ROUNDS = 200, 50


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the dense model; returns the exit status."""
    arguments = parser("host", __doc__, 180).parse_args(argv)
    session = Session.begin("host", arguments)
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    with torch.no_grad():
        session.each(LAYERS, partial(measure, session, rounds), describe, "host")
    return session.finish()


def measure(session: Session, rounds: int, layers: int) -> dict[str, Any]:
    """Time until the call returns ("returns") and until the device is idle ("done")."""
    torch._dynamo.reset()
    model = models.named("dense").build(session.device, **depth(layers))
    decode = Decode(model, BATCH, CAPACITY)
    decode.set_live(LIVE)
    compiled = {name: torch.compile(model, backend=backend) for name, backend in BACKENDS.items()}
    _, refused = warm(decode, compiled)
    arms = [
        Arm(name, partial(decode.step, step), decode.prepare)
        for name, step in compiled.items()
        if name not in refused
    ]
    clocks = {
        "returns": WallClock(torch.cuda.synchronize, wait=False),
        "done": WallClock(torch.cuda.synchronize),
    }
    return {
        name: candidates(interleave(with_nulls(arms), clock, rounds=rounds), refused)
        for name, clock in clocks.items()
    }


def depth(layers: int) -> dict[str, Any]:
    """Settings that give the dense model this many layers."""
    return {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}


def describe(layers: int) -> dict[str, Any]:
    """The cell's kind and shape."""
    shape = {"model": "dense", "layers": layers, "B": BATCH, "capacity": CAPACITY, "live": LIVE}
    return {"kind": "host", "shape": shape}


if __name__ == "__main__":
    raise SystemExit(main())
