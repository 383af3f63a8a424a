"""The page's data and its file: order, sharing, escaping, and folders that are not a dump's."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fusion_pass import show
from fusion_pass.__main__ import main
from fusion_pass.show import ShowError, collect, render, write_page

ROOT = Path(__file__).parent.parent
HOSTILE = "</script><script>alert('x')</script><!-- &amp; \u2028 \udcff"


def node(name: str, *inputs: str, **fields: Any) -> dict[str, Any]:
    described = {
        "name": name,
        "op": "call_function",
        "target": "aten.mul.Tensor",
        "args": ", ".join(inputs),
        "inputs": [[name, "self"] for name in inputs],
        "users": [],
        "outputs": [{"dtype": "float32", "shape": [2, "s0"], "stride": ["s0", 1], "device": "cpu"}],
        "source": "/home/user/model.py:7",
        "module": "layers.3.self_attn",
    }
    return described | fields


def site(attention: str, fused: bool = True, **fields: Any) -> dict[str, Any]:
    reason = None if fused else "gate-not-sigmoid"
    described = {"attention": attention, "fused": fused, "reason": reason, "detail": "why"}
    return described | {"producer": "cudnn", "source": "/home/user/model.py:7"} | fields


def put(folder: Path, stem: str, *sites: dict[str, Any], **record: Any) -> None:
    """Writes a graph's report, and its record if any part of one is given."""
    fused = sum(member["fused"] for member in sites)
    report = {
        "schema": 1,
        "fusion_pass": "0.1.0",
        "torch": "2.11.0",
        "fused": fused,
        "declined": len(sites) - fused,
        "sites": sites,
    }
    (folder / f"{stem}.report.json").write_text(json.dumps(report))
    if record:
        whole = {"schema": 1, "before": [], "after": [], "sites": []} | record
        (folder / f"{stem}.graph.json").write_text(json.dumps(whole))


def embedded(page: str) -> dict[str, Any]:
    """The data that is in a page."""
    found = re.search('<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def date(folder: Path, stem: str, moment: str) -> None:
    """Makes a graph's report as old as the local time `moment`."""
    seconds = time.mktime(time.strptime(moment, "%Y-%m-%d %H:%M:%S"))
    os.utime(folder / f"{stem}.report.json", (seconds, seconds))


@pytest.mark.parametrize(("day", "shown"), [("2026-03-05", ""), ("2026-03-04", "2026-03-0x ")])
def test_runs_come_as_they_began_and_their_graphs_as_they_were_compiled(
    tmp_path: Path, day: str, shown: str
) -> None:
    for number in (10, 9, 2):
        put(tmp_path, f"graph-77-{number}", site("sdpa"))
        date(tmp_path, f"graph-77-{number}", f"{day} 12:30:{number:02}")
    put(tmp_path, "graph-8-0", site("sdpa"))
    date(tmp_path, "graph-8-0", "2026-03-05 12:31:07")
    data = collect(tmp_path)
    first, second = (shown.replace("x", digit) for digit in "45")
    assert [(graph["run"], graph["title"]) for graph in data["graphs"]] == [
        (f"Run of 77 at {first}12:30:02", "Graph 2"),
        (f"Run of 77 at {first}12:30:02", "Graph 9"),
        (f"Run of 77 at {first}12:30:02", "Graph 10"),
        (f"Run of 8 at {second}12:31:07", "Graph 0"),
    ]
    assert data["extent"] == "4 graphs of 2 runs"


def test_graphs_without_attention_are_counted_and_left_out(tmp_path: Path) -> None:
    put(tmp_path, "graph-1-0", before=[node("mul")], after=[node("mul")])
    put(tmp_path, "graph-1-1", site("sdpa"))
    data = collect(tmp_path)
    assert len(data["graphs"]) == 1
    assert data["notes"] == ["Graphs without any attention, not shown: 1."]
    assert "mul" not in data["strings"]


def test_what_is_in_both_states_is_there_once(tmp_path: Path) -> None:
    same, gone, new = node("a"), node("sdpa", "a"), node("fused", "a")
    change = {"attention": "sdpa", "removed": ["sdpa"], "added": ["fused"], "kernels": None}
    put(
        tmp_path,
        "graph-1-0",
        site("sdpa"),
        before=[same, gone, node("out", "sdpa")],
        after=[same, new, node("out", "fused")],
        sites=[change],
    )
    data = collect(tmp_path)
    (graph,) = data["graphs"]
    assert graph["before"] == [0, 1, 2]
    assert graph["after"] == [0, 3, 4]
    assert graph["changes"] == {"sdpa": change}
    assert graph["sites"][0]["module"] == "layers.3.self_attn"
    assert len(set(data["strings"])) == len(data["strings"])
    name, op, target, args, kind, stride, device, source, module = (
        data["strings"][place] for place in graph["packed"][1][:9]
    )
    assert (name, op, target, args) == ("sdpa", "call_function", "aten.mul.Tensor", "a")
    assert (kind, stride, device) == ("float32[2, s0]", "(s0, 1)", "cpu")
    assert (source, module) == ("/home/user/model.py:7", "layers.3.self_attn")
    ((input_place, role),) = graph["packed"][1][9]
    assert (data["strings"][input_place], data["strings"][role]) == ("a", "self")


def test_a_node_without_a_tensor_has_no_type(tmp_path: Path) -> None:
    bare = node("sdpa", outputs=[], source=None, module=None)
    put(tmp_path, "graph-1-0", site("sdpa"), before=[bare], after=[bare])
    assert collect(tmp_path)["graphs"][0]["packed"][0][4:9] == [-1] * 5


@pytest.mark.parametrize("where", ["attention", "detail", "module", "reason"])
def test_no_text_of_a_model_can_end_the_script_or_open_another(tmp_path: Path, where: str) -> None:
    hostile = node(HOSTILE, HOSTILE, target=HOSTILE, source=HOSTILE, module=HOSTILE)
    put(
        tmp_path,
        "graph-1-0",
        site("sdpa", fused=False) | {where: HOSTILE},
        before=[hostile],
        after=[hostile],
    )
    write_page(tmp_path, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    harmless = render({"graphs": [], "strings": [], "sources": {}, "notes": [], "versions": ""})
    for mark in ("<script", "</script", "<!--"):
        assert page.count(mark) == harmless.count(mark)
    assert embedded(page)["graphs"][0]["sites"][0][where] == HOSTILE
    assert HOSTILE in embedded(page)["strings"]


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    put(tmp_path, "graph-1-0", site("sdpa"))
    page = render(collect(tmp_path))
    assert re.findall("(?:src|href)=[\"']?([^\"'> ]*)", page) == ["data:,"]
    assert set(re.findall(r"https?://[^\s\"']+", page)) <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in page
    assert "url(" not in page
    assert not re.search("@[A-Z]+@", page)


def test_text_that_looks_like_a_place_in_the_template_stays(tmp_path: Path) -> None:
    put(tmp_path, "graph-1-0", site("sdpa", module="@STYLE@ \\1 \\g<0>"))
    assert embedded(render(collect(tmp_path)))["graphs"][0]["sites"][0]["module"].endswith("\\g<0>")
    assert "@STYLE@" in render(collect(tmp_path))


@pytest.mark.parametrize("record", [{}, {"schema": 999}])
def test_a_graph_without_a_known_record_has_its_table_and_a_note(
    tmp_path: Path, record: dict[str, Any]
) -> None:
    put(tmp_path, "graph-1-0", site("sdpa"), **record)
    (graph,) = collect(tmp_path)["graphs"]
    assert graph["packed"] == []
    assert len(graph["sites"]) == 1
    assert "does not hold this graph's nodes" in graph["note"]


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        ("report", "{"),
        ("report", "[]"),
        ("report", '{"sites": [{}]}'),
        ("report", "\x00"),
        ("report", '{"sites": [], "fused": NaN}'),
    ],
)
def test_what_cannot_be_read_is_told_and_the_rest_is_shown(
    tmp_path: Path, suffix: str, content: str
) -> None:
    for number in (0, 1):
        put(tmp_path, f"graph-1-{number}", site("sdpa"), before=[node("sdpa")])
    (tmp_path / f"graph-1-0.{suffix}.json").write_text(content)
    data = collect(tmp_path)
    assert [graph["title"] for graph in data["graphs"]] == ["Graph 1"]
    (note,) = data["notes"]
    assert note.startswith("graph-1-0.report.json cannot be read: ")


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"schema": 1, "before": 3}',
        '{"schema": 1, "before": [{"name": 1}], "after": [], "sites": []}',
        '{"schema": 1, "before"',
        "[" * 100_000,
    ],
)
def test_decisions_are_shown_without_nodes_that_cannot_be_read(
    tmp_path: Path, content: str
) -> None:
    put(tmp_path, "graph-1-0", site("sdpa"), before=[node("sdpa")])
    (tmp_path / "graph-1-0.graph.json").write_text(content)
    (graph,) = collect(tmp_path)["graphs"]
    assert len(graph["sites"]) == 1
    assert graph["before"] == []
    assert graph["note"].startswith("graph-1-0.graph.json cannot be read: ")


def test_a_pipe_is_no_report(tmp_path: Path) -> None:
    put(tmp_path, "graph-1-0", site("sdpa"), before=[node("sdpa")])
    os.mkfifo(tmp_path / "graph-1-1.report.json")
    data = collect(tmp_path)
    assert len(data["graphs"]) == 1
    assert "no regular file" in data["notes"][0]


def test_a_folder_in_which_nothing_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "graph-1-0.report.json").write_text("{")
    with pytest.raises(ShowError, match=r"graph-1-0\.report\.json cannot be read"):
        collect(tmp_path)


def test_sources_are_split_into_functions(tmp_path: Path) -> None:
    put(tmp_path, "graph-1-0", site("sdpa"))
    source = "import x\n\n@x.jit\ndef split(a):\n    return a\n\n\ndef helper():\n    pass\n"
    (tmp_path / "kernels-0123456789ab.py").write_text(source)
    (tmp_path / "kernels-000000000000.py").write_text("def broken(")
    (tmp_path / "kernels-other.py").write_text("def not_ours(): pass")
    assert collect(tmp_path)["sources"] == {
        "kernels-000000000000.py": [],
        "kernels-0123456789ab.py": [
            {"name": "split", "code": "@x.jit\ndef split(a):\n    return a"},
            {"name": "helper", "code": "def helper():\n    pass"},
        ],
    }


class TestCommand:
    def test_writes_beside_the_dump(self, tmp_path: Path) -> None:
        put(tmp_path, "graph-1-0", site("sdpa"), site("sdpa_1", fused=False))
        result = subprocess.run(
            [sys.executable, "-m", "fusion_pass", "show", str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
        )
        page = tmp_path / "index.html"
        assert result.stdout == f"1 of 2 attentions fused, in 1 graph: {page}\n"
        assert len(embedded(page.read_text())["graphs"]) == 1

    def test_writes_where_it_is_told(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        put(tmp_path, "graph-1-0", site("sdpa"))
        page = tmp_path / "elsewhere.html"
        assert main(["show", str(tmp_path), "--output", str(page)]) == 0
        assert str(page) in capsys.readouterr().out
        assert page.exists()
        assert not (tmp_path / "index.html").exists()

    @pytest.mark.parametrize(
        ("folder", "output", "message"),
        [
            ("missing", "page.html", "FUSION_PASS_DUMP="),
            ("empty", "page.html", "holds no graph-"),
            ("dump", "no/such/folder/page.html", "there is no folder"),
            ("dump", "dump", "it is a folder"),
        ],
    )
    def test_says_what_is_wrong(
        self,
        folder: str,
        output: str,
        message: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        for made in ("empty", "dump"):
            (tmp_path / made).mkdir()
        put(tmp_path / "dump", "graph-1-0", site("sdpa"))
        with pytest.raises(SystemExit) as exit_info:
            main(["show", str(tmp_path / folder), "--output", str(tmp_path / output)])
        assert exit_info.value.code == 2
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error


def test_the_pages_files_are_installed() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = setup["options.package_data"]["fusion_pass"].split()
    page = Path(show.__file__).parent / "page"
    assert "page/*" in patterns
    assert {path.suffix for path in page.iterdir()} == {".html", ".css", ".js"}
