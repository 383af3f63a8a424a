"""The Inductor pass: recognise, ask whether the kernel can, rewrite, report."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch.fx import Graph, Node

from fusion_pass import __version__, eligibility, inductor, lowering, patterns, rewrite
from fusion_pass.config import Config, ConfigError
from fusion_pass.inductor import InferenceGraphPass, traced_for_inference
from fusion_pass.patterns import Decline, GatedAttention, Reason, Recognition
from fusion_pass.patterns.trace import has_tensor, tensor
from fusion_pass.report import GraphReport, Site, publish

_logger = logging.getLogger("fusion_pass")


class GatedAttentionPass(InferenceGraphPass):
    """Fuses every gated attention of a post-grad graph that the kernel can run.

    For stock Inductor: `options={"post_grad_custom_pre_pass": GatedAttentionPass()}`. Settings are
    a `Config` or its fields as keywords; without either they come from the environment.

    Raises:
        ConfigError: an unknown or invalid setting, or both a Config and keywords.
    """

    def __init__(self, config: Config | None = None, **settings: Any) -> None:
        if config is not None and settings:
            raise ConfigError("give GatedAttentionPass either a Config or settings, not both")
        self.config = config or Config.from_environment(**settings)

    def __call__(self, graph: Graph, is_inference: bool | None = None) -> None:
        """Rewrite `graph` in place; what does not match stays as it is.

        `is_inference` says that no gradient will be needed; None asks the compilation under way.
        """
        if not self.config.enabled:
            return
        candidates = [node for node in graph.nodes if patterns.may_be_attention(node)]
        before = str(graph) if self.config.dump else ""
        if is_inference is None:
            is_inference = traced_for_inference()
        numerics = "eager" if inductor_config.emulate_precision_casts else self.config.numerics
        context = eligibility.Context(graph, self.config, is_inference, numerics)
        sites = [self._visit(graph, node, context) for node in candidates]
        report = GraphReport(tuple(site for site in sites if site is not None))
        after = str(graph) if self.config.dump else ""
        publish(report, before, after, self.config)

    def uuid(self) -> Any | None:
        """What the rewrite depends on: sources, torch and triton, settings, GPUs and adapters.

        None, which switches Inductor's caches off, where the GPUs cannot be asked for, and where
        a log or a dump is wanted: the pass does not see a graph that comes from a cache.
        """
        if self.config.log is not None or self.config.dump is not None:
            return None
        gpus = visible_gpus() if "cuda" in self.config.devices else ()
        if gpus is None:
            return None
        versions = torch.__version__, inductor.triton_version()
        adapters = patterns.adapters()
        return source_digest(), versions, self.config.cache_key(), gpus, adapters

    def _visit(self, graph: Graph, node: Node, context: eligibility.Context) -> Site | None:
        """Fuse the attention at `node`, if it is one and can be; a fault leaves the graph alone."""
        site = _unknown(node)
        try:
            found = patterns.recognise(node)
            if found is None:
                return None
            site = _describe(found)
            refusal = self._fuse(graph, found, context)
        except Exception as fault:
            if self.config.strict:
                raise
            _logger.warning("%s is left as it was: %s", node.name, fault, exc_info=True)
            refusal = Decline(Reason.INTERNAL, f"{type(fault).__name__}: {fault}")
        if refusal is None:
            return replace(site, fused=True)
        return replace(site, reason=refusal.reason.value, detail=refusal.detail)

    def _fuse(
        self, graph: Graph, found: Recognition, context: eligibility.Context
    ) -> Decline | None:
        if refusal := eligibility.check_purpose(context):
            return refusal
        match = found.outcome
        if isinstance(match, Decline):
            return match
        if refusal := eligibility.check(match, context):
            return refusal
        plan = rewrite.plan(match)
        if isinstance(plan, Decline):
            return plan
        lowering.register()
        rewrite.fuse(graph, plan, context.numerics)
        return None


def _unknown(node: Node) -> Site:
    """An attention of which nothing is known but its node."""
    target = str(node.target)
    return Site(node.name, target, False, None, "", "", "", "", None, None, None)


def _describe(found: Recognition) -> Site:
    """The attention and its operands before any rewriting, not fused so far."""
    attention = found.attention
    match = found.outcome if isinstance(found.outcome, GatedAttention) else None
    stored = match.key_value if match else None
    return Site(
        attention=found.node.name,
        producer=attention.producer if attention else str(found.node.target),
        fused=False,
        reason=None,
        detail="",
        query=_spell(attention.query.node) if attention else "",
        key=_spell(stored.key.node if stored else attention.key.node) if attention else "",
        value=_spell(stored.value.node if stored else attention.value.node) if attention else "",
        gate=_spell(match.gate.sigmoid.argument.node) if match else None,
        mask=", ".join(map(_spell, match.mask.inputs)) if match and match.mask else None,
        source=_source(found.node),
    )


def _spell(node: Node) -> str:
    if not has_tensor(node):
        return ""
    value = tensor(node)
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}[{', '.join(str(size) for size in value.shape)}]"


def _source(node: Node) -> str | None:
    """The innermost line of the user's code that calls the attention, as `file:line`."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return None
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not lines:
        return None
    file, _, rest = lines[-1].removeprefix("File ").partition(", line ")
    return f"{file.strip(chr(34))}:{rest.partition(',')[0]}"


@functools.cache
def source_digest() -> str:
    """A hash of the version and of every source file of fusion_pass and fusion_pass.patterns."""
    digest = hashlib.sha256(__version__.encode())
    for path in sorted(_sources()):
        digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _sources() -> Iterable[Path]:
    for module in (rewrite, patterns):
        assert module.__file__ is not None
        yield from Path(module.__file__).parent.rglob("*.py")


@functools.cache
def visible_gpus() -> tuple[tuple[str, int, int, int], ...] | None:
    """Name, capability and multiprocessors of every GPU that a graph may run on.

    None if CUDA cannot be asked, as in a process forked from one that used it.
    """
    if not torch.cuda.is_available():
        return ()
    try:
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except RuntimeError:
        return None
    return tuple((gpu.name, gpu.major, gpu.minor, gpu.multi_processor_count) for gpu in found)
