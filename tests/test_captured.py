"""Graphs captured on a GPU (the shared folder beside the checkout): decodes are recognised.

The captures are text, one node a line; they are read back as graphs of fake CUDA tensors.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusion_pass import patterns
from fusion_pass.patterns import GatedAttention
from tests.graphs import recognitions, symbolic

FOLDER = Path(__file__).parent.parent.parent / "shared" / "graphs"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no captures in {FOLDER}")

# How many gated attentions of each capture fuse; 0 needs a reason.
EXPECTED = {
    "model_afmoe_static_L4096": 4,
    "model_qwen3_5_dynamic": 2,
    "model_qwen3_5_hybrid_static_L4096": 2,
    "model_qwen3_5_static_B8_L32768": 4,
    "model_qwen3_next_static_L4096": 4,
    # Its logsumexp is kept for the backward, and the backward has no forward attention.
    "sdpa_train": 0,
}

LINE = re.compile(r"%(\w+) : \[num_users=\d+\] = (\w+)\[target=([^\]]+)\](?:\((.*)\))?\s+# ?(.*)$")
VALUE = re.compile(r"(\w+)\[(.*?)\]\[(.*?)\]$")


class Reader:
    """One capture; the graphs that come before the last are the subgraphs that it calls."""

    def __init__(self, text: str) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self.symbols: dict[str, Any] = {}
        self.root = torch.nn.Module()
        self.graphs: list[Graph] = []
        subgraphs: list[GraphModule] = []
        for block in re.split(r"(?<=\n)\n", text.strip() + "\n"):
            attributes = re.findall(r"= get_attr\[target=(\w+)\]", block)
            for name, module in zip(attributes, subgraphs[-len(attributes) :], strict=False):
                setattr(self.root, name, module)
            graph = self.graph(block)
            self.graphs.append(graph)
            subgraphs.append(GraphModule(self.root, graph))

    def graph(self, block: str) -> Graph:
        graph, nodes = Graph(), dict[str, Node]()
        for line in block.splitlines():
            if (match := LINE.match(line)) is not None:
                name, op, target, call, value = match.groups()
                nodes[name] = self.node(graph, nodes, name, op, target, call or "", value)
            elif line.startswith("return "):
                results = line.removeprefix("return ").split("#")[0]
                graph.output(self.evaluate(re.sub(r"(\w+)", r"%\1", results), nodes))
        return graph

    def node(
        self, graph: Graph, nodes: dict[str, Node], name: str, op: str, target: str, call: str,
        value: str,
    ) -> Node:  # fmt: skip
        if op in ("placeholder", "get_attr"):
            node = graph.create_node(op, target, name=name)
        else:
            args, _, kwargs = call.partition(", kwargs = ")
            node = graph.call_function(
                self.operator(target),
                self.evaluate(args.removeprefix("args = "), nodes),
                dict(self.keywords(kwargs.strip("{}"), nodes)),
            )
        if (match := VALUE.match(value.strip())) is not None:
            dtype, sizes, strides = match.groups()
            size, stride = (self.evaluate(f"[{x}]", {}) for x in (sizes, strides))
            with self.mode:
                node.meta["val"] = torch.empty_strided(
                    size, stride, dtype=getattr(torch, dtype), device="cuda"
                )
        return node

    def operator(self, target: str) -> Any:
        if target.startswith("operator."):
            return getattr(operator, target.removeprefix("operator."))
        found: Any = torch
        for part in target.split(".")[1:]:
            found = getattr(found, part)
        return found

    def keywords(self, text: str, nodes: dict[str, Node]) -> Iterator[tuple[str, Any]]:
        for item in re.split(r", (?=\w+: )", text) if text else []:
            key, _, value = item.partition(": ")
            is_device = re.fullmatch(r"(cuda|cpu)(:\d+)?", value) is not None
            yield key, torch.device(value) if is_device else self.evaluate(value, nodes)

    def evaluate(self, text: str, nodes: dict[str, Node]) -> Any:
        """A Python expression in which `%name` is a node and `s69` a symbolic size."""
        for symbol in re.findall(r"\bs\d+\b", text):
            if symbol not in self.symbols:
                hint = 50 + len(self.symbols)
                fake = symbolic(self.mode, torch.empty(hint), (hint,))
                self.symbols[symbol] = fake.shape[0]
        options = re.sub(r"\{([A-Z][^{}]*)\}", "{}", text)
        names = {"torch": torch, "inf": math.inf, "floor": "floor", "nodes": nodes}
        return eval(re.sub(r"%(\w+)", r"nodes['\1']", options), names | self.symbols)


def fused(path: Path) -> tuple[int, list[patterns.Recognition]]:
    found = [r for graph in Reader(path.read_text()).graphs for r in recognitions(graph)]
    return sum(isinstance(r.outcome, GatedAttention) for r in found), found


@pytest.mark.parametrize(
    "path", sorted(FOLDER.glob("*.txt")) or [FOLDER], ids=lambda path: path.stem
)
def test_capture(path: Path) -> None:
    count, found = fused(path)
    assert count == EXPECTED.get(path.stem, 1), [r.outcome for r in found]
