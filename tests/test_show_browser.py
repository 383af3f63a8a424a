"""The page of `python -m fusion_pass show` in a real headless browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph

from fusion_pass import GatedAttentionPass
from fusion_pass.show import write_page

from .browser import PROGRAM, Browser
from .graphs import CPU, attend, fake_mode, merge_heads, qwen, qwen_inputs, trace

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")

LAYERS = 64
HOSTILE = "</script><img src=x onerror=alert(1)>.self_attn"
CALLS = {"net.py": "forward", "mine.py": "forward", "glue.py": "dispatch"}
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def model(layers: int, silu: tuple[int, ...] = ()) -> torch.fx.GraphModule:
    """A decoder's graph, of whose layers those in `silu` do not fuse."""
    fused = qwen("cpu-flash")

    def layer(index: int, hidden: Tensor, *operands: Tensor) -> Tensor:
        query, key, value, keep, gate = operands
        query = query + hidden.reshape(query.shape)
        if index not in silu:
            return hidden + fused(query, key, value, keep, gate)
        times = query.shape[1] // key.shape[1]
        wide = [x.repeat_interleave(times, 1) for x in (key, value)]
        attended = merge_heads(attend("cpu-flash", query, *wide, None))
        return hidden + attended * F.silu(gate[..., : attended.shape[-1]])

    def forward(*operands: Tensor) -> Tensor:
        hidden = operands[4].narrow(-1, 0, operands[4].shape[-1] // 2)
        for index in range(layers):
            hidden = layer(index, hidden, *operands)
        return hidden

    with fake_mode():
        module = trace(forward, *qwen_inputs(CPU))
    lengthen(module.graph)
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    for position, node in enumerate(nodes):
        index = position * layers // len(nodes)
        node.meta["nn_module_stack"] = {"0": (f"L['self'].model.layers.{index}.self_attn", None)}
        node.meta["stack_trace"] = f'  File "/home/user/model.py", line {position}, in forward\n'
    return module


def lengthen(graph: Graph) -> None:
    """Puts a hundred nodes behind the residual of every layer, where a model has its MLP."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        last, users = node, list(node.users)
        for _ in range(100):
            with graph.inserting_after(last):
                last = graph.call_function(torch.ops.aten.mul.Tensor, (last, 0.5))
            last.meta["val"] = node.meta["val"]
        for user in users:
            user.replace_input_with(node, last)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of three layers, the second of which is declined and has a hostile name."""
    folder = tmp_path_factory.mktemp("small")
    module = model(3, silu=(1,))
    for node in module.graph.nodes:
        if node.name == f"{ATTENTION}_1":
            node.meta["nn_module_stack"] = {"0": (f"L['self'].{HOSTILE}", None)}
            node.meta["stack_trace"] = "".join(
                f'  File "/home/user/{file}", line 7, in {function}\n'
                for file, function in CALLS.items()
            )
    GatedAttentionPass(devices=("cpu",), dump=str(folder), strict=True)(module.graph, True)
    write_page(folder, folder / "index.html")
    return folder / "index.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    driven = Browser(tmp_path_factory.mktemp("browser"))
    yield driven
    driven.close()


@pytest.fixture
def tab(browser: Browser, small: Path) -> Iterator[Browser]:
    """The small page, opened anew; afterwards nothing may have been complained of or fetched."""
    browser.resize(1280, 900)
    browser.prefer("light")
    browser.open(small)
    yield browser
    assert browser.complaints() == []
    assert browser.requests() == [small.as_uri()]


def shown(tab: Browser) -> list[str]:
    """The attentions whose rows are visible."""
    rows: list[str] = tab.run(
        "[...document.querySelectorAll('tr.site')].filter((row) => row.offsetParent)"
        ".map((row) => row.dataset.attention)"
    )
    return rows


def text(tab: Browser, selector: str) -> str:
    found: str = tab.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
    return found


def close_what_is_open(tab: Browser) -> None:
    tab.click("tr.site[aria-expanded=true]")
    assert tab.run("document.querySelectorAll('.detail').length") == 0


def width(tab: Browser) -> tuple[int, int]:
    """What the page needs and what the window has."""
    needed, has = tab.run("[document.documentElement.scrollWidth, innerWidth]")
    return needed, has


ALL = [ATTENTION, f"{ATTENTION}_1", f"{ATTENTION}_2"]


def test_opens_with_the_headline_and_every_attention(tab: Browser) -> None:
    assert text(tab, "h1") == "2 of 3 attentions fused"
    assert shown(tab) == ALL
    assert "gate-not-sigmoid" in text(tab, f"tr[data-attention={ATTENTION}_1]")


def test_opens_with_the_first_decline_drawn_and_the_culprit_marked(tab: Browser) -> None:
    assert tab.run("[...document.querySelectorAll('.opened')].length") == 1
    assert "gate-not-sigmoid" in text(tab, ".detail > .verdict")
    marked = "[...document.querySelectorAll('.detail .{} .op')].map((op) => op.textContent)"
    assert tab.run(marked.format("attention")) == ["sdpa_flash_for_cpu"]
    assert sorted(tab.run(marked.format("culprit"))) == ["mul", "silu"]
    assert "dashed" in text(tab, "figcaption")
    dashes = "getComputedStyle(document.querySelector('.culprit rect')).strokeDasharray"
    assert tab.run(dashes) != "none"
    tab.click(".detail svg .culprit")
    assert "gate-not-sigmoid" in text(tab, ".detail .chosen .verdict")


def test_opens_the_first_where_all_are_fused(browser: Browser, tmp_path: Path) -> None:
    GatedAttentionPass(devices=("cpu",), dump=str(tmp_path))(model(2).graph, True)
    write_page(tmp_path, tmp_path / "index.html")
    browser.resize(1900, 900)
    browser.open(tmp_path / "index.html")
    opened = "document.querySelector('.opened').previousElementSibling.dataset.attention"
    assert browser.run(opened) == ATTENTION
    before, after = browser.run(
        "[...document.querySelectorAll('figure')].map((f) => f.getBoundingClientRect().toJSON())"
    )
    assert before["right"] < after["left"]
    assert before["top"] == after["top"]


def test_tells_the_models_own_line_and_the_innermost(tab: Browser) -> None:
    places = f"[...document.querySelectorAll('tr[data-attention={ATTENTION}_1] .place')]"
    assert tab.run(f"{places}.map((place) => place.innerText)") == [
        "user/mine.py:7",
        "user/glue.py:7",
    ]


def test_groups_the_graphs_of_several_runs(browser: Browser, small: Path, tmp_path: Path) -> None:
    for path in small.parent.glob("graph-*.json"):
        _, _, _, *suffixes = re.split("[-.]", path.name)
        for run in ("7-0", "7-1", "8-0"):
            shutil.copy2(path, tmp_path / ".".join([f"graph-{run}", *suffixes]))
    write_page(tmp_path, tmp_path / "index.html")
    browser.open(tmp_path / "index.html")
    headings = browser.run("[...document.querySelectorAll('h2')].map((h) => h.innerText)")
    assert [re.sub(r"\d\d:\d\d:\d\d", "T", heading) for heading in headings] == [
        "Run of 7 at T2 graphs",
        "Run of 8 at T1 graph",
    ]
    assert text(browser, "#versions").startswith("3 graphs of 2 runs;")
    browser.type("#text", "no such thing")
    assert browser.run("[...document.querySelectorAll('h2')].some((h) => h.offsetParent)") is False
    assert browser.complaints() == []


def test_a_hostile_name_is_shown_as_text(tab: Browser) -> None:
    assert HOSTILE in text(tab, f"tr[data-attention={ATTENTION}_1]")
    assert tab.run("document.querySelectorAll('img').length") == 0


def test_filters_by_outcome(tab: Browser) -> None:
    tab.click("[data-outcome=declined]")
    assert shown(tab) == [ALL[1]]
    assert text(tab, "#shown") == "1 of 3 shown"
    tab.click("[data-outcome=fused]")
    assert shown(tab) == [ALL[0], ALL[2]]
    tab.click("[data-outcome=all]")
    assert shown(tab) == ALL


def test_filters_by_reason(tab: Browser) -> None:
    options = tab.run(
        "[...document.querySelector('#reasons').options].map((option) => option.text)"
    )
    assert options == ["any", "gate-not-sigmoid (1)"]
    tab.run("document.querySelector('#reasons').focus()")
    for kind in ("keyDown", "keyUp"):
        tab.call("Input.dispatchKeyEvent", type=kind, key="ArrowDown", windowsVirtualKeyCode=40)
    assert shown(tab) == [ALL[1]]


def test_filters_by_text(tab: Browser) -> None:
    tab.type("#text", "Layers.2.")
    assert shown(tab) == [ALL[2]]
    tab.type("#text", "no such thing")
    assert shown(tab) == []
    assert text(tab, "#shown") == "0 of 3 shown"


def test_a_declines_reason_is_found_by_clicking_its_node_in_the_graph(tab: Browser) -> None:
    tab.click("details.graphs > summary")
    tab.run("new Promise((done) => setTimeout(done, 100))")
    tab.click(f".cell.declined[data-node={ATTENTION}_1]")
    assert "gate-not-sigmoid" in text(tab, ".diff .info .verdict")
    assert "sigmoid(gate)" in text(tab, ".diff .info .verdict")
    tab.click(f".cell.declined[data-node={ATTENTION}_1]")
    assert text(tab, ".diff .info") == ""


def test_a_declines_reason_is_found_by_clicking_its_row_and_its_drawing(tab: Browser) -> None:
    close_what_is_open(tab)
    tab.click(f"tr[data-attention={ATTENTION}_1]")
    assert "gate-not-sigmoid" in text(tab, ".detail > .verdict")
    tab.click(f".detail svg [data-node={ATTENTION}_1]")
    assert "gate-not-sigmoid" in text(tab, ".detail .chosen .verdict")


def test_the_graphs_stand_side_by_side_with_the_difference_marked(tab: Browser) -> None:
    tab.click("details.graphs > summary")
    tab.run("new Promise((done) => setTimeout(done, 100))")
    before = f".line.differs > .matched.fused:first-child[data-node={ATTENTION}]"
    after = ".line.differs > .matched.fused:last-child[data-node=gated_decode_attention]"
    left, right = (
        tab.run(f"document.querySelector('{selector}').getBoundingClientRect().x")
        for selector in (before, after)
    )
    assert left + 300 < right
    mark = "getComputedStyle(document.querySelector('{}'), '::before').content"
    assert tab.run(mark.format(before)) == '"\u2212"'
    assert tab.run(mark.format(after)) == '"+"'
    tab.click(after)
    assert f"the fusion of {ATTENTION}" in text(tab, ".diff .info .verdict")
    folded = tab.run("document.querySelectorAll('.line').length")
    tab.click(".fold")
    assert tab.run("document.querySelectorAll('.line').length") > folded


def test_a_fused_attention_is_drawn_before_and_after_with_its_kernels(tab: Browser) -> None:
    close_what_is_open(tab)
    tab.click(f"tr[data-attention={ATTENTION}]")
    captions = tab.run("[...document.querySelectorAll('figcaption')].map((c) => c.innerText)")
    assert captions == ["Before", "After"]
    drawn = [
        set(
            tab.run(
                f"[...document.querySelectorAll('figure:nth-child({figure}) .own .op')]"
                ".map((op) => op.textContent)"
            )
        )
        for figure in (1, 2)
    ]
    assert {"sdpa_flash_for_cpu", "expand", "clone", "sigmoid", "mul"} <= drawn[0]
    assert "gated_decode_attention" in drawn[1]
    assert "sigmoid" not in drawn[1]
    assert "why fusing is expected to pay" in text(tab, ".detail > dl .meaning")
    if tab.run("document.querySelectorAll('.launch').length"):
        tab.click(".launch details summary")
        tab.run("new Promise((done) => setTimeout(done, 100))")
        assert "may look at no key" in text(tab, ".launch .meaning")
        tab.click(".launch details.source summary")
        tab.run("new Promise((done) => setTimeout(done, 100))")
        assert "def gated_decode_split(" in text(tab, ".launch details.source pre")
    else:
        assert "Triton is not installed" in text(tab, ".detail")


def test_works_by_keyboard(tab: Browser) -> None:
    close_what_is_open(tab)
    tab.run(f"document.querySelector('tr[data-attention={ATTENTION}_1]').focus()")
    tab.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", windowsVirtualKeyCode=13)
    assert "gate-not-sigmoid" in text(tab, ".detail > .verdict")


@pytest.mark.parametrize("pixels", [320, 400])
def test_a_phone_shows_all_without_scrolling_sideways(tab: Browser, pixels: int) -> None:
    tab.resize(pixels, 800)
    assert width(tab) == (pixels, pixels)
    tab.click(f"tr[data-attention={ATTENTION}]")
    tab.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    tab.run("new Promise((done) => setTimeout(done, 100))")
    assert tab.run("document.querySelectorAll('.detail svg .node').length") > 10
    assert width(tab) == (pixels, pixels)
    size = tab.run("parseFloat(getComputedStyle(document.querySelector('.diff')).fontSize)")
    assert size >= 11
    for drawn in tab.run(
        "[...document.querySelectorAll('.detail svg')].map((svg) => "
        "svg.getBoundingClientRect().width / svg.viewBox.baseVal.width"
        " * Math.min(...[...svg.querySelectorAll('text')]"
        ".map((text) => parseFloat(getComputedStyle(text).fontSize))))"
    ):
        assert drawn >= 11


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of one attention, declined for a gate that is joined from many parts."""

    def forward(*operands: Tensor) -> Tensor:
        query, key, value, _, gate = operands
        times = query.shape[1] // key.shape[1]
        repeated = [x.repeat_interleave(times, 1) for x in (key, value)]
        attended = merge_heads(attend("cpu-flash", query, *repeated, None))
        parts = [part * 2 for part in gate[..., : attended.shape[-1]].chunk(16, -1)]
        return attended * F.silu(torch.cat(parts, -1))

    folder = tmp_path_factory.mktemp("wide")
    with fake_mode():
        module = trace(forward, *qwen_inputs(CPU))
    GatedAttentionPass(devices=("cpu",), dump=str(folder), strict=True)(module.graph, True)
    write_page(folder, folder / "index.html")
    return folder / "index.html"


@pytest.mark.parametrize("pixels", [400, 1000, 1500])
def test_a_wide_drawing_scrolls_inside_its_cell(browser: Browser, wide: Path, pixels: int) -> None:
    browser.resize(pixels, 900)
    browser.open(wide)
    drawn, room = browser.run(
        "[document.querySelector('.detail svg').getBoundingClientRect().width,"
        " document.querySelector('.detail .scroll').clientWidth]"
    )
    assert drawn > 1500 > room
    needed, has = width(browser)
    assert needed <= has == pixels
    cells = browser.run(
        "[...document.querySelectorAll('th, td')].filter((cell) => cell.offsetParent)"
        ".map((cell) => [cell.getBoundingClientRect().right, cell.scrollWidth - cell.clientWidth])"
    )
    assert len(cells) > 5
    for right, hidden in cells:
        assert right <= needed
        assert hidden <= 0


def brightness(tab: Browser, selector: str, what: str) -> float:
    """From 0, black, to 255, white."""
    color: str = tab.run(f"getComputedStyle(document.querySelector({json.dumps(selector)})).{what}")
    channels = [float(part) for part in color[color.index("(") + 1 : -1].split(",")[:3]]
    return sum(channels) / 3


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
def test_follows_the_preferred_colours(tab: Browser, scheme: str, is_dark: bool) -> None:
    tab.prefer(scheme)
    for selector, ground in (
        ("body", "backgroundColor"),
        (".verdict", "backgroundColor"),
        ("svg rect", "fill"),
    ):
        assert (brightness(tab, selector, ground) < 100) is is_dark
    for selector, ink in (("body", "color"), (".verdict", "color"), ("svg .op", "fill")):
        assert (brightness(tab, selector, ink) > 155) is is_dark


def test_a_model_of_64_layers_is_small_and_opens_at_once(browser: Browser, tmp_path: Path) -> None:
    module = model(LAYERS, silu=tuple(range(3, LAYERS, 4)))
    GatedAttentionPass(devices=("cpu",), dump=str(tmp_path), strict=True)(module.graph, True)
    page = tmp_path / "index.html"
    write_page(tmp_path, page)
    assert len(module.graph.nodes) > 100 * LAYERS
    assert page.stat().st_size < 5e6
    browser.resize(1280, 900)
    browser.open(page)
    assert len(shown(browser)) == LAYERS
    drawn = browser.run("document.querySelector('.detail .attention .op').textContent")
    assert drawn == "sdpa_flash_for_cpu"
    loaded = browser.run("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert 0 < loaded < 2000
    opened = browser.run(
        "new Promise((done) => { const start = performance.now();"
        "document.querySelector('details.graphs').open = true;"
        "setTimeout(() => requestAnimationFrame(() => done(performance.now() - start)), 0); })"
    )
    assert len(browser.run("[...document.querySelectorAll('.line.differs')].map(() => 0)")) > LAYERS
    assert opened < 2000
    assert browser.complaints() == []
