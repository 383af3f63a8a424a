"""The Inductor lowerings: each operator becomes Triton launches, with no Python dispatch.

The only place for the private Inductor APIs that lowering rests on.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import sympy
import torch

from fusion_pass import launch
from fusion_pass.frame_stack import roomy
from fusion_pass.launch import Launch, Operand
from fusion_pass.operand import static
from fusion_pass.paged import check as paged_check
from fusion_pass.paged import launch as paged_launch
from fusion_pass.paged import ops as paged_ops

if TYPE_CHECKING:
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.ir import TensorBox

OPERATOR = torch.ops.fusion_pass.gated_decode_attention.default
PAGED_OPERATORS = {
    torch.ops.fusion_pass.paged_decode_attention.default: paged_ops.NAME,
    torch.ops.fusion_pass.gated_paged_decode_attention.default: paged_ops.GATED_NAME,
}


@functools.cache
def register() -> None:
    """Tell Inductor how to lower the operators. Idempotent."""
    from torch._inductor.lowering import register_lowering

    register_lowering(OPERATOR, type_promotion_kind=None)(_lower)
    for operator in PAGED_OPERATORS:
        lower = functools.partial(_lower_paged, operator)
        functools.update_wrapper(lower, _lower_paged)
        register_lowering(operator, type_promotion_kind=None)(lower)


@roomy
def _lower(
    query: TensorBox,
    key: TensorBox,
    value: TensorBox,
    gate: TensorBox,
    mask: TensorBox | None,
    sinks: TensorBox | None = None,
    *,
    dtype: torch.dtype | None = None,
    **modes: Any,
) -> Any:
    device = query.get_device_or_error()
    if device.type != "cuda":
        return _call_operator(OPERATOR, query, key, value, gate, mask, sinks, dtype=dtype, **modes)
    q, k, v = _operand(query), _operand(key), _operand(value)
    m = None if mask is None else _operand(mask)
    config = launch.choose(launch.problem_of(q, k, v, m), launch.device_limits(device))
    batch, heads, tokens, _ = q.size
    output = _empty((batch, tokens, heads, v.size[3]), dtype or q.dtype, device)
    fill = launch.fills(m, modes["mask_fill"])
    scratch = _scratch(launch.scratch_sizes(config, q, v, fill=fill), device)
    for step in launch.launches(
        config,
        query=q,
        key=k,
        value=v,
        gate=_operand(gate),
        mask=m,
        sinks=None if sinks is None else _operand(sinks),
        output=output,
        **scratch,
        input_precision=launch.float32_precision(q.dtype, device),
        **modes,
    ):
        _emit(step)
    return output


def _lower_paged(operator: torch._ops.OpOverload, *arguments: Any, **keywords: Any) -> Any:
    boxes, modes = paged_ops.BINDINGS[PAGED_OPERATORS[operator]](*arguments, **keywords)
    device = boxes.query.get_device_or_error()
    fixed = (*boxes.query.get_size()[1:], *boxes.v_cache.get_size()[1:])
    # Only the numbers of tokens, requests and pages may change under one kernel.
    dynamic = any(static(size) is None for size in fixed)
    if device.type != "cuda" or dynamic or paged_check.is_asked_for():
        return _call_operator(operator, *arguments, **keywords)
    operands = boxes.map(_operand)
    config = launch.choose(paged_launch.problem_of(operands, modes), launch.device_limits(device))
    dtype = modes.dtype or operands.query.dtype
    output = _empty(paged_launch.output_size(operands), dtype, device)
    for step in paged_launch.launches(
        config,
        operands,
        modes,
        output=output,
        **_scratch(paged_launch.scratch_sizes(config, operands), device),
        input_precision=launch.float32_precision(operands.query.dtype, device),
    ):
        _emit(step)
    return output


def _call_operator(operator: torch._ops.OpOverload, *operands: Any, **modes: Any) -> Any:
    """A call of the operator itself from the generated code, where the kernels cannot be used."""
    from torch._inductor.lowering import fallback_handler

    return fallback_handler(operator, add_to_fallback_set=False)(*operands, **modes)


def _operand(box: TensorBox) -> Operand:
    """`box` in memory, with the strides that it really gets: its layout cannot change any more.

    They are not padded, for which Inductor looks longer at an operand than all else takes here.
    """
    from torch._inductor.ir import ExternKernel, FlexibleLayout, InputsKernel, TensorBox

    stored = InputsKernel.unwrap_storage_for_input(ExternKernel.realize_input(box))
    if isinstance(stored.get_layout(), FlexibleLayout):
        stored.freeze_layout_with_exact_strides(stored.get_stride())
    return Operand(
        TensorBox.create(stored),
        tuple(stored.get_size()),
        tuple(stored.get_stride()),
        stored.get_dtype(),
    )


def _scratch(sizes: dict[str, tuple[Any, ...]], device: torch.device) -> dict[str, Any]:
    """Uninitialised float32 buffers of these sizes, by name."""
    return {name: _empty(size, torch.float32, device) for name, size in sizes.items()}


def _empty(size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Any:
    """An uninitialised contiguous buffer, for which no kernel runs.

    The lowering of `aten.empty_strided` makes the same in several times the time: it first makes a
    buffer that a kernel fills, and then takes the kernel's work away.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    sizes = [sympy.Integer(n) if isinstance(n, int) else sympy.expand(n) for n in size]
    strides = ir.FlexibleLayout.contiguous_strides(sizes)
    layout = ir.FixedLayout(device, dtype, sizes, strides)
    buffer = _uninitialised()(name=None, layout=layout, inputs=[])
    buffer.name = V.graph.register_buffer(buffer)
    V.graph.register_operation(buffer)
    return ir.TensorBox.create(buffer)


@functools.cache
def _uninitialised() -> Any:
    """A buffer that nothing computes, and that is allocated all the same."""
    from torch._inductor.ir import NopKernel

    class Uninitialised(NopKernel):
        def should_allocate(self) -> bool:
            return True

        def get_free_symbol_uses(self, unbacked_only: bool = False) -> Any:
            # It must not be allocated before its size is known.
            return self.layout.get_free_symbol_uses(unbacked_only)

    return Uninitialised


def _emit(step: Launch) -> None:
    """Add one kernel launch to the graph being lowered."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    with _writes_known(step):
        node = _labelled_kernel()(
            kernel_idx=kernel_side_table.add_kernel(
                _configured(step.kernel, step.num_warps, step.num_stages)
            ),
            grid=[step.grid],
            tma_descriptor_metadata={},
            kernel_args=step.arguments,
            **keywords_since_214(),
        )
    node.launch = step


_analysis = threading.Lock()


@contextmanager
def _writes_known(step: Launch) -> Iterator[None]:
    """Tell Inductor what the launch writes, which it would compile the kernel to find out.

    That costs it more than all the rest of a launch: 70 ms a kernel, for every layer anew.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    name = analysis_name()
    with _analysis:
        # Read under the lock: what another thread has put there would be put back for good.
        analyse = getattr(triton_kernel_wrap, name)

        def known(kernel: Any, *rest: Any, **keywords: Any) -> Any:
            # Another thread's kernel may come here.
            return accesses(step) if kernel is step.kernel else analyse(kernel, *rest, **keywords)

        setattr(triton_kernel_wrap, name, known)
        try:
            yield
        finally:
            setattr(triton_kernel_wrap, name, analyse)


def analysis_name() -> str:
    """The function that Inductor asks which arguments a user's kernel accesses."""
    from torch._higher_order_ops import triton_kernel_wrap

    since_212 = "identify_accessed_tensors"
    return since_212 if hasattr(triton_kernel_wrap, since_212) else "identify_mutated_tensors"


def accesses(step: Launch) -> Any:
    """What Inductor's analysis of the launch returns, see `analysis_name`."""
    if analysis_name() == "identify_mutated_tensors":
        return list(step.writes)
    from torch._higher_order_ops.triton_kernel_wrap import TensorAccesses
    from torch._inductor.dependencies import ReadWrites, StarDep
    from torch._inductor.ir import TensorBox
    from torch.utils._ordered_set import OrderedSet

    tensors = [name for name, value in step.arguments.items() if isinstance(value, TensorBox)]
    return TensorAccesses(
        ReadWrites(
            reads=OrderedSet(StarDep(name) for name in tensors if name not in step.writes),
            writes=OrderedSet(StarDep(name) for name in step.writes),
            index_exprs=OrderedSet(),
        ),
        can_fuse_epilogue=False,
    )


@functools.cache
def keywords_since_214() -> dict[str, Any]:
    """What `UserDefinedTritonKernel` takes besides from torch 2.14 on: names of launch options."""
    from torch._inductor.ir import UserDefinedTritonKernel

    known = inspect.signature(UserDefinedTritonKernel).parameters
    return {"launch_kwargs": ()} if "launch_kwargs" in known else {}


@functools.cache
def _labelled_kernel() -> Any:
    """A kernel that a profile knows by its launch's label, and that may be launched dependently.

    Inductor calls a user's kernel by the name in its source. It compiles with `launch_pdl` where a
    kernel's metadata asks for it, but offers no way to ask in a user's kernel.
    """
    from torch._inductor.ir import UserDefinedTritonKernel

    class LabelledTritonKernel(UserDefinedTritonKernel):
        launch: Launch

        def codegen(self, wrapper: PythonWrapperCodegen) -> None:
            define = wrapper.define_kernel

            def define_labelled(name: str, source: str, *rest: Any, **options: Any) -> None:
                define(name, _labelled(source, self.launch), *rest, **options)

            wrapper.define_kernel = define_labelled  # type: ignore[method-assign, assignment]
            try:
                super().codegen(wrapper)
            finally:
                del wrapper.define_kernel

    return LabelledTritonKernel


def _labelled(source: str, step: Launch) -> str:
    """The definition of a kernel under its label; with `launch_pdl` if it is dependent."""
    source = re.sub(rf"\b{step.kernel.__name__}\b", step.label, source)
    if step.dependent:
        source = source.replace("triton_meta={", "triton_meta={'launch_pdl': True, ", 1)
    return source


_configurations: dict[tuple[int, int, int], Any] = {}


def _configured(kernel: Any, num_warps: int, num_stages: int) -> Any:
    """`kernel` with its warps and stages as an autotuner's only choice.

    Given as kernel arguments, Inductor drops both without a word.
    """
    import triton

    # By identity: a kernel's own hash is that of its source and of all that it calls.
    key = id(kernel), num_warps, num_stages
    if key not in _configurations:
        config = triton.Config({}, num_warps=num_warps, num_stages=num_stages)
        _configurations[key] = triton.autotune(configs=[config], key=[])(kernel)
    return _configurations[key]
