"""The demo and the command line, run as a user would."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusion_pass
from fusion_pass import demo


def cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fusion_pass", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("interpret", "ran"), [("0", "torch reference"), ("1", "interpreted")])
def test_demo_shows_the_match_and_the_errors(interpret: str, ran: str) -> None:
    if interpret == "1":
        pytest.importorskip("triton")
    result = cli("demo", "--steps", "4", TRITON_INTERPRET=interpret, CUDA_VISIBLE_DEVICES="")
    if interpret == "1" and "only 0-dimensional arrays" in result.stderr:
        pytest.skip("the interpreter of Triton 3.6 does not run with numpy 2.4")
    assert result.returncode == 0, result.stderr
    before, after = result.stdout.split("After:")
    assert "scaled_dot_product" in before
    assert "sigmoid" in before
    assert "gated_decode_attention" not in before
    assert after.count("fusion_pass.gated_decode_attention") == 1
    match = re.search(r"(\d+) of (\d+) gated attentions fused", result.stdout)
    assert match
    assert match[1] == match[2] != "0"
    assert re.search(r"float64: stock [\d.e-]+, fused [\d.e-]+", result.stdout)
    (line,) = re.findall("^No GPU: .*", result.stdout, re.MULTILINE)
    assert ran in line.split("(")[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_demo_times_the_step_on_a_gpu() -> None:
    result = cli("demo", "--steps", "4")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"ran on {torch.cuda.get_device_name()}" in result.stdout
    times = re.search(r"live tokens: stock ([\d.]+) ms, fused ([\d.]+) ms", result.stdout)
    assert times
    assert float(times[2]) < float(times[1])


@pytest.mark.parametrize("missing", ["triton", "numpy", "triton numpy"])
def test_demo_names_what_the_interpreter_misses(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name: str) -> str | None:
        return None if name in missing.split() else name

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("fusion_pass.launch.find_spec", find_spec)
    monkeypatch.setattr("fusion_pass.demo.find_spec", find_spec)
    told = demo._what_ran(torch.float16)
    assert f"pip install {missing}," in told
    assert "torch reference" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="the demo compiles C++ on a CPU alone")
@pytest.mark.parametrize(
    ("missing", "told"),
    [("g++", "no C++ compiler is found"), ("Python.h", "Python's headers are missing")],
)
def test_demo_names_what_inductor_misses(missing: str, told: str, tmp_path: Path) -> None:
    compiler = tmp_path / "cxx"
    if missing == "Python.h":
        compiler.write_text(
            "#!/bin/sh\n"
            'case "$*" in *--version*) exec g++ "$@";; esac\n'
            "echo 'main.cpp:1: fatal error: Python.h: No such file or directory' >&2; exit 1\n"
        )
        compiler.chmod(0o755)
    result = cli("demo", CXX=str(compiler), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert result.returncode == 2
    assert told in result.stderr
    assert "Traceback" not in result.stderr


def test_demo_fails_where_nothing_is_fused() -> None:
    result = cli("demo", "--steps", "1", FUSION_PASS="0")
    assert result.returncode == 1
    assert "0 of" in result.stdout
    assert "it is off" in result.stdout


@pytest.mark.parametrize("steps", ["0", "65"])
def test_demo_refuses_what_the_cache_does_not_hold(steps: str) -> None:
    result = cli("demo", "--steps", steps)
    assert result.returncode == 2
    assert "1 to 64 tokens" in result.stderr


@pytest.mark.parametrize(("installed", "plan"), [(True, "auto"), (False, "manual")])
def test_the_tensor_parallel_example_plans_with_what_is_installed(
    installed: bool,
    plan: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = Path(__file__).parent.parent / "examples" / "tensor_parallel.py"
    example = runpy.run_path(str(path))
    found = {"accelerate": object()} if installed else {}
    monkeypatch.setitem(example["main"].__globals__, "find_spec", found.get)
    monkeypatch.setattr(sys, "argv", ["tensor_parallel.py", "--help"])
    with pytest.raises(SystemExit):
        example["main"]()
    assert re.search(rf"--plan {{auto,manual}}\s+default {plan}$", capsys.readouterr().out, re.M)


def test_version() -> None:
    assert cli("--version").stdout.strip() == f"fusion_pass {fusion_pass.__version__}"


def test_a_command_is_needed() -> None:
    assert cli().returncode == 2
