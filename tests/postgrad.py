"""What Inductor hands to the pass for a small program on the CPU, and what the pass makes of it.

The compilation ends there: no code is generated, so that a program costs a fraction of a second.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusion_pass import GatedAttentionPass, inductor, patterns
from fusion_pass.inductor import InferenceGraphPass

# What is the same in every graph here.
_UNSPOKEN = ("device", "layout", "memory_format", "pin_memory", "requires_grad")


class _End(Exception):  # noqa: N818
    """Ends a compilation after the pass."""


@dataclass(frozen=True)
class Rewrite:
    """The graph before and after the pass, as text, and the report of every attention in it."""

    before: str
    after: str
    sites: list[dict[str, Any]]


@dataclass
class _Recorder(InferenceGraphPass):
    """Runs the fusion, notes the graph on either side of it, and ends the compilation."""

    fusion: GatedAttentionPass
    names: dict[str, str] = field(default_factory=dict)
    before: str = ""
    after: str = ""

    def __call__(self, graph: Graph, is_inference: bool | None = None) -> None:
        if is_inference is None:
            is_inference = inductor.traced_for_inference()
        self.before = spell(graph, self.names)
        self.fusion(graph, is_inference)
        graph.lint()
        self.after = spell(graph, self.names)
        # The mods of FlexAttention are graphs of their own, and come first.
        if any(patterns.may_be_attention(node) for node in graph.nodes):
            raise _End

    def uuid(self) -> None:
        return None


def rewrite(program: Callable[..., Any], *inputs: Any, **settings: Any) -> Rewrite:
    """What the pass makes of `program` on the CPU; `settings` are fields of `Config`."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = {"devices": ("cpu",), "strict": True, "dump": folder, **settings}
        recorder = _Recorder(GatedAttentionPass(**chosen))

        def backend(module: GraphModule, examples: list[Any]) -> Any:
            recorder.names = _parameters(module)
            compiler = inductor.stock_compiler(None, {inductor.SLOT: recorder})
            return compiler(module, examples)

        torch._dynamo.reset()
        try:
            torch.compile(program, backend=backend)(*inputs)
        except (inductor.CompilationFailed, torch._dynamo.exc.BackendCompilerFailed) as failure:
            if not isinstance(getattr(failure, "inner_exception", None), _End):
                raise
        sites = [
            site
            for path in Path(folder).glob("*.report.json")
            for site in json.loads(path.read_text())["sites"]
        ]
    if not recorder.before:
        raise AssertionError(f"the compilation of {program} did not reach the pass")
    return Rewrite(recorder.before, recorder.after, sites)


def _parameters(module: GraphModule) -> dict[str, str]:
    """The program's name of every input of the post-grad graph."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    return {f"arg{i}_1": _plain(str(node.target)) for i, node in enumerate(inputs)}


def _plain(name: str) -> str:
    return name.removeprefix("L_").removeprefix("l_").strip("_")


def spell(graph: Graph, names: dict[str, str]) -> str:
    """One line a call, `name = operator(arguments)  # dtype[sizes]`; inputs by their `names`."""
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {_value(node.args[0], names)}")
        elif node.op == "get_attr":
            lines += _subgraph(node)
        elif node.op == "call_function":
            lines.append(f"{node.name} = {_call(node, names)}{_comment(node)}")
    return "\n".join(lines)


def _subgraph(node: Node) -> list[str]:
    module = getattr(node.graph.owning_module, str(node.target))
    if not isinstance(module, GraphModule):
        return []
    inputs = [inner.name for inner in module.graph.nodes if inner.op == "placeholder"]
    body = spell(module.graph, {}).splitlines()
    return [f"def {node.name}({', '.join(inputs)}):", *(f"    {line}" for line in body)]


def _call(node: Node, names: dict[str, str]) -> str:
    target = str(getattr(node.target, "__name__", node.target))
    if isinstance(node.target, torch._ops.OpOverload):
        target = str(node.target).removesuffix(".default").removesuffix(".Tensor")
    keywords = {key: value for key, value in node.kwargs.items() if key not in _UNSPOKEN}
    arguments = [_value(value, names) for value in node.args]
    arguments += [f"{key}={_value(value, names)}" for key, value in keywords.items()]
    return f"{target}({', '.join(arguments)})"


def _value(value: Any, names: dict[str, str]) -> str:
    if isinstance(value, Node):
        return names.get(value.name, value.name)
    if isinstance(value, (list, tuple)):
        items = ", ".join(_value(item, names) for item in value)
        # A block mask has more lists in later versions of torch.
        items = re.sub(r"(None, ){2,}", "..., ", items)
        return f"({items})" if isinstance(value, tuple) else f"[{items}]"
    return str(value).removeprefix("torch.")


def _comment(node: Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    return f"  # {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
