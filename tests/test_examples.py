"""The examples run as a user runs them; each ends by comparing itself with stock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", ["generate", "decode_loop", "aot_package", "own_attention"])
def test_example(name: str) -> None:
    if name == "generate":
        pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "counters: {" in done.stdout
