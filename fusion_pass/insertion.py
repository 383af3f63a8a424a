"""Adding nodes to a graph so that none stays if anything fails, and removing what is unused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fusion_pass import inductor, ops
from fusion_pass.patterns.layout import Size, same
from fusion_pass.patterns.trace import shape, source, tensor

aten = torch.ops.aten

_SHARED = "fusion_pass_shared"
_UNSHARED_META = ("val", "tensor_meta", "eager_input_vals", _SHARED)

_DENSE = torch.ops.fusion_pass.gated_decode_attention.default


class MisfitError(ValueError):
    """A symbolic size cannot be had from any value at hand, or comes out as another."""


class GatedFormError(RuntimeError):
    """An operator that somebody registered as a gated form does not do what it should."""


class Inserter:
    """Adds operator calls before a node, with that node's meta and a fake value of their own.

    The sizes of `measured`, which come before it and stay in the graph, may be asked for.
    """

    def __init__(self, graph: Graph, before: Node, measured: Sequence[Node]) -> None:
        self.graph = graph
        self.before = before
        self.measured = measured
        self.inserted: list[Node] = []
        self._meta = {key: item for key, item in before.meta.items() if key not in _UNSHARED_META}
        self._mode = tensor(before).fake_mode  # type: ignore[attr-defined]

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        name = target.__name__.split(".")[0]
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        self.inserted.append(node)
        node.meta.update(self._meta)
        values, modes = torch.fx.map_arg((args, kwargs), lambda item: item.meta["val"])
        node.meta["val"] = self._value(target, values, modes)
        return node

    def _value(self, target: Any, values: Any, modes: Any) -> Any:
        # The dispatcher comes to the same in both cases, and takes several times as long.
        if target is _DENSE:
            return inductor.empty_fake(self._mode, *ops.result_of(*values, **modes))
        if target is aten.reshape.default and _is_plain(*values):
            return inductor.viewed_fake(*values)
        with self._mode:
            return target(*values, **modes)

    def shared(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """What a call would compute, taken from an equal call of this method before, if any.

        Every layer has the same mask, and what is emitted for it twice is computed twice.
        """
        node: Node
        call = _spell_call(args, kwargs)
        operands: list[Node] = []
        torch.fx.map_arg(args, operands.append)
        alike = (
            operands[0].users
            if operands
            else self.graph.find_nodes(op="call_function", target=target, sort=False)
        )
        for node in alike:
            if node.target is not target or not node.meta.get(_SHARED):
                continue
            if _spell_call(node.args, node.kwargs) == call and node < self.before:
                return node
        node = self(target, *args, **kwargs)
        node.meta[_SHARED] = True
        return node

    def sizes(self, node: Node, target: Sequence[Size]) -> list[Any]:
        """`target` as arguments for a reshape of `node`: a symbolic size becomes -1 or a node."""
        symbolic = [size for size in target if not isinstance(size, int)]
        if len(symbolic) == 1:
            return [size if isinstance(size, int) else -1 for size in target]
        return [self.size(node, size) for size in target]

    def size(self, node: Node, size: Size) -> int | Node:
        """A size that a dimension of `node`, or else of `measured`, has, for an operator.

        Raises:
            MisfitError: none has it.
        """
        if isinstance(size, int):
            return size
        for known in (node, *self.measured):
            for dim, own in enumerate(shape(known)):
                if same(own, size):
                    return self(aten.sym_size.int, known, dim)
        raise MisfitError(f"no dimension of {node.name} has the size {size}")


def _is_plain(value: Tensor, target: Sequence[Any]) -> bool:
    """Whether a reshape to `target` is a view for which nothing has to be found out."""
    sizes = (*value.shape, *target)
    return all(type(size) is int and size > 0 for size in sizes) and value.is_contiguous()


def _spell_call(args: Any, kwargs: Any) -> str:
    """Arguments as text, in which the name of a node stands for it and 1 is not True."""
    return repr((tuple(args), sorted(kwargs.items())))


@contextmanager
def inserting(graph: Graph, before: Node, *measured: Node) -> Iterator[Inserter]:
    """Insert nodes before `before`, see `Inserter`; on an error none of them stays."""
    insert = Inserter(graph, before, measured)
    try:
        with graph.inserting_before(before):
            yield insert
    except BaseException:
        for node in reversed(insert.inserted):
            graph.erase_node(node)
        raise


def erase_unused(graph: Graph, node: Node, attention: Node) -> None:
    """Erase `node` and, transitively, every input of it that nothing else uses."""
    pending, erased = [node], set[Node]()
    while pending:
        current = pending.pop()
        if current in erased:
            continue
        for user in list(current.users):
            if user.target is getitem and not user.users:
                graph.erase_node(user)
        if current.users or current.op != "call_function":
            continue
        # Without dropout the attention draws no random numbers, though its operator might.
        if current is not attention and source(current) is None and current.is_impure():
            continue
        pending.extend(current.all_input_nodes)
        graph.erase_node(current)
        erased.add(current)
