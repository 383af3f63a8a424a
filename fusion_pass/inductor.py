"""The private torch APIs that the ways in rest on, each behind one small name."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch._guards
import torch._inductor.config
import torch._logging._internal
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._mode_utils import no_dispatch

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass as _InferenceBase
else:
    # torch 2.11 has no pass that is told whether the graph is for inference.
    _InferenceBase = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)

SLOT = "post_grad_custom_pre_pass"
"""The Inductor setting that holds the first passes over a post-grad graph."""

CompilationFailed = InductorError
"""What Inductor raises for a fault in a pass, a lowering or the compilation of a kernel."""


class InferenceGraphPass(_InferenceBase):
    """A pass over a post-grad graph that treats training and inference differently.

    Inductor calls it with `is_inference`, except torch 2.11's, which passes the graph alone:
    then `is_inference` is None, and `traced_for_inference()` answers.
    """

    @abstractmethod
    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        """Rewrites `graph` in place."""

    @abstractmethod
    def uuid(self) -> Any | None:
        """A picklable identity of the rewrite for Inductor's caches; None switches them off."""


_TOLD = InferenceGraphPass if _InferenceBase is CustomGraphPass else _InferenceBase


class PassChain(InferenceGraphPass):
    """Several passes in one slot, run in order. Nested chains, lists and tuples are flattened."""

    def __init__(self, *passes: object) -> None:
        self.passes = tuple(flatten(passes))

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        """Runs every pass on `graph`, with `is_inference` for those that take it."""
        if is_inference is None:
            is_inference = traced_for_inference()
        for member in self.passes:
            if isinstance(member, _TOLD):
                member(graph, is_inference)
            else:
                member(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """The members' identities in order; None if any of them has none."""
        uuids = tuple(
            member.uuid() if isinstance(member, CustomGraphPass) else None for member in self.passes
        )
        return uuids if all(uuids) else None


def flatten(slot: object) -> Iterator[Any]:
    """The passes that a slot holds: none, one, a list or tuple of them, or a `PassChain`."""
    if isinstance(slot, PassChain):
        yield from slot.passes
    elif isinstance(slot, (list, tuple)):
        for member in slot:
            yield from flatten(member)
    elif slot is not None:
        yield slot


def current_slot() -> object:
    """What Inductor's global settings hold in the slot; in this thread, except on torch 2.11."""
    return getattr(torch._inductor.config, SLOT)


def patched_slot(slot: object) -> AbstractContextManager[None]:
    """Puts `slot` into Inductor's global settings, as `current_slot` reads it, for a context."""
    patch: AbstractContextManager[None] = torch._inductor.config.patch({SLOT: slot})
    return patch


def stock_compiler(mode: str | None, options: dict[str, Any]) -> Any:
    """What `torch.compile(backend="inductor", mode=mode, options=options)` compiles graphs with.

    Its `config` is the dict of Inductor settings that the two amount to; calling it with a graph
    module and example inputs compiles with them.

    Raises:
        RuntimeError: an unknown mode or option, or an option of the wrong type.
    """
    return torch._TorchCompileInductorWrapper(mode, options, None)


@functools.cache
def triton_version() -> str | None:
    """The version of the installed triton, which is not imported for it; None without one."""
    names = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def reset_cuda_graphs() -> None:
    """Drops the CUDA graphs that Inductor recorded in this thread, if it recorded any."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()


def lack_of_compiler(fault: InductorError) -> str | None:
    """What is missing to compile C++ on this machine, and how to get it; None for other faults."""
    inner = fault.inner_exception
    if isinstance(inner, InvalidCxxCompiler):
        return (
            "no C++ compiler is found; install g++ (Debian: apt-get install g++), or set CXX to one"
        )
    if isinstance(inner, CppCompileError) and "Python.h: No such file" in inner.output:
        return "Python's headers are missing; install them (Debian: apt-get install python3-dev)"
    return None


def traced_for_inference() -> bool:
    """Whether the graph being compiled needs no gradient; True outside a compile.

    Only torch 2.11 keeps a record of it; later ones tell each pass instead.
    """
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return not getattr(metadata, "is_train", False)


def empty_fake(
    mode: FakeTensorMode, size: Sequence[Any], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """What `torch.empty` gives under `mode`, contiguous and without data, less the dispatch."""
    with no_dispatch():
        return FakeTensor(mode, torch.empty(size, dtype=dtype, device="meta"), device)


def viewed_fake(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """What `reshape` of a contiguous fake tensor gives, a view of it, less the dispatch."""
    assert isinstance(tensor, FakeTensor)
    with in_kernel_invocation_manager(tensor.fake_mode):
        viewed = tensor.view(size)
    with no_dispatch():
        return FakeTensor(tensor.fake_mode, viewed, tensor.fake_device)


def compiles_ahead_of_time() -> bool:
    """Whether the compilation under way makes an AOTInductor package."""
    from torch._inductor.virtualized import V

    # Unset, it is a placeholder that is true.
    return V.aot_compilation is True


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Puts JSON text into torch's structured trace (`TORCH_TRACE`), if one is being written."""
    torch._logging._internal.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=payload,
    )
