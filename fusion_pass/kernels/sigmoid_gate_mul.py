# mypy: allow-untyped-defs, allow-untyped-calls
"""`x * sigmoid(gate)` over up to five dimensions in one launch, rounded as in eager torch."""

import triton
import triton.language as tl

from fusion_pass.kernels.gated_decode import apply_gate


@triton.jit
def sigmoid_gate_mul(
    x,
    gate,
    output,
    elements,
    size_1,
    size_2,
    size_3,
    size_4,
    stride_x0,
    stride_x1,
    stride_x2,
    stride_x3,
    stride_x4,
    stride_g0,
    stride_g1,
    stride_g2,
    stride_g3,
    stride_g4,
    stride_o0,
    stride_o1,
    stride_o2,
    stride_o3,
    stride_o4,
    SIGMOID_DTYPE: tl.constexpr,
    IS_WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the product of BLOCK elements, counted in row-major order of the sizes.

    Grid: (elements / BLOCK,). IS_WIDE says that an offset may pass 2^31 elements.
    """
    program = tl.program_id(0)
    if IS_WIDE:
        program = program.to(tl.int64)
    place = program * BLOCK + tl.arange(0, BLOCK)
    valid = place < elements
    index_4 = place % size_4
    rest = place // size_4
    index_3 = rest % size_3
    rest = rest // size_3
    index_2 = rest % size_2
    rest = rest // size_2
    index_1 = rest % size_1
    index_0 = rest // size_1
    x += index_0 * stride_x0 + index_1 * stride_x1 + index_2 * stride_x2
    x += index_3 * stride_x3 + index_4 * stride_x4
    gate += index_0 * stride_g0 + index_1 * stride_g1 + index_2 * stride_g2
    gate += index_3 * stride_g3 + index_4 * stride_g4
    output += index_0 * stride_o0 + index_1 * stride_o1 + index_2 * stride_o2
    output += index_3 * stride_o3 + index_4 * stride_o4
    gates = tl.load(gate, mask=valid, other=0.0)
    factors = tl.load(x, mask=valid, other=0.0).to(tl.float32)
    # What is multiplied is exact in float32: only the sigmoid and the product are rounded.
    product = apply_gate(factors, gates, "eager", SIGMOID_DTYPE, tl.float32)
    tl.store(output, product, mask=valid)
