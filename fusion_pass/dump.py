"""What is written to the folder `FUSION_PASS_DUMP`: each graph before and after, and its report."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fusion_pass.config import warn_once
from fusion_pass.dump_format import SCHEMA, stem
from fusion_pass.kernel_record import kernels_of, plain
from fusion_pass.provenance import frames, module_path

_logger = logging.getLogger("fusion_pass")
_STOCK = ("aten", "prims")
_LONGEST_ARGUMENTS = 500
_T = TypeVar("_T")


class Recorder:
    """Follows one graph through the pass: its nodes before and after, and what each site changed.

    A fault in the recording is logged and costs the record; it never reaches the compile.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.before = str(graph)
        self._nodes = _unless_faulty(lambda: [describe(node) for node in graph.nodes])
        self._names = dict.fromkeys(node.name for node in graph.nodes)
        self._sites: list[dict[str, Any]] = []
        self._sources: dict[str, str] = {}

    @property
    def after(self) -> str:
        """The graph's text as it is now."""
        return str(self._graph)

    def visited(self, attention: Node) -> None:
        """Notes what changed since the visit before this one, as the doing of `attention`."""
        now = {node.name: node for node in self._graph.nodes}
        removed = [name for name in self._names if name not in now]
        added = [node for name, node in now.items() if name not in self._names]
        self._names = dict.fromkeys(now)
        if not added:
            return
        operator = next((node for node in reversed(added) if _namespace(node) not in _STOCK), None)
        self._sites.append(
            {
                "attention": attention.name,
                "removed": removed,
                "added": [node.name for node in added],
                "replacement": operator.name if operator else None,
                "kernels": _unless_faulty(lambda: kernels_of(operator, self._sources))
                if operator
                else None,
            }
        )

    def record(self) -> dict[str, Any] | None:
        """The graph before and after as JSON-serialisable data; None if it could not be read.

        Nodes are as `describe` gives them. A site names the nodes that its fusion removed and
        added, the operator among these, and its kernels as `kernels_of` gives them; "sources" are
        the kernels' modules by the names of their files.
        """
        after = _unless_faulty(lambda: [describe(node) for node in self._graph.nodes])
        if self._nodes is None or after is None:
            return None
        return {
            "schema": SCHEMA,
            "before": self._nodes,
            "after": after,
            "sites": self._sites,
            "sources": self._sources,
        }


def write(
    folder: str,
    number: int,
    report: dict[str, Any],
    before: str,
    after: str,
    record: dict[str, Any] | None = None,
) -> None:
    """Writes one graph into `folder`; a folder that cannot be written warns once.

    The files are `graph-<pid>-<number>` with .before.txt, .after.txt, .report.json and, where there
    is a record, .graph.json, and the kernels' sources once. No name comes from the model.
    """
    texts = {"before.txt": before, "after.txt": after}
    sources: dict[str, str] = {}
    if record is not None:
        sources = record["sources"]
        rest = {key: value for key, value in record.items() if key != "sources"}
        texts["graph.json"] = json.dumps(rest, separators=(",", ":")) + "\n"
    # Last, so that whoever finds a report finds the rest.
    texts["report.json"] = json.dumps(report, indent=2) + "\n"
    start = stem(os.getpid(), number)
    files = sources | {f"{start}.{suffix}": text for suffix, text in texts.items()}
    try:
        os.makedirs(folder, exist_ok=True)
        for name, text in files.items():
            _write_whole(os.path.join(folder, name), text)
    except (OSError, ValueError) as error:
        # A ValueError is a path with a null byte.
        warn_once(f"fusion_pass cannot dump graphs to {folder!r}: {error}")


def _write_whole(path: str, text: str) -> None:
    """Writes a file that no reader sees in part."""
    part = f"{path}.{os.getpid()}.part"
    # The path of a user's file may hold bytes that are no UTF-8.
    with open(part, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    os.replace(part, path)


def describe(node: Node) -> dict[str, Any]:
    """A node as JSON-serialisable data; sizes and strides that are symbolic are text.

    `inputs` are pairs of a node's name and the parameter that it is given for; `outputs` are the
    dtype, shape, stride (in elements) and device of every tensor that the node makes; `source` is
    the user's line as "file:line".
    """
    calls = frames(node)
    return {
        "name": node.name,
        "op": node.op,
        "target": _spell_target(node),
        "args": _spell_arguments(node),
        "inputs": [list(pair) for pair in _inputs(node)],
        "users": [user.name for user in node.users],
        "outputs": [_describe_tensor(tensor) for tensor in _tensors(node.meta.get("val"))],
        "source": calls[-1].partition(" in ")[0] if calls else None,
        "module": module_path(node),
    }


def _namespace(node: Node) -> str:
    return getattr(node.target, "namespace", "")


def _spell_target(node: Node) -> str:
    target = node.target
    if isinstance(target, (str, torch._ops.OperatorBase)):
        return str(target)
    module = getattr(target, "__module__", "").lstrip("_")
    return f"{module}.{getattr(target, '__name__', target)}"


def _spell_arguments(node: Node) -> str:
    if node.op == "placeholder":
        return ""
    parts = [repr(argument) for argument in node.args]
    text = ", ".join(parts + [f"{name}={value!r}" for name, value in node.kwargs.items()])
    return text if len(text) <= _LONGEST_ARGUMENTS else text[: _LONGEST_ARGUMENTS - 1] + "…"


def _inputs(node: Node) -> Iterator[tuple[str, str]]:
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = [
        (names[position] if position < len(names) else "", argument)
        for position, argument in enumerate(node.args)
    ]
    for name, argument in [*given, *node.kwargs.items()]:
        found: list[Node] = []
        torch.fx.map_arg(argument, found.append)
        yield from ((input_node.name, name) for input_node in found)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _tensors(member)


def _describe_tensor(tensor: Tensor) -> dict[str, Any]:
    strided = tensor.layout is torch.strided
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": [plain(size) for size in tensor.shape],
        "stride": [plain(step) for step in tensor.stride()] if strided else None,
        "device": str(tensor.device),
    }


def _unless_faulty(made: Callable[[], _T]) -> _T | None:
    try:
        return made()
    except Exception as fault:
        _logger.warning("the dump is incomplete: %s", fault, exc_info=True)
        return None
