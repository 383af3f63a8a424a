"""The ways in: a dynamo backend found by name, and a context for code that compiles itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from fusion_pass import inductor
from fusion_pass.config import Config, configure_logging
from fusion_pass.graph_pass import GatedAttentionPass
from fusion_pass.report import fused_so_far, retract

OPTION_PREFIX = "fusion_pass."

_logger = logging.getLogger("fusion_pass")


def fusion_pass(
    gm: torch.fx.GraphModule,
    example_inputs: list[torch.Tensor],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a graph with Inductor and the fusion: `torch.compile(m, backend="fusion_pass")`.

    Options named `fusion_pass.<field>` are fields of `Config`; `mode` and the other options mean
    what they mean to Inductor. Passes that Inductor's slot already holds run before the fusion.
    Without options of its own the backend keeps a `GatedAttentionPass` that is already there.
    If Inductor fails on a graph with the operator in it, the graph is compiled again without.

    Raises:
        ConfigError: an unknown or invalid option of fusion_pass.
        RuntimeError: an unknown or invalid mode or option of Inductor.
    """
    settings, inductor_options = _split(options or {})
    config = Config.from_environment(**settings)
    configure_logging(config)
    compiler = inductor.stock_compiler(mode, inductor_options)
    before = compiler.config.get(inductor.SLOT, inductor.current_slot())
    if settings or not config.enabled or not _fusions(before):
        after = _with_fusion(before, config)
        if after is not before:
            compiler.config[inductor.SLOT] = after
    return _compile(compiler, gm, example_inputs)


# torch.compiler.reset() calls this attribute of a backend.
fusion_pass.reset = inductor.reset_cuda_graphs  # type: ignore[attr-defined]


def enable(**settings: Any) -> AbstractContextManager[None]:
    """A context in which graphs that Inductor compiles in this thread get the fusion.

    With torch 2.11, whose settings all threads share, it holds in every thread.

    For code that calls `torch.compile` itself. `settings` are fields of `Config`. A nested
    `enable` replaces the outer one's settings. What was compiled before is not compiled again.

    Inductor asks a pass once and then compiles what the pass left, so that here, as with the pass
    in Inductor's slot, a kernel that does not compile is raised; only the backend, which calls the
    compiler itself, can compile the graph again without the fusion.

    Raises:
        ConfigError: an unknown or invalid setting, at the call.
    """
    config = Config.from_environment(**settings)
    configure_logging(config)
    return _enabled(config)


@contextmanager
def _enabled(config: Config) -> Iterator[None]:
    with inductor.patched_slot(_with_fusion(inductor.current_slot(), config)):
        yield


def _compile(
    compiler: Any, gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]
) -> Callable[..., Any]:
    """Compile as `compiler` says; without the fusion where it is the fusion that cannot be."""
    slot = compiler.config.get(inductor.SLOT, inductor.current_slot())
    before = fused_so_far()
    compiled: Callable[..., Any]
    try:
        compiled = compiler(gm, example_inputs)
    except inductor.CompilationFailed as failure:
        fused = fused_so_far() - before
        if not fused or any(fusion.config.strict for fusion in _fusions(slot)):
            raise
        cause = failure.inner_exception
        message = "a graph is compiled again without the fusion: %s: %s"
        _logger.warning(message, type(cause).__name__, cause, exc_info=failure)
        retract(fused)
        compiler.config[inductor.SLOT] = _with_fusion(slot, Config(enabled=False))
        compiled = compiler(gm, example_inputs)
    return compiled


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of `Config` among `options`, without their prefix, and the options left."""
    own = {
        name.removeprefix(OPTION_PREFIX): value
        for name, value in options.items()
        if name.startswith(OPTION_PREFIX)
    }
    rest = {name: value for name, value in options.items() if not name.startswith(OPTION_PREFIX)}
    return own, rest


def _fusions(slot: object) -> list[GatedAttentionPass]:
    return [member for member in inductor.flatten(slot) if isinstance(member, GatedAttentionPass)]


def _with_fusion(slot: object, config: Config) -> object:
    """`slot` with the fusion last, in place of one that it held; without it where disabled."""
    if not config.enabled and not _fusions(slot):
        return slot
    passes = [p for p in inductor.flatten(slot) if not isinstance(p, GatedAttentionPass)]
    if config.enabled:
        passes.append(GatedAttentionPass(config))
    return inductor.PassChain(*passes) if passes else None
