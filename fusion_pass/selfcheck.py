"""Whether a torch newer than those tested still has the private APIs that the fusion rests on."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_pass import __version__, inductor, lowering
from fusion_pass.config import warn_once
from fusion_pass.launch import Launch
from fusion_pass.patterns import Decline, Reason

OLDEST_TESTED, NEWEST_TESTED = (2, 11), (2, 15)


def check() -> Decline | None:
    """Why nothing is fused on this torch, or None.

    A torch that was tested is not looked at. A newer one warns once, and is declined if any of
    `problems()` is found, before a graph is touched.
    """
    if release(torch.__version__) <= NEWEST_TESTED:
        return None
    found = problems()
    tested = f"{_spell(OLDEST_TESTED)} to {_spell(NEWEST_TESTED)}"
    outcome = "nothing is fused, for " + found[0] if found else "its self-check found no fault"
    warn_once(
        f"fusion_pass {__version__} was tested with torch {tested}, and this is "
        f"{torch.__version__}: {outcome}"
    )
    return Decline(Reason.TORCH, f"torch {torch.__version__}: {found[0]}") if found else None


def release(version: str) -> tuple[int, int]:
    """The first two numbers of a version such as "2.15.0.dev20261129+cu130"."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


@functools.cache
def problems() -> tuple[str, ...]:
    """What the fusion needs of torch and does not find, in words; empty where all is there."""
    found = []
    for probe in _PROBES:
        try:
            probe()
        except Exception as fault:
            what = (probe.__doc__ or "").strip(".").lower()
            found.append(f"{what} changed ({type(fault).__name__}: {fault})")
    return tuple(found)


def _spell(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _takes(function: Callable[..., object], *arguments: object, **keywords: object) -> None:
    inspect.signature(function).bind(*arguments, **keywords)


def _has(owner: object, *names: str) -> None:
    for name in names:
        getattr(owner, name)


def _slot() -> None:
    """The slot for custom passes."""
    with inductor.patched_slot(inductor.PassChain()):
        if not isinstance(inductor.current_slot(), inductor.PassChain):
            raise TypeError("it does not hold what is put into it")


def _compiler() -> None:
    """The compiler behind torch.compile."""
    compiler = inductor.stock_compiler(None, {"max_fusion_size": 7})
    _takes(compiler, None, [])
    if compiler.config.get("max_fusion_size") != 7:
        raise TypeError("it does not keep its options")


def _context() -> None:
    """The context of a compilation."""
    inductor.traced_for_inference()
    inductor.compiles_ahead_of_time()


def _fakes() -> None:
    """The tensors without data that a graph is traced with."""
    fake = inductor.empty_fake(FakeTensorMode(), (2, 3), torch.float32, torch.device("cpu"))
    if (fake.shape, fake.stride(), fake.device.type) != ((2, 3), (3, 1), "cpu"):
        raise TypeError("one that is made is not as asked for")


def _registry() -> None:
    """The registry of lowerings."""
    from torch._inductor import lowering as lowerings

    lowering.register()
    if lowering.OPERATOR not in lowerings.lowerings:
        raise KeyError("a lowering is registered and not found")
    _takes(lowerings.fallback_handler, lowering.OPERATOR, add_to_fallback_set=False)


def _buffers() -> None:
    """The buffers of Inductor's IR."""
    from torch._inductor import ir
    from torch._inductor.graph import GraphLowering

    _takes(ir.ExternKernel.realize_input, None)
    _takes(ir.InputsKernel.unwrap_storage_for_input, None)
    _takes(ir.TensorBox.create, None)
    _has(ir.TensorBox, "get_device_or_error")
    cpu, sizes = torch.device("cpu"), [sympy.Integer(1)]
    nothing = ir.Pointwise(device=cpu, dtype=torch.float32, inner_fn=_takes, ranges=[0])
    layout = ir.FixedLayout(cpu, torch.float32, sizes, ir.FlexibleLayout.contiguous_strides(sizes))
    _takes(ir.ComputedBuffer, name=None, layout=layout, data=nothing)
    _takes(GraphLowering.register_buffer, None, None)
    _takes(GraphLowering.register_operation, None, None)
    for kind in (ir.Buffer, ir.ReinterpretView):
        _has(kind, "freeze_layout", "get_size", "get_stride", "get_dtype")


def _kernels() -> None:
    """The launch of a user's Triton kernel."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.ir import UserDefinedTritonKernel

    _takes(kernel_side_table.add_kernel, None)
    _takes(PythonWrapperCodegen.define_kernel, None, "name", "source")
    _takes(UserDefinedTritonKernel.codegen, None, None)
    _takes(
        UserDefinedTritonKernel,
        kernel_idx=0,
        grid=[(1, 1, 1)],
        tma_descriptor_metadata={},
        kernel_args={},
        **lowering.keywords_since_214(),
    )


def _analysis() -> None:
    """The analysis of what a user's Triton kernel writes."""
    from torch._higher_order_ops import triton_kernel_wrap
    from torch._inductor.ir import UserDefinedTritonKernel

    name = lowering.analysis_name()
    _takes(getattr(triton_kernel_wrap, name), None, {}, {})
    # Not its source, to find which Python parses the whole module, in 130 ms.
    if name not in UserDefinedTritonKernel.__init__.__code__.co_names:
        raise TypeError("a launch does not ask for it")
    lowering.accesses(Launch(None, (), {}, 1, 1, "probe", ("output",)))


_PROBES: tuple[Callable[[], None], ...] = (
    _slot,
    _compiler,
    _context,
    _fakes,
    _registry,
    _buffers,
    _kernels,
    _analysis,
)
