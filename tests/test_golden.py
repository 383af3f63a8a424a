"""The graphs of the main forms before and after the pass, to the letter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import Graph

from tests.graphs import (
    CUDA,
    attend,
    fake_mode,
    merge_heads,
    qwen,
    qwen_inputs,
    repeat_kv,
    run_pass,
    trace,
    where_mask,
)

pytestmark = pytest.mark.usefixtures("h200")


def calls(graph: Graph) -> str:
    """The operator calls of a graph, without the shared prefix of their names."""
    lines = [node.format_node() for node in graph.nodes if node.op == "call_function"]
    return "\n".join(
        str(line).replace("call_function[target=torch.ops.", "[").replace("[num_users=1] = ", "")
        for line in lines
    )


def before_and_after(model: Callable[..., Tensor], *inputs: Tensor) -> tuple[str, str]:
    module = trace(model, *inputs)
    before = calls(module.graph)
    assert run_pass(module) == 1
    return before, calls(module.graph)


def test_qwen() -> None:
    with fake_mode():
        before, after = before_and_after(qwen("cudnn"), *qwen_inputs(CUDA))
    assert_expected_inline(
        before,
        """\
%full : [aten.full.default](args = ([], 0.0), kwargs = {dtype: torch.bfloat16, device: cuda:0, pin_memory: False})
%full_1 : [aten.full.default](args = ([], -65536.0), kwargs = {dtype: torch.bfloat16, device: cuda:0, pin_memory: False})
%where : [aten.where.self](args = (%keep_1, %full, %full_1), kwargs = {})
%unsqueeze : [aten.unsqueeze.default](args = (%key_1, 2), kwargs = {})
%expand : [aten.expand.default](args = (%unsqueeze, [8, 2, 8, 4096, 256]), kwargs = {})
%clone : [aten.clone.default](args = (%expand,), kwargs = {memory_format: torch.contiguous_format})
%_unsafe_view : [aten._unsafe_view.default](args = (%clone, [8, 16, 4096, 256]), kwargs = {})
%unsqueeze_1 : [aten.unsqueeze.default](args = (%value_1, 2), kwargs = {})
%expand_1 : [aten.expand.default](args = (%unsqueeze_1, [8, 2, 8, 4096, 256]), kwargs = {})
%clone_1 : [aten.clone.default](args = (%expand_1,), kwargs = {memory_format: torch.contiguous_format})
%_unsafe_view_1 : [aten._unsafe_view.default](args = (%clone_1, [8, 16, 4096, 256]), kwargs = {})
%_scaled_dot_product_cudnn_attention : [aten._scaled_dot_product_cudnn_attention.default](args = (%query_1, %_unsafe_view, %_unsafe_view_1, %where, False), kwargs = {})
%getitem : call_function[target=operator.getitem](args = (%_scaled_dot_product_cudnn_attention, 0), kwargs = {})
%view : [aten.view.default](args = (%fused_1, [8, 1, 16, 512]), kwargs = {})
%split : [aten.split.Tensor](args = (%view, 256, -1), kwargs = {})
%getitem_10 : call_function[target=operator.getitem](args = (%split, 1), kwargs = {})
%transpose : [aten.transpose.int](args = (%getitem, 1, 2), kwargs = {})
%view_1 : [aten.view.default](args = (%transpose, [8, 1, -1]), kwargs = {})
%clone_2 : [aten.clone.default](args = (%getitem_10,), kwargs = {memory_format: torch.contiguous_format})
%_unsafe_view_2 : [aten._unsafe_view.default](args = (%clone_2, [8, 1, 4096]), kwargs = {})
%sigmoid : [aten.sigmoid.default](args = (%_unsafe_view_2,), kwargs = {})
%mul : [aten.mul.Tensor](args = (%view_1, %sigmoid), kwargs = {})""",
    )
    assert_expected_inline(
        after,
        """\
%view : [aten.view.default](args = (%fused_1, [8, 1, 16, 512]), kwargs = {})
%split : [aten.split.Tensor](args = (%view, 256, -1), kwargs = {})
%getitem_10 : call_function[target=operator.getitem](args = (%split, 1), kwargs = {})
%gated_decode_attention : [fusion_pass.gated_decode_attention.default](args = (%query_1, %key_1, %value_1, %getitem_10, %keep_1), kwargs = {scale: 0.0625, mask_fill: -65536.0, masked_row: zero, numerics: compiled})
%reshape : [aten.reshape.default](args = (%gated_decode_attention, [8, 1, 4096]), kwargs = {})""",
    )


def test_spelled_out() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, gate: Tensor) -> Tensor:
        logits = torch.matmul(query, repeat_kv(key, 8).transpose(2, 3)) * 0.0625
        weights = torch.softmax(logits + where_mask(keep, query.dtype), dim=-1)
        output = torch.matmul(weights, repeat_kv(value, 8))
        return merge_heads(output) * torch.sigmoid(gate)

    with fake_mode():
        before, after = before_and_after(model, *qwen_inputs(CUDA)[:4], CUDA.gate())
    assert_expected_inline(
        before,
        """\
%unsqueeze : [aten.unsqueeze.default](args = (%key_1, 2), kwargs = {})
%expand : [aten.expand.default](args = (%unsqueeze, [8, 2, 8, 4096, 256]), kwargs = {})
%clone : [aten.clone.default](args = (%expand,), kwargs = {memory_format: torch.contiguous_format})
%_unsafe_view : [aten._unsafe_view.default](args = (%clone, [8, 16, 4096, 256]), kwargs = {})
%transpose : [aten.transpose.int](args = (%_unsafe_view, 2, 3), kwargs = {})
%expand_1 : [aten.expand.default](args = (%query_1, [8, 16, 1, 256]), kwargs = {})
%view : [aten.view.default](args = (%expand_1, [128, 1, 256]), kwargs = {})
%expand_2 : [aten.expand.default](args = (%transpose, [8, 16, 256, 4096]), kwargs = {})
%view_1 : [aten.view.default](args = (%expand_2, [128, 256, 4096]), kwargs = {})
%bmm : [aten.bmm.default](args = (%view, %view_1), kwargs = {})
%_unsafe_view_1 : [aten._unsafe_view.default](args = (%bmm, [8, 16, 1, 4096]), kwargs = {})
%mul : [aten.mul.Tensor](args = (%_unsafe_view_1, 0.0625), kwargs = {})
%full : [aten.full.default](args = ([], 0.0), kwargs = {dtype: torch.bfloat16, device: cuda:0, pin_memory: False})
%full_1 : [aten.full.default](args = ([], -inf), kwargs = {dtype: torch.bfloat16, device: cuda:0, pin_memory: False})
%where : [aten.where.self](args = (%keep_1, %full, %full_1), kwargs = {})
%add : [aten.add.Tensor](args = (%mul, %where), kwargs = {})
%_softmax : [aten._softmax.default](args = (%add, -1, False), kwargs = {})
%unsqueeze_1 : [aten.unsqueeze.default](args = (%value_1, 2), kwargs = {})
%expand_3 : [aten.expand.default](args = (%unsqueeze_1, [8, 2, 8, 4096, 256]), kwargs = {})
%clone_1 : [aten.clone.default](args = (%expand_3,), kwargs = {memory_format: torch.contiguous_format})
%_unsafe_view_2 : [aten._unsafe_view.default](args = (%clone_1, [8, 16, 4096, 256]), kwargs = {})
%expand_4 : [aten.expand.default](args = (%_softmax, [8, 16, 1, 4096]), kwargs = {})
%view_2 : [aten.view.default](args = (%expand_4, [128, 1, 4096]), kwargs = {})
%expand_5 : [aten.expand.default](args = (%_unsafe_view_2, [8, 16, 4096, 256]), kwargs = {})
%view_3 : [aten.view.default](args = (%expand_5, [128, 4096, 256]), kwargs = {})
%bmm_1 : [aten.bmm.default](args = (%view_2, %view_3), kwargs = {})
%_unsafe_view_3 : [aten._unsafe_view.default](args = (%bmm_1, [8, 16, 1, 256]), kwargs = {})
%transpose_1 : [aten.transpose.int](args = (%_unsafe_view_3, 1, 2), kwargs = {})
%view_4 : [aten.view.default](args = (%transpose_1, [8, 1, -1]), kwargs = {})
%sigmoid : [aten.sigmoid.default](args = (%gate_1,), kwargs = {})
%mul_1 : [aten.mul.Tensor](args = (%view_4, %sigmoid), kwargs = {})""",
    )
    assert_expected_inline(
        after,
        """\
%expand_1 : [aten.expand.default](args = (%query_1, [8, 16, 1, 256]), kwargs = {})
%view : [aten.view.default](args = (%expand_1, [128, 1, 256]), kwargs = {})
%reshape : [aten.reshape.default](args = (%view, [8, 16, 1, 256]), kwargs = {})
%reshape_1 : [aten.reshape.default](args = (%gate_1, [8, 1, 16, 256]), kwargs = {})
%gated_decode_attention : [fusion_pass.gated_decode_attention.default](args = (%reshape, %key_1, %value_1, %reshape_1, %keep_1), kwargs = {scale: 0.0625, mask_fill: -inf, masked_row: nan, numerics: compiled})
%reshape_2 : [aten.reshape.default](args = (%gated_decode_attention, [8, 1, 4096]), kwargs = {})""",
    )


def test_one_gate_a_head_in_float32() -> None:
    cast = torch.ops.prims.convert_element_type

    def model(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        output = attend("flash", query, key, value, None).transpose(1, 2)
        weight = torch.sigmoid(cast(gate, torch.float32).unsqueeze(-1))
        return cast(cast(output, torch.float32) * weight, query.dtype).flatten(2)

    with fake_mode():
        before, after = before_and_after(model, *qwen_inputs(CUDA)[:3], CUDA.empty(8, 1, 16))
    assert_expected_inline(
        before,
        """\
%_scaled_dot_product_flash_attention : [aten._scaled_dot_product_flash_attention.default](args = (%query_1, %key_1, %value_1), kwargs = {})
%getitem : call_function[target=operator.getitem](args = (%_scaled_dot_product_flash_attention, 0), kwargs = {})
%transpose : [aten.transpose.int](args = (%getitem, 1, 2), kwargs = {})
%convert_element_type : [prims.convert_element_type.default](args = (%gate_1, torch.float32), kwargs = {})
%unsqueeze : [aten.unsqueeze.default](args = (%convert_element_type, -1), kwargs = {})
%sigmoid : [aten.sigmoid.default](args = (%unsqueeze,), kwargs = {})
%convert_element_type_1 : [prims.convert_element_type.default](args = (%transpose, torch.float32), kwargs = {})
%mul : [aten.mul.Tensor](args = (%convert_element_type_1, %sigmoid), kwargs = {})
%convert_element_type_2 : [prims.convert_element_type.default](args = (%mul, torch.bfloat16), kwargs = {})
%view : [aten.view.default](args = (%convert_element_type_2, [8, 1, 4096]), kwargs = {})""",
    )
    assert_expected_inline(
        after,
        """\
%reshape : [aten.reshape.default](args = (%gate_1, [8, 1, 16, 1]), kwargs = {})
%gated_decode_attention : [fusion_pass.gated_decode_attention.default](args = (%query_1, %key_1, %value_1, %reshape, None), kwargs = {scale: 0.0625, mask_fill: -inf, masked_row: zero, numerics: compiled, sigmoid_dtype: torch.float32})
%view : [aten.view.default](args = (%gated_decode_attention, [8, 1, 4096]), kwargs = {})""",
    )
