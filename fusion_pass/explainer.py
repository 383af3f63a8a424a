"""Asking what the pass would do to a program, without compiling or running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from fusion_pass import description, inductor, profitability
from fusion_pass.ambiguity import unambiguous
from fusion_pass.config import Config
from fusion_pass.explanation import SWITCHED_OFF, ExplainedGraph, ExplainedSite, Explanation
from fusion_pass.graph_pass import GatedAttentionPass
from fusion_pass.launch import Limits
from fusion_pass.patterns import Reason, unregistered
from fusion_pass.provenance import frames
from fusion_pass.report import GraphReport, Site
from fusion_pass.tracing import original, trace

ASSUMED_NAME = "NVIDIA H200"
_CPU_NAME = "CPU"
ASSUMED = Limits("cuda", 90, 132, 232448)
"""The GPU that a program is judged for on a machine without one."""

_ASSUMED_GPU = (
    f"There is no GPU here: judged for an {ASSUMED_NAME} (sm_{ASSUMED.arch}, "
    f"{ASSUMED.multiprocessors} SMs, {ASSUMED.shared_memory} bytes of shared memory a block)."
)
_CPU_PRODUCER = (
    "Traced on CPU tensors: the producer of an SDPA shows as the CPU's; a GPU has its own."
)
_OF_SDPA = ("cpu-flash", profitability.DECOMPOSED)
_CPU = (
    "Judged for the CPU, on which nothing is rewritten unless asked for; "
    'device="cuda" (--device cuda) judges for a GPU.'
)
_JUDGE_FOR_GPU = 'pass device="cuda" to judge for a GPU'
_OFF = "The pass is switched off (FUSION_PASS=0 or enabled=False): nothing is fused"
_SECOND_TRACE = (
    "A gradient may be needed: what is told of those attentions, and what becomes of them without "
    "gradients, is from a second trace under torch.no_grad()."
)
_NO_SECOND_TRACE = "A gradient may be needed, and a trace under torch.no_grad() fails: "
_ALREADY_GATED = (
    torch.ops.fusion_pass.gated_decode_attention.default,
    torch.ops.fusion_pass.gated_paged_decode_attention.default,
)
_NO_GRAPH = "Nothing was compiled: no graph was traced."


@unambiguous()
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
    nothing is computed, compiled to machine code, counted or changed. Copied are the arguments, and
    what closures, globals, defaults and hooks of functions hold. Gradient mode counts as in a
    compile: call it under torch.no_grad() where you would call the compiled function so.

    Classes, and what their methods other than the module's forward refer to, are not copied: if the
    program leaves a tensor of the trace there, in an attribute, list or dict, it is put back and an
    error names it. Sets, deques, slots, files and what C code holds are not watched. A function or
    inner module with graph breaks that was compiled before may be compiled anew at its next call.

    Args:
        function: a module, function or method, compiled already or not.
        args, kwargs: as for a call of it; tensors may be real, fake or on "meta".
        device: "cuda" or "cpu", the device the program is meant for. By default the one that its
            tensors are on, and "cuda" for those on "meta". For "cuda" on a machine without a GPU
            an H200 is assumed, and the report says so.
        dynamic: as for torch.compile.
        config: settings of the pass; by default those of the environment.

    A parameter of `function` that is called as one of the last three must be given by position or
    bound: `explain(functools.partial(function, device=...), ...)`.

    Raises:
        TypeError: `device`, `dynamic` or `config` is given by name, and `function` has a parameter
            of that name; something among the arguments cannot be copied, or is a nested tensor or a
            torch.Generator; the program leaves tensors in what is only watched, which is put back;
            or the call is inside a compiled function.
        ValueError: `device` is neither "cuda" nor "cpu".
    """
    if not callable(function):
        raise TypeError(f"explain needs a function or a module, not {type(function).__name__}")
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config must be a fusion_pass.Config, not {type(config).__name__}")
    function = original(function)
    kinds = _device_kinds((function, args, kwargs))
    target = _target(device, kinds)
    fusion = GatedAttentionPass(config)
    assumed = ASSUMED if target == "cuda" and not torch.cuda.is_available() else None
    place = "cpu" if assumed else device or ("cuda" if "meta" in kinds else None)
    slot = list(inductor.flatten(inductor.current_slot()))

    remarks: dict[str, None] = {}

    def look() -> tuple[list[ExplainedGraph], str | None]:
        graphs: list[ExplainedGraph] = []

        def visit(graph: Graph, is_inference: bool) -> None:
            remarks.update(dict.fromkeys(_remarks(graph)))
            report = fusion.rewrite(graph, is_inference, assumed=assumed)
            graphs.append(_explained(graph, report))

        stopped = trace(
            function,
            args,
            kwargs,
            visit,
            dynamic=dynamic,
            device=None if place is None else torch.device(place),
            earlier=[member for member in slot if not isinstance(member, GatedAttentionPass)],
        )
        return graphs, stopped

    graphs, stopped = look()
    graphs, second = _look_again(graphs, look)
    is_unasked = target == "cpu" and "cpu" not in fusion.config.devices
    notes = (
        *(() if fusion.config.enabled else (f"{_OFF}.",)),
        *second,
        *((_ASSUMED_GPU,) if assumed else ()),
        *((_CPU_PRODUCER,) if assumed and _may_have_sdpa(graphs) else ()),
        *((_CPU,) if is_unasked else ()),
        *(() if graphs else (_NO_GRAPH,)),
        *remarks,
    )
    if device is None and is_unasked:
        graphs = _each_site(graphs, _advise_device)
    if not fusion.config.enabled:
        graphs = _each_site(graphs, _switch_off)
    found = tuple(graph for graph in graphs if graph.sites)
    return Explanation(
        found, _device_name(target), assumed is not None, notes, stopped, fusion.config.enabled
    )


@unambiguous("device", "dynamic", "config")
def assert_fused(
    function: Callable[..., Any], /, *args: Any, expected: int | None = None, **kwargs: Any
) -> Explanation:
    """Asserts that the pass would fuse `expected` attentions, or at least one and every gated one.

    Args:
        function, args, kwargs: as for `explain`.
        expected: how many attentions must fuse, in all graphs together.

    Raises:
        TypeError: as for `explain`, and for `expected` too; or `expected` is no int.
        AssertionError: with the table that `explain` prints; always if the pass is switched off.
    """
    if expected is not None and (isinstance(expected, bool) or not isinstance(expected, int)):
        raise TypeError(f"expected must be a number of attentions, not {expected!r}")
    found = explain(function, *args, **kwargs)
    is_met = found.all_fused if expected is None else found.fused == expected
    if is_met and found.enabled:
        return found
    failed = "not every gated attention would be fused"
    if expected is not None:
        failed = f"attentions that would be fused: {found.fused}, not {expected}"
    if not found.enabled:
        failed = _OFF
    elif found.device == _CPU_NAME and kwargs.get("device") is None:
        failed += f"; {_JUDGE_FOR_GPU}"
    raise AssertionError(f"{failed}\n{found}")


def _may_have_sdpa(graphs: Sequence[ExplainedGraph]) -> bool:
    """Whether an attention is what a CPU makes of SDPA, though it may be spelled out."""
    return any(site.producer in _OF_SDPA for graph in graphs for site in graph.sites)


def _remarks(graph: Graph) -> Iterator[str]:
    """What is told of operators that are no attention to the pass."""
    for operator in unregistered(graph):
        wrapped = ", wrapped so that it returns its result," if operator._schema.is_mutable else ""
        yield (
            f"{operator} is multiplied by a sigmoid, and nobody registered it: if it is an "
            f"attention, fusion_pass.register_attention makes it known{wrapped} to the pass."
        )
    for operator in _ALREADY_GATED:
        if graph.find_nodes(op="call_function", target=operator):
            yield f"{operator} is called by the program itself: nothing is left to fuse in it."


def _explained(graph: Graph, report: GraphReport) -> ExplainedGraph:
    """`report` with what the rewritten graph tells besides."""
    nodes = {node.name: node for node in graph.nodes}
    return ExplainedGraph(tuple(_explained_site(nodes, site) for site in report.sites))


def _explained_site(nodes: dict[str, Node], site: Site) -> ExplainedSite:
    told = ExplainedSite(**vars(site), assumed=site.ground.startswith(profitability.ASSUMED))
    if site.reason != Reason.NOT_SIGMOID.value:
        return told
    product = description.other_product(nodes[site.attention])
    calls = () if product is None else frames(product)
    return replace(told, gate_source=calls[-1].partition(" in ")[0] if calls else None)


def _each_site(
    graphs: Sequence[ExplainedGraph], change: Callable[[ExplainedSite], ExplainedSite]
) -> list[ExplainedGraph]:
    return [ExplainedGraph(tuple(map(change, graph.sites))) for graph in graphs]


def _look_again(
    graphs: list[ExplainedGraph], look: Callable[[], tuple[list[ExplainedGraph], str | None]]
) -> tuple[list[ExplainedGraph], tuple[str, ...]]:
    """`graphs` with a second opinion, without gradients, on what they are declined for; notes."""
    if not any(site.reason == Reason.TRAINING.value for graph in graphs for site in graph.sites):
        return graphs, ()
    try:
        with torch.no_grad():
            without, _ = look()
    except Exception as error:
        return graphs, (f"{_NO_SECOND_TRACE}{type(error).__name__}: {error}".splitlines()[0],)
    # Training keeps other results of an attention, so that its node may be another.
    waiting: dict[object, list[ExplainedSite]] = {}
    for site in (site for graph in without for site in graph.sites):
        waiting.setdefault((site.module, site.frames), []).append(site)

    def judged_again(site: ExplainedSite) -> ExplainedSite:
        same = waiting.get((site.module, site.frames))
        if site.reason != Reason.TRAINING.value or not same:
            return site
        return _instead(same.pop(0), site)

    return _each_site(graphs, judged_again), (_SECOND_TRACE,)


def _instead(otherwise: ExplainedSite, site: ExplainedSite) -> ExplainedSite:
    """What `otherwise` tells of an attention, declined as `site` is."""
    return replace(
        otherwise,
        attention=site.attention,
        fused=False,
        reason=site.reason,
        detail=site.detail,
        expected=site.expected,
        remedy=site.remedy,
        ground="",
        kernel=None,
        assumed=False,
        otherwise=otherwise if otherwise.reason != site.reason else None,
    )


def _switch_off(site: ExplainedSite) -> ExplainedSite:
    """`site`, which a pass that is switched off does not fuse."""
    if not site.fused:
        return site
    declined = replace(
        site,
        reason=SWITCHED_OFF,
        detail="FUSION_PASS=0 or enabled=False",
        expected="a pass that is switched on",
        remedy="Unset FUSION_PASS, and do not set enabled=False.",
    )
    return _instead(site, declined)


def _advise_device(site: ExplainedSite) -> ExplainedSite:
    """`site` with the remedy for tensors that are on the CPU for the explanation alone."""
    if site.reason == Reason.DEVICE.value:
        return replace(site, remedy=f"{_JUDGE_FOR_GPU}. {site.remedy}")
    if site.otherwise is None:
        return site
    return replace(site, otherwise=_advise_device(site.otherwise))


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
        return _CPU_NAME
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ASSUMED_NAME
