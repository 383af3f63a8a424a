"""Asking what the pass would do to a program, without compiling or running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph

from fusion_pass import inductor
from fusion_pass.config import Config
from fusion_pass.explanation import Explanation
from fusion_pass.graph_pass import GatedAttentionPass
from fusion_pass.launch import Limits
from fusion_pass.report import GraphReport
from fusion_pass.tracing import original, trace

ASSUMED_NAME = "NVIDIA H200"
ASSUMED = Limits("cuda", 90, 132, 232448)
"""The GPU that a program is judged for on a machine without one."""

_ASSUMPTIONS = (
    f"There is no GPU here: judged for an {ASSUMED_NAME} (sm_{ASSUMED.arch}, "
    f"{ASSUMED.multiprocessors} SMs, {ASSUMED.shared_memory} bytes of shared memory a block).",
    "Profitability was assumed: nothing was measured here.",
    "Traced on CPU tensors: the producer of an SDPA shows as the CPU's; a GPU has its own.",
)
_CPU = (
    "Judged for the CPU, on which nothing is rewritten unless asked for; "
    'device="cuda" judges for a GPU.'
)
_SWITCHED_OFF = "The pass is switched off (FUSION_PASS=0 or enabled=False): nothing is fused."
_NO_GRAPH = "Nothing was compiled: no graph was traced."


def explain(
    function: Callable[..., Any],
    /,
    *args: Any,
    device: str | None = None,
    dynamic: bool | None = None,
    config: Config | None = None,
    **kwargs: Any,
) -> Explanation:
    """What the pass would do with `torch.compile(function)(*args, **kwargs)`, and why.

    The program is traced as torch.compile would, through graph breaks, on tensors without data:
    nothing is computed, compiled to machine code, counted or changed, and the arguments are only
    copied. Gradient mode counts as in a compile: call it under torch.no_grad() where you would
    call the compiled function so.

    Args:
        function: a module, function or method, compiled already or not.
        args, kwargs: as for a call of it; tensors may be real, fake or on "meta".
        device: "cuda" or "cpu", the device the program is meant for. By default the one that its
            tensors are on, and "cuda" for those on "meta". For "cuda" on a machine without a GPU
            an H200 is assumed, and the report says so.
        dynamic: as for torch.compile.
        config: settings of the pass; by default those of the environment.

    Raises:
        TypeError: something among the arguments cannot be copied.
        ValueError: `device` is neither "cuda" nor "cpu".
    """
    function = original(function)
    kinds = _device_kinds((function, args, kwargs))
    target = _target(device, kinds)
    fusion = GatedAttentionPass(config)
    assumed = ASSUMED if target == "cuda" and not torch.cuda.is_available() else None
    place = "cpu" if assumed else device or ("cuda" if "meta" in kinds else None)
    graphs: list[GraphReport] = []

    def visit(graph: Graph, is_inference: bool) -> None:
        graphs.append(fusion.rewrite(graph, is_inference, assumed=assumed))

    slot = inductor.flatten(inductor.current_slot())
    stopped = trace(
        function,
        args,
        kwargs,
        visit,
        dynamic=dynamic,
        device=None if place is None else torch.device(place),
        earlier=[member for member in slot if not isinstance(member, GatedAttentionPass)],
    )
    notes = (
        *(() if fusion.config.enabled else (_SWITCHED_OFF,)),
        *(_ASSUMPTIONS if assumed else ()),
        *((_CPU,) if target == "cpu" and "cpu" not in fusion.config.devices else ()),
        *(() if graphs else (_NO_GRAPH,)),
    )
    found = tuple(graph for graph in graphs if graph.sites)
    return Explanation(found, _device_name(target), assumed is not None, notes, stopped)


def assert_fused(
    function: Callable[..., Any], /, *args: Any, expected: int | None = None, **kwargs: Any
) -> Explanation:
    """Asserts that the pass would fuse `expected` attentions, or at least one and every gated one.

    Args:
        function, args, kwargs: as for `explain`.
        expected: how many attentions must fuse, in all graphs together.

    Raises:
        AssertionError: with the table that `explain` prints.
    """
    found = explain(function, *args, **kwargs)
    if expected is None:
        if not found.all_fused:
            raise AssertionError(f"not every gated attention would be fused\n{found}")
    elif found.fused != expected:
        raise AssertionError(f"{found.fused} attentions would be fused, not {expected}\n{found}")
    return found


def _target(device: str | None, kinds: set[str]) -> str:
    if device not in (None, "cuda", "cpu"):
        raise ValueError(f'device={device!r}: use "cuda" or "cpu"')
    return device or ("cuda" if kinds & {"cuda", "meta"} else "cpu")


def _device_kinds(things: Any) -> set[str]:
    return {tensor.device.type for tensor in _tensors(things)}


def _tensors(things: Any) -> Iterator[Tensor]:
    """The tensors among arguments, and in the modules and methods of modules among them."""
    for thing in torch.utils._pytree.tree_leaves(things):
        owner = getattr(thing, "__self__", thing)
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(owner, nn.Module):
            yield from owner.parameters()
            yield from owner.buffers()


def _device_name(target: str) -> str:
    if target == "cpu":
        return "CPU"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ASSUMED_NAME
