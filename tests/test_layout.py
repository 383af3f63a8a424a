"""Layout algebra against what torch does to real tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_pass.patterns import Conversion, Factor, Layout, convert

AXES = {"batch": 4, "head": 4, "query": 2, "dim": 4}
FULL = Layout.of((name, size, 1) for name, size in AXES.items())


def index_of(layout: Layout) -> torch.Tensor:
    """The tensor that `layout` describes, each element holding the place of its axes' indices.

    An axis without a factor counts as index 0.
    """
    weights = {"batch": 32, "head": 8, "query": 4, "dim": 1}
    result = torch.zeros((), dtype=torch.long)
    for dim in layout.dims:
        index = torch.zeros((), dtype=torch.long)
        for factor in dim:
            digit = torch.arange(factor.size) * factor.stride * weights[factor.axis]
            index = (index[..., None] + digit).flatten()
        result = result[..., None] + index
        if not dim:
            result = result.reshape(*result.shape[:-1], 1) if result.dim() else result.reshape(1)
    return result


@dataclass(frozen=True)
class Step:
    """One operation on a tensor together with what it does to a layout."""

    name: str
    argument: tuple[int, ...]

    def on_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return (
            tensor.permute(self.argument)
            if self.name == "permute"
            else tensor.reshape(self.argument)
        )

    def on_layout(self, layout: Layout) -> Layout | None:
        return (
            layout.permute(self.argument)
            if self.name == "permute"
            else layout.reshape(self.argument)
        )


@st.composite
def steps(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Step]:
    chain: list[Step] = []
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.booleans()):
            order = tuple(draw(st.permutations(range(len(shape)))))
            chain.append(Step("permute", order))
            shape = tuple(shape[i] for i in order)
        else:
            shape = draw(factorisations(math.prod(shape)))
            chain.append(Step("reshape", shape))
    return chain


@st.composite
def factorisations(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    sizes: list[int] = []
    while total > 1 and len(sizes) < 5:
        size = draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
        sizes.append(size)
        total //= size
    return (*sizes, total)


@settings(max_examples=300, deadline=None)
@given(steps(tuple(AXES.values())))
def test_a_chain_of_views_is_followed_exactly(chain: list[Step]) -> None:
    tensor, layout = index_of(FULL), FULL
    for step in chain:
        tensor = step.on_tensor(tensor)
        followed = step.on_layout(layout)
        # All sizes are powers of two, so that every reshape cuts between or inside factors.
        assert followed is not None
        layout = followed
    assert torch.equal(index_of(layout), tensor)


@settings(max_examples=300, deadline=None)
@given(steps(tuple(AXES.values())), steps(tuple(AXES.values())))
def test_convert_turns_one_arrangement_into_the_other(
    first: list[Step], second: list[Step]
) -> None:
    source, target = FULL, FULL
    for step in first:
        source = step.on_layout(source) or source
    for step in second:
        target = step.on_layout(target) or target
    conversion = convert(source, target)
    assert conversion is not None
    tensor = index_of(source)
    if conversion.split is not None:
        tensor = tensor.reshape(conversion.split)
    if conversion.order is not None:
        tensor = tensor.permute(conversion.order)
    if conversion.shape is not None:
        tensor = tensor.reshape(conversion.shape)
    assert torch.equal(tensor, index_of(target))


@settings(max_examples=300, deadline=None)
@given(steps(tuple(AXES.values())))
def test_equal_layouts_mean_equal_content(chain: list[Step]) -> None:
    tensor, layout = index_of(FULL), FULL
    for step in chain:
        tensor, layout = step.on_tensor(tensor), step.on_layout(layout) or layout
    home = layout.reshape(tuple(AXES.values()))
    same_content = torch.equal(tensor.reshape(tuple(AXES.values())), index_of(FULL))
    assert (home == FULL) == same_content


def test_unpermute_undoes_permute() -> None:
    assert FULL.permute((2, 0, 3, 1)).unpermute((2, 0, 3, 1)) == FULL


def test_repeated_heads_are_the_leading_digits() -> None:
    repeated = Layout.of((("batch", 4, 1), ("head", 8, 1), ("key", 5, 1), ("dim", 4, 1)))
    split = repeated.reshape((4, 2, 4, 5, 4))
    assert split is not None
    stored = split.shrink((4, 2, 1, 5, 4), (4, 2, 4, 5, 4))
    assert stored is not None
    assert stored.of_axis("head") == (Factor("head", 2, 4),)


def test_tiled_heads_are_the_trailing_digits() -> None:
    repeated = Layout.of((("batch", 4, 1), ("head", 8, 1), ("key", 5, 1), ("dim", 4, 1)))
    split = repeated.reshape((4, 4, 2, 5, 4))
    assert split is not None
    stored = split.shrink((4, 1, 2, 5, 4), (4, 4, 2, 5, 4))
    assert stored is not None
    assert stored.of_axis("head") == (Factor("head", 2, 1),)


def test_a_reshape_that_straddles_factors_is_refused() -> None:
    odd = Layout.of((("head", 3, 1), ("dim", 4, 1)))
    assert odd.reshape((4, 3)) is None
    assert odd.reshape((2, 6)) is None
    assert odd.reshape((6, 2)) == Layout(
        ((Factor("head", 3), Factor("dim", 2, 2)), (Factor("dim", 2),))
    )


def test_unit_dimensions_hold_nothing() -> None:
    one = Layout.of((("batch", 1, 1), ("head", 3, 1)))
    assert one.dims == ((), (Factor("head", 3),))
    assert one.reshape((3, 1, 1)) == Layout(((Factor("head", 3),), (), ()))


def test_different_content_does_not_convert() -> None:
    heads = Layout.of((("batch", 4, 1), ("head", 4, 1)))
    dims = Layout.of((("batch", 4, 1), ("dim", 4, 1)))
    assert convert(heads, dims) is None
    assert convert(heads, heads) == Conversion(None, None, None)
