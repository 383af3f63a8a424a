"""The graphs of the main forms after the pass, to the letter."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from tests.graphs import CUDA, fake_mode, qwen, qwen_inputs, run_pass, trace


@pytest.mark.usefixtures("h200")
def test_qwen() -> None:
    with fake_mode():
        module = trace(qwen("cudnn"), *qwen_inputs(CUDA))
    assert run_pass(module) == 1
    assert_expected_inline(
        str(module.graph).strip(),
        """\
graph():
    %query_1 : [num_users=1] = placeholder[target=query_1]
    %key_1 : [num_users=1] = placeholder[target=key_1]
    %value_1 : [num_users=1] = placeholder[target=value_1]
    %keep_1 : [num_users=1] = placeholder[target=keep_1]
    %fused_1 : [num_users=1] = placeholder[target=fused_1]
    %view : [num_users=1] = call_function[target=torch.ops.aten.view.default](args = (%fused_1, [8, 1, 16, 512]), kwargs = {})
    %split : [num_users=1] = call_function[target=torch.ops.aten.split.Tensor](args = (%view, 256, -1), kwargs = {})
    %getitem_10 : [num_users=1] = call_function[target=operator.getitem](args = (%split, 1), kwargs = {})
    %gated_decode_attention : [num_users=1] = call_function[target=torch.ops.fusion_pass.gated_decode_attention.default](args = (%query_1, %key_1, %value_1, %getitem_10, %keep_1), kwargs = {scale: 0.0625, mask_fill: -65536.0, masked_row: zero, numerics: compiled})
    %reshape : [num_users=1] = call_function[target=torch.ops.aten.reshape.default](args = (%gated_decode_attention, [8, 1, 4096]), kwargs = {})
    return reshape""",
    )
