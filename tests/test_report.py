"""Reports: the summary, the JSON, the counters, the log lines and the dump."""

from __future__ import annotations

import json
import logging
import os
import warnings
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import fusion_pass
from fusion_pass.config import Config, warn_once
from fusion_pass.report import GraphReport, Site, publish

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
)


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
    data = json.loads(json.dumps(report.to_dict()))
    assert list(data) == ["schema", "fusion_pass", "torch", "fused", "declined", "sites"]
    assert data["schema"] == 1
    assert data["fusion_pass"] == fusion_pass.__version__
    assert data["torch"] == torch.__version__
    assert (data["fused"], data["declined"]) == (1, 1)
    assert tuple(Site(**site) for site in data["sites"]) == report.sites


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
    (info,) = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert info.endswith("1 fused, 1 declined: silu x1")
    details = [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG]
    assert len(details) == 2
    assert "sdpa_1" in details[0]
    assert "the output goes to silu" in details[1]


def test_no_info_line_for_a_graph_without_attention(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fusion_pass")
    publish(GraphReport(()), "", "", Config())
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]


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
    assert all(json.loads(texts[f"{stem}.report.json"]) == report.to_dict() for stem in stems)


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
