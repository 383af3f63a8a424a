"""The documentation: what is made from the code is as the code makes it, and every name exists."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fusion_pass import Config
from fusion_pass.patterns import Reason
from tests.declines import DECLINES, Decline
from tests.doc_programs import paged_csr, pages
from tests.make_docs import DOCS, made, pages_with_parts

ROOT = DOCS.parent
EVERY = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SETTINGS = {f"fusion_pass.{field.name}" for field in dataclasses.fields(Config)}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(path: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("path", pages_with_parts(), ids=name)
def test_made_parts_are_up_to_date(path: Path) -> None:
    assert path.read_text("utf-8") == made(path), "run python -m tests.make_docs"


def test_every_page_has_its_program_and_every_program_its_page() -> None:
    found = {path.stem for path in (DOCS / "patterns").glob("*.md")}
    assert found == set(pages())
    assert {case.page for case in DECLINES} <= found
    for page in found:
        text = (DOCS / "patterns" / f"{page}.md").read_text("utf-8")
        assert re.search(r"= fusion_pass\.gated_\w+\(", text)
        for section in ("## What it needs", "## What declines"):
            assert section in text


def test_every_reason_is_in_the_table() -> None:
    text = (DOCS / "reasons.md").read_text("utf-8")
    for reason in Reason:
        assert f"\n| `{reason.value}` |" in text


def test_what_the_gates_page_says_of_a_factor() -> None:
    written = "(flat(sdpa(query, wide(key), wide(value))) * torch.sigmoid(gate)) * 2"
    (site,) = Decline("gate", Reason.NOT_SIGMOID, written).run().sites
    assert site["fused"]


def test_the_paged_page_s_second_program_attends_to_the_pages_that_it_names() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 8, 64), (10, 16, 2, 64), (10, 16, 2, 32), (8,), (2, 8, 32))
    operands = [torch.randn(size, generator=generator) for size in sizes]
    query, k_cache, v_cache, sinks, gate = (operand.double() for operand in operands)
    rows = []
    for row, (pages_of_row, length) in enumerate((([7, 2, 9], 40), ([4, 0], 17))):
        key, value = (
            cache[pages_of_row].flatten(0, 1)[max(length - 32, 0) : length].repeat_interleave(4, 1)
            for cache in (k_cache, v_cache)
        )
        logits = torch.einsum("hd,shd->hs", query[row], key) / 8
        weights = torch.cat([logits, sinks[:, None]], 1).softmax(1)[:, :-1]
        rows.append(torch.einsum("hs,shd->hd", weights, value))
    expected = torch.stack(rows) * gate.sigmoid()
    torch.testing.assert_close(paged_csr(*operands), expected.float())


@pytest.mark.parametrize("path", EVERY, ids=name)
def test_links_lead_to_files(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if not link.startswith(("http", "#")):
            assert (path.parent / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize("path", EVERY, ids=name)
def test_names_of_the_package_exist(path: Path) -> None:
    for dotted in re.findall(r"`(fusion_pass(?:\.\w+)+)\b[^`]*`", path.read_text("utf-8")):
        assert dotted in SETTINGS or exists(dotted), dotted


@pytest.mark.parametrize("path", EVERY, ids=name)
def test_files_and_tests_exist(path: Path) -> None:
    for file, test in mentioned(path):
        where = [ROOT / file, ROOT / "fusion_pass" / file, ROOT / "patterns" / file]
        (found, *_) = [place for place in where if place.exists()] or [None]
        assert found is not None, file
        assert test is None or re.search(rf"\b{test}\b", found.read_text("utf-8")), test


def test_the_checks_tell_what_exists() -> None:
    assert exists("fusion_pass.patterns.Reason")
    assert exists("fusion_pass.gated_decode_attention")
    assert not exists("fusion_pass.patterns.NoSuchName")
    assert not exists("fusion_pass.no_such_module.name")
    found = list(mentioned(DOCS / "maintainers.md"))
    assert ("tests/test_imports.py", None) in found
    assert ("tests/test_backend.py", "test_backend_fuses") in found


def mentioned(path: Path) -> Iterator[tuple[str, str | None]]:
    """Every `folder/file.py` in backticks, and the last name of `folder/file.py::test`."""
    for file, test in re.findall(r"`([\w/.-]+\.py)(?:::([\w:]+))?`", prose(path)):
        if path == DOCS / "reports.md":
            file = f"tests/{file.removeprefix('tests/')}"
        if "/" in file:
            yield file, test.rpartition("::")[2] or None


def exists(dotted: str) -> bool:
    """Whether a module, an attribute or an operator has this name."""
    parts = dotted.split(".")
    if len(parts) == 2 and hasattr(torch.ops.fusion_pass, parts[1]):
        return True
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for part in parts[split:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False
