"""The dump: the graphs' nodes, what each site changed, the kernels, and faults on the way."""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import Graph, GraphModule

from fusion_pass import dump, kernel_record, launch
from fusion_pass.config import warn_once
from fusion_pass.dump_format import SCHEMA

from .graphs import (
    CPU,
    CUDA,
    attend,
    fake_mode,
    merge_heads,
    qwen,
    qwen_inputs,
    run_pass,
    symbolic,
    trace,
)

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def traced(shape: Any = CPU, producer: str = "cpu-flash") -> GraphModule:
    with fake_mode():
        return trace(qwen(producer), *qwen_inputs(shape))


def dumped(module: GraphModule, folder: Path, **options: Any) -> dict[str, Any]:
    """Runs the pass over the module with a dump; the graph's record."""
    run_pass(module, dump=str(folder), **options)
    (path,) = folder.glob("*.graph.json")
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def by_name(nodes: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {node["name"]: node for node in nodes}


@pytest.fixture
def gpu(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 to launch on as well."""
    limits = launch.Limits("cuda", 90, 132, 232448)
    monkeypatch.setattr(launch, "device_limits", lambda device: limits)


def test_nodes_tell_what_the_graph_tells(tmp_path: Path) -> None:
    module = traced()
    node = next(node for node in module.graph.nodes if node.name == ATTENTION)
    node.meta["stack_trace"] = '  File "/home/user/model.py", line 7, in forward\n    attend()\n'
    node.meta["nn_module_stack"] = {"0": ("L['self'].layers.3.self_attn", None)}
    names = [node.name for node in module.graph.nodes]
    record = dumped(module, tmp_path, devices=("cpu",))
    assert record["schema"] == SCHEMA
    assert [node["name"] for node in record["before"]] == names
    assert [node["name"] for node in record["after"]] == [n.name for n in module.graph.nodes]
    found = by_name(record["before"])[ATTENTION]
    assert found["op"] == "call_function"
    assert found["target"] == f"aten.{ATTENTION}.default"
    assert found["args"] == "query_1, _unsafe_view, _unsafe_view_1, attn_mask=where"
    assert [role for _, role in found["inputs"]] == ["query", "key", "value", "attn_mask"]
    assert [user.partition("_")[0] for user in found["users"]] == ["getitem"]
    assert found["outputs"][0] == {
        "dtype": "float32",
        "shape": [2, 8, 1, 16],
        "stride": [128, 16, 16, 1],
        "device": "cpu",
    }
    assert found["source"] == "/home/user/model.py:7"
    assert found["module"] == "layers.3.self_attn"


def test_a_site_names_what_was_matched_and_what_replaced_it(tmp_path: Path) -> None:
    record = dumped(traced(), tmp_path, devices=("cpu",))
    before, after = by_name(record["before"]), by_name(record["after"])
    (site,) = record["sites"]
    assert site["attention"] == ATTENTION
    assert site["removed"] == [name for name in before if name not in after]
    assert site["added"] == [name for name in after if name not in before]
    targets = {before[name]["target"] for name in site["removed"]}
    assert {"aten.sigmoid.default", "aten.where.self", "aten.expand.default"} <= targets
    assert site["replacement"] == "gated_decode_attention"
    operator = after["gated_decode_attention"]
    assert operator["target"] == "fusion_pass.gated_decode_attention.default"
    assert [role for _, role in operator["inputs"]] == ["query", "key", "value", "gate", "mask"]
    for name, node in after.items():
        assert [after[user]["name"] for user in node["users"]] == node["users"], name


def test_each_site_has_its_own_changes(tmp_path: Path) -> None:
    layer = qwen("cpu-flash")

    def twice(query: Tensor, *rest: Tensor) -> Tensor:
        first = layer(query, *rest)
        return layer(query + first.reshape(query.shape), *rest)

    with fake_mode():
        module = trace(twice, *qwen_inputs(CPU))
    record = dumped(module, tmp_path, devices=("cpu",))
    first, second = record["sites"]
    assert [first["attention"], second["attention"]] == [ATTENTION, f"{ATTENTION}_1"]
    for part in ("removed", "added"):
        assert first[part]
        assert not set(first[part]) & set(second[part])
    assert ATTENTION in first["removed"]
    assert f"{ATTENTION}_1" in second["removed"]


def test_a_declined_attention_changes_nothing(tmp_path: Path) -> None:
    def silu(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        attended = merge_heads(attend("cpu-flash", query, key, value, None))
        return attended * torch.nn.functional.silu(gate)

    with fake_mode():
        module = trace(silu, CPU.query(), CPU.query(), CPU.query(), CPU.gate())
    record = dumped(module, tmp_path, devices=("cpu",))
    assert record["sites"] == []
    assert record["before"] == record["after"]


@pytest.mark.usefixtures("gpu")
def test_the_kernels_as_they_would_be_launched(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    record = dumped(traced(CUDA, "cudnn"), tmp_path)
    kernels = record["sites"][0]["kernels"]
    assert kernels["runs"]
    assert kernels["limits"]["arch"] == 90
    split, reduce = kernels["launches"]
    assert (split["kernel"], reduce["kernel"]) == ("gated_decode_split", "gated_decode_reduce")
    compiled = split["constexpr"]
    assert (compiled["HEAD_DIM"], compiled["GROUP"], compiled["MASK"]) == (256, 8, "bool")
    assert compiled["BLOCK_N"] == kernels["config"]["block_n"]
    assert split["options"]["num_warps"] == kernels["config"]["split_warps"]
    assert split["grid"] == [16, kernels["config"]["num_splits"], 1]
    assert split["arguments"]["kv_length"] == 4096
    assert split["arguments"]["stride_kn"] == 256
    names = by_name(record["after"])
    assert {split["arguments"][name] for name in ("query", "key", "value", "mask")} <= set(names)
    for step in kernels["launches"]:
        assert f"def {step['kernel']}(" in (tmp_path / step["source"]).read_text()


def test_the_kernels_of_a_cpu_do_not_run(tmp_path: Path) -> None:
    record = dumped(traced(), tmp_path, devices=("cpu",))
    assert not record["sites"][0]["kernels"]["runs"]


@pytest.mark.usefixtures("gpu")
def test_without_triton_there_is_the_configuration_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_record, "find_spec", lambda name: None)
    record = dumped(traced(CUDA, "cudnn"), tmp_path)
    kernels = record["sites"][0]["kernels"]
    assert kernels["launches"] == []
    assert kernels["config"]["num_splits"] > 1
    assert not list(tmp_path.glob("*.py"))


@pytest.mark.usefixtures("gpu")
def test_the_kernels_of_the_paged_operator() -> None:
    pytest.importorskip("triton")

    def paged(*operands: Tensor) -> Tensor:
        query, cache, table, gate, lengths = operands
        operator = torch.ops.fusion_pass.gated_paged_decode_attention.default
        result: Tensor = operator(
            query, cache, cache, None, table, gate, lengths, scale=0.125, max_query_tokens=1
        )
        return result

    with fake_mode():
        empty = CUDA.empty
        indices = [empty(4, 32, dtype=torch.int32), empty(4, dtype=torch.int32)]
        query, cache, gate = empty(4, 16, 64), empty(100, 16, 2, 64), empty(4, 16, 64)
        module = trace(paged, query, cache, indices[0], gate, indices[1])
    (node,) = (n for n in module.graph.nodes if n.op == "call_function")
    sources: dict[str, str] = {}
    kernels = kernel_record.kernels_of(node, sources)
    assert kernels is not None
    split, reduce = kernels["launches"]
    assert (split["constexpr"]["PAGE_SIZE"], split["constexpr"]["HEAD_DIM"]) == (16, 64)
    for step in (split, reduce):
        assert f"def {step['kernel']}(" in sources[step["source"]]
    assert json.loads(json.dumps(kernels)) == kernels


def test_no_kernels_of_another_operator() -> None:
    module = traced()
    assert all(kernel_record.kernels_of(node, {}) is None for node in module.graph.nodes)


def test_symbolic_sizes_are_text_and_get_no_guard(tmp_path: Path) -> None:
    guards = []
    tensors = qwen_inputs(replace(CPU, batch=5, kv_length=48))
    for options in ({}, {"dump": str(tmp_path)}):
        mode = fake_mode(symbolic=True)
        inputs = [symbolic(mode, tensor, (5, 48)) for tensor in tensors]
        module = trace(qwen("cpu-flash"), *inputs)
        assert run_pass(module, devices=("cpu",), **options) == 1
        assert mode.shape_env is not None
        guards.append([str(guard.expr) for guard in mode.shape_env.guards])
    assert guards[0] == guards[1]
    (path,) = tmp_path.glob("*.graph.json")
    record = json.loads(path.read_text())
    cache = by_name(record["before"])["key_1"]["outputs"][0]
    assert [type(size) for size in cache["shape"]] == [str, int, str, int]
    (site,) = record["sites"]
    assert site["kernels"]["config"]["block_n"] >= 16


def test_files_are_named_by_process_and_number_alone(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        module = traced()
        for node in module.graph.nodes:
            node.meta["nn_module_stack"] = {"0": ("L['self']./../../escaped", None)}
        run_pass(module, devices=("cpu",), dump=str(tmp_path / folder))
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    named = re.compile(
        rf"graph-{os.getpid()}-\d+\.(before\.txt|after\.txt|report\.json|graph\.json)"
        r"|kernels-[0-9a-f]{12}\.py"
    )
    assert len(written) >= 8
    assert all(named.fullmatch(path.name) for path in written)


def test_what_is_no_utf_8_is_written_all_the_same(tmp_path: Path) -> None:
    report = {"source": "/home/\udcff.py"}
    dump.write(str(tmp_path), 0, report, "before \udcff", "after")
    stem = tmp_path / f"graph-{os.getpid()}-0"
    assert json.loads(stem.with_suffix(".report.json").read_text()) == report
    assert stem.with_suffix(".before.txt").read_text() == "before \\udcff"


@pytest.mark.parametrize("name", ["describe", "kernels_of"])
def test_a_fault_costs_the_record_and_not_the_fusion(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(dump, name, broken)
    assert run_pass(traced(), devices=("cpu",), dump=str(tmp_path)) == 1
    assert "injected" in caplog.text
    levels = [record.levelno for record in caplog.records if "incomplete" in record.getMessage()]
    assert set(levels) == {logging.WARNING}
    suffixes = {path.name.partition(".")[2] for path in tmp_path.iterdir()}
    assert {"before.txt", "after.txt", "report.json"} <= suffixes
    assert ("graph.json" in suffixes) is (name == "kernels_of")


def test_a_folder_that_cannot_be_written_warns_once(tmp_path: Path) -> None:
    # A file in the way stops root as well, which a folder's mode does not.
    (tmp_path / "file").write_text("")
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert run_pass(traced(), devices=("cpu",), dump=str(tmp_path / "file")) == 1
    (warning,) = [w for w in caught if "cannot dump" in str(w.message)]
    assert str(tmp_path / "file") in str(warning.message)


def test_nothing_is_recorded_without_a_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "describe", lambda node: pytest.fail("described"))
    assert run_pass(traced(), devices=("cpu",)) == 1
    assert counters["fusion_pass"]["fused"] == 1


def test_odd_nodes_are_described() -> None:
    graph = Graph()
    entry = graph.placeholder("x")
    pair = graph.call_function(divmod, (entry, [entry, 2]))
    pair.meta["val"] = (torch.empty(2, 3), [torch.eye(2).to_sparse()], None, 3)
    long = graph.call_function(torch.ops.aten.add.Tensor, (entry, float("inf")))
    wide = graph.call_function(torch.cat, ([entry] * 400,))
    graph.output((pair, long, wide))
    found = by_name([dump.describe(node) for node in graph.nodes])
    assert found["x"]["args"] == ""
    assert found["x"]["outputs"] == []
    assert found["divmod_1"]["target"] == "builtins.divmod"
    assert found["divmod_1"]["inputs"] == [["x", ""], ["x", ""]]
    assert [made["stride"] for made in found["divmod_1"]["outputs"]] == [[3, 1], None]
    assert found["add_tensor"]["args"] == "x, inf"
    assert len(found["cat"]["args"]) == 500
    assert found["cat"]["args"].endswith("…")
    assert json.loads(json.dumps(found, allow_nan=False)) == found
