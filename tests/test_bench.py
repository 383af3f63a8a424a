"""The benchmark tool without a GPU: statistics, bookkeeping, tables, plots and --check."""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_module_simplified
from torch.nn.attention import SDPBackend

from bench import __main__ as everything
from bench import (
    ahead,
    bars,
    compile_time,
    entries,
    environment,
    gate,
    kernel,
    model,
    models,
    operands,
    paged,
    paged_operands,
    paged_tables,
    peers,
    reading,
    report,
    tables,
)
from bench.ceilings import Ceilings
from bench.geometry import GEOMETRIES, GRID, Geometry, named
from bench.models import MODELS, Decode
from bench.peers import Peer
from bench.results import Results, candidates, failed, load
from bench.session import Session
from fusion_pass import timing
from fusion_pass.environment import COMMIT_VARIABLE, DIRTY_VARIABLE
from fusion_pass.paged import reference
from fusion_pass.timing import (
    NULL,
    Arm,
    Captured,
    Summary,
    WallClock,
    interleave,
    is_null,
    quantile,
    summarise,
    with_null,
    with_nulls,
)

CPU = torch.device("cpu")
POPEN = subprocess.Popen
SMALL = Geometry("small", 4, 2, 16, False, "none")


class ScriptedClock:
    """Gives each arm the time that its name says, plus a drift that grows with every sample."""

    def __init__(self, drift: float = 0.0) -> None:
        self.drift = drift
        self.taken: list[list[str]] = []
        self._count = 0

    def time(self, arms: Sequence[Arm]) -> list[float]:
        self.taken.append([arm.name for arm in arms])
        samples = []
        for arm in arms:
            arm.run()
            self._count += 1
            samples.append(float(arm.name.split()[-1]) + self.drift * self._count)
        return samples


def nothing() -> None:
    pass


# Timing


def test_quantiles_interpolate_between_samples() -> None:
    ordered = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert [quantile(ordered, share) for share in (0, 0.25, 0.5, 1)] == [1, 2, 4, 16]
    assert quantile(ordered, 0.375) == 3
    cuts = statistics.quantiles(range(37), n=5, method="inclusive")
    assert summarise(range(37)) == Summary(18, cuts[0], cuts[3], 37)
    with pytest.raises(ValueError, match="no samples"):
        quantile([], 0.5)


def test_every_arm_is_sampled_once_a_round_and_the_first_round_does_not_count() -> None:
    clock = ScriptedClock()
    taken = interleave([Arm("a 5", nothing), Arm("b 7", nothing)], clock, rounds=12)
    assert {name: (s.median, s.samples) for name, s in taken.items()} == {
        "a 5": (5, 12),
        "b 7": (7, 12),
    }
    assert len(clock.taken) == 13
    assert all(sorted(names) == ["a 5", "b 7"] for names in clock.taken)
    assert len({tuple(names) for names in clock.taken}) == 2


def test_drift_meets_all_arms_alike() -> None:
    arms = [Arm("a 100", nothing), Arm("b 100", nothing)]
    taken = interleave(arms, ScriptedClock(drift=0.1), rounds=200)
    # Timed one after the other, they would differ by 200 samples of drift, 20.
    assert abs(taken["a 100"].median - taken["b 100"].median) < 1


@pytest.mark.parametrize(("seconds", "rounds"), [(1e-4, 10), (0.03, 30), (10.0, 200)])
def test_rounds_fill_the_time(seconds: float, rounds: int) -> None:
    arms = [Arm("a 400", nothing), Arm("b 600", nothing)]
    taken = interleave(arms, ScriptedClock(), seconds=seconds)
    assert taken["a 400"].samples == rounds


def test_the_null_arm_is_the_first_arm_again() -> None:
    ran: list[str] = []
    arms = [Arm("a", lambda: ran.append("a"), nothing), Arm("b", lambda: ran.append("b"))]
    null = with_null(arms)[-1]
    null.run()
    assert (null.name, ran, null.prepare) == (NULL, ["a"], nothing)
    assert with_null([]) == with_nulls([]) == []


def test_on_the_host_every_arm_runs_equally_often() -> None:
    ran: list[str] = []
    arms = [Arm(name, functools.partial(ran.append, name), nothing) for name in "abc"]
    twice = with_nulls(arms)
    assert [arm.name for arm in twice if not is_null(arm.name)] == ["a", "b", "c"]
    assert [arm.name for arm in twice].count(NULL) == 1
    for arm in twice:
        assert arm.prepare is nothing
        arm.run()
    assert sorted(ran) == ["a", "a", "b", "b", "c", "c"]
    entry = candidates(interleave(twice, WallClock(lambda: None), rounds=10), {})
    assert entry["candidates"].keys() == set("abc")
    assert entry["null"]["samples"] == 10


def test_no_arms_take_no_time() -> None:
    assert interleave([], ScriptedClock()) == {}


def test_arms_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="distinct"):
        interleave([Arm("a 1", nothing), Arm("a 1", nothing)], ScriptedClock())


@pytest.mark.parametrize("wait", [True, False])
def test_wall_clock_times_the_run_alone(wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    now = iter(range(100))

    def record(name: str) -> Callable[[], None]:
        return lambda: events.append(name)

    def tick() -> int:
        events.append("clock")
        return next(now)

    monkeypatch.setattr(timing.time, "perf_counter", tick)
    clock = timing.WallClock(record("sync"), record("evict"), wait=wait)
    assert clock.time([Arm("a", record("run"), record("prepare"))]) == [1e6]
    inside = ["run", "sync"] if wait else ["run"]
    assert events == ["prepare", "evict", "sync", "clock", *inside, "clock", "sync"]


# Results and sessions


def session(tmp_path: Path, budget: float = 100.0) -> Session:
    results = Results("kernel", "fake", tmp_path, {"device": "fake"})
    clock: Any = ScriptedClock()
    return Session(results, clock, Ceilings(2.0, 4.0), CPU, budget)


def begin(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """The session that a run begins, in which every sample takes a microsecond."""
    begun = session(tmp_path)
    begun.results.data["run"] = run
    begun.clock.time = lambda arms: [1.0 for arm in arms]  # type: ignore[method-assign]
    monkeypatch.setattr(Session, "begin", lambda *arguments: begun)
    return begun


def torchs(given: operands.Operands) -> peers.Call:
    """A peer that computes with torch's own operators."""
    q, k, v, gate, mask, scale = vars(given).values()
    return lambda: peers._gated_sdpa(q, k, v, gate, mask, scale)


def test_a_cell_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    def measure(cell: int) -> dict[str, Any]:
        if cell == 1:
            raise RuntimeError("out\nof memory")
        return {"value": cell}

    run = session(tmp_path)
    run.each([0, 1, 2], measure, lambda cell: {"kind": "test", "shape": {"B": cell}}, "test")
    cells = load(run.results.path)["cells"]
    assert [cell.get("value") for cell in cells] == [0, None, 2]
    assert cells[1]["failed"] == "RuntimeError: out of memory"
    assert [cell["shape"]["B"] for cell in cells] == [0, 1, 2]


def test_a_spent_budget_is_written_down(tmp_path: Path) -> None:
    run = session(tmp_path, budget=-1)
    run.each([0], lambda cell: {}, lambda cell: {"kind": "test"}, "test")
    assert load(run.results.path)["cells"][0]["skipped"] == "time budget of -1 s"


def test_candidates_keep_who_has_no_time() -> None:
    summaries = {"fused": Summary(1.23456, 1, 2, 9), NULL: Summary(1.25, 1, 2, 9)}
    entry = candidates(summaries, {"fa3": failed("no")}, {"fused": {"error": 0.002}})
    assert entry["candidates"]["fused"] == {
        "median_us": 1.235,
        "p20_us": 1,
        "p80_us": 2,
        "samples": 9,
        "error": 0.002,
    }
    assert entry["candidates"]["fa3"] == {"failed": "no"}
    assert entry["null"]["median_us"] == 1.25


def test_a_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="schema 0"):
        load(path)


def test_the_environment_is_described_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMIT_VARIABLE, "abc")
    monkeypatch.setenv(DIRTY_VARIABLE, "1")
    described = json.loads(json.dumps(environment.describe(CPU)))
    assert (described["commit"], described["dirty"]) == ("abc", True)
    assert torch.__version__.startswith(described["packages"]["torch"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("run", [everything.main, kernel.main, model.main, paged.main])
def test_runs_say_that_they_need_a_gpu(run: Callable[[list[str]], int]) -> None:
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        run(["--quick"])


class FinishedAfter:
    """A process that is still running at its first polls."""

    def __init__(self, polls: int, returncode: int) -> None:
        self.polls = polls
        self.returncode = returncode

    def poll(self) -> int | None:
        self.polls -= 1
        return self.returncode if self.polls < 0 else None


def test_runs_are_shared_out_over_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "POLL_SECONDS", 0)
    started: list[tuple[str, int]] = []
    jobs = [everything.Job(name, name) for name in "abcd"]

    def start(job: everything.Job, gpu: int) -> Any:
        started.append((job.name, gpu))
        return FinishedAfter(polls=9 if job.name == "a" else 1, returncode=int(job.name == "c"))

    assert everything.share_out(jobs, 2, start) == [jobs[2]]
    assert started == [("a", 0), ("b", 1), ("c", 1), ("d", 1)]


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_run_over_two_gpus_is_left_out_where_there_is_one(
    gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = everything.chosen(["gate", "paged", "tensor_parallel"], True, gpus)
    assert [job.module for job in jobs] == ["bench.gate", "bench.paged", "bench.model"][: gpus + 1]
    said = "left out: tensor_parallel needs 2 GPUs, and there is 1"
    assert (said in capsys.readouterr().err) is (gpus == 1)
    assert all(job.exclusive for job in everything.JOBS if job.gpus > 1)


@pytest.mark.parametrize(
    ("visible", "one", "two"), [("", "1", "0,1"), ("7,GPU-a,3", "GPU-a", "7,GPU-a")]
)
def test_runs_get_gpus_of_those_that_are_visible(
    visible: str, one: str, two: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (everything.devices(1, 1), everything.devices(0, 2)) == (one, two)


# Kernel cells


@pytest.fixture
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls stand in for the CUDA graphs of kernel cells."""

    def replayed(call: Callable[[], Tensor]) -> Captured:
        output = call().clone()
        return Captured(lambda: output.copy_(call()), output)

    monkeypatch.setattr(kernel, "capture", replayed)


@pytest.mark.usefixtures("no_graphs")
def test_wrong_and_failing_candidates_get_no_time(tmp_path: Path) -> None:
    given = operands.make(SMALL, 3, 20, CPU)
    given = given.masked(operands.live_mask(20, 7, CPU))
    exact = operands.truth(given)
    right = exact.output.to(operands.DTYPE)

    def refuses(given: operands.Operands) -> peers.Call:
        raise NotImplementedError("not here")

    compared = [
        entries.Entry(name, Peer(name, build), given, exact)
        for name, build in {
            "right 10": lambda given: lambda: right,
            "flat 20": lambda given: lambda: right.flatten(2),
            "off 30": lambda given: lambda: right * 1.1,
            "nan 40": lambda given: lambda: right * math.nan,
            "refuses 50": refuses,
        }.items()
    ]
    run = session(tmp_path)
    run.clock.time = lambda arms: [1.0 for arm in arms]  # type: ignore[method-assign]
    entry = kernel.compare(run, compared)
    timed = {name for name, c in entry["candidates"].items() if "median_us" in c}
    assert timed == {"right 10", "flat 20"}
    assert entry["null"] is not None
    assert entry["candidates"]["right 10"]["error"] < exact.bound
    assert "wrong" in entry["candidates"]["off 30"]["failed"]
    assert "wrong" in entry["candidates"]["nan 40"]["failed"]
    assert entry["candidates"]["refuses 50"]["failed"] == "NotImplementedError: not here"


@pytest.mark.usefixtures("no_graphs")
def test_a_whole_kernel_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = begin("kernel", tmp_path, monkeypatch)
    ours, stock = Peer("fused", torchs), Peer("stock", torchs)
    monkeypatch.setattr(entries, "OURS", ours)
    monkeypatch.setattr(entries, "STOCK", stock)
    monkeypatch.setattr(kernel, "PEERS", (ours, stock, Peer("fa3", torchs, lambda: "gone")))
    readers = [Arm(f"{reading.NAME} {way}", lambda: None) for way in "ab"]
    monkeypatch.setattr(reading, "arms", lambda given: readers)
    monkeypatch.setattr(entries, "LIVE", 5)
    monkeypatch.setattr(entries, "CAPACITIES", (16, 32))
    monkeypatch.setattr(entries, "BATCHES", (2,))
    monkeypatch.setattr(entries, "TOKENS_LENGTH", 32)
    monkeypatch.setattr(kernel.geometry, "QUICK_GRID", ((1, 16), (2, 32)))
    assert kernel.main(["--quick", "--only", "grid", "masks", "tokens"]) == 0

    data = load(begun.results.path)
    assert data["missing"] == {"fa3": "gone"}
    cells: dict[str, list[dict[str, Any]]] = {}
    for cell in data["cells"]:
        cells.setdefault(cell["kind"], []).append(cell)
        assert all("median_us" in c for c in cell["candidates"].values()), cell
    assert [len(cells[kind]) for kind in ("grid", "masks", "tokens")] == [4, 1, 1]
    assert cells["grid"][0]["shape"]["S"] == 16
    assert set(cells["grid"][0]["candidates"]) == {"fused", "stock"}
    assert cells["grid"][0]["read_us"] == 1.0
    assert "read_us" not in cells["masks"][0]
    variants = {
        f"fused {m} @{c}" for m in ("none", "bool-full", "bool-5", "where-5") for c in (16, 32)
    }
    assert variants < set(cells["masks"][0]["candidates"])
    assert {"fused 1", "fused 4", "fused 4 causal"} < set(cells["tokens"][0]["candidates"])
    assert "| fused bool-5 @32 | 1.00 |" in report.everything(report.sources(tmp_path))


@pytest.mark.usefixtures("no_graphs")
def test_a_whole_gate_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = begin("gate", tmp_path, monkeypatch)
    monkeypatch.setattr(gate, "OURS", Peer("fused", torchs))
    monkeypatch.setattr(gate, "GEOMETRY", SMALL)
    monkeypatch.setattr(gate, "BATCHES", (1, 2))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    assert gate.main([]) == 0
    cells = load(begun.results.path)["cells"]
    assert [cell["shape"]["B"] for cell in cells] == [1, 2]
    for cell in cells:
        assert list(cell["candidates"]) == [
            "fused",
            "separate, eager",
            "separate, compiled",
            "un-gated",
        ]
        assert all("median_us" in entry for entry in cell["candidates"].values()), cell
    assert set(verdicts("gate", cells).values()) == {"met"}


@pytest.fixture
def small_paged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """The session of a paged benchmark of small cells, whose kernels are the reference."""

    def ours(given: Any, modes: Any) -> peers.Call:
        return lambda: reference.paged_decode_attention(given, modes)

    begun = begin("paged", tmp_path, monkeypatch)
    monkeypatch.setattr(paged_operands.launch, "run", reference.paged_decode_attention)
    monkeypatch.setattr(paged_operands, "ours", ours)
    monkeypatch.setattr(paged, "OURS", Peer("fused", torchs))
    monkeypatch.setattr(paged, "capture", kernel.capture)
    monkeypatch.setattr(paged, "GEOMETRIES", (SMALL,))
    monkeypatch.setattr(paged, "GATE_LENGTHS", ((5,), (6, 3)))
    monkeypatch.setattr(paged, "PRODUCT_SHAPES", ((1, 8), (2, 8)))
    monkeypatch.setattr(paged, "PAGE_SIZES", (1, 16))
    monkeypatch.setattr(paged.geometry, "GRID", ((2, 16),))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    return begun


@pytest.mark.usefixtures("no_graphs")
def test_a_whole_paged_run(small_paged: Session, tmp_path: Path) -> None:
    assert paged.main([]) == 0
    cells = load(small_paged.results.path)["cells"]
    assert [cell["kind"] for cell in cells] == ["gate"] * 2 + ["product"] * 2 + ["grid"] * 2
    assert [tuple(cell["candidates"]) for cell in cells] == [
        *[(tables.FUSED, tables.EAGER, tables.COMPILED)] * 2,
        *[(tables.FUSED, tables.EAGER)] * 2,
        (tables.FUSED, tables.COMPILED),
        (tables.FUSED, tables.COMPILED, bars.DENSE),
    ]
    for cell in cells:
        assert all("median_us" in entry for entry in cell["candidates"].values()), cell
    assert bars.FLASHINFER == peers.FLASHINFER
    text = report.everything(report.sources(tmp_path))
    for name in paged_tables.TABLES:
        assert f"## {name}\n" in text


def test_the_bound_admits_bfloat16_and_no_more() -> None:
    exact = operands.truth(operands.make(SMALL, 2, 50, CPU))
    eps = torch.finfo(torch.bfloat16).eps
    assert eps / 8 < exact.bound < 2 * eps


@pytest.mark.parametrize("geometry", [SMALL, GEOMETRIES[3]], ids=lambda g: g.name)
def test_stock_peers_agree_with_the_truth(geometry: Geometry) -> None:
    given = operands.make(geometry, 2, 24, CPU)
    exact = operands.truth(given)
    output = peers._gated_sdpa(given.query, given.key, given.value, given.gate, None, given.scale)
    assert exact.error(output) <= exact.bound


def test_a_forced_backend_is_part_of_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[str] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        def keep(traced: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            graphs.append(str(traced.graph))
            return traced.forward

        compiler: Any = keep
        return aot_module_simplified(module, inputs, fw_compiler=compiler)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    given = operands.make(SMALL, 1, 16, CPU)
    for choice in (None, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        peers._stock(choice)(given)()
    assert ["flash" in graph for graph in graphs] == [True, False, True]


def test_ninja_is_found_beside_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    peers._find_ninja()
    peers._find_ninja()
    assert os.environ["PATH"] == f"/usr/bin:{Path(sys.executable).parent}"


def test_compilers_that_take_too_long_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    started: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(POPEN([sys.executable, "-c", script], stdin=subprocess.PIPE, **options))
        return started[-1]

    monkeypatch.setattr(ahead.subprocess, "Popen", start)
    monkeypatch.setattr(ahead, "SECONDS", 0.2)
    ahead.compile_ahead(["qwen3_next"])
    assert len(started) == 2 + len(entries.PARTS)
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 4


def test_compilers_go_on_where_a_peer_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[tuple[int, int]] = []

    def build(given: operands.Operands) -> peers.Call:
        built.append((given.query.shape[0], given.key.shape[2]))
        raise NotImplementedError("not here")

    never = Peer("never", build, lambda: "not installed")
    monkeypatch.setattr(ahead, "PEERS", (Peer("fails", build), never, Peer("other", build)))
    monkeypatch.setattr(ahead.geometry, "GRID", ((1, 16), (2, 32)))
    ahead.grid(SMALL, ["fails", "never"], CPU)
    assert built == [(1, 16), (2, 32)]
    assert "fails: not here" in capsys.readouterr().err


def test_pages_hold_the_cache() -> None:
    cache = torch.arange(2 * 3 * 32 * 4).view(2, 3, 32, 4)
    pages = peers._in_pages(cache)
    assert pages.shape == (4, 3, 16, 4)
    assert torch.equal(pages[3], cache[1, :, 16:])


def test_a_peer_that_is_not_installed_is_named() -> None:
    missing = {peer.name: peer.missing() for peer in peers.PEERS}
    assert missing["fused"] is None
    assert missing["stock"] is None
    absent = peers._needs("some-package 1.0", "no_such_module_here")
    assert absent() == "some-package 1.0 is not installed"
    assert peers._needs("torch", "no_such_module_here", "torch")() is None


def test_a_peer_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_peer.py").write_text("raise OSError('no libcuda')")
    monkeypatch.syspath_prepend(tmp_path)
    reason = peers._needs("broken 1.0", "broken_peer")()
    assert reason == "broken 1.0 cannot be imported: OSError: no libcuda"


def test_the_fastest_way_to_read_is_no_candidate() -> None:
    times = {"fused": 5.0, "read a": 3.0, "read b": 2.5, "null": 5.1}
    summaries = {name: timing.summarise([taken]) for name, taken in times.items()}
    assert reading.least(summaries) == {"read_us": 2.5}
    assert list(summaries) == ["fused", "null"]
    assert reading.least(summaries) == {}


def test_floors_follow_the_bytes() -> None:
    shape = named("qwen3_next")
    assert shape.kv_bytes(8, 4096) == 2 * 8 * 2 * 4096 * 256 * 2
    assert Ceilings(3.4, 4.48).floor_us(shape.kv_bytes(1, 131072)) == pytest.approx(63.3, abs=0.1)
    with pytest.raises(KeyError, match="qwen3_next"):
        named("nobody")


# Models

TINY = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
TINY_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
CHANGES: dict[str, dict[str, Any]] = {
    "dense": TINY,
    "hybrid": {**TINY, **TINY_LINEAR},
    "moe": {**TINY, **TINY_LINEAR, **TINY_EXPERTS, "shared_expert_intermediate_size": 16},
    "afmoe": {**TINY, **TINY_EXPERTS, "sliding_window": 24},
}


@torch.no_grad()
@pytest.mark.parametrize("name", CHANGES)
def test_a_step_attends_to_the_live_keys_alone(name: str) -> None:
    pytest.importorskip("transformers")
    changes = {k: v for k, v in CHANGES[name].items() if name != "moe" or k != "intermediate_size"}
    built = models.named(name).build(CPU, **changes)
    decode = Decode(built, batch=2, capacity=48)
    assert (
        sum(
            tensor.numel() * tensor.element_size()
            for layer in decode._attention_layers()
            for tensor in (layer.keys, layer.values)
        )
        == models.cache_bytes(built, 2, 48)[0]
    )
    for live in (20, 48):
        decode.set_live(live)
        steps = []
        for _ in range(2):
            decode.restore()
            decode.prepare()
            steps.append(decode.step(built).clone())
        assert torch.equal(*steps)
    decode.set_live(20)
    decode.restore()
    before = decode.step(built).clone()
    for slots, same in ((slice(20, None), True), (slice(5, 6), False)):
        decode.restore()
        decode.prepare()
        for layer in decode._attention_layers():
            layer.keys[:, :, slots] += 5
            layer.values[:, :, slots] += 5
        assert torch.equal(decode.step(built), before) is same
    with pytest.raises(ValueError, match="49 live"):
        decode.set_live(49)


def test_models_say_how_many_gated_layers_they_have() -> None:
    for entry in MODELS:
        kinds = entry.settings["layer_types"]
        assert len(kinds) == entry.settings["num_hidden_layers"]
        assert sum(kind != "linear_attention" for kind in kinds) == entry.gated_layers


def test_logits_further_from_eager_than_stock_are_refused() -> None:
    eager = torch.randn(2, 1, 50, generator=torch.Generator().manual_seed(0))
    outputs = {"eager": eager, "stock": eager * 1.01, "fused": eager * 1.04}
    details, wrong = model.judge(outputs)
    assert details["fused"]["difference_from_eager"] == pytest.approx(0.04, rel=0.01)
    assert not wrong
    for bad in (eager * 1.2, eager * math.nan):
        assert set(model.judge({**outputs, "fused": bad})[1]) == {"fused"}
    assert set(model.judge({"stock": eager, "fused": -eager})[1]) == {"fused"}
    assert model.judge({}) == ({}, {})
    others = {**outputs, "fused": eager * 1.3}
    assert set(model.judge(others)[1]) == {"fused"}
    assert not model.judge(others, model.EXPERTS_AGREEMENT)[1]


# Bars


def verdicts(run: str, cells: list[dict[str, Any]]) -> dict[str, str]:
    return {bar.name: bar.verdict for bar in bars.BARS[run]({"run": run, "cells": cells})}


def timed(**medians: float) -> dict[str, Any]:
    """A cell's part on candidates, the first of which is repeated by a null arm."""
    names = {name.replace("_", " "): entry(taken) for name, taken in medians.items()}
    return {"candidates": names, "null": next(iter(names.values()))}


def test_a_bar_that_was_not_measured_is_not_met() -> None:
    for run in bars.BARS:
        assert set(verdicts(run, []).values()) <= {"not measured"}
        assert bars.rows(run)({"run": run, "cells": []}) == []
    assert bars.Bar("nan", math.nan, 1.0).verdict == "not measured"
    assert bars.lines({"run": "nothing", "cells": []}) == []


def test_kernel_bars_judge_the_worst_cell() -> None:
    cells = [
        {"kind": "grid", "floor_us": 9.0, **timed(fused=10.0, stock=15.0, fa3=14.0)},
        {"kind": "grid", "floor_us": 4.0, **timed(fused=10.0, stock=9.0)},
        {"kind": "grid", "floor_us": 4.0, "failed": "no"},
    ]
    for cell, errors in zip(cells[:2], ((1.0, 1.1), (1.2, 1.1)), strict=True):
        for name, error in zip(("fused", "stock"), errors, strict=True):
            cell["candidates"][name]["error"] = error
    found = verdicts("kernel", cells)
    assert found == {
        "best peer over fused, geometric mean": "missed",
        "best peer over fused, least": "missed",
        "floor over fused, geometric mean": "missed",
        "floor over fused, least": "missed",
        "error over stock's, most": "missed",
    }
    assert set(verdicts("kernel", cells[:1]).values()) == {"met"}


def test_kernel_bars_compare_capacities_masks_and_tokens() -> None:
    arms = {f"fused bool-{live} @{size}": 10.0 for live in ("full", 600) for size in (4096, 131072)}
    arms |= {"fused none @4096": 9.9, "fused none @131072": 9.0, "fused where-600 @131072": 13.0}
    masks: dict[str, Any] = {
        "kind": "masks",
        "shape": {"B": 8},
        "candidates": {n: entry(t) for n, t in arms.items()},
    }
    masks["candidates"]["fused where-600 @4096"] = entry(10.0)
    tokens = {"kind": "tokens", "shape": {"B": 1}, **timed(fused_1=10.0, fused_4=11.4)}
    found = verdicts("kernel", [masks, tokens])
    assert found["batch 8, 600 live, bool mask: capacity 131072 over 4096"] == "met"
    assert found["batch 8, 600 live, where mask: capacity 131072 over 4096"] == "missed"
    assert found["batch 8, full mask over none at 4096"] == "met"
    assert found["batch 8, full mask over none at 131072"] == "missed"
    assert found["batch 1, 4 query tokens over 1"] == "met"


def paged_cells() -> list[dict[str, Any]]:
    """Cells of each kind, of a run whose time ended before the last."""

    def cell(size: tuple[int, int, int], floor: float, **medians: float) -> dict[str, Any]:
        described = paged.describe_grid(paged.Cell(GEOMETRIES[0], *size))
        return {**described, "floor_us": floor, **compared(**medians)}

    def compared(**medians: float) -> dict[str, Any]:
        words = {"eager": tables.EAGER, "compiled": tables.COMPILED}
        return timed(**{words.get(name, name): taken for name, taken in medians.items()})

    last = paged.describe_grid(paged.Cell(GEOMETRIES[1], 1, 64, 8192))
    return [
        {**paged.describe_gate((512,)), **compared(fused=5.0, eager=7.0, compiled=6.0)},
        {**paged.describe_gate((512, 495)), **compared(fused=5.0, eager=6.0, compiled=5.5)},
        {**paged.describe_product((1, 4096)), **compared(fused=1.5, eager=3.0)},
        {**paged.describe_product((8, 4096)), **compared(fused=1.3, eager=2.0)},
        cell((1, 1, 512), 5.0, fused=8.0, compiled=9.0, flashinfer=16.0),
        cell((16, 1, 32768), 19.0, fused=24.0, compiled=27.0, flashinfer=21.0, dense=20.0),
        {**last, "skipped": "time budget of 280 s"},
    ]


def test_paged_bars_judge_the_worst_cell() -> None:
    found = {bar.name: bar for bar in bars.paged({"cells": paged_cells()})}
    assert {name: (bar.value, bar.verdict) for name, bar in found.items()} == {
        "FlashInfer over fused, geometric mean": (pytest.approx(math.sqrt(2 * 21 / 24)), "met"),
        "FlashInfer over fused, least": (21 / 24, "missed"),
        "un-gated and a compiled gate over fused, least": (9 / 8, "met"),
        "fused over dense at 32768, most": (pytest.approx(1.2), "missed"),
        "batch 1: separate eager gate over fused": (1.4, "met"),
        "batch 4: separate eager gate over fused": (None, "not measured"),
        "sigmoid_gate_mul over eager, most": (pytest.approx(0.65), "missed"),
    }


@pytest.mark.parametrize(("null", "verdict"), [(100.0, "missed"), (106.0, "met")])
def test_no_step_may_be_slower_than_the_null_arm_allows(null: float, verdict: str) -> None:
    times = {**timed(stock=100.0, fused=105.0), "null": entry(null)}
    step = step_cell("hybrid", 1, 4096)
    step["live"] = {"600": {"graph": times, "no_graph": {"candidates": {}}}}
    found = verdicts("model", [step])
    least = "least stock over fused {} CUDA graphs, the null arm's spread allowed"
    assert found[least.format("with")] == verdict
    assert found[least.format("without")] == "not measured"
    assert found["hybrid, capacity 4096, batch 1, 600 live: stock over fused"] == "missed"


def test_the_host_may_not_wait_longer() -> None:
    cell = {"kind": "host", "shape": {"layers": 8}, "returns": timings(), "done": timings()}
    assert set(verdicts("host", [cell]).values()) == {"met"}
    cell["done"] = timed(stock=280.0, fused=281.0)
    assert list(verdicts("host", [cell]).values()) == ["met", "missed"]


def test_compilation_is_told_apart_from_what_the_pass_adds(monkeypatch: Any) -> None:
    def compiled(device: torch.device, backend: str, layers: int) -> dict[str, float]:
        if backend == "inductor":
            return {"seconds": 9.0, "pass_ms": 0, "lowering_ms": 0, "collector_ms": 0, "sites": 0}
        inside = {"pass_ms": 60.0, "lowering_ms": 40.0, "collector_ms": 5.0}
        return {"seconds": 10.1, **inside, "sites": layers}

    monkeypatch.setattr(compile_time, "compile_once", compiled)
    cell = compile_time.measure(CPU, ("stock", "fused"), 64)
    assert (cell["stock_s"], cell["fused_s"], cell["fused_sites"]) == (9.0, 10.1, 64)
    assert cell["added_share"] == 0.01
    alone = compile_time.measure(CPU, ("fused",), 64)
    assert alone == {**cell, "stock_s": None}
    found = verdicts("compile_time", [{**alone, **compile_time.describe(64)}])
    assert found == {"64 layers: added share": "met", "64 layers: added time": "met"}


def test_a_stopwatch_counts_calls_that_raise_too() -> None:
    spans: list[compile_time.Span] = []
    timed_call = compile_time.stopwatch(lambda x: 1 / x, spans)
    assert timed_call(2) == 0.5
    with pytest.raises(ZeroDivisionError):
        timed_call(0)
    assert len(spans) == 2
    assert all(start <= end for start, end in spans)


def test_what_the_collector_takes_of_a_call_is_told() -> None:
    calls: list[compile_time.Span] = []
    collected: list[compile_time.Span] = []
    with compile_time.collections(collected):
        gc.collect()
        compile_time.stopwatch(gc.collect, calls)()
    gc.collect()
    assert len(collected) == 2
    assert compile_time.within(collected, calls) == collected[1:]
    assert compile_time.length([(1.0, 1.5), (2.0, 2.25)]) == 0.75


# Reports


def entry(median: float) -> dict[str, Any]:
    return {"median_us": median, "p20_us": median, "p80_us": median, "samples": 10}


MISSING = {
    "kernel": {"fa3": "fa3-fwd 0.0.3 is not installed"},
    "paged": {"another": "another 1.0 is not installed", "flashinfer": "no"},
}


def result(run: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "schema": 1,
        "run": run,
        "gpu": "h200",
        "environment": {
            "device": "NVIDIA H200",
            "nvidia_smi": {"driver_version": "580.1"},
            "packages": {"torch": "2.11.0", "triton": "3.6.0", "transformers": None},
            "commit": "0123456789abcdef",
            "dirty": False,
        },
        "missing": MISSING.get(run, {}),
        "cells": cells,
    }


def grid_cell(geometry: Geometry, batch: int, length: int) -> dict[str, Any]:
    return {
        **kernel.describe_grid(kernel.Cell(geometry, batch, length)),
        "floor_us": 8.0,
        "read_us": 9.0,
        "candidates": {
            "fused": entry(10.0),
            "stock": entry(16.0),
            "flex": entry(15.0),
            "stock-flash": {"failed": "no"},
        },
        "null": entry(10.1),
    }


def step_cell(name: str, batch: int, capacity: int) -> dict[str, Any]:
    times = candidates({"stock": Summary(11340, 1, 1, 9), "fused": Summary(420, 1, 1, 9)}, {})
    return {
        "kind": "step",
        "shape": {"model": name, "B": batch, "capacity": capacity},
        "live": {"600": {"graph": times, "no_graph": times}},
    }


def fabricated(folder: Path) -> None:
    """One result file of every run."""
    folder.mkdir(parents=True)
    compared = {"candidates": {"fused": entry(10.0), "separate": entry(14.0)}, "null": entry(10.0)}
    steps = [step_cell("dense", 8, 4096), step_cell("dense", 8, 32768)]
    steps.append({**step_cell("dense", 32, 32768), "skipped": "needs 200 GiB", "live": {}})
    rates = [
        {"kind": "generate", "candidate": name, "tokens_per_s": rate, "shape": {"B": 8}}
        for name, rate in {"stock": 700.4, "fused": 9000.2}.items()
    ]
    files = {
        "kernel": [grid_cell(g, *shape) for g in GEOMETRIES[:2] for shape in GRID[:3]]
        + [
            {**kernel.describe_part("masks", 8), **compared},
            {**kernel.describe_part("tokens", 8), **compared},
        ],
        "model-dense": [*steps, *rates],
        "model-tp2": [step_cell("dense on 2 GPUs", 8, 32768)],
        "gate": [{"kind": "gate", "shape": {"B": 1}, **compared}],
        "paged": paged_cells(),
        "host": [{"kind": "host", "shape": {"layers": 8}, "returns": timings(), "done": timings()}],
        "compile_time": [
            {
                "kind": "compile_time",
                "shape": {"layers": 64},
                "stock_s": 90.0,
                "fused_s": 91.0,
                "pass_ms": 120.0,
                "lowering_ms": 60.0,
                "collector_ms": 3.0,
                "added_share": 0.002,
            }
        ],
    }
    for run, cells in files.items():
        (folder / f"{run}-h200.json").write_text(json.dumps(result(run, cells)))


def timings() -> dict[str, Any]:
    return {"candidates": {"stock": entry(350.0), "fused": entry(280.0)}, "null": entry(351.0)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with results of every run and a README with every marker."""
    fabricated(tmp_path / "bench" / "results")
    sections = [
        f"<!-- bench:{name} -->\n<!-- /bench:{name} -->" for name in (*report.TABLES, report.PLOTS)
    ]
    (tmp_path / "README.md").write_text("\n\n".join(["# Title", *sections, "End.\n"]))
    return tmp_path


def run_report(root: Path, *options: str) -> int:
    return report.main(["--root", str(root), *options])


def test_every_table_is_rendered_and_checks(root: Path) -> None:
    assert run_report(root, "--check") == 1
    assert run_report(root) == 0
    text = (root / "README.md").read_text()
    for line in (
        "| 1, 512 | 10.0 us, 1.50x flex, 0.80 | 10.0 us, 1.50x flex, 0.80 |",
        "Best peer over fused: geometric mean 1.50, least 1.50. "
        "Floor over fused: geometric mean 0.80, least 0.80. "
        "Mean over reading alone: fused 1.11, best peer 1.67.",
        "| 16/2 heads of 256, 1, 4096 | 8.00 | 9.00 | 10.0 | 16.0 | 15.0 | failed | 10.1 |",
        "Not measured: fa3, fa3-fwd 0.0.3 is not installed.",
        "| model | capacity | live | batch 8 | batch 32 |",
        "| dense | 4096 | 600 | 11.3 → 0.42 ms (27.0x) | - |",
        "| dense | 32768 | 600 | 11.3 → 0.42 ms (27.0x) | skipped |",
        "| dense on 2 GPUs | 8 | 32768 | 600 | 11.3 → 0.42 ms (27.0x) | 11.3 → 0.42 ms (27.0x) |",
        "| fused | 9000 |",
        "| separate | 14.0 |",
        "| 8 layers, until the call returns | 350 | 280 |",
        "| 64 | 90.0 s | 91.0 s | 120.0 ms | 60.0 ms | 3.0 ms | 0.20 % |",
        "NVIDIA H200, driver 580.1, torch 2.11.0, triton 3.6.0; commit 0123456789ab: "
        "`model-dense-h200.json`.",
        "| heads | page | batch | KV length | floor | fused | separate, compiled | flashinfer "
        "| dense | null | best paged peer over fused |",
        "| 16/2 heads of 256 | 1 | 1 | 512 | 5.00 | 8.00 | 9.00 | 16.0 | - | 8.00 "
        "| 1.12x separate, compiled |",
        "| 16/2 heads of 256 | 16 | 1 | 32768 | 19.0 | 24.0 | 27.0 | 21.0 | 20.0 | 24.0 "
        "| 0.88x flashinfer |",
        "| 32/8 heads of 128 | 1 | 64 | 8192 | - | - | - | - | - | - | skipped |",
        "Not measured: another, another 1.0 is not installed.",
        "| 1 | 512 | 5.00 | 7.00 | 6.00 | 5.00 | 1.40 | 1.20 |",
        "| 2 | 512, 495 | 5.00 | 6.00 | 5.50 | 5.00 | 1.20 | 1.10 |",
        "| 8 | 4096 | 1.30 | 2.00 | 1.30 | 1.54 |",
        "| batch 1: separate eager gate over fused | 1.40 | ≥ 1.4 | met |",
        "| best peer over fused, geometric mean | 1.50 | ≥ 1.35 | met |",
        "| dense, capacity 32768, batch 8, 600 live: stock over fused | 27.0 | ≥ 25 | met |",
        "| 64 layers: added time | 180 ms | ≤ 200 ms | met |",
        "![Fused decode against its floor](images/floor-h200.svg)",
        "End.",
    ):
        assert line in text.splitlines()
    # Among the decode steps of one GPU the README's table alone has it.
    assert text.count("dense on 2 GPUs |") == 2
    assert "| dense on 2 GPUs | 32768 | 600 |" in text
    assert "flashinfer, no" not in text
    assert run_report(root, "--check") == 0
    assert run_report(root) == 0
    assert (root / "README.md").read_text() == text


@pytest.mark.parametrize("edited", ["11.3 → 0.42 ms", "| 64 | 90.0 s", "1.50x flex"])
def test_an_edited_number_fails_the_check(root: Path, edited: str) -> None:
    run_report(root)
    readme = root / "README.md"
    text = readme.read_text()
    assert edited in text
    readme.write_text(text.replace(edited, edited.replace("1", "2").replace("9", "8"), 1))
    assert run_report(root, "--check") == 1


def test_a_changed_result_or_plot_fails_the_check(root: Path) -> None:
    run_report(root)
    plot = root / "docs" / "images" / "speedup-h200.svg"
    original = plot.read_text()
    plot.write_text(original.replace("circle", "ellipse"))
    assert run_report(root, "--check") == 1
    plot.write_text(original)
    assert run_report(root, "--check") == 0
    path = root / "bench" / "results" / "gate-h200.json"
    path.write_text(path.read_text().replace("14.0", "15.0"))
    assert run_report(root, "--check") == 1


def test_plots_are_well_formed(root: Path) -> None:
    run_report(root)
    images = sorted((root / "docs" / "images").iterdir())
    assert [path.name for path in images] == [
        "capacity-h200.svg",
        "floor-h200.svg",
        "speedup-h200.svg",
    ]
    circles = [
        len([e for e in ElementTree.parse(path).iter() if e.tag.endswith("circle")])
        for path in images
    ]
    assert circles == [4, 6, 6]


def test_a_table_without_results_is_empty(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench:gate -->\n| stale |\n<!-- /bench:gate -->\n")
    assert run_report(tmp_path, "--check") == 1
    assert run_report(tmp_path) == 0
    assert readme.read_text() == "<!-- bench:gate -->\n<!-- /bench:gate -->\n"


def test_a_run_may_lie_in_two_files(root: Path) -> None:
    folder = root / "bench" / "results"
    cells = paged_cells()
    absent = {**result("paged-grid", cells[4:]), "missing": {"another": "gone"}}
    (folder / "paged-h200.json").write_text(json.dumps(result("paged-gate", cells[:4])))
    (folder / "paged-grid-h200.json").write_text(json.dumps(absent))
    source = next(source for source in report.sources(folder) if source.run == "paged")
    assert sorted(map(str, source.data["cells"])) == sorted(map(str, cells))
    text = report.section("paged", [source])
    assert "Not measured: another, gone." in text
    assert "`paged-grid-h200.json`" in text
    assert "`paged-h200.json`" not in text


def test_an_unknown_marker_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("<!-- bench:nope -->\n<!-- /bench:nope -->\n")
    with pytest.raises(ValueError, match="bench:nope"):
        run_report(tmp_path, "--check")


def test_quick_results_are_printed_but_never_rendered(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_report(root)
    cells = [{**grid_cell(GEOMETRIES[0], 1, 512), "floor_us": 5.0}]
    path = root / "bench" / "results" / "kernel-quick-h200.json"
    path.write_text(json.dumps(result("kernel-quick", cells)))
    assert run_report(root, "--check") == 0
    assert run_report(root, "--print") == 0
    assert "## kernel" in capsys.readouterr().out


def test_one_cell_in_two_files_is_an_error(root: Path) -> None:
    again = result("model", [step_cell("dense", 8, 4096)])
    (root / "bench" / "results" / "model-h200.json").write_text(json.dumps(again))
    with pytest.raises(ValueError, match="a cell twice"):
        run_report(root, "--check")


def test_the_committed_documents_agree_with_the_committed_results() -> None:
    assert report.main(["--check"]) == 0
