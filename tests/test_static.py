"""Lint, format and types, so that the one test command checks them too."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fusion_pass
import fusion_pass.patterns

ROOT = Path(__file__).parent.parent


def check(module: str, *arguments: str, folder: Path = ROOT) -> None:
    """Runs `python -m module`, which must find nothing."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_lint() -> None:
    check("ruff", "check", ".")


def test_format() -> None:
    check("ruff", "format", "--check", ".")


def test_types(tmp_path: Path) -> None:
    # mypy does not follow an editable install's mapping of fusion_pass.patterns to patterns/, so
    # that it gets the package laid out as a wheel has it.
    ignore = shutil.ignore_patterns("__pycache__")
    package = tmp_path / "fusion_pass"
    shutil.copytree(Path(fusion_pass.__file__).parent, package, ignore=ignore)
    patterns = Path(fusion_pass.patterns.__file__).parent
    shutil.copytree(patterns, package / "patterns", ignore=ignore, dirs_exist_ok=True)
    config = str(ROOT / "setup.cfg")
    check("mypy", "--config-file", config, "-p", "fusion_pass", folder=tmp_path)


def test_ci_runs_the_readmes_test_command() -> None:
    lines = map(str.strip, (ROOT / ".ci" / "run").read_text().splitlines())
    command = next(line for line in lines if "pytest" in line)
    assert command in (ROOT / "README.md").read_text().splitlines()
