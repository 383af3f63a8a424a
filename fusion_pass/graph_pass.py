"""The Inductor pass: recognise, ask whether the kernel can, rewrite, report."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch.fx import Graph, Node

from fusion_pass import (
    __version__,
    description,
    eligibility,
    eligibility_opaque,
    inductor,
    lowering,
    patterns,
    profitability,
    rewrite,
    rewrite_paged,
    selfcheck,
)
from fusion_pass.config import Config, ConfigError
from fusion_pass.dump import Recorder
from fusion_pass.frame_stack import roomy
from fusion_pass.guards import Context, check_purpose
from fusion_pass.inductor import InferenceGraphPass, traced_for_inference
from fusion_pass.insertion import MisfitError
from fusion_pass.launch import Limits
from fusion_pass.paged import check
from fusion_pass.patterns import Decline, GatedOpaque, Reason, Recognition
from fusion_pass.profitability import Judge
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
        recorder = Recorder(graph) if self.config.dump else None
        visited = recorder.visited if recorder is not None else None
        report = self.rewrite(graph, is_inference, visited=visited)
        try:
            if recorder is None:
                publish(report, "", "", self.config)
            else:
                publish(report, recorder.before, recorder.after, self.config, recorder.record())
        except Exception as fault:
            if self.config.strict:
                raise
            _logger.warning("what became of a graph is not told: %s", fault, exc_info=True)

    @roomy
    def rewrite(
        self,
        graph: Graph,
        is_inference: bool | None = None,
        *,
        assumed: Limits | None = None,
        visited: Callable[[Node], None] | None = None,
    ) -> GraphReport:
        """Rewrite `graph` in place without counting, logging or dumping it.

        `assumed` is the GPU to judge for, if not the one that the tensors are on; `visited` is
        called with each node that may be an attention once it is done.
        """
        if is_inference is None:
            is_inference = traced_for_inference()
        numerics = "eager" if inductor_config.emulate_precision_casts else self.config.numerics
        context = Context(graph, self.config, is_inference, numerics, assumed)
        judge = Judge(self.config, is_assumed=assumed is not None)
        sites = []
        for node in patterns.candidates(graph):
            sites.append(self._visit(node, context, judge))
            if visited is not None:
                visited(node)
        return GraphReport(tuple(site for site in sites if site is not None))

    def uuid(self) -> Any | None:
        """What the code depends on: sources, versions, settings, GPUs, tables and adapters.

        None, which switches Inductor's caches off, where the GPUs cannot be asked for, where an
        adapter is bound to what has no fingerprint, and where a log or a dump is wanted: the pass
        does not see a graph that comes from a cache.
        """
        if self.config.log is not None or self.config.dump is not None:
            return None
        adapters = patterns.adapters()
        if any(fingerprint is None for _, fingerprint in adapters):
            return None
        gpus = visible_gpus() if "cuda" in self.config.devices else ()
        if gpus is None:
            return None
        versions = torch.__version__, inductor.triton_version()
        tables = profitability.identity(self.config, tuple(name for name, *_ in gpus))
        settings = self.config.cache_key(), check.is_asked_for()
        return source_digest(), versions, settings, gpus, tables, adapters

    def _visit(self, node: Node, context: Context, judge: Judge) -> Site | None:
        """Fuse the attention at `node`, if it is one and can be; a fault leaves the graph alone."""
        site = None
        try:
            found = patterns.recognise(node)
            if found is None:
                return None
            site = description.describe(found)
            return self._fuse(found, site, context, judge)
        except MisfitError as unknown:
            assert site is not None
            return description.declined(site, Decline(Reason.ATTENTION_LAYOUT, str(unknown)))
        except Exception as fault:
            if self.config.strict:
                raise
            _logger.warning("%s is left as it was: %s", node.name, fault, exc_info=True)
            return description.faulted(site or description.unknown(node), node, fault)

    def _fuse(self, found: Recognition, site: Site, context: Context, judge: Judge) -> Site:
        if refusal := check_purpose(context) or selfcheck.check():
            return description.declined(site, refusal)
        match = found.outcome
        if isinstance(match, Decline):
            return description.declined(site, match)
        if isinstance(match, GatedOpaque):
            return self._fuse_opaque(match, site, context)
        if refusal := eligibility.check(match, context):
            return description.declined(site, refusal)
        match = replace(match, pages=eligibility_opaque.readable_pages(match, context))
        verdict = judge(match)
        if not verdict.fuse:
            return description.declined(site, Decline(Reason.UNPROFITABLE, verdict.ground))
        plan = rewrite_paged.plan_paged(match) or rewrite.plan(match)
        if isinstance(plan, Decline):
            return description.declined(site, plan)
        lowering.register()
        if isinstance(plan, rewrite_paged.PagedPlan):
            rewrite_paged.fuse_paged(context.graph, plan, context.numerics)
            ground = f"{verdict.ground}; the pages are read where they are"
            return replace(site, fused=True, ground=ground)
        config = eligibility.kernel_config(match, context)
        fused = description.fused(site, match, verdict.ground, config)
        rewrite.fuse(context.graph, plan, context.numerics)
        return fused

    def _fuse_opaque(self, match: GatedOpaque, site: Site, context: Context) -> Site:
        if refusal := eligibility_opaque.check_opaque(match, context):
            return description.declined(site, refusal)
        if self.config.policy == "never":
            return description.declined(site, Decline(Reason.UNPROFITABLE, 'the policy is "never"'))
        plan = rewrite_paged.plan_opaque(match)
        if isinstance(plan, Decline):
            return description.declined(site, plan)
        lowering.register()
        rewrite_paged.fuse_opaque(context.graph, plan, context.numerics)
        return replace(site, fused=True, ground="its operator has a gated form")


@functools.cache
def source_digest() -> str:
    """A hash of the version and of every file of fusion_pass and fusion_pass.patterns."""
    digest = hashlib.sha256(__version__.encode())
    for root in _packages():
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                name = path.relative_to(root).as_posix()
                digest.update(b"\0" + name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _packages() -> Iterable[Path]:
    for module in (rewrite, patterns):
        assert module.__file__ is not None
        yield Path(module.__file__).parent


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
