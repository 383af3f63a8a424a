"""The parts of docs/ that are made from the code: `python -m tests.make_docs` writes them.

A part stands between `<!-- made: NAME -->` and `<!-- /made -->`; the rest is written by hand.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from fusion_pass import reference, register_attention
from fusion_pass.patterns import Reason, registry
from fusion_pass.patterns.advice import ADVICE
from fusion_pass.patterns.reason import EXPECTED
from tests.declines import DECLINES
from tests.doc_programs import Page, paged_csr, pages, read_attend
from tests.postgrad import rewrite

DOCS = Path(__file__).parent.parent / "docs"
_PART = re.compile(r"(<!-- made: (?P<name>\S+) -->\n).*?(<!-- /made -->)", re.DOTALL)
_BFLOAT16_STEP = 2.0**-8


def made(path: Path) -> str:
    """The text of a page with its made parts made anew."""
    text = path.read_text(encoding="utf-8")

    def make(part: re.Match[str]) -> str:
        return f"{part[1]}{_maker(part['name'])()}\n{part[3]}"

    return _PART.sub(make, text)


def pages_with_parts() -> list[Path]:
    """Every page that has a made part."""
    return [path for path in sorted(DOCS.rglob("*.md")) if _PART.search(path.read_text("utf-8"))]


def _maker(name: str) -> Callable[[], str]:
    kind, _, argument = name.partition(":")
    return {
        "program": lambda: program(pages()[argument]),
        "paged-csr": lambda: program(Page(paged_csr, ())),
        "graphs": lambda: graphs(pages()[argument]),
        "declines": lambda: declines(argument),
        "reasons": reasons,
        "rounding": rounding,
        "agreement": agreement,
        "masked-rows": masked_rows,
    }[kind]


def program(page: Page) -> str:
    """The source of a page's program."""
    functions = (*page.shown, page.program)
    return _block("python", "\n\n\n".join(inspect.getsource(f).rstrip() for f in functions))


def graphs(page: Page) -> str:
    """The graph that Inductor makes of a page's program, before and after the pass."""
    adapters = patch.multiple(
        registry, _RECOGNISERS={**registry._RECOGNISERS}, _ADAPTERS={**registry._ADAPTERS}
    )
    with adapters, torch.no_grad():
        register_attention(torch.ops.my_engine.attend.default, read_attend)
        found = rewrite(page.program, *page.inputs)
    before, after = _block("text", found.before), _block("text", found.after)
    return f"Before:\n\n{before}\n\nAfter:\n\n{after}"


def declines(page: str) -> str:
    """The programs of a page that are declined, and what the report says of them."""
    rows = ["| written | reason | what the report says |", "|---|---|---|"]
    for case in DECLINES:
        if case.page != page:
            continue
        (site,) = case.run().sites
        written = ", ".join([f"`{case.written}`", *case.changes()])
        # The numbers of symbolic sizes differ from one version of torch to another.
        detail = re.sub(r"\bs\d+\b", "s0", site["detail"])
        reason = f"[`{site['reason']}`](../reasons.md)"
        rows.append(f"| {_cell(written)} | {reason} | {_cell(detail)} |")
    return "\n".join(rows)


def reasons() -> str:
    """The table of all reasons."""
    rows = [
        "| reason | what it says | what is needed | what would change it |",
        "|---|---|---|---|",
    ]
    rows += [
        f"| `{reason.value}` | {_cell(advice.meaning)} | {_cell(EXPECTED[reason])} | "
        f"{_cell(advice.remedy)} |"
        for reason, advice in ((reason, ADVICE[reason]) for reason in Reason)
    ]
    return "\n".join(rows)


def rounding() -> str:
    """One product under each contract, in bfloat16, with numbers for which all three differ."""
    output, gate = _where_all_differ()
    wide = torch.sigmoid(gate.float())
    rows = [
        f"- attention output in float32: `o = {output.item():.9g}`",
        f"- gate in bfloat16: `g = {gate.item():.9g}`",
        f"- its sigmoid in float32: `{wide.item():.9g}`, and rounded to bfloat16: "
        f"`{wide.bfloat16().item():.9g}`",
        f"- the output rounded to bfloat16: `T(o) = {output.bfloat16().item():.9g}`",
        f"- the product in float64: `{output.double().mul(gate.double().sigmoid()).item():.9g}`",
        "",
        "| numerics | computed | result |",
        "|---|---|---|",
    ]
    formulas = {
        "compiled": "`T(T(o) * sigmoid(g))`",
        "eager": "`T(T(o) * T(sigmoid(g)))`",
        "fp32": "`T(o * sigmoid(g))`",
    }
    for numerics, formula in formulas.items():
        result = _gated(output, gate, numerics)
        rows.append(f'| `"{numerics}"` | {formula} | `{result.item():.9g}` |')
    return "\n".join(rows)


def agreement() -> str:
    """How often each contract gives the bfloat16 that is closest to the exact product."""
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(1 << 18, generator=generator)
    gate = (2 * torch.randn(1 << 18, generator=generator)).bfloat16()
    exact = output.double() * gate.double().sigmoid()
    rows = ["| numerics | correctly rounded | largest relative error |", "|---|---|---|"]
    for numerics in ("compiled", "eager", "fp32"):
        found = _gated(output, gate, numerics)
        right = (found == exact.bfloat16()).double().mean().item()
        error = ((found.double() - exact) / exact).abs().max().item() / _BFLOAT16_STEP
        rows.append(f'| `"{numerics}"` | {right:.0%} | {error:.1f} x 2^-8 |')
    return "\n".join(rows)


def masked_rows() -> str:
    """What a row without a live key gives, by its fill and its producer's convention."""
    value = torch.tensor([1.0, 3.0, 8.0])
    shape = (1, 1, 1, 1)
    rows = ["| mask_fill | masked_row | result |", "|---|---|---|"]
    conventions = (
        (-torch.inf, "zero"),
        (-torch.inf, "nan"),
        (-65504.0, "zero"),
        (-65504.0, "mean"),
    )
    for fill, masked_row in conventions:
        result = reference.attention(
            torch.ones(shape),
            torch.tensor([0.0, 1.0, 2.0]).view(1, 1, 3, 1),
            value.view(1, 1, 3, 1),
            torch.zeros(1, 1, 1, 3, dtype=torch.bool),
            None,
            scale=1.0,
            mask_fill=fill,
            masked_row=masked_row,
            compute_dtype=torch.float32,
        )
        rows.append(f'| `{fill}` | `"{masked_row}"` | `{result.item():g}` |')
    return "\n".join(rows)


def _where_all_differ() -> tuple[Tensor, Tensor]:
    """An output in float32 and a gate in bfloat16 for which the three contracts differ."""
    generator = torch.Generator().manual_seed(0)
    output = 1 + torch.rand(4096, generator=generator)
    gate = torch.randn(4096, generator=generator).bfloat16()
    found = [_gated(output, gate, numerics) for numerics in ("compiled", "eager", "fp32")]
    differ = (found[0] != found[1]) & (found[0] != found[2]) & (found[1] != found[2])
    index = int(differ.nonzero()[0])
    return output[index], gate[index]


def _gated(output: Tensor, gate: Tensor, numerics: str) -> Tensor:
    attended = output if numerics == "fp32" else output.bfloat16()
    return reference.apply_gate(attended, gate, numerics, torch.bfloat16, torch.bfloat16)


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write() -> Iterator[Path]:
    """Writes every page whose made parts have changed; those pages."""
    for path in pages_with_parts():
        text = made(path)
        if text != path.read_text("utf-8"):
            path.write_text(text, "utf-8")
            yield path


if __name__ == "__main__":
    for written in write():
        sys.stdout.write(f"{written}\n")
