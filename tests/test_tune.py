"""`python -m fusion_pass tune` without a GPU: the grid, the bookkeeping, what it writes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion_pass import environment, tune
from fusion_pass.__main__ import main
from fusion_pass.tables import Shape, parse
from fusion_pass.tables.store import Key, in_force, user_path
from fusion_pass.timing import Arm, Captured

CPU = torch.device("cpu")
SMALL = Shape(4, 2, 16, 3, 20, 2, "bool")


class EvenClock:
    """Stock takes 30 us, everything else 20."""

    def time(self, arms: Sequence[Arm]) -> list[float]:
        return [30.0 if arm.name == "stock" else 20.0 for arm in arms]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures on the CPU: calls stand in for CUDA graphs, and compilation is left out."""

    def replayed(call: Callable[[], Tensor]) -> Captured:
        output = call().clone()
        return Captured(lambda: output.copy_(call()), output)

    monkeypatch.setattr(tune, "capture", replayed)
    monkeypatch.setattr(tune, "fused_attention", tune.stock_attention)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))


def test_the_grid_is_what_a_table_holds() -> None:
    grid = tune.shapes()
    assert len(set(grid)) == len(grid) == 39
    assert {shape.mask for shape in grid} == {"none", "bool"}
    assert {shape.query_tokens for shape in grid} == {1, 4}
    assert set(tune.shapes(quick=True)) < set(grid)
    assert max(4 * tune.operand_bytes(shape) for shape in grid) < 140 << 30


@pytest.mark.usefixtures("no_gpu")
def test_a_shape_is_measured() -> None:
    cell = tune.measure(SMALL, EvenClock(), CPU)
    assert (cell["stock"]["median_us"], cell["fused"]["median_us"]) == (30, 20)
    assert cell["null"]["p20_us"] == 20


def test_operands_have_the_shapes_of_the_operator() -> None:
    query, key, value, gate, mask = tune.make_operands(SMALL, CPU)
    assert query.shape == (3, 4, 2, 16)
    assert key.shape == value.shape == (3, 2, 20, 16)
    assert gate.shape == tune.stock_attention(query, key, value, gate, mask).shape == (3, 2, 4, 16)
    assert mask is not None
    assert mask.shape == (3, 1, 1, 20)
    assert 2 * key.numel() * key.element_size() == tune.operand_bytes(SMALL)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("factor", [1.1, math.nan])
def test_different_results_give_no_time(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "fused_attention", lambda *x: tune.stock_attention(*x) * factor)
    with pytest.raises(ArithmeticError, match="apart"):
        tune.measure(SMALL, EvenClock(), CPU)


@pytest.mark.usefixtures("no_gpu")
def test_a_shape_that_does_not_fit_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1 << 30))
    with pytest.raises(MemoryError, match="are free"):
        tune.measure(SMALL, EvenClock(), CPU)


def test_a_shape_that_fails_is_named_and_the_rest_measured(capsys: Any) -> None:
    def measure(shape: Shape) -> dict[str, Any]:
        if shape.batch == 8:
            raise RuntimeError("no\nkernel")
        return {name: {"median_us": 10.0} for name in ("stock", "fused")}

    saved: list[tuple[int, int]] = []
    grid = tune.shapes(quick=True)
    done = tune.tune(grid, measure, lambda a, b: saved.append((len(a), len(b))), 100)
    assert len(done) == 3
    assert saved[-1] == (3, 3)
    assert len(saved) == len(grid) + 1
    told = capsys.readouterr().err
    assert "RuntimeError: no kernel" in told
    assert "10.0 us, fused 10.0 us (1.00x)" in told
    assert "not measured: 3 of 6 shapes" in told


def test_a_spent_budget_ends_the_run() -> None:
    failed: list[dict[str, Any]] = []
    assert tune.tune(tune.shapes(), lambda shape: {}, lambda a, b: failed.extend(b), -1) == []
    assert failed == []


def test_what_is_written_is_the_table_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = Key.of("cpu")
    cells = [{"shape": vars(SMALL), "stock": {"median_us": 30.0}, "fused": {"median_us": 20.0}}]
    tune.write(user_path(key), tune.describe(CPU), cells, [])
    table = in_force(key)
    assert table is not None
    assert table.ratio(SMALL) == pytest.approx(1.5)
    assert list(user_path(key).parent.iterdir()) == [user_path(key)]
    described = json.loads(user_path(key).read_text())["environment"]
    assert {"device", "driver", "torch", "triton", "commit", "dirty", "source"} <= set(described)
    with pytest.raises(ValueError, match="schema"):
        parse(user_path(key).read_text().replace('"schema": 1', '"schema": 9'), "it", 1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_command_says_that_it_needs_a_gpu() -> None:
    with pytest.raises(SystemExit, match="measures a GPU"):
        main(["tune", "--quick"])


@pytest.mark.usefixtures("no_gpu")
def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "current_gpu", lambda: CPU)
    monkeypatch.setattr(tune, "CudaClock", lambda device: EvenClock())
    monkeypatch.setattr(tune, "shapes", lambda quick: [SMALL])
    output = tmp_path / "table.json"
    assert main(["tune", "--output", str(output)]) == 0
    assert parse(output.read_text(), "it", 1.0).ratio(SMALL) == pytest.approx(1.5)
    assert main(["tune", "--output", str(output), "--budget", "1e-9"]) == 1
    with pytest.raises(SystemExit, match="2"):
        main(["tune", "--output", str(output), "--budget", "-1"])


def test_the_package_does_not_import_the_benchmarks() -> None:
    program = (
        "import sys, fusion_pass.tune, torch;"
        "print('bench' in sys.modules, torch.cuda.is_initialized())"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert printed.stdout.decode().split() == ["False", "False"]


def test_device_names_make_file_names() -> None:
    names = {"NVIDIA H200": "h200", "NVIDIA GeForce RTX 4090": "rtx-4090", "cpu": "cpu"}
    assert {name: environment.slug(name) for name in names} == names
    assert environment.slug("") == "unknown"


def test_the_commit_can_be_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert environment.commit(tmp_path) == (None, None)
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "abc")
    monkeypatch.setenv(environment.DIRTY_VARIABLE, "1")
    assert environment.commit(tmp_path) == ("abc", True)
