"""What a fused operator of a graph launches, told without launching it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch
from torch.fx import Node

from fusion_pass import launch
from fusion_pass.dump_format import kernels_file
from fusion_pass.launch import Launch, LaunchConfig, Limits, Operand
from fusion_pass.paged import launch as paged_launch
from fusion_pass.paged import ops as paged_ops
from fusion_pass.patterns.trace import as_size

_DENSE = torch.ops.fusion_pass.gated_decode_attention.default
_OPERANDS = ("query", "key", "value", "gate", "mask", "sinks")
_SCRATCH = {"accumulator": "accumulator", "statistics": "statistics"}


def kernels_of(node: Node, sources: dict[str, str]) -> dict[str, Any] | None:
    """The launches of the operator at `node` as JSON-serialisable data; None if it is not ours.

    `runs` tells whether its device runs the kernels at all: a CPU has the reference instead, or
    Triton's interpreter. Each launch is a kernel's name, grid, Triton options, compile-time
    (`constexpr`) and run-time arguments, and the name under which `sources` gets its code. Strides
    are those of the traced graph, and a tensor is its node's name. Without triton there are no
    launches.
    """
    schema = getattr(node.target, "_schema", None)
    ours = node.target is _DENSE or (schema is not None and schema.name in paged_ops.BINDINGS)
    if not ours:
        return None
    device = node.meta["val"].device
    limits = launch.device_limits(device)
    make = _dense if node.target is _DENSE else _paged
    config, steps = make(node, limits, device, find_spec("triton") is not None)
    return {
        "runs": device.type == "cuda",
        "limits": asdict(limits),
        "config": asdict(config),
        "launches": [_describe(step, sources) for step in steps],
    }


def _dense(
    node: Node, limits: Limits, device: torch.device, launchable: bool
) -> tuple[LaunchConfig, Iterable[Launch]]:
    arguments: dict[str, Any] = dict(zip(_OPERANDS, node.args, strict=False))
    operands: dict[str, Any] = {
        name: None if argument is None else _operand(argument)
        for name, argument in arguments.items()
    }
    query = operands["query"]
    problem = launch.problem_of(query, operands["key"], operands["value"], operands["mask"])
    config = launch.choose(problem, limits)
    if not launchable:
        return config, ()
    modes: dict[str, Any] = {name: mode for name, mode in node.kwargs.items() if name != "dtype"}
    precision = launch.float32_precision(query.dtype, device)
    operands |= {"output": node.name, "input_precision": precision, **_SCRATCH}
    return config, launch.launches(config, **operands, **modes)


def _paged(
    node: Node, limits: Limits, device: torch.device, launchable: bool
) -> tuple[LaunchConfig, Iterable[Launch]]:
    target: Any = node.target
    boxes, modes = paged_ops.BINDINGS[target._schema.name](*node.args, **node.kwargs)
    operands = boxes.map(_operand)
    config = launch.choose(paged_launch.problem_of(operands, modes), limits)
    if not launchable:
        return config, ()
    return config, paged_launch.launches(
        config,
        operands,
        modes,
        output=node.name,
        input_precision=launch.float32_precision(operands.query.dtype, device),
        **_SCRATCH,
    )


def _operand(node: Node) -> Operand:
    """An operand whose tensor is its node's name; expressions, unlike SymInt, add no guard."""
    tensor = node.meta["val"]
    size, stride = tensor.shape, tensor.stride()
    return Operand(node.name, tuple(map(as_size, size)), tuple(map(as_size, stride)), tensor.dtype)


def _describe(step: Launch, sources: dict[str, str]) -> dict[str, Any]:
    arguments = {name: plain(value) for name, value in step.arguments.items()}
    compiled = {name: value for name, value in arguments.items() if name.isupper()}
    module = inspect.getmodule(step.kernel.fn)
    assert module is not None
    source = inspect.getsource(module)
    file = kernels_file(source)
    sources[file] = source
    return {
        "kernel": step.kernel.fn.__name__,
        "source": file,
        "grid": [plain(size) for size in step.grid],
        "options": step.options,
        "constexpr": compiled,
        "arguments": {name: value for name, value in arguments.items() if name not in compiled},
    }


def plain(value: Any) -> Any:
    """`value` if JSON has it, or its text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
