"""Filling of the compilers' caches before anything is timed, in processes of their own."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from bench import entries, geometry, operands
from bench.operands import Operands
from bench.peers import FLASHINFER, PEERS, Peer
from bench.session import tell

SECONDS = 150
RIVALS = [peer.name for peer in PEERS]


def compile_ahead(names: Sequence[str]) -> None:
    """Fill Inductor's, Triton's and FlashInfer's caches for geometries, masks and tokens.

    Nothing is timed meanwhile: the processes use the device. One that takes too long is stopped,
    and the run compiles for itself.
    """
    # FlashInfer's compiler takes as long as all others together.
    jobs = [
        [name, "--peers", *group]
        for group in ([FLASHINFER], [name for name in RIVALS if name != FLASHINFER])
        for name in names
    ]
    jobs += [[part] for part in entries.PARTS]
    compilers = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.ahead", *job],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # With the compilers that it starts it can then be stopped as one.
            start_new_session=True,
        )
        for job in jobs
    ]
    tell(f"compiling {', '.join(names)}")
    deadline = time.monotonic() + SECONDS
    for compiler in compilers:
        try:
            compiler.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(compiler.pid, signal.SIGKILL)
            compiler.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Compile everything of one geometry or part, whatever comes of it."""
    options = argparse.ArgumentParser(prog="python -m bench.ahead", description=__doc__)
    choices = [*(shape.name for shape in geometry.GEOMETRIES), *entries.PARTS]
    options.add_argument("what", choices=choices)
    options.add_argument("--peers", nargs="+", choices=RIVALS, default=RIVALS)
    arguments = options.parse_args(argv)
    device = torch.device("cuda")
    if arguments.what in entries.PARTS:
        part(arguments.what, device)
    else:
        grid(geometry.named(arguments.what), arguments.peers, device)
    return 0


def part(name: str, device: torch.device) -> None:
    """Call every candidate of masks or of tokens once."""
    for batch in entries.BATCHES:
        torch._dynamo.reset()
        for entry in entries.PARTS[name](batch, device):
            attempt(entry.peer, entry.operands)


def grid(shape: geometry.Geometry, names: Sequence[str], device: torch.device) -> None:
    """Call the named peers once on every cell of one geometry."""
    chosen = [peer for peer in PEERS if peer.name in names and not peer.missing()]
    for batch, kv_length in geometry.GRID:
        torch._dynamo.reset()
        given = operands.make(shape, batch, kv_length, device)
        for peer in chosen:
            attempt(peer, given)


def attempt(peer: Peer, given: Operands) -> None:
    """Call a peer; one that cannot is tried again, and judged, by the run itself."""
    try:
        peer.build(given)()
        torch.cuda.synchronize()
    except Exception as fault:
        tell(f"{peer.name}: {fault}")


if __name__ == "__main__":
    raise SystemExit(main())
