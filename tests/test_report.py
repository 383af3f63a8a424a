"""Reports: the summary, the JSON, the counters, the log lines and the dump."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import fusion_pass
from fusion_pass.config import Config, warn_once
from fusion_pass.report import ARTIFACT, GraphReport, Site, TensorInfo, publish

FUSED = Site(
    attention="sdpa_1",
    producer="cpu-flash",
    fused=True,
    reason=None,
    detail="",
    query="bfloat16[8, 16, 1, 256]",
    key="bfloat16[8, 2, 512, 256]",
    value="bfloat16[8, 2, 512, 256]",
    gate="bfloat16[8, 1, 16, 256]",
    mask="bool[1, 1, 1, 512]",
    source="model.py:7",
    tensors={"query": TensorInfo("bfloat16", (8, "s0"), (2, 1))},
)
SITE_KEYS = [
    "attention",
    "producer",
    "fused",
    "reason",
    "detail",
    "query",
    "key",
    "value",
    "gate",
    "mask",
    "source",
    "ground",
    "module",
    "frames",
    "tensors",
    "mask_kind",
    "gate_kind",
    "expected",
    "remedy",
    "kernel",
]


def declined(reason: str) -> Site:
    return Site(
        attention="sdpa_2",
        producer="cpu-flash",
        fused=False,
        reason=reason,
        detail="the output goes to silu",
        query="bfloat16[8, 16, 1, 256]",
        key="bfloat16[8, 2, 512, 256]",
        value="bfloat16[8, 2, 512, 256]",
        gate=None,
        mask=None,
        source=None,
    )


def own(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Without those of torch's structured trace, which pytest captures too."""
    return [record for record in caplog.records if record.name == "fusion_pass"]


def as_json(report: GraphReport) -> Any:
    return json.loads(json.dumps(report.to_dict()))


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    warn_once.cache_clear()


@pytest.mark.parametrize(
    ("sites", "summary"),
    [
        ((), "no attention"),
        ((FUSED,) * 4, "4 of 4 gated attentions fused"),
        ((FUSED, declined("silu"), declined("silu")), "1 fused, 2 declined: silu x2"),
        ((declined("scale"), declined("mask")), "0 fused, 2 declined: mask x1, scale x1"),
    ],
)
def test_summary(sites: tuple[Site, ...], summary: str) -> None:
    assert GraphReport(sites).summary() == summary


def test_json_is_stable() -> None:
    report = GraphReport((FUSED, declined("silu")))
    data = as_json(report)
    assert list(data) == ["schema", "fusion_pass", "torch", "fused", "declined", "sites"]
    assert data["schema"] == 2
    assert data["fusion_pass"] == fusion_pass.__version__
    assert data["torch"] == torch.__version__
    assert (data["fused"], data["declined"]) == (1, 1)
    first, second = data["sites"]
    assert list(first) == list(second) == SITE_KEYS
    assert (first["fused"], first["source"], first["reason"]) == (True, "model.py:7", None)
    assert (second["fused"], second["reason"]) == (False, "silu")
    assert first["tensors"] == {
        "query": {"dtype": "bfloat16", "shape": [8, "s0"], "stride": [2, 1]}
    }


def test_counters_add_up_over_graphs() -> None:
    publish(GraphReport((FUSED, declined("silu"))), "", "", Config())
    publish(GraphReport((FUSED, declined("silu"), declined("scale"))), "", "", Config())
    assert counters["fusion_pass"] == {
        "fused": 2,
        "declined": 3,
        "declined: silu": 2,
        "declined: scale": 1,
    }


def test_a_graph_without_attention_is_not_counted() -> None:
    publish(GraphReport(()), "", "", Config())
    assert not counters["fusion_pass"]


def test_one_info_line_a_graph_that_has_an_attention(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fusion_pass")
    publish(GraphReport((FUSED, declined("silu"))), "", "", Config())
    (info,) = [r.getMessage() for r in own(caplog) if r.levelno == logging.INFO]
    assert info.endswith("1 fused, 1 declined: silu x1")
    details = [r.getMessage() for r in own(caplog) if r.levelno == logging.DEBUG]
    assert len(details) == 2
    assert "sdpa_1" in details[0]
    assert "the output goes to silu" in details[1]


def test_no_info_line_for_a_graph_without_attention(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fusion_pass")
    publish(GraphReport(()), "", "", Config())
    assert [record.levelno for record in own(caplog)] == [logging.DEBUG]


def test_a_line_tells_where_and_why() -> None:
    site = replace(declined("silu"), module="layers.3.attn", source="model.py:7", gate_kind="silu")
    line = site.line()
    for part in (
        "sdpa_2",
        "cpu-flash",
        "layers.3.attn",
        "model.py:7",
        "gate silu",
        "declined: silu",
    ):
        assert part in line
    assert line.endswith("declined: silu: the output goes to silu")
    assert FUSED.line().endswith(": fused")
    assert replace(FUSED, ground="it pays").line().endswith("fused: it pays")


def test_torchs_structured_trace_gets_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[tuple[dict[str, str], str]] = []

    def trace(kind: str, metadata_fn: Callable[[], Any], payload_fn: Callable[[], str]) -> None:
        assert kind == "artifact"
        traced.append((metadata_fn(), payload_fn()))

    monkeypatch.setattr(torch._logging._internal, "trace_structured", trace)
    report = GraphReport((FUSED,))
    publish(report, "", "", Config())
    ((metadata, payload),) = traced
    assert metadata == {"name": ARTIFACT, "encoding": "json"}
    assert json.loads(payload) == as_json(report)


def test_a_trace_is_written_where_torch_is_told_to(tmp_path: Path) -> None:
    """The artefact is in the log that tlparse reads."""
    program = f"""
from fusion_pass.config import Config
from fusion_pass.report import GraphReport, Site, publish
publish(GraphReport(({replace(FUSED, tensors={})!r},)), "", "", Config())
"""
    environment = os.environ | {"TORCH_TRACE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert f'"name": "{ARTIFACT}"' in text
    assert '"source": "model.py:7"' in text


def test_dump_writes_the_graph_before_and_after_and_the_report(tmp_path: Path) -> None:
    config = Config(dump=str(tmp_path / "made" / "for it"))
    report = GraphReport((FUSED,))
    publish(report, "graph before", "graph after", config)
    publish(report, "second before", "second after", config)
    names = sorted(path.name for path in Path(str(config.dump)).iterdir())
    stems = sorted({name.split(".")[0] for name in names})
    assert len(stems) == 2
    assert all(stem.startswith(f"graph-{os.getpid()}-") for stem in stems)
    assert names == sorted(
        f"{stem}.{suffix}"
        for stem in stems
        for suffix in ("before.txt", "after.txt", "report.json")
    )
    texts = {path.name: path.read_text() for path in Path(str(config.dump)).iterdir()}
    assert {texts[f"{stem}.before.txt"] for stem in stems} == {"graph before", "second before"}
    assert {texts[f"{stem}.after.txt"] for stem in stems} == {"graph after", "second after"}
    assert all(json.loads(texts[f"{stem}.report.json"]) == as_json(report) for stem in stems)


def test_nothing_is_written_without_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    publish(GraphReport((FUSED,)), "graph before", "graph after", Config())
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder_warns_once(tmp_path: Path) -> None:
    # A file in the way stops root as well, which a folder's mode does not.
    (tmp_path / "file").write_text("")
    config = Config(dump=str(tmp_path / "file"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        publish(GraphReport((FUSED,)), "before", "after", config)
        publish(GraphReport((FUSED,)), "before", "after", config)
    (warning,) = caught
    assert str(config.dump) in str(warning.message)
    assert counters["fusion_pass"]["fused"] == 2
