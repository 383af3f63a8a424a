"""What fuses and on what ground: structure, policy, and the table in force."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion_pass import (
    GatedAttentionPass,
    eligibility,
    graph_pass,
    inductor,
    profitability,
    tables,
)
from fusion_pass.config import warn_once
from fusion_pass.environment import slug
from fusion_pass.launch import Limits
from fusion_pass.profitability import decide, measured_shape, structural_saving
from fusion_pass.tables import Shape, Table, TableError, parse, store
from fusion_pass.tables.store import Key, in_force, user_path
from tests.graphs import (
    CPU,
    CUDA,
    attend,
    fake_mode,
    merge_heads,
    only_match,
    repeat_kv,
    run_pass,
    symbolic,
    trace,
    where_mask,
)

KEY = Key("NVIDIA H200", "2.11.0", "3.6.0")


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    warn_once.cache_clear()


def sized(batch: int | None, kv_length: int | None, tokens: int = 1, mask: str = "none") -> Shape:
    return Shape(16, 2, 256, batch, kv_length, tokens, mask)


def table(ratios: dict[Shape, float], margin: float = 1.0) -> Table:
    return Table({"device": "NVIDIA H200"}, ratios, "a table", margin, "digest")


# Structure


def gate_only(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    return merge_heads(attend("flash", query, key, value, None)) * torch.sigmoid(gate)


def repeated(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    output = attend("flash", query, repeat_kv(key, 8), repeat_kv(value, 8), None)
    return merge_heads(output) * torch.sigmoid(gate)


def repeated_values(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    """K is read where it lies, as a view with stride 0; V is copied."""
    key = key.unsqueeze(2).expand(8, 2, 8, 4096, 256)
    logits_heads = key.reshape(8, 16, 4096, 256)
    output = attend("flash", query, logits_heads, repeat_kv(value, 8), None)
    return merge_heads(output) * torch.sigmoid(gate)


def multi_query_view(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    """One K/V head, which all query heads read as a view with stride 0."""
    key, value = (x.narrow(1, 0, 1).expand(8, 16, 4096, 256) for x in (key, value))
    return merge_heads(attend("flash", query, key, value, None)) * torch.sigmoid(gate)


def contiguous(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    """A copy that repeats nothing: Inductor may make it where K is written anyway."""
    output = attend("flash", query, key.clone(), value.clone(), None)
    return merge_heads(output) * torch.sigmoid(gate)


def decomposed(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    logits = torch.matmul(query.view(8, 2, 8, 256), key.transpose(2, 3)) * 0.0625
    output = torch.matmul(torch.softmax(logits, dim=-1), value).view(8, 16, 1, 256)
    return merge_heads(output) * torch.sigmoid(gate)


def masked(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, keep: Tensor) -> Tensor:
    output = attend("cudnn", query, key, value, where_mask(keep, query.dtype))
    return merge_heads(output) * torch.sigmoid(gate)


def inputs() -> tuple[Tensor, ...]:
    return CUDA.query(), CUDA.stored(), CUDA.stored(), CUDA.gate()


@pytest.mark.parametrize(
    ("model", "saving"),
    [
        (gate_only, None),
        (contiguous, None),
        (multi_query_view, None),
        (repeated, "repeat_kv"),
        (repeated_values, "repeat_kv"),
        (decomposed, "logits"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_saved_besides_the_gate(model: Callable[..., Tensor], saving: str | None) -> None:
    with fake_mode():
        match = only_match(trace(model, *inputs()).graph)
    found = structural_saving(match)
    assert (found is None) == (saving is None), found
    assert saving is None or saving in str(found)
    verdict = decide(match, "measured", None)
    assert verdict.fuse is (saving is not None)
    assert verdict.ground.startswith("structural" if saving else "only the gate")


@pytest.mark.parametrize(("dynamic", "saves"), [((), True), ((50,), False)])
def test_a_mask_saves_reading_a_static_cache_alone(dynamic: tuple[int, ...], saves: bool) -> None:
    shape = replace(CPU, kv_length=50)
    keep = shape.empty(2, 1, 1, 50, dtype=torch.bool)
    mode = fake_mode(symbolic=True)
    given = (shape.query(), shape.stored(), shape.stored(), shape.gate(), keep)
    match = only_match(trace(masked, *[symbolic(mode, x, dynamic) for x in given]).graph)
    assert ("dead keys" in (structural_saving(match) or "")) is saves
    assert measured_shape(match) == Shape(8, 2, 16, 2, None if dynamic else 50, 1, "bool")


# The pass


def pass_over(model: Callable[..., Tensor], monkeypatch: Any, **settings: Any) -> Any:
    """What the pass reports of the one attention of `model`, on a fake GPU."""
    reports: list[Any] = []
    limits = Limits("cuda", 90, 132, 232448)
    monkeypatch.setattr(eligibility, "device_limits", lambda device: limits)
    monkeypatch.setattr(graph_pass, "publish", lambda report, *rest: reports.append(report))
    with fake_mode():
        module = trace(model, *inputs())
        GatedAttentionPass(strict=True, **settings)(module.graph, True)
    return reports[0].sites[0]


def test_without_a_table_an_attention_of_which_the_gate_alone_would_go_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = pass_over(gate_only, monkeypatch)
    assert (site.fused, site.reason) == (False, "unprofitable")
    assert "python -m fusion_pass tune" in site.detail
    assert '"always"' in site.detail


@pytest.mark.parametrize(
    ("model", "settings", "ground"),
    [
        (gate_only, {"policy": "always"}, 'the policy is "always"'),
        (repeated, {}, "structural: K and V"),
        (decomposed, {}, "structural: logits"),
    ],
)
def test_the_ground_of_a_fusion_is_reported(
    model: Any, settings: Any, ground: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = pass_over(model, monkeypatch, **settings)
    assert site.fused
    assert site.ground.startswith(ground)


def test_never_leaves_every_attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    site = pass_over(repeated, monkeypatch, policy="never")
    assert (site.fused, site.reason, site.detail) == (
        False,
        "unprofitable",
        'the policy is "never"',
    )


@pytest.mark.parametrize(("ratio", "fused"), [(1.3, True), (0.9, False)])
def test_a_table_decides_where_only_the_gate_would_go(
    ratio: float, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profitability, "device_key", lambda device: KEY)
    write(user_path(KEY), [(sized(8, 4096), ratio)])
    site = pass_over(gate_only, monkeypatch)
    assert site.fused is fused
    assert f"{ratio:.2f} times as long" in (site.ground if fused else site.detail)


def test_a_cpu_is_rewritten_where_it_is_asked_for() -> None:
    with fake_mode():
        module = trace(gate_only_on_cpu, CPU.query(), CPU.stored(), CPU.stored(), CPU.gate())
        verdict = decide(only_match(module.graph), "measured", None)
    assert verdict.fuse
    assert "CPU" in verdict.ground
    assert run_pass(module, devices=("cpu",)) == 1


def gate_only_on_cpu(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    return merge_heads(attend("cpu-flash", query, key, value, None)) * torch.sigmoid(gate)


# Tables


def test_a_measured_shape_gives_its_own_ratio() -> None:
    ratios = {sized(b, s): b + s / 1e6 for b in (1, 8) for s in (512, 4096)}
    found = table(ratios)
    assert all(found.ratio(shape) == pytest.approx(ratio) for shape, ratio in ratios.items())


def test_between_shapes_the_ratio_is_interpolated_and_beyond_them_kept() -> None:
    found = table({sized(1, 512): 1.0, sized(1, 8192): 4.0, sized(16, 512): 1.0})
    assert found.ratio(sized(1, 2048)) == pytest.approx(2.0)
    assert found.ratio(sized(1, 1024)) == pytest.approx(math.sqrt(2))
    assert found.ratio(sized(1, 1)) == 1.0
    assert found.ratio(sized(1, 1 << 20)) == 4.0
    # Its fourth corner was not measured: the other three share its weight.
    assert found.ratio(sized(4, 2048)) == pytest.approx(4.0 ** (1 / 3))


def test_over_an_unknown_size_the_mean_counts_unless_one_is_a_loss() -> None:
    found = table({sized(b, s): r for b, s, r in ((1, 512, 2.0), (1, 4096, 0.8), (8, 512, 1.5))})
    assert found.ratio(sized(1, None)) == pytest.approx(0.8)
    assert found.ratio(sized(None, 512)) == pytest.approx(math.sqrt(3))
    assert found.ratio(sized(None, None)) == pytest.approx(0.8)
    nearly = table({sized(1, 512): 2.0, sized(1, 4096): 0.98})
    assert found.ratio(sized(None, 1)) == pytest.approx(math.sqrt(3))
    assert nearly.ratio(sized(1, None)) == pytest.approx(1.4)


def test_the_nearest_family_counts() -> None:
    narrow = Shape(32, 8, 128, 1, 512, 1, "none")
    found = table({sized(1, 512): 2.0, narrow: 3.0, sized(1, 512, tokens=4): 5.0})
    assert found.ratio(Shape(24, 4, 256, 1, 512, 1, "none")) == pytest.approx(2.0)
    assert found.ratio(Shape(8, 4, 64, 1, 512, 1, "none")) == pytest.approx(3.0)
    assert found.ratio(sized(1, 512, tokens=3)) == pytest.approx(5.0)
    assert found.ratio(sized(1, 512, mask="bool")) is None


def test_batches_compare_by_the_heads_that_are_attended_to() -> None:
    found = table({sized(1, 512): 1.0, sized(16, 512): 4.0})
    twice = Shape(32, 4, 256, 2, 512, 1, "none")
    assert found.ratio(twice) == found.ratio(sized(4, 512)) == pytest.approx(2.0)


# Files


def write(path: Path, cells: list[tuple[Shape, float]], **environment: str) -> None:
    """A table in which stock takes 10 us times the ratio of each shape."""
    data = {
        "schema": 1,
        "environment": {
            "device": KEY.device,
            "torch": KEY.torch,
            "triton": KEY.triton,
            **environment,
        },
        "cells": [
            {
                "shape": asdict(shape),
                "stock": {"median_us": 10 * ratio},
                "fused": {"median_us": 10},
            }
            for shape, ratio in cells
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


ONE = [(sized(1, 512), 1.02)]


def test_no_table_is_no_fault() -> None:
    assert in_force(KEY) is None
    assert in_force(None) is None


def test_the_users_own_table_goes_before_the_shipped_one() -> None:
    write(store.SHIPPED / "h200.json", ONE)
    shipped = in_force(KEY)
    assert shipped is not None
    assert "ships" in shipped.origin
    write(user_path(KEY), ONE)
    own = in_force(KEY)
    assert own is not None
    assert own.origin == str(user_path(KEY))


def test_a_chosen_file_goes_before_both(tmp_path: Path) -> None:
    write(user_path(KEY), ONE)
    chosen = tmp_path / "mine.json"
    write(chosen, [(sized(1, 512), 3.0)])
    found = in_force(KEY, str(chosen))
    assert found is not None
    assert found.ratio(sized(1, 512)) == pytest.approx(3.0)


def test_the_shipped_table_needs_a_clear_win_with_other_versions() -> None:
    write(store.SHIPPED / "h200.json", ONE)
    for key, margin in ((KEY, 1.0), (replace(KEY, triton="4.0"), 1.05)):
        found = in_force(key)
        assert found is not None
        assert found.margin == margin
    assert in_force(replace(KEY, device="H200 of another maker")) is None
    assert in_force(replace(KEY, device="NVIDIA A100")) is None


def test_releases_alone_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(inductor, "triton_version", lambda: "3.6.0")
    assert Key.of("NVIDIA H200") == KEY


@pytest.mark.parametrize("field", ["device", "torch", "triton"])
def test_a_foreign_table_is_ignored_with_a_warning(field: str) -> None:
    write(user_path(KEY), ONE, **{field: "other"})
    with pytest.warns(RuntimeWarning, match=r"measured for .*other.*tune"):
        assert in_force(KEY) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert in_force(KEY) is None


BROKEN: dict[str, Callable[[Any], Any]] = {
    "no schema": lambda data: data.pop("schema"),
    "another schema": lambda data: data.update(schema=2),
    "no environment": lambda data: data.pop("environment"),
    "no triton": lambda data: data["environment"].pop("triton"),
    "no cells": lambda data: data["cells"].clear(),
    "a cell that is no object": lambda data: data["cells"].append(3),
    "no shape": lambda data: data["cells"][0].pop("shape"),
    "no size": lambda data: data["cells"][0]["shape"].pop("batch"),
    "a size of zero": lambda data: data["cells"][0]["shape"].update(batch=0),
    "a true size": lambda data: data["cells"][0]["shape"].update(batch=True),
    "heads that do not divide": lambda data: data["cells"][0]["shape"].update(kv_heads=3),
    "an unknown mask": lambda data: data["cells"][0]["shape"].update(mask="causal"),
    "no time": lambda data: data["cells"][0].pop("fused"),
    "a time of zero": lambda data: data["cells"][0]["fused"].update(median_us=0),
    "an infinite time": lambda data: data["cells"][0]["stock"].update(median_us=math.inf),
    "a time beyond floats": lambda data: data["cells"][0]["stock"].update(median_us=10**400),
    "a time of nothing": lambda data: data["cells"][0]["stock"].update(median_us=5e-324),
    "no number as time": lambda data: data["cells"][0]["fused"].update(median_us=math.nan),
    "a size beyond floats": lambda data: data["cells"][0]["shape"].update(head_dim=10**400),
    "a time in words": lambda data: data["cells"][0]["stock"].update(median_us="fast"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_corrupt_table_is_ignored_with_a_warning(fault: str) -> None:
    path = user_path(KEY)
    write(path, ONE)
    data = json.loads(path.read_text())
    BROKEN[fault](data)
    path.write_text(json.dumps(data))
    with pytest.raises(TableError):
        parse(path.read_text(), "it", 1.0)
    with pytest.warns(RuntimeWarning, match="ignores the table"):
        assert in_force(KEY) is None


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "null", "[]", "\xff"])
def test_what_is_no_table_is_ignored_with_a_warning(text: str) -> None:
    path = user_path(KEY)
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin-1"))
    with pytest.warns(RuntimeWarning, match="ignores the table"):
        assert in_force(KEY) is None


@pytest.mark.parametrize("chosen", ["a\0b.json", "/dev/zero", "/"])
def test_a_chosen_path_that_is_no_file_warns(chosen: str) -> None:
    with pytest.warns(RuntimeWarning, match="ignores the table"):
        assert in_force(KEY, chosen) is None


def test_a_chosen_file_that_is_not_there_warns(tmp_path: Path) -> None:
    write(user_path(KEY), ONE)
    with pytest.warns(RuntimeWarning, match="finds no table"):
        assert in_force(KEY, str(tmp_path / "absent.json")) is None


def test_a_table_that_changes_on_disk_is_read_again() -> None:
    write(user_path(KEY), ONE)
    first = in_force(KEY)
    write(user_path(KEY), [(sized(1, 512), 1.125)])
    second = in_force(KEY)
    assert first is not None
    assert second is not None
    assert (first.ratio(sized(1, 512)), second.ratio(sized(1, 512))) == pytest.approx((1.02, 1.125))
    assert first.digest != second.digest


def test_the_identity_of_the_pass_covers_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_pass, "visible_gpus", lambda: ((KEY.device, 9, 0, 132),))
    monkeypatch.setattr(torch, "__version__", KEY.torch)
    monkeypatch.setattr(inductor, "triton_version", lambda: KEY.triton)

    def identities() -> tuple[Any, ...]:
        return tuple(GatedAttentionPass(policy=p).uuid() for p in ("measured", "always"))

    before = identities()
    write(user_path(KEY), ONE)
    after = identities()
    assert before[0] != after[0]
    assert before[1] == after[1]
    assert before[0] != before[1]


def test_what_the_package_ships_is_whole() -> None:
    for path in Path(tables.__file__).parent.glob("*.json"):
        shipped = parse(path.read_text(), path.name, 1.0)
        assert slug(shipped.environment["device"]) == path.stem
        assert shipped.environment["commit"]
        assert not shipped.environment["dirty"]
