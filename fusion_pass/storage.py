"""Which values of a graph lie in the storage of which, and who writes to it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch.fx import Graph, Node

from fusion_pass.patterns.trace import source


def storage_writers(graph: Graph) -> dict[Node, list[Node]]:
    """Who writes in place, by the value whose storage is written."""
    writers: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for written in _written(node):
            writers.setdefault(storage_root(written), []).append(node)
    return writers


def storage_root(node: Node) -> Node:
    """The value whose storage `node` is a view of."""
    while (origin := _origin(node)) is not None:
        node = origin
    return node


def is_view(node: Node) -> bool:
    """Whether `node` may lie in the storage of its first input."""
    return _origin(node) is not None


def _origin(node: Node) -> Node | None:
    """The input in whose storage `node` may lie: of a view, or of taking one of several results."""
    if (rearranged := source(node)) is not None:
        return rearranged
    inputs = node.all_input_nodes
    return inputs[0] if inputs and node.op == "call_function" and _may_alias(node.target) else None


@functools.cache
def _may_alias(function: Any) -> bool:
    """Whether a function returns a view of an argument; what is no operator may."""
    schema = getattr(function, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)


def _written(node: Node) -> Iterator[Node]:
    for position, name in _written_arguments(node.target):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        if isinstance(value, Node):
            yield value


@functools.cache
def _written_arguments(function: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of every argument that an operator writes to."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    return tuple((i, given.name) for i, given in enumerate(schema.arguments) if given.is_write)
