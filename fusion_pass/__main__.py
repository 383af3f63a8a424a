"""`python -m fusion_pass`."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from fusion_pass import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` names; 0 if it did what it should."""
    parser = argparse.ArgumentParser(prog="python -m fusion_pass")
    parser.add_argument("--version", action="version", version=f"fusion_pass {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="decode with a small model, the pass off and on")
    demo.add_argument("--steps", type=int, default=16, help="tokens to decode (default 16)")
    demo.set_defaults(run=functools.partial(_demo, demo))
    show = commands.add_parser("show", help="a dump's graphs and decisions as one HTML page")
    show.add_argument("folder", type=Path, help="what FUSION_PASS_DUMP named")
    show.add_argument("--output", type=Path, help="the page (default: index.html in the folder)")
    show.set_defaults(run=functools.partial(_show, show))
    explain = commands.add_parser(
        "explain", help="what would fuse in a transformers model, and why"
    )
    _add_explain_arguments(explain)
    explain.set_defaults(run=functools.partial(_explain, explain))
    tune = commands.add_parser("tune", help="measure on this GPU where fusing pays")
    tune.add_argument("--quick", action="store_true", help="six shapes only")
    tune.add_argument("--output", type=Path, help="the table (default: in the user's cache folder)")
    tune.add_argument("--budget", type=float, help="seconds after which no shape is begun")
    tune.set_defaults(run=functools.partial(_tune, tune))
    arguments = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    return run(arguments)


def _demo(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from fusion_pass.demo import MAX_STEPS, ToolchainError, run

    steps = arguments.steps
    if not 1 <= steps <= MAX_STEPS:
        parser.error(f"--steps {steps}: the demo decodes 1 to {MAX_STEPS} tokens")
    try:
        return 0 if run(steps) else 1
    except ToolchainError as error:
        _fail(parser, error)


def _show(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from fusion_pass.show import ShowError, write_page

    folder: Path = arguments.folder
    _check_place(parser, "--output", arguments.output)
    try:
        print(write_page(folder, arguments.output or folder / "index.html"))
    except (ShowError, OSError) as error:
        _fail(parser, error)
    return 0


def _add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="a folder or its config.json")
    parser.add_argument("--batch", type=int, default=1, help="sequences (default 1)")
    parser.add_argument(
        "--capacity", type=int, default=4096, help="tokens that the static cache holds (4096)"
    )
    parser.add_argument("--query-tokens", type=int, default=1, help="tokens a step (default 1)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default cuda")
    parser.add_argument("--layers", type=int, help="build at most so many, the first ones")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the model's code in the folder"
    )
    parser.add_argument(
        "--require-all",
        action="store_true",
        help="status 1 unless there is a gated attention and every one fuses",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--html", type=Path, help="write the table as a page as well")


def _explain(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from fusion_pass.explain_model import ModelError, Step, explain_model

    for name in ("batch", "capacity", "query_tokens", "layers"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: it must be at least 1")
    _check_place(parser, "--html", arguments.html)
    try:
        found = explain_model(
            arguments.model,
            Step(arguments.batch, arguments.capacity, arguments.query_tokens),
            device=arguments.device,
            layers=arguments.layers,
            trust_remote_code=arguments.trust_remote_code,
        )
    except ModelError as error:
        _fail(parser, error)
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else found)
    if arguments.html is not None:
        try:
            arguments.html.write_text(found.to_html(), encoding="utf-8")
            print(f"{arguments.html}: written", file=sys.stderr)
        except OSError as error:
            _fail(parser, f"--html {arguments.html}: {error}")
    return 1 if arguments.require_all and not found.all_fused else 0


def _tune(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from fusion_pass.tune import BUDGET, run

    budget: float | None = arguments.budget
    if budget is not None and not budget > 0:
        parser.error(f"--budget {budget}: it must be more than 0 seconds")
    return run(arguments.quick, arguments.output, BUDGET if budget is None else budget)


def _check_place(parser: argparse.ArgumentParser, option: str, page: Path | None) -> None:
    if page is None:
        return
    if not page.parent.is_dir():
        parser.error(f"{option} {page}: there is no folder {page.parent}")
    if page.is_dir():
        parser.error(f"{option} {page}: it is a folder; name a file in it")


def _fail(parser: argparse.ArgumentParser, error: object) -> NoReturn:
    """Ends with a message alone, for what is no matter of usage."""
    parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    raise SystemExit(main())
