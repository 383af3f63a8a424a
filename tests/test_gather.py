"""K and V gathered from pages by a table: read through the table wherever that means the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch.fx import Graph, GraphModule
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import create_block_mask

from fusion_pass import GatedAttentionPass, explain
from fusion_pass.paged import check as paged_check
from fusion_pass.patterns.gather import DROWNING
from fusion_pass.profitability import structural_saving
from tests.graphs import fake_mode, trace
from tests.test_flex import Captured, flex

aten = torch.ops.aten
PAGED = "fusion_pass.gated_paged_decode_attention.default"
DENSE = "fusion_pass.gated_decode_attention.default"

B, HEADS, KV_HEADS, DIM = 3, 4, 2, 16
PAGES, PAGE_SIZE, ROW_PAGES = 13, 4, 5
LENGTH = ROW_PAGES * PAGE_SIZE
LOWEST = torch.finfo(torch.float32).min


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """One request a row: query, caches in pages, block table, lengths and gate."""

    query: Tensor
    key: Tensor
    value: Tensor
    table: Tensor
    lengths: Tensor
    gate: Tensor

    def all(self) -> tuple[Tensor, ...]:
        return self.query, self.key, self.value, self.table, self.lengths, self.gate


def case(page_size: int = PAGE_SIZE, *, pages: int = PAGES) -> Case:
    row_pages = LENGTH // page_size
    generator = torch.Generator().manual_seed(3)
    return Case(
        query=numbers(B, HEADS, 1, DIM, seed=0),
        key=numbers(pages, page_size, KV_HEADS, DIM, seed=1),
        value=numbers(pages, page_size, KV_HEADS, DIM, seed=2),
        table=torch.randint(pages, (B, row_pages), generator=generator),
        lengths=torch.tensor([7, LENGTH, 1]),
        gate=numbers(B, 1, HEADS * DIM, seed=4),
    )


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def repeated(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """SDPA after repeat_kv."""
    wide = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    return F.scaled_dot_product_attention(query, *wide, attn_mask=mask)


def spelled_out(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, fill: float = -65504.0
) -> Tensor:
    """Attention whose mask is added to the logits."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    logits = query @ key.transpose(2, 3) * DIM**-0.5
    if mask is not None:
        logits = logits + torch.where(mask, 0.0, fill)
    return torch.softmax(logits, -1) @ value


def replaced(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, fill: float = LOWEST
) -> Tensor:
    """Attention whose mask takes the place of logits."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    logits = query @ key.transpose(2, 3) * DIM**-0.5
    assert mask is not None
    return torch.softmax(logits.masked_fill(~mask, fill), -1) @ value


def biased(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """SDPA with an additive mask of the lowest number."""
    assert mask is not None
    bias = torch.where(mask, 0.0, LOWEST).to(query.dtype)
    return sdpa(query, key, value, bias)


def in_heads(cache: Tensor) -> Tensor:
    """(B, pages, page size, H, D) or (B, S, H, D) as (B, H, S, D)."""
    return cache.reshape(B, -1, *cache.shape[-2:]).transpose(1, 2)


GATHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda cache, table: in_heads(cache[table]),
    "index-flat": lambda cache, table: in_heads(cache[table.view(-1)]),
    "index_select": lambda cache, table: in_heads(cache.index_select(0, table.reshape(-1))),
    "embedding": lambda cache, table: (
        F.embedding(table, cache.view(PAGES, -1)).view(B, LENGTH, KV_HEADS, DIM).transpose(1, 2)
    ),
    "unsafe": lambda cache, table: in_heads(torch.ops.aten._unsafe_index.Tensor(cache, [table])),
    "head-major": lambda cache, table: (
        # (Hkv, P, page size, D), as PyTorch's paged attention stores it.
        cache.permute(2, 0, 1, 3)[:, table].reshape(KV_HEADS, B, LENGTH, DIM).transpose(0, 1)
    ),
    "pages-of-heads": lambda cache, table: (
        # (P, Hkv, page size, D)
        cache.transpose(1, 2)[table].transpose(1, 2).reshape(B, KV_HEADS, LENGTH, DIM)
    ),
    "slots": lambda cache, table: in_heads(
        cache.view(-1, KV_HEADS, DIM)[
            (table[:, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=table.device)).view(
                B, -1
            )
        ]
    ),
    "gather": lambda cache, table: (
        cache.view(1, -1, KV_HEADS, DIM)
        .transpose(1, 2)
        .expand(B, -1, -1, -1)
        .gather(
            2,
            (table[:, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=table.device))
            .view(B, 1, -1, 1)
            .expand(-1, KV_HEADS, -1, DIM),
        )
    ),
}


def positions(like: Tensor) -> Tensor:
    return torch.arange(LENGTH, device=like.device)


MASKS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "none": lambda lengths: None,
    "lt": lambda lengths: (positions(lengths) < lengths[:, None])[:, None, None],
    "le": lambda lengths: (positions(lengths)[None] <= lengths[:, None] - 1)[:, None, None],
    "gt": lambda lengths: (lengths.view(B, 1, 1, 1) > positions(lengths)).expand(-1, 4, -1, -1),
    "not-ge": lambda lengths: ~(positions(lengths) >= lengths[:, None]).view(B, 1, 1, -1),
    "scalar": lambda lengths: (positions(lengths) < 9).view(1, 1, 1, -1),
    "one-for-all": lambda lengths: (positions(lengths) <= lengths[0]).view(1, 1, 1, -1),
    "both": lambda lengths: (
        (positions(lengths) < lengths[:, None]) & (positions(lengths) < 6)
    ).view(B, 1, 1, -1),
    "int32": lambda lengths: (positions(lengths).int() < lengths.int()[:, None]).view(B, 1, 1, -1),
}


def model(
    gather: Callable[[Tensor, Tensor], Tensor] = GATHERS["index"],
    mask: Callable[[Tensor], Tensor | None] = MASKS["none"],
    attend: Attend = sdpa,
) -> Callable[..., Tensor]:
    def forward(
        query: Tensor, key: Tensor, value: Tensor, table: Tensor, lengths: Tensor, gate: Tensor
    ) -> Tensor:
        output = attend(query, gather(key, table), gather(value, table), mask(lengths))
        return output.transpose(1, 2).reshape(B, 1, -1) * torch.sigmoid(gate)

    return forward


class Step(Captured):
    """A model run from its graph after Inductor's joint-graph passes and ours."""

    def _compile(self, module: GraphModule, inputs: Any) -> Callable[..., Any]:
        return super()._compile(joint_graph_passes(module), inputs)


def operators(step: Captured) -> list[str]:
    """The fused operators of the one graph of a step."""
    (graph,) = step.graphs
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name for name in names if name.startswith("fusion_pass.")]


def check(function: Callable[..., Tensor], *inputs: Tensor, paged: bool = True) -> Graph:
    """That K and V are read through the table or not, and the numbers are right either way."""
    step = Step(function)
    found = step(*inputs)
    exact = function(*[x.double() if x.is_floating_point() else x for x in inputs])
    torch.testing.assert_close(found, exact.float(), rtol=2e-5, atol=2e-6)
    assert operators(step) == [PAGED if paged else DENSE]
    return step.graphs[0]


@pytest.mark.parametrize("gather", GATHERS)
def test_gathers(gather: str) -> None:
    graph = check(model(GATHERS[gather]), *case().all())
    # No copy of K or V: nothing in the graph is as large as what was gathered.
    sizes = [node.meta["val"].numel() for node in graph.nodes if node.op == "call_function"]
    assert max(sizes) < B * LENGTH * KV_HEADS * DIM


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str) -> None:
    check(model(mask=MASKS[mask]), *case().all())


@pytest.mark.parametrize("is_window", [False, True])
def test_the_report_tells_which_is_read(is_window: bool) -> None:
    def window(lengths: Tensor) -> Tensor:
        return ((lengths[:, None] - positions(lengths)) > 0)[:, None, None]

    function = model(mask=window if is_window else MASKS["lt"])
    with torch.no_grad():
        (site,) = explain(function, *case().all(), device="cuda").sites
    assert site.fused
    assert ("the pages are read where they are" in site.ground) == (not is_window)


@pytest.mark.parametrize("attend", [repeated, spelled_out])
@pytest.mark.parametrize("mask", ["none", "lt"])
def test_producers(attend: Attend, mask: str) -> None:
    check(model(mask=MASKS[mask], attend=attend), *case().all())


@pytest.mark.parametrize("page_size", [1, 2, LENGTH])
def test_page_sizes(page_size: int) -> None:
    check(model(mask=MASKS["lt"]), *case(page_size).all())


def test_flex() -> None:
    def forward(
        query: Tensor, key: Tensor, value: Tensor, table: Tensor, lengths: Tensor, gate: Tensor
    ) -> Tensor:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return torch.where(k < lengths[b], score, -torch.inf)

        pages = [in_heads(cache[table]) for cache in (key, value)]
        output = flex(query, *pages, score_mod=score_mod, enable_gqa=True)
        return output.transpose(1, 2).reshape(B, 1, -1) * torch.sigmoid(gate)

    operands = case()
    step = Step(forward)
    found = step(*operands.all())
    assert operators(step) == [PAGED]
    expected = model(mask=MASKS["lt"])(*operands.all())
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


def test_negative_page_numbers_count_from_the_end() -> None:
    operands = case()
    wrapped = operands.table - PAGES * (torch.arange(ROW_PAGES) % 2)
    inputs = (*operands.all()[:3], wrapped, *operands.all()[4:])
    check(model(), *inputs)
    check(model(mask=MASKS["lt"]), *inputs)


@pytest.mark.parametrize("number", [PAGES, 2**31 + 1, -PAGES - 1])
@pytest.mark.parametrize("asked", [False, True])
def test_page_numbers_out_of_range(
    number: int, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They reach the check that is asked for, and no memory outside the cache without."""
    monkeypatch.setenv(paged_check.VARIABLE, "1" if asked else "0")
    operands = case()
    inputs = [x.clone() for x in operands.all()]
    # Of row 0, the keys of two pages are live.
    inputs[3][0, 2] = number
    inputs[3][1] -= PAGES
    step = Step(model(mask=MASKS["lt"]))
    found = step(*inputs)
    assert operators(step) == [PAGED]
    expected = model(mask=MASKS["lt"])(*operands.all())
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
    inputs[3][0, 1] = number
    if asked:
        with pytest.raises(IndexError, match="kv_indices gives request 0 page"):
            step(*inputs)
    else:
        assert step(*inputs).isfinite().all()


def test_the_check_reads_int32_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(paged_check.VARIABLE, "1")
    inputs = [x.clone() for x in case().all()]
    inputs[3] = (inputs[3] - PAGES * (torch.arange(ROW_PAGES) % 2)).int()
    check(model(mask=MASKS["lt"]), *inputs)


def test_layers_share_a_checked_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(paged_check.VARIABLE, "1")
    step = Step(two_layers)
    step(*case().all())
    for target in (aten.lt.Scalar, aten.where.self):
        assert len(step.graphs[0].find_nodes(op="call_function", target=target)) == 1


def test_unused_entries_are_not_read() -> None:
    """What lies behind the live keys may be anything."""
    operands = case()
    expected = Step(model(mask=MASKS["lt"]))(*operands.all())
    poisoned = [cache.clone() for cache in (operands.key, operands.value)]
    table = operands.table.clone()
    for row, length in enumerate(operands.lengths.tolist()):
        table[row, -(-length // PAGE_SIZE) :] = PAGES - 1
    for cache in poisoned:
        live = torch.cat(
            [row[: -(-n // 4)] for row, n in zip(table, operands.lengths, strict=True)]
        )
        dead = [page for page in range(PAGES) if page not in live.tolist()]
        assert dead
        cache[dead] = torch.nan
    rest = operands.lengths, operands.gate
    step = Step(model(mask=MASKS["lt"]))
    found = step(operands.query, *poisoned, table, *rest)
    assert operators(step) == [PAGED]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("lengths", [[0, 5, LENGTH + 1], [2**62, -3, 2**31]])
@pytest.mark.parametrize("mask", ["lt", "le"])
@pytest.mark.parametrize(
    "attend",
    [sdpa, spelled_out, biased, functools.partial(spelled_out, fill=LOWEST)],
    ids=["sdpa", "added", "biased", "added-lowest"],
)
def test_lengths_out_of_range(lengths: list[int], mask: str, attend: Attend) -> None:
    """A row that sees no key gives zeros, or attends to all where the fill is finite.

    It attends to all alike where the fill is so low that no logit changes it.
    """
    operands = case()
    inputs = (*operands.all()[:4], torch.tensor(lengths), operands.gate)
    check(model(mask=MASKS[mask], attend=attend), *inputs)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_least_fill_that_drowns_every_logit(scale: float) -> None:
    """As in float32: in float64 it only shifts the logits."""
    operands = case()
    key = scale / operands.key.abs().amax() * operands.key
    inputs = (operands.query, key, *operands.all()[2:4], torch.tensor([0, 5, 0]), operands.gate)
    function = filled(DROWNING)
    step = Step(function)
    torch.testing.assert_close(step(*inputs), function(*inputs), rtol=2e-5, atol=2e-6)
    assert operators(step) == [PAGED]


@pytest.mark.parametrize("poisoned", ["query", "key"])
@pytest.mark.parametrize("attend", [biased, replaced])
def test_a_nan_in_a_row_without_keys_shows_as_in_eager(attend: Attend, poisoned: str) -> None:
    """Where the fill is added to it; where it takes the place of the logits, it hides it."""
    inputs = [x.clone() for x in case().all()]
    if poisoned == "query":
        inputs[4] = torch.tensor([0, 5, 0])
        inputs[0][0, 1] = torch.nan
    else:
        # No page is one request's alone.
        inputs[4].zero_()
        inputs[1][:] = torch.nan
    found = Step(model(mask=MASKS["lt"], attend=attend))(*inputs)
    expected = model(mask=MASKS["lt"], attend=attend)(*inputs)
    assert expected.isnan().any() == (attend is biased)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6, equal_nan=True)


def test_a_cache_written_in_the_same_step() -> None:
    """A decode step: the new token goes into its page, then all pages are read."""

    def forward(*inputs: Tensor) -> Tensor:
        query, key, value, table, lengths, gate, new = inputs
        last = lengths - 1
        page = table.gather(1, (last // PAGE_SIZE)[:, None])[:, 0]
        key[page, last % PAGE_SIZE] = new
        value[page, last % PAGE_SIZE] = 2 * new
        return model(mask=MASKS["lt"])(query, key, value, table, lengths, gate)

    operands = case()
    inputs = (*operands.all(), numbers(B, KV_HEADS, DIM, seed=9))
    copies = [x.clone() for x in inputs]
    expected = forward(*copies)
    step = Step(forward)
    found = step(*inputs)
    assert operators(step) == [PAGED]
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("written", [None, "before", "between"])
def test_a_table_computed_twice_around_a_write(written: str | None) -> None:
    """Between the first steps of the two, not between the last, which alone are the tables."""

    def program(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
        table, _, gate = rest
        numbers = [table + 1, table + 1]
        pages = [cache[(n * 2) % PAGES] for cache, n in zip((key, value), numbers, strict=True)]
        output = sdpa(query, *map(in_heads, pages), None)
        return output.transpose(1, 2).reshape(B, 1, -1) * torch.sigmoid(gate)

    mode = fake_mode()
    graph = trace(program, *map(mode.from_tensor, case().all())).graph
    first, second = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    if written is not None:
        with graph.inserting_before(first if written == "before" else second):
            write = graph.call_function(aten.add_.Tensor, (first.args[0], 1))
        write.meta["val"] = first.meta["val"]
    GatedAttentionPass(devices=("cpu",), strict=True).rewrite(graph, True)
    targets = [str(node.target) for node in graph.nodes]
    assert (PAGED in targets, DENSE in targets) == (
        (False, True) if written == "between" else (True, False)
    )


def test_tables_computed_twice_in_many_steps() -> None:
    """Each step has two uses of the one before: there are 2**60 ways through them."""

    def program(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
        table, _, gate = rest

        def number() -> Tensor:
            found = table
            for _ in range(60):
                found = torch.bitwise_or(found, found)
            return found

        output = sdpa(query, in_heads(key[number()]), in_heads(value[number()]), None)
        return output.transpose(1, 2).reshape(B, 1, -1) * torch.sigmoid(gate)

    mode = fake_mode()
    graph = trace(program, *map(mode.from_tensor, case().all())).graph
    GatedAttentionPass(devices=("cpu",), strict=True).rewrite(graph, True)
    assert PAGED in [str(node.target) for node in graph.nodes]


def test_a_dynamic_batch() -> None:
    def forward(
        query: Tensor, key: Tensor, value: Tensor, table: Tensor, lengths: Tensor, gate: Tensor
    ) -> Tensor:
        pages = [
            cache[table].view(len(table), LENGTH, KV_HEADS, DIM).transpose(1, 2)
            for cache in (key, value)
        ]
        mask = (torch.arange(LENGTH) < lengths[:, None])[:, None, None]
        output = sdpa(query, *pages, mask)
        return output.transpose(1, 2).reshape(len(query), 1, -1) * torch.sigmoid(gate)

    operands = case()
    step = Step(forward)
    for rows in (3, 2):
        inputs = [x[:rows] for x in operands.all()]
        inputs[1:3] = operands.key, operands.value
        for x in (inputs[0], inputs[3], inputs[4], inputs[5]):
            torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(step(*inputs), forward(*inputs), rtol=2e-5, atol=2e-6)
    assert operators(step) == [PAGED]


def two_layers(*inputs: Tensor) -> Tensor:
    query, key, value, table, lengths, gate = inputs
    step = model(mask=MASKS["lt"])
    first = step(*inputs).view(query.shape)
    return step(first, value, key, table, lengths, gate)


def test_layers_share_table_and_lengths() -> None:
    operands = case()
    step = Step(two_layers)
    found = step(*operands.all())
    torch.testing.assert_close(found, two_layers(*operands.all()), rtol=2e-5, atol=2e-6)
    assert operators(step) == [PAGED, PAGED]
    remainders = step.graphs[0].find_nodes(op="call_function", target=aten.remainder.Scalar)
    minima = step.graphs[0].find_nodes(op="call_function", target=aten.clamp_min.default)
    assert (len(remainders), len(minima)) == (1, 1)


def other_tables(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
    table, _, gate = rest
    output = sdpa(query, in_heads(key[table]), in_heads(value[table.flip(1)]), None)
    return output.transpose(1, 2).reshape(B, 1, -1) * torch.sigmoid(gate)


def signed_zeros(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
    """Pages of K from the start, and of V from the end."""
    table, _, gate = rest
    pages = [
        cache[torch.copysign(table.float(), torch.full((), zero)).long()]
        for cache, zero in ((key, 0.0), (value, -0.0))
    ]
    output = sdpa(query, *map(in_heads, pages), None)
    return output.transpose(1, 2).reshape(B, 1, -1) * torch.sigmoid(gate)


def gathered_by_row(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
    """Every row has a cache of its own, of which the table takes tokens."""
    table, _, gate = rest
    index = (table % 4)[:, None, :, None].expand(-1, KV_HEADS, -1, DIM)
    pages = [cache[:B].transpose(1, 2).gather(2, index) for cache in (key, value)]
    output = sdpa(query, *pages, None)
    return output.transpose(1, 2).reshape(B, 1, -1) * torch.sigmoid(gate)


def reversed_pages(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor:
    """Key `i` of the attention is not key `i` of the pages: they interleave."""
    table, _, gate = rest
    pages = [
        cache[table].transpose(1, 2).reshape(B, LENGTH, KV_HEADS, DIM).transpose(1, 2)
        for cache in (key, value)
    ]
    output = sdpa(query, *pages, MASKS["lt"](rest[1]))
    return output.transpose(1, 2).reshape(B, 1, -1) * torch.sigmoid(gate)


def twice(dim: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Gathers from pages of half the size, whose keys come twice along a new dimension."""

    def gather(cache: Tensor, table: Tensor) -> Tensor:
        pages = cache.reshape(2 * PAGES, PAGE_SIZE // 2, KV_HEADS, DIM)[table]
        sizes = [-1] * 5
        sizes.insert(dim, 2)
        return in_heads(pages.unsqueeze(dim).expand(sizes))

    return gather


def by_slot(cache: Tensor, table: Tensor) -> Tensor:
    """Every slot of a page is taken from a page of its own."""
    index = (table[0][:, None] + torch.arange(PAGE_SIZE, device=table.device)) % PAGES
    pages = cache.gather(0, index[:, :, None, None].expand(-1, -1, KV_HEADS, DIM))
    return pages.view(1, LENGTH, KV_HEADS, DIM).expand(B, -1, -1, -1).transpose(1, 2)


def fewer_pages_of_keys(query: Tensor, key: Tensor, *rest: Tensor) -> Tensor:
    value, table, *others = rest
    return model()(query, key[:-3], value, table % (PAGES - 3), *others)


def beside_sinks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    assert mask is not None
    logits = query @ key.transpose(2, 3) * DIM**-0.5 + torch.where(mask, 0.0, LOWEST)
    sinks = torch.linspace(-1, 1, HEADS, dtype=logits.dtype, device=logits.device)
    sinks = sinks.view(1, -1, 1, 1).expand(B, -1, 1, 1)
    return torch.softmax(torch.cat([logits, sinks], -1), -1)[..., :-1] @ value


def filled(fill: float) -> Callable[..., Tensor]:
    """Rows without a live key would give NaN, or what the logits make of it."""
    return model(mask=MASKS["lt"], attend=functools.partial(spelled_out, fill=fill))


LEFT: dict[str, Callable[..., Tensor]] = {
    "other-tables": other_tables,
    "tables-of-signed-zeros": signed_zeros,
    "gathered-by-row": gathered_by_row,
    "interleaved": reversed_pages,
    "each-page-twice": model(twice(2), MASKS["lt"]),
    "each-token-twice": model(twice(3), MASKS["lt"]),
    "all-pages-twice": model(twice(1), MASKS["lt"]),
    "repeat_interleave": model(
        lambda cache, table: in_heads(cache[table, ::2].repeat_interleave(2, 2)), MASKS["lt"]
    ),
    "a-page-a-slot": model(by_slot, MASKS["lt"]),
    "fewer-pages-of-keys": fewer_pages_of_keys,
    "filled-with-infinity": filled(-torch.inf),
    # So low that some logits change it, and others do not.
    "filled-with-a-billion": filled(-1e9),
    "filled-with-the-lowest-beside-sinks": model(mask=MASKS["lt"], attend=beside_sinks),
    # A NaN in K would show in a row without a live key.
    "replaced-by-the-lowest": model(mask=MASKS["lt"], attend=replaced),
    "suffix": model(
        mask=lambda lengths: (torch.arange(LENGTH) >= lengths[:, None] - 1)[:, None, None]
    ),
    "window": model(
        mask=lambda lengths: (
            (torch.arange(LENGTH) < lengths[:, None])
            & (torch.arange(LENGTH) >= lengths[:, None] - 3)
        )[:, None, None]
    ),
    "shifted": model(
        mask=lambda lengths: (torch.arange(1, LENGTH + 1) < lengths[:, None] + 1)[:, None, None]
    ),
    "every-other": model(
        mask=lambda lengths: (torch.arange(0, 2 * LENGTH, 2) < lengths[:, None])[:, None, None]
    ),
    "by-head": model(
        mask=lambda lengths: (
            torch.arange(LENGTH)
            < (lengths[:, None, None, None] + torch.arange(HEADS).view(1, -1, 1, 1))
        )
    ),
    "either": model(
        mask=lambda lengths: (
            (torch.arange(LENGTH) < lengths[:, None]) | (torch.arange(LENGTH) < 3)
        )[:, None, None]
    ),
    "floating": model(
        mask=lambda lengths: (torch.arange(LENGTH) < lengths[:, None] / 2)[:, None, None]
    ),
    "causal": model(
        attend=lambda query, key, value, mask: F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_read_from_the_gathered_copy(name: str) -> None:
    """The gate is fused all the same."""
    check(LEFT[name], *case().all(), paged=False)


def test_a_mask_from_outside_is_not_known_to_be_a_prefix() -> None:
    operands = case()
    mask = MASKS["lt"](operands.lengths)
    assert mask is not None

    def forward(*inputs: Tensor) -> Tensor:
        *rest, given = inputs
        return model(mask=lambda lengths: given)(*rest)

    check(forward, *operands.all(), mask, paged=False)


def test_several_query_tokens_are_read_from_the_copy() -> None:
    operands = case()
    query, gate = numbers(B, HEADS, 2, DIM, seed=0), numbers(B, 2, HEADS * DIM, seed=4)

    def forward(*inputs: Tensor) -> Tensor:
        query, key, value, table, _, gate = inputs
        output = sdpa(query, in_heads(key[table]), in_heads(value[table]), None)
        return output.transpose(1, 2).reshape(B, 2, -1) * torch.sigmoid(gate)

    check(forward, query, *operands.all()[1:5], gate, paged=False)


def test_reading_through_the_table_pays_whatever_is_measured() -> None:
    step = Step(model())
    step(*case().all())
    ((recognition,),) = step.before
    saving = structural_saving(recognition.outcome)
    assert saving is not None
    assert "pages" in saving


def test_pytorchs_own_paged_attention() -> None:
    """FlexAttention over all pages, whose block mask is the table: K and V stay where they are."""
    pages, size, lengths = 12, 16, torch.tensor([20, 37])
    rows, room = len(lengths), 64
    query, gate = numbers(rows, HEADS, 1, DIM, seed=0), numbers(rows, 1, HEADS * DIM, seed=1)
    key, value = (numbers(rows, KV_HEADS, room, DIM, seed=seed) for seed in (2, 3))
    stored = [torch.full((1, KV_HEADS, pages * size, DIM), torch.nan) for _ in range(2)]
    paged: Any = PagedAttention(pages, size, rows, device="cpu")
    for row, length in enumerate(lengths.tolist()):
        paged.reserve(torch.tensor(row), torch.tensor(length))
        live = [x[row : row + 1, :, :length] for x in (key, value)]
        paged.assign(torch.tensor([row]), torch.arange(length)[None], *live, *stored)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k < lengths[b]

    logical: Any = create_block_mask(
        visible, rows, None, 1, room, device="cpu", BLOCK_SIZE=(1, size)
    )
    mask = paged.convert_logical_block_mask(logical)

    def forward(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        output = flex(query, key, value, block_mask=mask, enable_gqa=True)
        return output.transpose(1, 2).reshape(rows, 1, -1) * torch.sigmoid(gate)

    step = Step(forward)
    found = step(query, *stored, gate)
    assert operators(step) == [DENSE]
    prefix = (torch.arange(room) < lengths[:, None])[:, None, None]
    expected = sdpa(query, key, value, prefix).transpose(1, 2).reshape(rows, 1, -1)
    torch.testing.assert_close(found, expected * torch.sigmoid(gate), rtol=2e-5, atol=2e-6)
    (node,) = step.graphs[0].find_nodes(
        op="call_function", target=torch.ops.fusion_pass.gated_decode_attention.default
    )
    assert all(read.target is aten.expand.default for read in node.args[1:3])
