"""What is recognised as a gated attention, what is not and why, on fake CUDA and CPU graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion_pass import patterns
from fusion_pass.patterns import GatedAttention, Reason
from fusion_pass.patterns.trace import rounded
from tests.graphs import (
    PRODUCERS,
    Shape,
    attend,
    fake_mode,
    merge_heads,
    only_match,
    only_refusal,
    placeholder,
    recognitions,
    repeat_kv,
    trace,
    where_mask,
)

SHAPE = Shape()


@pytest.fixture(autouse=True)
def _fake() -> Iterator[None]:
    with fake_mode():
        yield


def shape_for(producer: str) -> Shape:
    return replace(SHAPE, device="cpu" if producer == "cpu-flash" else "cuda")


def match_of(function: Callable[..., Any], *inputs: Tensor) -> GatedAttention:
    return only_match(trace(function, *inputs).graph)


def reason_of(function: Callable[..., Any], *inputs: Tensor) -> Reason:
    return only_refusal(trace(function, *inputs).graph).reason


def gated(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    return merge_heads(attend("cudnn", query, key, value, None)) * torch.sigmoid(gate)


def activated(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """An attention whose output is multiplied by `activation` of the gate."""

    def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        return merge_heads(attend("cudnn", query, key, value, None)) * activation(gate)

    return model


def causal(producer: str) -> Callable[..., Tensor]:
    """A gated attention with `is_causal`."""

    def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        out = attend(producer, query, key, value, None, is_causal=True)
        return merge_heads(out) * torch.sigmoid(gate)

    return model


def operands(shape: Shape = SHAPE) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, K and V with a head for every query head, and a flat gate."""
    full = replace(shape, kv_heads=shape.query_heads)
    return shape.query(), full.stored(), full.stored(), shape.gate()


class TestProducers:
    @pytest.mark.parametrize("producer", PRODUCERS)
    def test_fires(self, producer: str) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            return merge_heads(attend(producer, query, key, value, None)) * torch.sigmoid(gate)

        match = match_of(model, *operands(shape_for(producer)))
        assert match.attention.producer == producer
        assert match.attention.scale == 1 / math.sqrt(SHAPE.head_dim)
        assert match.mask is None

    @pytest.mark.parametrize("scale", [1.0, 0.37, -2.0, 0.0])
    def test_the_scale_is_the_users(self, scale: float) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            out = attend("cudnn", query, key, value, None, scale=scale)
            return merge_heads(out) * torch.sigmoid(gate)

        assert match_of(model, *operands()).attention.scale == scale

    @pytest.mark.parametrize("producer", ["cudnn", "flash", "efficient", "cpu-flash"])
    def test_dropout_declines(self, producer: str) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            out = attend(producer, query, key, value, None, dropout_p=0.1)
            return merge_heads(out) * torch.sigmoid(gate)

        assert reason_of(model, *operands(shape_for(producer))) is Reason.DROPOUT

    @pytest.mark.parametrize("tokens", [1, 3, 48])
    @pytest.mark.parametrize("producer", ["cudnn", "efficient", "cpu-flash"])
    def test_causal_counts_from_the_first_key(self, producer: str, tokens: int) -> None:
        shape = replace(shape_for(producer), query_tokens=tokens)
        assert match_of(causal(producer), *operands(shape)).attention.is_causal

    def test_causal_flash_is_known_where_it_is_square(self) -> None:
        square = replace(SHAPE, query_tokens=48)
        assert match_of(causal("flash"), *operands(square)).attention.is_causal
        assert reason_of(causal("flash"), *operands()) is Reason.CAUSAL

    def test_a_used_logsumexp_declines(self) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Any:
            results = torch.ops.aten._scaled_dot_product_cudnn_attention(
                query, key, value, None, True
            )
            return merge_heads(results[0]) * torch.sigmoid(gate), results[1]

        assert reason_of(model, *operands()) is Reason.STATISTICS_USED

    def test_a_graph_without_attention_has_nothing_to_say(self) -> None:
        graph = trace(lambda x: x * torch.sigmoid(x), SHAPE.gate()).graph
        assert recognitions(graph) == []

    def test_candidates_are_in_the_order_of_the_graph(self) -> None:
        def model(*inputs: Tensor) -> Tensor:
            return gated(*inputs) + (inputs[3] @ inputs[3].mT) @ gated(*inputs)

        graph = trace(model, *operands()).graph
        found = patterns.candidates(graph)
        assert found == [node for node in graph.nodes if patterns.may_be_attention(node)]
        assert len({node.target for node in found}) > 1


class TestKeyValue:
    def check(self, function: Callable[..., Any], *inputs: Tensor, heads: int) -> None:
        graph = trace(function, *inputs).graph
        match = only_match(graph)
        assert match.key_value.heads == heads
        assert match.key_value.key.node is placeholder(graph, "key")
        assert match.key_value.value.node is placeholder(graph, "value")

    def test_repeat_kv_is_read_at_the_cache(self) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            return gated(query, repeat_kv(key, 4), repeat_kv(value, 4), gate)

        self.check(model, SHAPE.query(), SHAPE.stored(), SHAPE.stored(), SHAPE.gate(), heads=2)

    def test_enable_gqa(self) -> None:
        stored = SHAPE.stored()
        self.check(gated, SHAPE.query(), stored, SHAPE.stored(), SHAPE.gate(), heads=2)

    def test_one_head_for_all(self) -> None:
        shape = replace(SHAPE, kv_heads=1)

        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            wide = [x.expand(-1, 8, -1, -1) for x in (key, value)]
            return gated(query, *wide, gate)

        self.check(model, shape.query(), shape.stored(), shape.stored(), shape.gate(), heads=1)

    def test_token_major_cache(self) -> None:
        cache = SHAPE.empty(2, 48, 2, 16)

        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            heads = [repeat_kv(x.transpose(1, 2), 4) for x in (key, value)]
            return gated(query, *heads, gate)

        self.check(model, SHAPE.query(), cache, SHAPE.empty(2, 48, 2, 16), SHAPE.gate(), heads=2)

    def test_tiled_heads_are_not_a_group_and_stay_repeated(self) -> None:
        """`x.repeat(1, 4, 1, 1)` gives query head h the K/V head h % Hkv, not h // G."""

        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            tiled = [
                x.unsqueeze(1).expand(2, 4, 2, 48, 16).reshape(2, 8, 48, 16) for x in (key, value)
            ]
            return gated(query, *tiled, gate)

        graph = trace(model, SHAPE.query(), SHAPE.stored(), SHAPE.stored(), SHAPE.gate()).graph
        match = only_match(graph)
        assert match.key_value.heads == SHAPE.query_heads
        assert match.key_value.key.node is not placeholder(graph, "key")

    def test_k_and_v_of_different_heads_meet_at_the_larger_number(self) -> None:
        full = replace(SHAPE, kv_heads=8)

        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            return gated(query, repeat_kv(key, 4), value, gate)

        match = match_of(model, SHAPE.query(), SHAPE.stored(), full.stored(), SHAPE.gate())
        assert match.key_value.heads == 8

    def test_permuted_keys_do_not_pass_for_heads(self) -> None:
        """Hkv == S == D, so that only the axes tell a wrong permute."""
        shape = replace(SHAPE, kv_heads=16, query_heads=16, kv_length=16)

        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            return gated(query, key.transpose(1, 3), value, gate)

        graph = trace(model, shape.query(), shape.stored(), shape.stored(), shape.gate()).graph
        key = only_match(graph).key_value.key
        assert key.node is placeholder(graph, "key")
        assert [dim[0].axis for dim in key.layout.dims] == ["batch", "dim", "key", "head"]


class TestMasks:
    @pytest.mark.parametrize("producer", ["cudnn", "efficient", "cpu-flash"])
    @pytest.mark.parametrize(
        "size", [(2, 1, 1, 48), (1, 1, 1, 48), (2, 8, 1, 48), (1, 8, 1, 48), (1, 1, 1, 1)]
    )
    def test_a_boolean_is_read_through_where(self, producer: str, size: tuple[int, ...]) -> None:
        shape = shape_for(producer)

        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, keep: Tensor) -> Tensor:
            mask = where_mask(keep, query.dtype)
            return merge_heads(attend(producer, query, key, value, mask)) * torch.sigmoid(gate)

        graph = trace(model, *operands(shape), shape.empty(*size, dtype=torch.bool)).graph
        mask = only_match(graph).mask
        assert mask is not None
        assert mask.is_boolean
        assert mask.fill == -math.inf
        assert mask.operand.node is placeholder(graph, "keep")

    @pytest.mark.parametrize(
        ("device", "dtype", "fill", "expected"),
        [
            ("cuda", torch.bfloat16, -65536.0, -65536.0),
            ("cuda", torch.float16, -65536.0, -math.inf),
            ("cuda", torch.float16, -65504.0, -65504.0),
            ("cuda", torch.bfloat16, torch.finfo(torch.bfloat16).min, -math.inf),
            ("cpu", torch.bfloat16, torch.finfo(torch.bfloat16).min, -3.3895313892515355e38),
            ("cpu", torch.float32, -3.4028234663852886e38, -3.4028234663852886e38),
        ],
    )
    def test_the_fill_is_what_the_producer_sees(
        self, device: str, dtype: torch.dtype, fill: float, expected: float
    ) -> None:
        shape = replace(SHAPE, device=device, dtype=dtype)
        producer = "cudnn" if device == "cuda" else "cpu-flash"

        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, keep: Tensor) -> Tensor:
            mask = where_mask(keep, query.dtype, fill)
            return merge_heads(attend(producer, query, key, value, mask)) * torch.sigmoid(gate)

        mask = match_of(model, *operands(shape), shape.empty(2, 1, 1, 48, dtype=torch.bool)).mask
        assert mask is not None
        assert (mask.is_boolean, mask.fill) == (True, expected)

    def test_a_cast_of_the_bias_is_read_through(self) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, keep: Tensor) -> Tensor:
            mask = torch.ops.prims.convert_element_type(
                where_mask(keep, torch.float32, torch.finfo(torch.bfloat16).min), query.dtype
            )
            return merge_heads(attend("cudnn", query, key, value, mask)) * torch.sigmoid(gate)

        graph = trace(model, *operands(), SHAPE.empty(2, 1, 1, 48, dtype=torch.bool)).graph
        mask = only_match(graph).mask
        assert mask is not None
        assert mask.operand.node is placeholder(graph, "keep")

    @pytest.mark.parametrize("fill", [-1.0, -100.0, -10000.0, 0.0, 5.0])
    def test_a_bias_that_does_not_kill_stays_a_bias(self, fill: float) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, keep: Tensor) -> Tensor:
            mask = where_mask(keep, query.dtype, fill)
            return merge_heads(attend("cudnn", query, key, value, mask)) * torch.sigmoid(gate)

        mask = match_of(model, *operands(), SHAPE.empty(2, 1, 1, 48, dtype=torch.bool)).mask
        assert mask is not None
        assert not mask.is_boolean

    def test_an_inverted_where_stays_a_bias(self) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, drop: Tensor) -> Tensor:
            zero = torch.full((), 0.0, dtype=query.dtype, device=query.device)
            mask = torch.where(drop, zero - math.inf, zero)
            return merge_heads(attend("cudnn", query, key, value, mask)) * torch.sigmoid(gate)

        mask = match_of(model, *operands(), SHAPE.empty(2, 1, 1, 48, dtype=torch.bool)).mask
        assert mask is not None
        assert not mask.is_boolean

    @pytest.mark.parametrize("size", [(2, 1, 1, 48), (1, 8, 1, 48), (48,), (1, 48)])
    def test_a_float_mask(self, size: tuple[int, ...]) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
            return merge_heads(attend("cudnn", query, key, value, bias)) * torch.sigmoid(gate)

        graph = trace(model, *operands(), SHAPE.empty(*size)).graph
        mask = only_match(graph).mask
        assert mask is not None
        assert not mask.is_boolean
        assert mask.operand.node is placeholder(graph, "bias")

    def test_an_expanded_mask_is_read_before_the_expansion(self) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, keep: Tensor) -> Tensor:
            mask = where_mask(keep.unsqueeze(1).unsqueeze(1).expand(2, 8, 1, 48), query.dtype)
            return merge_heads(attend("cudnn", query, key, value, mask)) * torch.sigmoid(gate)

        graph = trace(model, *operands(), SHAPE.empty(2, 48, dtype=torch.bool)).graph
        mask = only_match(graph).mask
        assert mask is not None
        assert mask.operand.node is placeholder(graph, "keep")

    def test_a_mask_of_other_sizes_declines(self) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
            return merge_heads(attend("cudnn", query, key, value, bias)) * torch.sigmoid(gate)

        assert reason_of(model, *operands(), SHAPE.empty(2, 1, 1, 47)) is Reason.MASK_LAYOUT


class TestGates:
    def check(self, function: Callable[..., Any], *inputs: Tensor) -> GatedAttention:
        return match_of(function, *inputs)

    def test_qwen_chunk_is_read_without_a_copy(self) -> None:
        fused = SHAPE.empty(2, 1, 8 * 2 * 16)

        def model(query: Tensor, key: Tensor, value: Tensor, fused: Tensor) -> Tensor:
            gate = fused.view(2, 1, 8, 32).chunk(2, -1)[1].reshape(2, 1, -1)
            return gated(query, key, value, gate)

        match = self.check(model, *operands()[:3], fused)
        logits = match.gate.sigmoid.argument.node
        assert logits.target is not torch.ops.aten.clone.default
        assert logits.meta["val"].stride() == (256, 256, 32, 1)

    def test_a_chunk_along_the_wrong_dim_is_that_chunk(self) -> None:
        """A flat half is a different gate: it must be read as what it is, not as Qwen's."""
        fused = SHAPE.empty(2, 1, 8 * 2 * 16)

        def model(query: Tensor, key: Tensor, value: Tensor, fused: Tensor) -> Tensor:
            return gated(query, key, value, fused.chunk(2, -1)[1])

        logits = self.check(model, *operands()[:3], fused).gate.sigmoid.argument
        assert tuple(logits.node.meta["val"].shape) == (2, 1, 128)

    def test_either_operand_order(self) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            return torch.sigmoid(gate) * merge_heads(attend("cudnn", query, key, value, None))

        self.check(model, *operands())

    def test_gate_before_the_reshape(self) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            output = attend("cudnn", query, key, value, None).transpose(1, 2)
            return (output * torch.sigmoid(gate.view(2, 1, 8, 16))).reshape(2, 1, -1)

        self.check(model, *operands())

    def test_one_gate_a_head(self) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            output = attend("cudnn", query, key, value, None).transpose(1, 2)
            return output * torch.sigmoid(gate.unsqueeze(-1))

        logits = self.check(model, *operands()[:3], SHAPE.empty(2, 1, 8)).gate.sigmoid.argument
        assert logits.layout.of_axis("dim") == ()

    def test_other_activations_decline(self) -> None:
        def silu(gate: Tensor) -> Tensor:
            return gate * torch.sigmoid(gate)

        near: list[Callable[[Tensor], Tensor]] = [
            silu,
            torch.tanh,
            torch.relu,
            lambda gate: torch.sigmoid(gate) * 2.0,
            lambda gate: 1.0 - torch.sigmoid(gate),
            lambda gate: torch.sigmoid(gate) + 1.0,
            lambda gate: torch.sqrt(torch.sigmoid(gate)),
            lambda gate: torch.sigmoid(gate) * torch.sigmoid(gate),
            lambda gate: torch.nn.functional.hardsigmoid(gate),
            lambda gate: torch.softmax(gate, -1),
            lambda gate: gate,
        ]
        for activation in near:
            assert reason_of(activated(activation), *operands()) is Reason.NOT_SIGMOID

    def test_no_gate_declines(self) -> None:
        weight = SHAPE.empty(128, 64)

        def model(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
            return merge_heads(attend("cudnn", query, key, value, None)) @ weight

        assert reason_of(model, *operands()[:3], weight) is Reason.NO_GATE

    def test_a_constant_factor_is_no_gate(self) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return merge_heads(attend("cudnn", query, key, value, None)) * 0.5

        assert reason_of(model, *operands()[:3]) is Reason.NOT_SIGMOID

    def test_output_used_elsewhere_declines(self) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Any:
            output = merge_heads(attend("cudnn", query, key, value, None))
            return output * torch.sigmoid(gate), output

        assert reason_of(model, *operands()) is Reason.OUTPUT_USED

    def test_gate_computed_from_the_output_declines(self) -> None:
        weight = SHAPE.empty(128, 128)

        def model(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
            output = merge_heads(attend("cudnn", query, key, value, None))
            return output * torch.sigmoid(output @ weight)

        assert reason_of(model, *operands()[:3], weight) is Reason.OUTPUT_USED

    def test_self_gating_declines(self) -> None:
        def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            output = merge_heads(attend("cudnn", query, key, value, None))
            return output * output

        assert reason_of(model, *operands()[:3]) is Reason.OUTPUT_USED

    @pytest.mark.parametrize(
        ("rounded", "product", "result"),
        [
            (torch.bfloat16, torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.float32, torch.float32),
            (torch.float32, torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.float32, torch.float16),
            (torch.float16, torch.float32, torch.bfloat16),
        ],
    )
    def test_casts_are_read_with_their_rounding(
        self, rounded: torch.dtype, product: torch.dtype, result: torch.dtype
    ) -> None:
        cast = torch.ops.prims.convert_element_type

        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            output = cast(merge_heads(attend("cudnn", query, key, value, None)), product)
            weight = cast(cast(torch.sigmoid(cast(gate, torch.float32)), rounded), product)
            return cast(output * weight, result)

        graph = trace(model, *operands()).graph
        gate = only_match(graph).gate
        assert gate.sigmoid.dtype is rounded
        assert gate.sigmoid.argument.node is placeholder(graph, "gate")
        assert gate.product.node.meta["val"].dtype is result

    def test_a_sigmoid_rounded_to_two_dtypes_declines(self) -> None:
        cast = torch.ops.prims.convert_element_type

        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            weight = cast(cast(torch.sigmoid(gate), torch.float16), torch.bfloat16)
            return merge_heads(attend("cudnn", query, key, value, None)) * weight

        assert reason_of(model, *operands()) is Reason.GATE_DTYPE

    def test_a_narrowed_output_is_no_gated_one(self) -> None:
        cast = torch.ops.prims.convert_element_type
        shape = replace(SHAPE, dtype=torch.float32, device="cpu")

        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            output = merge_heads(attend("cpu-flash", query, key, value, None))
            return cast(output, torch.bfloat16) * torch.sigmoid(cast(gate, torch.bfloat16))

        assert reason_of(model, *operands(shape)) is Reason.NO_GATE

    @pytest.mark.parametrize(
        "spelling",
        [
            lambda x: 1.0 / (1.0 + torch.exp(-x)),
            lambda x: torch.reciprocal(torch.exp(-x) + 1),
        ],
    )
    def test_spelled_out(self, spelling: Callable[[Tensor], Tensor]) -> None:
        assert match_of(activated(spelling), *operands()).gate.sigmoid.is_spelled_out

    @pytest.mark.parametrize(
        "spelling",
        [
            lambda x: 1.0 / (1.0 + torch.exp(x)),
            lambda x: 2.0 / (1.0 + torch.exp(-x)),
            lambda x: 1.0 / (2.0 + torch.exp(-x)),
            lambda x: 1.0 / (1.0 + torch.exp2(-x)),
            lambda x: torch.rsqrt(1.0 + torch.exp(-x)),
            lambda x: 1.0 / (1.0 - torch.exp(-x)),
        ],
    )
    def test_nearly_spelled_out(self, spelling: Callable[[Tensor], Tensor]) -> None:
        assert reason_of(activated(spelling), *operands()) is Reason.NOT_SIGMOID

    def test_a_gate_that_repeats_along_nothing_known_declines(self) -> None:
        shape = replace(SHAPE, batch=1)

        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            return merge_heads(attend("cudnn", query, key, value, None)) * torch.sigmoid(gate)

        inputs = operands(shape)[:3]
        assert reason_of(model, *inputs, shape.empty(3, 1, 128)) is Reason.GATE_LAYOUT


class TestChains:
    """Hq == D == B, so that no size tells a wrong chain."""

    shape = Shape(batch=16, query_heads=16, kv_heads=16, head_dim=16)

    def reason_or_axes(self, chain: Callable[[Tensor], Tensor]) -> Any:
        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            output = chain(attend("cudnn", query, key, value, None))
            return output * torch.sigmoid(gate.reshape(output.shape))

        graph = trace(model, *operands(self.shape)).graph
        (recognition,) = recognitions(graph)
        if not isinstance(recognition.outcome, GatedAttention):
            return recognition.outcome.reason
        product = recognition.outcome.gate.product
        return [[factor.axis for factor in dim] for dim in product.layout.dims]

    @pytest.mark.parametrize(
        "chain",
        [
            lambda x: x.transpose(1, 2).reshape(16, 1, 256),
            lambda x: x.permute(0, 2, 1, 3).contiguous().view(16, 1, -1),
            lambda x: x.transpose(1, 2).flatten(2),
            lambda x: x.transpose(1, 2).clone().reshape(16, 256).unsqueeze(1),
            lambda x: x.squeeze(2).reshape(16, 1, 256),
            lambda x: x.permute(2, 0, 1, 3).squeeze(0).flatten(1).unsqueeze(1),
            lambda x: x.transpose(1, 2).unflatten(2, (4, 4)).flatten(2),
        ],
    )
    def test_every_spelling_of_merged_heads(self, chain: Callable[[Tensor], Tensor]) -> None:
        assert self.reason_or_axes(chain) == [["batch"], [], ["head", "dim"]]

    def test_a_wrong_permute_is_told_by_its_axes(self) -> None:
        found = self.reason_or_axes(lambda x: x.permute(0, 2, 3, 1).reshape(16, 1, 256))
        assert found == [["batch"], [], ["dim", "head"]]

    def test_batch_and_heads_exchanged(self) -> None:
        found = self.reason_or_axes(lambda x: x.permute(1, 2, 0, 3).reshape(16, 1, 256))
        assert found == [["head"], [], ["batch", "dim"]]

    def test_a_cut_across_axes_declines(self) -> None:
        odd = replace(self.shape, query_heads=3, kv_heads=3)

        def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
            output = attend("cudnn", query, key, value, None).transpose(1, 2).reshape(16, 16, 3)
            return output * torch.sigmoid(gate.reshape(16, 16, 3))

        assert reason_of(model, *operands(odd)) is Reason.ATTENTION_LAYOUT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [0.0, -0.0, 0.1, -65504.0, -65536.0, 1e39, -math.inf, 3])
def test_a_constant_is_rounded_as_its_dtype_stores_it(value: float, dtype: torch.dtype) -> None:
    stored = float(torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype))
    for _ in range(2):
        found = rounded(value, dtype)
        assert (found, math.copysign(1, found)) == (stored, math.copysign(1, stored))
