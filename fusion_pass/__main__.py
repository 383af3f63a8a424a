"""`python -m fusion_pass`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fusion_pass import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` names; 0 if it did what it should."""
    parser = argparse.ArgumentParser(prog="python -m fusion_pass")
    parser.add_argument("--version", action="version", version=f"fusion_pass {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="decode with a small model, the pass off and on")
    demo.add_argument("--steps", type=int, default=16, help="tokens to decode (default 16)")
    arguments = parser.parse_args(argv)
    return _demo(parser, arguments.steps)


def _demo(parser: argparse.ArgumentParser, steps: int) -> int:
    from fusion_pass.demo import MAX_STEPS, run

    if not 1 <= steps <= MAX_STEPS:
        parser.error(f"--steps {steps}: the demo decodes 1 to {MAX_STEPS} tokens")
    return 0 if run(steps) else 1


if __name__ == "__main__":
    raise SystemExit(main())
