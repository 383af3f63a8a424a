"""The paged operators without their kernels: semantics, schema, fake, validation and checks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fusion_pass
from bench import operands as bench_operands
from bench import paged_operands
from bench.geometry import Geometry
from fusion_pass import lowering
from fusion_pass.paged import check, reference
from fusion_pass.paged.operands import PagedModes, PagedOperands

OP = torch.ops.fusion_pass.paged_decode_attention.default
GATED_OP = torch.ops.fusion_pass.gated_paged_decode_attention.default
CPU = torch.device("cpu")
PAGE_SIZE, PAGES, HEADS = 3, 9, 4
LENGTHS = (7, 0, 6)
TOKENS = (2, 1, 3)


def operands(dtype: torch.dtype = torch.float32, tokens: int = 3) -> dict[str, Tensor]:
    """Three requests of 7, 0 and 6 tokens, by the names of the public function."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    return {
        "query": random(tokens, HEADS, 16),
        "k_cache": random(PAGES, PAGE_SIZE, 2, 16),
        "v_cache": random(PAGES, PAGE_SIZE, 2, 8),
        "kv_indptr": torch.tensor([0, 3, 3, 5], dtype=torch.int32),
        "kv_indices": torch.tensor([4, 0, 7, 2, 8, 10**6], dtype=torch.int32),
        "kv_lengths": torch.tensor(LENGTHS, dtype=torch.int32),
        "gate": random(tokens, HEADS, 8),
    }


def with_tokens(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    offsets = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    return {**operands(dtype, 6), "query_indptr": offsets, "max_query_tokens": 3}


def as_table(given: dict[str, Any]) -> dict[str, Any]:
    table = torch.tensor([[4, 0, 7], [10**6, -1, -5], [2, 8, 10**6]], dtype=torch.int32)
    return {**given, "kv_indptr": None, "kv_indices": table}


def brute_force(given: dict[str, Any]) -> Tensor:
    """Token after token and head after head, in float64, from the definition alone."""
    query, gate = given["query"].double(), given["gate"].double()
    pages = ([4, 0, 7], [], [2, 8])
    counts = TOKENS if "query_indptr" in given else (1, 1, 1)
    result = torch.zeros(len(query), HEADS, 8, dtype=torch.float64)
    token = 0
    for request, count in enumerate(counts):
        for place in range(count):
            position = LENGTHS[request] - count + place
            first = max(0, position + 1 - given["window"]) if given.get("window") else 0
            for head in range(HEADS):
                sink = given["sinks"][head].item() if "sinks" in given else -math.inf
                total, weighted = math.exp(sink), torch.zeros(8, dtype=torch.float64)
                for key in range(first, position + 1):
                    row = pages[request][key // PAGE_SIZE], key % PAGE_SIZE, head // 2
                    logit = 0.3 * query[token, head].dot(given["k_cache"][row].double())
                    total += math.exp(logit)
                    weighted += math.exp(logit) * given["v_cache"][row].double()
                if total:
                    result[token, head] = weighted / total * gate[token, head].sigmoid()
            token += 1
    return result


def test_all_tokens_are_computed_unless_fewer_are_asked_for() -> None:
    given = with_tokens()
    most = given.pop("max_query_tokens")
    found = fusion_pass.paged_decode_attention(**given)
    assert torch.equal(found, fusion_pass.paged_decode_attention(**given, max_query_tokens=most))
    message = "request 0 2 query tokens, but max_query_tokens is 1"
    with pytest.raises(IndexError, match=message):
        fusion_pass.paged_decode_attention(**given, max_query_tokens=1, check_indices=True)


@pytest.mark.parametrize("form", [lambda given: given, as_table], ids=["csr", "table"])
@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("build", [operands, with_tokens], ids=["one", "several"])
def test_equals_brute_force(
    build: Callable[[], dict[str, Any]],
    sinks: bool,
    window: int,
    form: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    given = {**form(build()), "window": window}
    if sinks:
        given["sinks"] = torch.tensor([-math.inf, -1.0, 0.0, 3.0])
    expected = brute_force(given)
    modes = {"scale": 0.3, "window": window, "numerics": "compiled"}
    if "max_query_tokens" in given:
        modes["max_query_tokens"] = given["max_query_tokens"]
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    exact = reference.paged_decode_attention(
        PagedOperands(**tensors), PagedModes(**modes), compute_dtype=torch.float64
    )
    torch.testing.assert_close(exact, expected)
    result = fusion_pass.paged_decode_attention(**given, scale=0.3)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_zero_length_request_and_tokens_of_no_request_give_zeros() -> None:
    result = fusion_pass.paged_decode_attention(**operands())
    assert (result[1] == 0).all()
    given = with_tokens()
    given["query_indptr"] = torch.tensor([0, 1, 1, 4])
    result = fusion_pass.paged_decode_attention(**given)
    assert (result[4:] == 0).all()
    assert (result[:4] != 0).any(dim=(1, 2)).all()


def test_the_first_of_more_tokens_than_keys_give_zeros() -> None:
    given = {**with_tokens(), "kv_lengths": torch.tensor([7, 0, 2])}
    result = fusion_pass.paged_decode_attention(**given)
    # The last request has three tokens and two keys: its first token comes before both.
    assert (result[3] == 0).all()
    assert (result[4:] != 0).any(dim=(1, 2)).all()


@pytest.mark.parametrize("length", [2**31, 2**32 + 5, 2**63 - 1, -1, -(2**31) - 1, -(2**63)])
def test_lengths_of_64_bits(length: int) -> None:
    given = {**operands(), "kv_lengths": torch.tensor([7, 0, length])}
    result = fusion_pass.paged_decode_attention(**given)
    given["kv_lengths"][2] = 6 if length > 0 else 0
    assert torch.equal(result, fusion_pass.paged_decode_attention(**given))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_is_plain_attention_then_the_gate_in_torch(dtype: torch.dtype) -> None:
    given = operands(dtype)
    gate = given["gate"]
    plain = fusion_pass.paged_decode_attention(**{**given, "gate": None})
    sigmoid = gate.float().sigmoid()
    for numerics, expected in (
        ("eager", plain * sigmoid.to(dtype)),
        ("compiled", (plain.float() * sigmoid).to(dtype)),
    ):
        result = fusion_pass.paged_decode_attention(**given, numerics=numerics)
        assert torch.equal(result, expected)
        assert result.dtype == dtype


@pytest.mark.parametrize("place", [(), (0,), (0, 0), (0, 0, 0), (0, slice(None), slice(1))])
def test_a_gate_of_fewer_dimensions_broadcasts(place: tuple[Any, ...]) -> None:
    given = operands()
    gate = given["gate"][place]
    whole = gate.expand(given["gate"].shape)
    expected = fusion_pass.paged_decode_attention(**{**given, "gate": whole})
    result = fusion_pass.paged_decode_attention(**{**given, "gate": gate})
    # A CPU's sigmoid of one number and of several may differ in the last bit.
    torch.testing.assert_close(result, expected)


def test_layouts_are_the_same_cache() -> None:
    given = operands()
    expected = fusion_pass.paged_decode_attention(**given)
    head_major = {n: given[n].transpose(1, 2).contiguous() for n in ("k_cache", "v_cache")}
    result = fusion_pass.paged_decode_attention(**{**given, **head_major}, layout="HND")
    assert torch.equal(result, expected)
    slots = (given["kv_indices"][:5, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()
    keep = [*range(7), *range(9, 15)]
    by_token = {
        "k_cache": given["k_cache"].flatten(0, 1),
        "v_cache": given["v_cache"].flatten(0, 1),
        "kv_indices": slots[keep],
        "kv_indptr": torch.tensor([0, 7, 7, 13]),
        "kv_lengths": None,
    }
    assert torch.equal(fusion_pass.paged_decode_attention(**{**given, **by_token}), expected)


def test_default_scale_is_that_of_attention() -> None:
    given = operands()
    expected = fusion_pass.paged_decode_attention(**given, scale=0.25)
    assert torch.equal(fusion_pass.paged_decode_attention(**given), expected)


def positional(given: dict[str, Any], gated: bool) -> tuple[Any, ...]:
    names = ["query", "k_cache", "v_cache", "kv_indptr", "kv_indices"]
    names += ["gate"] if gated else []
    names += ["kv_lengths", "query_indptr", "sinks"]
    return tuple(given.get(name) for name in names)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_opcheck(dtype: torch.dtype, gated: bool) -> None:
    op = GATED_OP if gated else OP
    torch.library.opcheck(op, positional(operands(dtype), gated), {"scale": 0.3})
    given = {**as_table(with_tokens(dtype)), "sinks": torch.ones(HEADS)}
    modes = {"scale": 0.3, "max_query_tokens": 3, "window": 4}
    if gated:
        modes |= {"numerics": "eager", "sigmoid_dtype": torch.float16, "dtype": torch.float32}
    torch.library.opcheck(op, positional(given, gated), modes)


@pytest.mark.parametrize("op", [OP, GATED_OP])
def test_tags_and_schema(op: Any) -> None:
    assert torch.Tag.flexible_layout in op.tags
    assert torch.Tag.pt2_compliant_tag in op.tags
    assert not op._schema.is_mutable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_gives_the_real_layout(dtype: torch.dtype) -> None:
    given = with_tokens(dtype)
    given["query"] = given["query"].transpose(0, 1).contiguous().transpose(0, 1)
    arguments = positional(given, True)
    for output in (None, torch.float16):
        modes = {"scale": 0.3, "max_query_tokens": 3, "dtype": output}
        real = GATED_OP(*arguments, **modes)
        fake = GATED_OP(*(None if x is None else x.to("meta") for x in arguments), **modes)
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
        assert real.dtype == (output or dtype)


def test_backward_is_refused() -> None:
    given = operands()
    given["query"].requires_grad_()
    for gate in (given["gate"], None):
        result = fusion_pass.paged_decode_attention(**{**given, "gate": gate})
        with pytest.raises(RuntimeError, match="inference only"):
            result.sum().backward()


def changed(**changes: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {**operands(), **changes}


def derived(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[], dict[str, Any]]:
    return lambda: {**operands(), name: change(operands()[name])}


INT = torch.int32
INVALID: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "no tensor": (changed(kv_indptr=[0, 3, 3, 5]), TypeError, "kv_indptr must be a tensor"),
    "no cache": (changed(k_cache=None), TypeError, "k_cache must be a tensor"),
    "no values": (changed(v_cache=None), TypeError, "v_cache must be a tensor, not NoneType"),
    "no query": (changed(query=None), TypeError, "query must be a tensor, not NoneType"),
    "no indices": (changed(kv_indices=None), TypeError, "kv_indices must be a tensor, not None"),
    "scale of no width": (
        lambda: {**operands(), **{n: operands()[n][..., :0] for n in ("query", "k_cache")}},
        ValueError,
        "query has head dimension 0: give scale",
    ),
    "no scale": (changed(scale="a"), TypeError, "scale must be a number or None, not str"),
    "layout": (changed(layout="BSND"), ValueError, "layout must be one of"),
    "query rank": (derived("query", lambda t: t[0]), ValueError, "query must have 3"),
    "cache rank": (derived("v_cache", lambda t: t[0, 0]), ValueError, "v_cache must have 3 or 4"),
    "gate rank": (derived("gate", lambda t: t[None]), ValueError, "gate must have 3"),
    "table for CSR": (
        changed(kv_indices=torch.zeros(3, 2, dtype=INT)),
        ValueError,
        "kv_indices must have 1 dim.*block table",
    ),
    "CSR for a table": (changed(kv_indptr=None), ValueError, "kv_indices must have 2 dim"),
    "query dtype": (derived("query", Tensor.double), TypeError, "query must be"),
    "mixed dtypes": (derived("v_cache", Tensor.half), TypeError, "v_cache is"),
    "gate dtype": (derived("gate", Tensor.long), TypeError, "gate must be"),
    "index dtype": (derived("kv_indices", Tensor.float), TypeError, "kv_indices must be int32"),
    "lengths dtype": (derived("kv_lengths", Tensor.short), TypeError, "kv_lengths must be int32"),
    "sinks dtype": (changed(sinks=torch.ones(HEADS, dtype=INT)), TypeError, "sinks must be"),
    "output dtype": (changed(dtype=torch.float64), TypeError, "^dtype must be"),
    "device": (derived("kv_indices", lambda t: t.to("meta")), ValueError, "kv_indices is on meta"),
    "heads": (derived("query", lambda t: t[:, :3]), ValueError, "no multiple"),
    "head_dim": (derived("k_cache", lambda t: t[..., :8]), ValueError, "k_cache has"),
    "caches differ": (derived("v_cache", lambda t: t[1:]), ValueError, "v_cache has"),
    "empty pages": (
        lambda: {**operands(), **{n: operands()[n][:, :0] for n in ("k_cache", "v_cache")}},
        ValueError,
        "pages of no token",
    ),
    "gate shape": (derived("gate", lambda t: t[..., :3]), ValueError, "gate of shape"),
    "shape of a gate with fewer dimensions": (
        derived("gate", lambda t: t.flatten(1)),
        ValueError,
        rf"gate of shape \(3, \d+\) does not broadcast to \(3, {HEADS}, ",
    ),
    "sinks shape": (changed(sinks=torch.ones(3)), ValueError, "sinks has"),
    "lengths shape": (
        derived("kv_lengths", lambda t: t[:2]),
        ValueError,
        "kv_indptr delimits 3 requests, and kv_lengths has 2 entries: give one a request",
    ),
    "table of fewer rows": (
        lambda: {**as_table(operands()), "kv_indices": as_table(operands())["kv_indices"][:2]},
        ValueError,
        "kv_indices, a block table, has 2 rows, and kv_lengths has 3 entries: give one a request",
    ),
    "empty indptr": (derived("kv_indptr", lambda t: t[:0]), ValueError, "kv_indptr is empty"),
    "table without lengths": (
        lambda: {**as_table(operands()), "kv_lengths": None},
        ValueError,
        "needs kv_lengths",
    ),
    "tokens": (
        lambda: operands(tokens=2),
        ValueError,
        "2 tokens for 3 requests",
    ),
    "several tokens": (changed(max_query_tokens=2), ValueError, "needs query_indptr"),
    "no tokens": (changed(max_query_tokens=0), ValueError, "1 to 16, not 0"),
    "too many tokens": (
        lambda: {**with_tokens(), "max_query_tokens": 17},
        ValueError,
        "max_query_tokens must be 1 to 16, not 17",
    ),
    "part of a token": (changed(max_query_tokens=2.5), TypeError, "max_query_tokens must be an in"),
    "query_indptr": (
        lambda: {**with_tokens(), "query_indptr": torch.zeros(3, dtype=INT)},
        ValueError,
        "one entry more",
    ),
    "window": (changed(window=-1), ValueError, "window must be"),
    "wide window": (changed(window=2**70), ValueError, "window must be .* below 2\\*\\*63"),
    "part of a window": (changed(window=1.5), TypeError, "window must be an integer, not float"),
    "window of None": (changed(window=None), TypeError, "window must be an integer, not NoneType"),
    "window in a tensor": (changed(window=torch.tensor(2.5)), TypeError, "window .* give its item"),
    "integral window in a tensor": (changed(window=torch.tensor(2)), TypeError, "not Tensor; give"),
    "window that is a truth": (changed(window=True), TypeError, "window must be an integer, not b"),
    "windows": (changed(window=np.array([2])), TypeError, "window must be an integer, not ndarray"),
    "tokens in a tensor": (
        changed(max_query_tokens=torch.tensor(1)),
        TypeError,
        "max_query_tokens must be an integer, not Tensor; give its item",
    ),
    "scale in a tensor": (changed(scale=torch.tensor(0.3)), TypeError, "scale .* give its item"),
    "scales in a tensor": (changed(scale=torch.ones(2)), TypeError, "scale .* not Tensor; give"),
    "scales": (changed(scale=np.ones(2)), TypeError, "scale must be a number or None, not ndarray"),
    "infinite scale": (changed(scale=math.inf), ValueError, "give a finite number"),
    "scale of NaN": (changed(scale=math.nan), ValueError, "give a finite number"),
    "huge scale": (changed(scale=10**400), ValueError, "scale is infinite .* give a finite"),
    "huge fraction": (changed(scale=Fraction(10**400)), ValueError, "scale is infinite"),
    "numerics": (changed(numerics="fast"), ValueError, "numerics must be one of"),
    "numerics without a gate": (changed(gate=None, numerics="eager"), ValueError, "give a gate"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_operands_are_named(case: str) -> None:
    build, error, message = INVALID[case]
    with pytest.raises(error, match=message):
        fusion_pass.paged_decode_attention(**build())


@pytest.mark.parametrize("gated", [False, True])
def test_the_operators_validate_too(gated: bool) -> None:
    arguments = positional(operands(), gated)
    wrong = (arguments[0], arguments[1][1:], *arguments[2:])
    for operation in (wrong, tuple(None if x is None else x.to("meta") for x in wrong)):
        with pytest.raises(ValueError, match="v_cache has"):
            (GATED_OP if gated else OP)(*operation, scale=0.3)


@pytest.mark.parametrize("op", [OP, GATED_OP])
@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_the_operators_refuse_a_scale_that_is_not_finite(op: Any, scale: float) -> None:
    arguments = positional(operands(), op is GATED_OP)
    for given in (arguments, tuple(None if x is None else x.to("meta") for x in arguments)):
        with pytest.raises(ValueError, match="give a finite number"):
            op(*given, scale=scale)


@pytest.mark.parametrize(
    "modes",
    [
        {"window": np.int64(2), "max_query_tokens": np.int32(1)},
        {"scale": np.float32(0.25), "window": 2},
        {"scale": Fraction(1, 4), "window": 2},
    ],
)
def test_numbers_of_other_types(modes: dict[str, Any]) -> None:
    expected = fusion_pass.paged_decode_attention(**operands(), scale=0.25, window=2)
    assert torch.equal(fusion_pass.paged_decode_attention(**operands(), **modes), expected)


def test_symbolic_numbers() -> None:
    """A window and a scale that the compiler does not know."""
    given = operands()

    def attend(window: int, scale: float) -> Tensor:
        return fusion_pass.paged_decode_attention(**given, window=window, scale=scale)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for modes in ((2, 0.5), (3, 0.25)):
        assert torch.equal(compiled(*modes), attend(*modes))


def page(entry: int, number: int) -> dict[str, Any]:
    given = operands()
    given["kv_indices"][entry] = number
    return given


def lengths(*values: int) -> dict[str, Any]:
    return {**operands(), "kv_lengths": torch.tensor(values)}


def offsets(name: str, *values: int) -> dict[str, Any]:
    return {**with_tokens(), name: torch.tensor(values)}


OUTSIDE: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "page": (lambda: page(4, 9), r"request 2 page 9 as entry 1, but the cache has 9 pages"),
    "negative page": (lambda: page(0, -1), "request 0 page -1 as entry 0"),
    "length": (lambda: lengths(7, 0, 7), r"kv_lengths\[2\] is 7, but request 2 has 2 pages of 3"),
    "negative length": (lambda: lengths(-1, 0, 6), r"kv_lengths\[0\] is -1"),
    "table length": (lambda: as_table(lengths(7, 0, 10)), "request 2 has 3 pages"),
    "table page": (lambda: as_table(lengths(7, 1, 6)), "request 1 page 1000000 as entry 0"),
    "indptr": (lambda: offsets("kv_indptr", 0, 3, 2, 5), "kv_indptr gives request 1 .* 3 to 2"),
    "capacity": (lambda: offsets("kv_indptr", 0, 3, 3, 7), "kv_indices has 6 entries"),
    "tokens": (lambda: offsets("query_indptr", 0, 2, 3, 7), "query has 6 tokens"),
    "many tokens": (lambda: offsets("query_indptr", 0, 2, 2, 6), "request 2 4 query tokens"),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_numbers_that_point_outside_are_named(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, message = OUTSIDE[case]
    with pytest.raises(IndexError, match=message):
        fusion_pass.paged_decode_attention(**build(), check_indices=True)
    monkeypatch.setenv(check.VARIABLE, "1")
    with pytest.raises(IndexError, match=message):
        fusion_pass.paged_decode_attention(**build())


@pytest.mark.parametrize("build", [operands, with_tokens, lambda: as_table(operands())])
def test_checks_leave_what_is_right_alone(
    build: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fusion_pass.paged_decode_attention(**build())
    monkeypatch.setenv(check.VARIABLE, "on")
    result = fusion_pass.paged_decode_attention(**build(), check_indices=True)
    assert torch.equal(result, expected)


def test_dynamic_shapes_add_no_guard() -> None:
    compiled = torch.compile(
        lambda *args: GATED_OP(*args, scale=0.3), backend="aot_eager", fullgraph=True
    )
    arguments = positional(operands(), True)
    for index in (0, 3, 4, 5, 6):  # query, kv_indptr, kv_indices, gate, kv_lengths
        torch._dynamo.mark_dynamic(arguments[index], 0)
    assert torch.equal(compiled(*arguments), GATED_OP(*arguments, scale=0.3))
    more = operands(tokens=4)
    more["kv_indptr"] = torch.tensor([0, 3, 3, 5, 6], dtype=INT)
    more["kv_indices"] = torch.tensor([4, 0, 7, 2, 8, 1, 5, 10**6], dtype=INT)
    more["kv_lengths"] = torch.tensor([*LENGTHS, 2], dtype=INT)
    arguments = positional(more, True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(compiled(*arguments), GATED_OP(*arguments, scale=0.3))


@pytest.mark.parametrize("gated", [False, True])
def test_inductor_calls_the_operator_on_a_cpu(gated: bool) -> None:
    lowering.register()
    given = operands()
    given["gate"] = given["gate"] if gated else None

    def step(cache: Tensor, new: Tensor) -> Tensor:
        cache = cache.index_put((torch.tensor([4]), torch.tensor([1])), new)
        return fusion_pass.paged_decode_attention(**{**given, "k_cache": cache}) + 1

    new = torch.full((1, 2, 16), 2.0)
    result = torch.compile(step, fullgraph=True)(given["k_cache"], new)
    torch.testing.assert_close(result, step(given["k_cache"], new))
    assert not torch.equal(result, fusion_pass.paged_decode_attention(**given) + 1)


def test_operands_are_left_as_they_are() -> None:
    given = with_tokens()
    before = {name: x.clone() for name, x in given.items() if isinstance(x, Tensor)}
    fusion_pass.paged_decode_attention(**given)
    for name, tensor in before.items():
        assert torch.equal(given[name], tensor)


def test_operand_names_are_those_of_the_schema() -> None:
    names = {field.name for field in dataclasses.fields(PagedOperands)}
    schema = {argument.name for argument in GATED_OP._schema.arguments}
    assert names < schema
    assert schema - names == {field.name for field in dataclasses.fields(PagedModes)}


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_benchmark_pages_what_it_compares_with(page_size: int) -> None:
    given = bench_operands.make(Geometry("small", 4, 2, 16, False, "none"), 3, 12, CPU)
    dense = bench_operands.truth(given)
    paged = paged_operands.in_pages(given, page_size)
    modes = PagedModes(given.scale, numerics="compiled")
    fused = reference.paged_decode_attention(paged, modes)
    assert dense.error(fused) <= dense.bound
    lengths = (12, 5, 1)
    shorter = reference.paged_decode_attention(paged_operands.shortened(paged, lengths), modes)
    assert torch.equal(shorter[0], fused[0])
    assert not torch.equal(shorter[1], fused[1])
    check.check_indices(paged, modes)
