"""`sigmoid_gate_mul`: bits, strides, broadcasts, gradient, errors; Inductor's own kernel."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_pass import GatedAttentionPass, gate_mul_launch
from fusion_pass.gate_mul import sigmoid_gate_mul
from fusion_pass.inductor import SLOT
from fusion_pass.overlap import may_share, overlaps, overlaps_itself, span

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=generator)).to(dtype)


LAYOUTS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "flat": lambda: (numbers(1000), numbers(1000, seed=1)),
    "chunked-gate": lambda: (
        numbers(2, 3, 4 * 16),
        numbers(2, 3, 4, 32, seed=1).chunk(2, -1)[1].reshape(2, 3, 64),
    ),
    "strided-gate": lambda: (numbers(2, 3, 4, 16), numbers(2, 3, 4, 32, seed=1)[..., 16:]),
    "transposed-x": lambda: (numbers(2, 4, 3, 16).transpose(1, 2), numbers(2, 3, 4, 16, seed=1)),
    "gate-a-head": lambda: (numbers(2, 3, 4, 16), numbers(2, 3, 4, 1, seed=1)),
    "gate-a-channel": lambda: (numbers(2, 3, 4, 16), numbers(16, seed=1)),
    "wider-gate": lambda: (numbers(1, 5), numbers(7, 1, seed=1)),
    "expanded-x": lambda: (numbers(1, 5).expand(6, 5), numbers(6, 5, seed=1)),
    "every-other": lambda: (numbers(40, 6)[::2, ::3], numbers(20, 4, seed=1)[:, ::2]),
    "empty": lambda: (numbers(0, 4), numbers(1, 4, seed=1)),
    "no-dimensions": lambda: (numbers(), numbers(seed=1)),
    "six-uneven": lambda: (
        numbers(*[4] * 6)[::2, ::2, ::2, ::2, ::2, ::2],
        numbers(*[3] * 6, seed=1)[:2, :2, :2, :2, :2, :2],
    ),
}


def eager(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


def negated(view: Tensor) -> Tensor:
    """The negative of a tensor, of which torch keeps a bit instead of computing it."""
    result = torch.complex(view, view).conj().imag
    assert result.is_neg()
    return result


def tangent(function: Callable[..., Tensor], x: Tensor, gate: Tensor) -> Tensor:
    with forward_ad.dual_level():
        result = function(forward_ad.make_dual(x, gate), forward_ad.make_dual(gate, x))
        return forward_ad.unpack_dual(result).tangent


# Calls of `sigmoid_gate_mul` or `eager` in which a kernel would miss a part.
INDIRECT: dict[str, Callable[[Callable[..., Tensor], Tensor, Tensor], Tensor]] = {
    "negated-x": lambda function, x, gate: function(negated(x), gate),
    "negated-gate": lambda function, x, gate: function(x, negated(gate)),
    "forward-mode": tangent,
    "jvp": lambda function, x, gate: torch.func.jvp(function, (x, gate), (gate, x))[1],
    "vmap": lambda function, x, gate: torch.func.vmap(function)(x, gate),
    "grad": lambda function, x, gate: torch.func.grad(lambda x: function(x, gate).sum())(x),
    "functionalize": lambda function, x, gate: torch.func.functionalize(function)(x, gate),
    "make-fx": lambda function, x, gate: make_fx(lambda *args: function(*args))(x, x)(x, gate),
    "trace": lambda function, x, gate: torch.jit.trace(
        lambda *args: function(*args), (x, x), check_trace=False
    )(x, gate),
}


@pytest.mark.parametrize("call", INDIRECT)
def test_what_a_kernel_would_miss(call: str) -> None:
    x, gate = numbers(3, 4), numbers(3, 4, seed=1)
    found, expected = (INDIRECT[call](function, x, gate) for function in (sigmoid_gate_mul, eager))
    assert torch.equal(found, expected)


def check(x: Tensor, gate: Tensor) -> Tensor:
    """The product, equal to eager torch's in bits, shape, strides and dtype; inputs unmodified."""
    copies = x.clone(), gate.clone()
    found, expected = sigmoid_gate_mul(x, gate), eager(x, gate)
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.equal(x, copies[0])
    assert torch.equal(gate, copies[1])
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    x, gate = LAYOUTS[layout]()
    check(x, gate)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("gate_dtype", DTYPES)
def test_dtypes_promote_and_round_as_in_eager(x_dtype: Any, gate_dtype: Any) -> None:
    check(numbers(64, dtype=x_dtype), numbers(64, seed=1, dtype=gate_dtype))


@pytest.mark.parametrize("layout", ["flat", "strided-gate", "gate-a-head", "transposed-x"])
def test_out(layout: str) -> None:
    x, gate = LAYOUTS[layout]()
    out = torch.full([2 * n for n in x.shape], torch.nan)[tuple(slice(n) for n in x.shape)]
    assert sigmoid_gate_mul(x, gate, out=out) is out
    assert torch.equal(out, eager(x, gate))


def test_in_place() -> None:
    x, gate = LAYOUTS["gate-a-head"]()
    expected = eager(x, gate)
    assert torch.equal(sigmoid_gate_mul(x, gate, out=x), expected)


def test_halves_of_one_buffer() -> None:
    """The gated output takes the place of the query in the projection that held both."""
    fused, x = numbers(3, 4, 32), numbers(3, 4, 16, seed=1)
    query, gate = fused.chunk(2, -1)
    expected = eager(x, gate)
    sigmoid_gate_mul(x, gate, out=query)
    assert torch.equal(fused[..., :16], expected)


@pytest.mark.parametrize("shapes", [((3, 4), (3, 4)), ((3, 4), (3, 1)), ((1, 4), (3, 4))])
def test_gradient(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    x, gate = (
        numbers(*shape, seed=seed, dtype=torch.float64).requires_grad_()
        for seed, shape in enumerate(shapes)
    )
    assert torch.autograd.gradcheck(sigmoid_gate_mul, (x, gate))
    assert torch.autograd.gradgradcheck(sigmoid_gate_mul, (x, gate))


SHAPES = {
    "same": ((3, 40), (3, 40)),
    "gate-a-row": ((3, 40), (3, 1)),
    "gate-a-column": ((3, 40), (40,)),
    "wider-gate": ((40,), (3, 40)),
    "gate-of-no-dimensions": ((3, 40), ()),
    "x-of-no-dimensions": ((), (3, 40)),
}


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("gate_dtype", DTYPES)
def test_gradients_are_those_of_torch_in_bits(
    x_dtype: torch.dtype, gate_dtype: torch.dtype, shapes: str
) -> None:
    x_shape, gate_shape = SHAPES[shapes]
    for asked in ((True, True), (True, False), (False, True)):
        x = numbers(*x_shape, dtype=x_dtype).requires_grad_(asked[0])
        gate = numbers(*gate_shape, seed=1, dtype=gate_dtype).requires_grad_(asked[1])
        inputs = [operand for operand in (x, gate) if operand.requires_grad]
        found, expected = (
            torch.autograd.grad(product, inputs, numbers(3, 40, seed=2, dtype=product.dtype))
            for product in (sigmoid_gate_mul(x, gate), eager(x, gate))
        )
        for own, other in zip(found, expected, strict=True):
            assert own.dtype is other.dtype
            assert torch.equal(own, other)


def test_a_batch_of_gradients() -> None:
    x, gate = (numbers(3, 4, seed=seed).requires_grad_() for seed in range(2))
    found, expected = (
        torch.autograd.grad(
            function(x, gate), (x, gate), numbers(5, 3, 4, seed=2), is_grads_batched=True
        )
        for function in (sigmoid_gate_mul, eager)
    )
    assert all(map(torch.equal, found, expected))


def test_x_is_kept_only_for_the_gradient_of_the_gate() -> None:
    leaf, gate = numbers(4).requires_grad_(), numbers(4, seed=1)
    for operand in (gate, gate.clone().requires_grad_()):
        x = 1 * leaf
        product = sigmoid_gate_mul(x, operand)
        with torch.no_grad():
            x.zero_()
        if operand.requires_grad:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()
        else:
            (found,) = torch.autograd.grad(product.sum(), leaf)
            assert torch.equal(found, torch.sigmoid(gate))


def test_the_gate_may_not_change_before_the_backward_pass() -> None:
    x, gate = numbers(4).requires_grad_(), numbers(4, seed=1)
    product = sigmoid_gate_mul(x, gate)
    gate.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_gradient_with_a_gate_from_inference_mode() -> None:
    with torch.inference_mode():
        gate = numbers(4, seed=1)
    x = numbers(4).requires_grad_()
    sigmoid_gate_mul(x, gate).sum().backward()
    assert torch.equal(x.grad, torch.sigmoid(gate))


def test_a_gradient_of_one_input_alone() -> None:
    x, gate = numbers(4).requires_grad_(), numbers(4, seed=1)
    sigmoid_gate_mul(x, gate).sum().backward()
    assert torch.equal(x.grad, torch.sigmoid(gate))


def test_under_torch_compile_it_is_the_plain_expression() -> None:
    x, gate = LAYOUTS["strided-gate"]()
    compiled = torch.compile(sigmoid_gate_mul, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, gate), eager(x, gate))


@pytest.mark.parametrize("dynamic", [False, True])
def test_out_under_torch_compile(dynamic: bool) -> None:
    x, gate = numbers(3, 4, dtype=torch.bfloat16), numbers(3, 1, seed=1)
    out = torch.full((3, 4), torch.nan)
    compiled = torch.compile(sigmoid_gate_mul, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert compiled(x, gate, out=out) is out
    assert torch.equal(out, eager(x, gate))


X = torch.zeros(3, 4)
BAD: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((X, 2.0), {}, TypeError, "gate must be a tensor"),
    ((X.long(), X), {}, TypeError, "cast it"),
    ((X, X.to(torch.complex64)), {}, TypeError, "cast it"),
    ((X, torch.zeros(3)), {}, ValueError, "does not broadcast"),
    ((X, X.to("meta")), {}, ValueError, "move one"),
    ((X, X), {"out": 1}, TypeError, "out must be a tensor"),
    ((X, X), {"out": X.half()}, TypeError, "out is torch.float16"),
    ((X, X), {"out": torch.zeros(4, 3)}, ValueError, "out has shape"),
    ((X, X), {"out": torch.zeros(1, 4).expand(3, 4)}, ValueError, "written twice"),
    ((X, X), {"out": X.to("meta")}, ValueError, "out is on meta"),
]


@pytest.mark.parametrize(("args", "keywords", "error", "message"), BAD)
def test_bad_input(
    args: Any, keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        sigmoid_gate_mul(*args, **keywords)


@pytest.mark.parametrize(
    ("args", "keywords", "error", "message"),
    [case for case in BAD if "broadcast" not in case[3] and "twice" not in case[3]],
)
def test_bad_input_under_torch_compile(
    args: Any, keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        torch.compile(sigmoid_gate_mul, backend="aot_eager")(*args, **keywords)


def test_fake_tensors_have_no_addresses_to_overlap() -> None:
    with FakeTensorMode():
        x, gate, out = torch.empty(3, 4), torch.empty(3, 1), torch.empty(3, 4)
        assert sigmoid_gate_mul(x, gate, out=out) is out
        assert sigmoid_gate_mul(x, gate).shape == (3, 4)


def test_an_out_over_the_inputs_at_other_places() -> None:
    """As if the product were computed first; views that only interleave are written directly."""
    views = {
        "shifted": lambda base: (base[0:8:2], base[1:9:2], base[2:10:2]),
        "transposed": lambda base: (
            base[:9].view(3, 3),
            base[9:18].view(3, 3),
            base[:9].view(3, 3).T,
        ),
        "interleaved": lambda base: tuple(base[:18].view(6, 3).unbind(1)),
    }
    for name, take in views.items():
        base = torch.linspace(-3, 3, 20)
        x, gate, out = take(base)
        expected = x * torch.sigmoid(gate)
        assert may_share(out, x) is (name != "interleaved")
        assert torch.equal(sigmoid_gate_mul(x, gate, out=out), expected), name


def test_an_out_that_lies_over_itself() -> None:
    out = torch.zeros(20).as_strided((3, 4), (1, 1))
    with pytest.raises(ValueError, match="written twice"):
        sigmoid_gate_mul(torch.zeros(3, 4), torch.zeros(3, 4), out=out)


EMPTY: dict[str, Callable[[], Tensor]] = {
    "overlapping-strides": lambda: torch.empty(2, 0, 1) * 4,
    "expanded": lambda: torch.empty(1, 0).expand(3, 0),
    "inside": lambda: torch.zeros(4, 4)[1:3, 2:2],
    "dense": lambda: torch.empty(0),
}


@pytest.mark.parametrize("case", EMPTY)
def test_an_out_without_elements(case: str) -> None:
    out = EMPTY[case]()
    for x in (out, torch.empty(out.shape)):
        assert sigmoid_gate_mul(x, x, out=out) is out
    assert not overlaps_itself(out)
    first, last = span(out)
    assert first == last


def test_nothing_without_elements_overlaps() -> None:
    buffer = torch.zeros(8)
    for empty in (buffer[3:3], buffer[2:4].expand(0, 2), buffer.view(2, 4)[:, 1:1]):
        for pair in ((empty, buffer), (buffer, empty), (empty, empty)):
            assert not may_share(*pair)
            assert not overlaps(*pair)


def test_a_shifted_out() -> None:
    buffer = torch.zeros(10)
    with pytest.raises(ValueError, match="out overlaps x"):
        sigmoid_gate_mul(buffer[:8], torch.zeros(8), out=buffer[2:])


def test_no_gradient_into_out() -> None:
    x = torch.zeros(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="leave out away"):
        sigmoid_gate_mul(x, x, out=torch.zeros(4))
    with torch.no_grad():
        sigmoid_gate_mul(x, x, out=torch.zeros(4))


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("layout", ["flat", "strided-gate", "every-other"])
def test_compiles_ahead_of_time(target: str, layout: str) -> None:
    pytest.importorskip("triton")
    from tests.test_aot import POINTERS, TARGETS, compile_for

    x, gate = (operand.bfloat16() for operand in LAYOUTS[layout]())
    out = torch.empty(x.shape, dtype=x.dtype)
    step = gate_mul_launch.launch_of(x, gate, out, gate_mul_launch.merge(x.shape, (x, gate, out)))
    pointers = dict.fromkeys(("x", "gate", "output"), POINTERS[torch.bfloat16])
    step = dataclasses.replace(step, arguments={**step.arguments, **pointers})
    assert compile_for(TARGETS[target], step).metadata.shared == 0


@pytest.mark.parametrize(("tokens", "width"), [(64, "b32"), (65, "v4.b32")])
def test_a_gate_that_is_half_of_a_projection_is_read_in_vectors(tokens: int, width: str) -> None:
    """Of two elements, so that all threads have some, or of eight where there are many."""
    pytest.importorskip("triton")
    from tests.test_aot import POINTERS, TARGETS, compile_for

    x, gate = numbers(tokens, 16, 256).bfloat16(), numbers(tokens, 16, 512).bfloat16()[..., 256:]
    step = gate_mul_launch.launch_of(x, gate, x, gate_mul_launch.merge(x.shape, (x, gate, x)))
    pointers = dict.fromkeys(("x", "gate", "output"), POINTERS[torch.bfloat16])
    step = dataclasses.replace(step, arguments={**step.arguments, **pointers})
    text = compile_for(TARGETS["sm_90"], step).asm["ptx"]
    assert text.count(f"ld.global.{width}") == 2
    assert text.count(f"st.global.{width}") == 1


class TestOpaque:
    """An attention that nobody registered: Inductor makes one kernel of its gate."""

    @pytest.fixture(autouse=True)
    def _engine(self) -> Iterator[None]:
        with torch.library._scoped_library("fusion_pass_opaque_tests", "DEF") as library:
            library.define("attend(Tensor query) -> Tensor")
            library.impl("attend", torch.empty_like, "Meta")
            library.impl("attend", torch.clone, "CPU")
            yield

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("arrangement", ["half", "flat", "transposed"])
    def test_one_kernel_reads_the_gate_where_it_is(
        self, dtype: torch.dtype, arrangement: str
    ) -> None:
        def model(query: Tensor, fused: Tensor) -> Tensor:
            output = torch.ops.fusion_pass_opaque_tests.attend(query)
            if arrangement == "transposed":
                return output * torch.sigmoid(fused.view(32, 4, 2).permute(2, 1, 0))
            gate = fused.view(2, 4, 2, 16)[:, :, 1]
            if arrangement == "half":
                gate = fused.view(2, 4, 32)[..., 16:]
            return (output.view(2, -1) * torch.sigmoid(gate.reshape(2, -1))).view(2, 4, -1)

        width = 32 if arrangement == "transposed" else 16
        query, fused = numbers(2, 4, width, dtype=dtype), numbers(2, 128, seed=1, dtype=dtype)
        if arrangement == "transposed":
            fused = numbers(256, seed=1, dtype=dtype)
        with torch.no_grad():
            options: dict[str, Any] = {SLOT: GatedAttentionPass(devices=("cpu",), strict=True)}
            codes = get_code(torch.compile(model, options=options), query, fused)
        (code,) = (code for code in codes if "def call(" in code)
        assert "fused" not in counters["fusion_pass"]
        assert code.count("torch.ops.fusion_pass_opaque_tests.attend.default(") == 1
        assert code.count("async_compile.cpp_pybinding(") == 1
        (arguments,) = re.findall(r"\n +cpp_fused_\w+\((.*)\)", code)
        # The gate is read from the graph's input, and the product takes the output's place.
        assert "arg1_1" in arguments
        assert "empty_strided_cpu((" not in code
