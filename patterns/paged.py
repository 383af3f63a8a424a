"""Attention that is known by its output alone, where its operator has a gated form of its own.

The paged operator of fusion_pass is read so, and the operators of serving engines: what they do
with their caches no graph tells, and need not be told to put the gate into them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Node

from .fused import first_result
from .layout import Layout
from .reason import Decline, Reason
from .trace import Operand, arguments, has_tensor, shape

_AXES = {
    2: ("batch", "dim"),
    3: ("batch", "head", "dim"),
    4: ("batch", "query", "head", "dim"),
}
_CONTRACT = {
    "numerics": "str",
    "sigmoid_dtype": "Optional[ScalarType]",
    "dtype": "Optional[ScalarType]",
}


@dataclass(frozen=True)
class OpaqueAttention:
    """What one call of an attention operator returns, and the operator that gates it as well.

    Attributes:
        node: the call.
        producer: what to call it in a report.
        axes: a name for each dimension of the result.
        result: the output; its layout has these axes.
        gated: the operator that takes the place of the call and of the gate.
        is_rounded: always True, as of every operator that writes its result to memory.
    """

    node: Node
    producer: str
    axes: tuple[str, ...]
    result: Operand
    gated: torch._ops.OpOverload
    is_rounded: bool = True

    @property
    def inputs(self) -> tuple[Node, ...]:
        """Every tensor that the call reads; query, K and V come first by custom."""
        return tuple(node for node in self.node.all_input_nodes if has_tensor(node))

    def takes(self, name: str) -> bool:
        """Whether the gated form has an argument of that name."""
        return any(argument.name == name for argument in self.gated._schema.arguments)

    def call(self, gate: Node, **rounding: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the gated form, matched by name."""
        values = arguments(self.node) | {"gate": gate} | rounding
        args: list[Any] = []
        keywords: dict[str, Any] = {}
        for argument in self.gated._schema.arguments:
            value = values.get(argument.name, argument.default_value)
            if argument.kwarg_only:
                keywords[argument.name] = value
            else:
                args.append(value)
        return tuple(args), keywords


def read_opaque(
    node: Node,
    producer: str,
    gated: torch._ops.OpOverload,
    *,
    output: Node | None = None,
) -> OpaqueAttention | Decline:
    """The attention of an operator that has a gated form.

    Args:
        node: the call of the operator.
        producer: what to call it in a report.
        gated: the gated form; see `register_attention` for what it must be.
        output: `node`, or the one of its results that is the output; by default the first. It
            has 2 to 4 dimensions, in which the elements of the gate are told apart.

    Returns:
        The attention, or why it is none; never raises on what a graph may hold.
    """
    if output is None:
        found = node if has_tensor(node) else first_result(node)
        if isinstance(found, Decline):
            return found
        output = found
    sizes = shape(output)
    if len(sizes) not in _AXES:
        return Decline(
            Reason.ATTENTION_LAYOUT,
            f"{output.name} has {len(sizes)} dimensions; 2 to 4 are read",
        )
    axes = _AXES[len(sizes)]
    layout = Layout.of((axis, size, 1) for axis, size in zip(axes, sizes, strict=True))
    return OpaqueAttention(node, producer, axes, Operand(output, layout), gated)


def check_gated(op: torch._ops.OpOverload, gated: object) -> torch._ops.OpOverload:
    """`gated`, if it can be called with the arguments of `op` and a gate.

    Raises:
        TypeError: it is no operator overload.
        ValueError: one of the two writes to its arguments, `gated` has no `Tensor gate` or does
            not return one tensor, one lacks an argument that the other needs, or an argument of
            `gated` does not take what that of `op` is given.
    """
    if not isinstance(gated, torch._ops.OpOverload):
        raise TypeError(
            f"the gated form of {op} must be an operator overload such as "
            f"torch.ops.lib.op.default, not {gated!r}"
        )
    check_functional(op)
    check_functional(gated)
    results = gated._schema.returns
    if len(results) != 1 or not isinstance(results[0].type, torch.TensorType):
        raise ValueError(f"{gated} must return one tensor")
    own = {argument.name for argument in op._schema.arguments}
    wanted = gated._schema.arguments
    names = {argument.name for argument in wanted}
    if "gate" not in names - own:
        raise ValueError(f"{gated} has no argument `gate`, or {op} has one as well")
    if lost := sorted(own - names):
        raise ValueError(f"{gated} lacks the arguments {', '.join(lost)} of {op}")
    known = own | {"gate", *_CONTRACT}
    for argument in wanted:
        if argument.name not in known and not argument.has_default_value():
            raise ValueError(f"{gated} needs {argument.name}, which {op} does not have")
    _check_types(op, gated)
    return gated


def check_functional(op: torch._ops.OpOverload) -> None:
    """Raise ValueError if `op` writes to its arguments: no graph calls it by its own name then."""
    if op._schema.is_mutable:
        raise ValueError(
            f"{op} writes to its arguments; register a functional operator, which returns its "
            "result (wrap it in one)"
        )


def _check_types(op: torch._ops.OpOverload, gated: torch._ops.OpOverload) -> None:
    """Raise ValueError unless each argument takes whatever it is given in a call of `gated`."""
    own = {argument.name: argument.real_type for argument in op._schema.arguments}
    exact = {"gate": "Tensor", **_CONTRACT}
    for argument in gated._schema.arguments:
        name, found = argument.name, argument.real_type
        if name in own:
            expected, is_taken = str(own[name]), own[name].isSubtypeOf(found)
        else:
            expected = exact.get(name, str(found))
            is_taken = str(found) == expected
        if not is_taken:
            raise ValueError(
                f"{gated} must have the argument `{expected} {name}`, not `{found} {name}`"
            )


def recognise_paged(node: Node) -> OpaqueAttention | Decline:
    """The attention of fusion_pass's own paged operator."""
    ops = cast(Any, torch.ops.fusion_pass)
    return read_opaque(node, "paged", ops.gated_paged_decode_attention.default)
