"""Tracing as `torch.compile` does it, up to the slot of the pass; nothing is compiled or computed.

The only place for the private torch APIs that this rests on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.overrides import TorchFunctionMode

from fusion_pass import dynamo_state
from fusion_pass.escape import Watch
from fusion_pass.inductor import SLOT, InferenceGraphPass, PassChain
from fusion_pass.isolation import Isolation

Visit = Callable[[Graph, bool], None]
"""Called with a post-grad graph, which it may rewrite, and whether it is for inference."""

_UNKNOWN_WITHOUT_DATA = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)
_NO_LIMIT = 1 << 30


def trace(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    visit: Visit,
    *,
    dynamic: bool | None = None,
    device: torch.device | None = None,
    earlier: Sequence[object] = (),
) -> str | None:
    """Runs `function` on tensors without data, and visits every graph that would be compiled.

    Graph breaks are gone through. Whatever the tensors belong to is copied first, and so is what
    closures, globals, defaults and hooks of functions hold, so that the run changes nothing. With a
    `device` all tensors are put there. `earlier` are the passes that run in the slot before the
    visit.

    Not copied are classes, Python modules, what methods of classes other than a module's forward
    refer to, and what a closure or a global holds that cannot be: if the run leaves a tensor
    without data there, it is taken out and an error says so. Files, the network, objects with
    slots, and other state that is not in a dict, list or attribute are not watched.

    Returns:
        What stopped the run before its end, such as `.item()`; None if nothing did.

    Raises:
        TypeError: something among the arguments cannot be copied or has no form without data; the
            program left a tensor without data in what was not copied; or the caller is compiled.
    """
    reject_compiled_caller()
    _reject_what_has_no_fake((args, kwargs))
    mode, isolation = FakeTensorMode(allow_non_fake_inputs=True), Isolation()
    things = function, tuple(args), dict(kwargs)
    function, args, kwargs = without_data(things, mode, device, isolation)
    watch = Watch(isolation, mode)
    compiled: Callable[..., Any] = torch.compile(
        function, backend=_backend(visit, earlier), dynamic=dynamic
    )
    try:
        with dynamo_state.untouched(), isolation.importable(), _settings(), mode:
            compiled(*args, **kwargs)
    except _UNKNOWN_WITHOUT_DATA as unknown:
        return f"{type(unknown).__name__}: {unknown}".splitlines()[0]
    finally:
        watch.check()
    return None


def reject_compiled_caller() -> None:
    """Refuses to trace inside of a compiled function.

    Raises:
        TypeError: the caller is being compiled, or runs in a function that is.
    """
    if dynamo_state.is_compiling():
        raise TypeError(
            "explain was called inside a compiled function; call it outside, with the function "
            "that torch.compile is given"
        )


def _reject_what_has_no_fake(things: Any) -> None:
    for thing in torch.utils._pytree.tree_leaves(things):
        if isinstance(thing, torch.Generator):
            raise TypeError(
                "a torch.Generator among the arguments cannot be traced: leave it out, or draw "
                "the random numbers before and pass them"
            )
        if isinstance(thing, Tensor) and thing.is_nested:
            raise TypeError(
                "a nested tensor among the arguments cannot be traced without data: pass a padded "
                "tensor and a mask, for example of tensor.to_padded_tensor(0)"
            )


def original(function: Any) -> Any:
    """What was given to `torch.compile`, if `function` comes from it; else `function`."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch._dynamo.OptimizedModule) and function.__name__ == "__call__":
        return owner._orig_mod
    if isinstance(function, torch._dynamo.OptimizedModule):
        return function._orig_mod
    return getattr(function, "_torchdynamo_orig_callable", function)


@contextmanager
def _settings() -> Iterator[None]:
    """No graph from a cache, no limit to recompilations; nothing that computes or measures.

    Padding of matmuls is off for the latter: whether it pays Inductor finds out by running both.
    """
    with ExitStack() as stack:
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        stack.enter_context(
            torch._inductor.config.patch(freezing=False, cpp_wrapper=False, shape_padding=False)
        )
        limits = torch._dynamo.config.patch(
            recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT
        )
        stack.enter_context(limits)
        yield


def _backend(visit: Visit, earlier: Sequence[object]) -> Callable[..., Any]:
    """A dynamo backend that goes Inductor's way up to the slot, and then interprets the graph."""

    def record(
        module: GraphModule, inputs: Sequence[Any], is_inference: bool = False, **_: Any
    ) -> Any:
        _visit_post_grad(module, inputs, is_inference, visit, earlier)

        def run(arguments: list[Any]) -> Any:
            return module(*arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(module: GraphModule, inputs: list[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(module, inputs, inner_compile=record)

    return backend


class _Visitor(InferenceGraphPass):
    """The last pass in the slot: calls `visit`, and ends the post-grad passes."""

    def __init__(self, visit: Visit, is_inference: bool) -> None:
        self._visit = visit
        self._is_inference = is_inference

    def __call__(self, graph: Graph, is_inference: bool | None = None) -> None:
        """Visits `graph`.

        Raises:
            _Visited: always.
        """
        self._visit(graph, self._is_inference)
        raise _Visited

    def uuid(self) -> None:
        """None: no cache takes part."""


class _Visited(BaseException):
    """The slot has been reached. No handler of errors on the way is meant to take it."""


def _visit_post_grad(
    module: GraphModule,
    inputs: Sequence[Any],
    is_inference: bool,
    visit: Visit,
    earlier: Sequence[object],
) -> None:
    """Does what Inductor does with a graph before the slot, in it and in its subgraphs."""
    from torch._inductor.compile_fx import fake_tensor_prop
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V

    view_to_reshape(module)
    with torch.no_grad():
        mode = fake_tensor_prop(module, inputs)
    slot = PassChain(*earlier, _Visitor(visit, is_inference))
    for graph_module in reversed([m for m in module.modules() if isinstance(m, GraphModule)]):
        with V.set_fake_mode(mode), torch._inductor.config.patch({SLOT: slot}):
            try:
                post_grad_passes(graph_module, is_inference)
            except _Visited:
                graph_module.recompile()


def without_data(
    things: Any,
    mode: FakeTensorMode,
    device: torch.device | None,
    isolation: Isolation | None = None,
) -> Any:
    """A deep copy in which each tensor is fake; what shared a tensor still does.

    Functions are copied with an `isolation` alone.
    """
    try:
        with _Faking(mode, device):
            return copy.deepcopy(things) if isolation is None else isolation.copy(things)
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"what the function is given, or the module it belongs to, cannot be copied: {error}; "
            "give it without what cannot be, such as a lock, a stream or a generator"
        ) from error


class _Faking(TorchFunctionMode):
    """Makes `copy.deepcopy` of a tensor or parameter a fake tensor of `mode`."""

    def __init__(self, mode: FakeTensorMode, device: torch.device | None) -> None:
        super().__init__()
        self._mode = mode
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replaces the copy of a tensor, and the clone that the copy of a parameter makes."""
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._fake(tensor)
            return memo[id(tensor)]
        if func is torch._C.TensorBase.clone:
            return self._fake(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _fake(self, tensor: Tensor) -> Tensor:
        exists = not isinstance(tensor, FakeTensor) and not tensor.is_meta
        if exists and (self._device is None or self._device.type == tensor.device.type):
            fake: Tensor = self._mode.from_tensor(tensor, static_shapes=True)
        else:
            with self._mode:
                fake = torch.empty_strided(
                    tuple(map(int, tensor.shape)),
                    tuple(map(int, tensor.stride())),
                    dtype=tensor.dtype,
                    device=self._device or tensor.device,
                )
            if fake.is_floating_point():
                fake.requires_grad_(tensor.requires_grad)
        # What torch._dynamo.mark_dynamic and its kind have noted.
        marks = {key: mark for key, mark in vars(tensor).items() if key.startswith("_dynamo")}
        vars(fake).update(marks)
        return fake
