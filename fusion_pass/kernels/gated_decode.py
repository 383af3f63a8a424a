# mypy: allow-untyped-defs, allow-untyped-calls
"""Split-KV decode attention in two launches, the second of which applies the sigmoid gate.

`gated_decode_split` computes an online softmax over one share of the keys for all query heads
of a KV head; `gated_decode_reduce` merges the shares of a query row and gates the result.
"""

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.libdevice import exp as accurate_exp

if knobs.runtime.interpret:
    # libdevice has no body that the interpreter could run.
    @triton.jit
    def accurate_exp(x):
        """The interpreter's exponential, as accurate as numpy's."""
        return tl.exp(x)


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_mask(pointers, in_range, MASK: tl.constexpr):
    """Load mask elements as what is added to the logit: 0 where live, -inf where masked."""
    if MASK == "bool":
        # A boolean pointer may arrive as uint8 (Inductor) or as int1 (Triton).
        attend = tl.load(pointers, mask=in_range, other=0) != 0
        bias = tl.where(attend, 0.0, float("-inf"))
    else:
        bias = tl.load(pointers, mask=in_range, other=float("-inf")).to(tl.float32)
    return bias


@triton.jit
def find_live_tiles(
    mask_rows,
    row_valid,
    stride_mn,
    kv_length,
    split,
    num_splits,
    num_tiles,
    MASK: tl.constexpr,
    SCAN_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the half-open range of this split's tiles outside which no row attends to a key."""
    lanes = tl.arange(0, SCAN_TILES)
    first = tl.full([SCAN_TILES], 0x7FFFFFFF, tl.int32)
    end = tl.zeros([SCAN_TILES], tl.int32)
    for base in range(0, num_tiles, SCAN_TILES):
        tiles = base + lanes
        starts = (split + tiles * num_splits) * BLOCK_N
        keys = starts[:, None, None] + tl.arange(0, BLOCK_N)[None, None, :]
        in_range = (keys < kv_length) & (tiles < num_tiles)[:, None, None]
        in_range = in_range & row_valid[None, :, None]
        pointers = mask_rows[None, :, None] + keys.to(tl.int64) * stride_mn
        live = load_mask(pointers, in_range, MASK) != float("-inf")  # [SCAN_TILES, rows, BLOCK_N]
        tile_live = tl.max(tl.max(live.to(tl.int32), axis=2), axis=1) > 0
        first = tl.minimum(first, tl.where(tile_live, tiles, 0x7FFFFFFF))
        end = tl.maximum(end, tl.where(tile_live, tiles + 1, 0))
    return tl.min(first, axis=0), tl.max(end, axis=0)


@triton.jit
def gated_decode_split(
    query,
    key,
    value,
    mask,
    accumulator,
    statistics,
    kv_length,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_vd,
    stride_mb,
    stride_mh,
    stride_mt,
    stride_mn,
    SCALE: tl.constexpr,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    SCAN_TILES: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Attend from the query rows of one KV head to every `num_splits`-th tile of its keys.

    Grid: (batch * kv_heads * row blocks, num_splits). A row is a (head of the group, token).
    Writes the row maximum and sum to `statistics` (rows, 2, num_splits), always, and the
    unnormalised output to `accumulator` (rows, num_splits, VALUE_DIM) if any key was live.
    """
    ROWS: tl.constexpr = GROUP * QUERY_TOKENS
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    row_block = tl.program_id(0) % ROW_BLOCKS
    kv_head = (tl.program_id(0) // ROW_BLOCKS) % KV_HEADS
    batch = (tl.program_id(0) // (ROW_BLOCKS * KV_HEADS)).to(tl.int64)

    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_valid = rows < ROWS
    heads = (kv_head * GROUP + rows // QUERY_TOKENS).to(tl.int64)
    tokens = (rows % QUERY_TOKENS).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    tile_keys = tl.arange(0, BLOCK_N)

    query_rows = query + batch * stride_qb + heads * stride_qh + tokens * stride_qt
    q = tl.load(
        query_rows[:, None] + dims.to(tl.int64)[None, :] * stride_qd,
        mask=row_valid[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    key += batch * stride_kb + kv_head.to(tl.int64) * stride_kh
    value += batch * stride_vb + kv_head.to(tl.int64) * stride_vh
    # 64-bit offsets inside a tile too: with a large token stride one tile passes 2^31 elements.
    key_offsets = tile_keys.to(tl.int64)[:, None] * stride_kn
    key_offsets += dims.to(tl.int64)[None, :] * stride_kd
    value_offsets = tile_keys.to(tl.int64)[:, None] * stride_vn
    value_offsets += value_dims.to(tl.int64)[None, :] * stride_vd

    total_tiles = (kv_length + BLOCK_N - 1) // BLOCK_N
    num_tiles = (total_tiles - split + num_splits - 1) // num_splits
    first = 0
    end = num_tiles
    if MASK != "none":
        # One mask row serves all rows of the program unless the mask tells them apart.
        mask_row = row_block * BLOCK_M + tl.arange(0, MASK_ROWS)
        mask_row_valid = mask_row < ROWS
        mask_heads = (kv_head * GROUP + mask_row // QUERY_TOKENS).to(tl.int64)
        mask_tokens = (mask_row % QUERY_TOKENS).to(tl.int64)
        mask_rows = mask + batch * stride_mb + mask_heads * stride_mh + mask_tokens * stride_mt
        first, end = find_live_tiles(
            mask_rows,
            mask_row_valid,
            stride_mn,
            kv_length,
            split,
            num_splits,
            num_tiles,
            MASK,
            SCAN_TILES,
            BLOCK_N,
        )

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    # From 0: Triton 3.9 does not pipeline a loop whose lower bound is a variable.
    for tile in range(end - first):
        start = (split + (first + tile) * num_splits) * BLOCK_N
        start_64 = start.to(tl.int64)
        in_range = start + tile_keys < kv_length
        k = tl.load(
            key + start_64 * stride_kn + key_offsets,
            mask=in_range[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        logits = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION) * SCALE
        if MASK == "none":
            logits = tl.where(in_range[None, :], logits, float("-inf"))
            key_live = in_range
        else:
            bias = load_mask(
                mask_rows[:, None] + (start_64 + tile_keys)[None, :] * stride_mn,
                in_range[None, :] & mask_row_valid[:, None],
                MASK,
            )
            # Selected, not added: a dead key's logit may be NaN.
            logits = tl.where(bias == float("-inf"), float("-inf"), logits + bias)
            key_live = tl.max((bias != float("-inf")).to(tl.int32), axis=0) > 0

        # Natural logarithms: log2(e) times a finfo.min mask would overflow to -inf.
        new_max = tl.maximum(row_max, tl.max(logits, axis=1))
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2((logits - finite_max[:, None]) * LOG2_E)
        decay = tl.exp2((row_max - finite_max) * LOG2_E)
        row_sum = row_sum * decay + tl.sum(weights, axis=1)
        row_max = new_max
        # Keys that no row attends to are not loaded, so that 0 * NaN cannot reach the sum.
        v = tl.load(
            value + start_64 * stride_vn + value_offsets,
            mask=key_live[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        output = tl.dot(
            weights.to(v.dtype), v, output * decay[:, None], input_precision=INPUT_PRECISION
        )

    scratch_rows = (batch * KV_HEADS + kv_head) * ROWS + rows
    row_statistics = statistics + scratch_rows * (2 * num_splits) + split
    tl.store(row_statistics, row_max, mask=row_valid)
    tl.store(row_statistics + num_splits, row_sum, mask=row_valid)
    if first < end:
        tl.store(
            accumulator
            + (scratch_rows * num_splits + split)[:, None] * VALUE_DIM
            + value_dims[None, :],
            output,
            mask=row_valid[:, None] & (value_dims < VALUE_DIM)[None, :],
        )


@triton.jit
def attend_to_all(
    query,
    key,
    value,
    kv_length,
    stride_qd,
    stride_kn,
    stride_kd,
    stride_vn,
    stride_vd,
    value_dims,
    SCALE: tl.constexpr,
    MASK_FILL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend from one query row to every key, each logit shifted by the finite mask fill."""
    dims = tl.arange(0, BLOCK_D)
    dim_valid = dims < HEAD_DIM
    q = tl.load(query + dims.to(tl.int64) * stride_qd, mask=dim_valid, other=0.0).to(tl.float32)
    row_max = float("-inf")
    row_sum = 0.0
    output = value_dims * 0.0
    for start in range(0, kv_length, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        in_range = keys < kv_length
        k = tl.load(
            key + keys.to(tl.int64)[:, None] * stride_kn + dims.to(tl.int64)[None, :] * stride_kd,
            mask=in_range[:, None] & dim_valid[None, :],
            other=0.0,
        ).to(tl.float32)
        logits = tl.sum(k * q[None, :], axis=1) * SCALE + MASK_FILL
        logits = tl.where(in_range, logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, axis=0))
        weights = tl.exp2((logits - new_max) * LOG2_E)
        decay = tl.exp2((row_max - new_max) * LOG2_E)
        v = tl.load(
            value
            + keys.to(tl.int64)[:, None] * stride_vn
            + value_dims.to(tl.int64)[None, :] * stride_vd,
            mask=in_range[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        row_sum = row_sum * decay + tl.sum(weights, axis=0)
        output = output * decay + tl.sum(weights[:, None] * v, axis=0)
        row_max = new_max
    return tl.div_rn(output, row_sum)


@triton.jit
def apply_gate(attention, gate, NUMERICS: tl.constexpr, DTYPE: tl.constexpr):
    """Multiply by the gate's sigmoid, rounding to DTYPE where the numerics contract does."""
    gate_32 = gate.to(tl.float32)
    if NUMERICS == "eager":
        # torch's CUDA sigmoid: accurate exp, IEEE division, rounded to the gate's dtype.
        sigmoid = tl.div_rn(1.0, 1.0 + accurate_exp(-gate_32)).to(gate.dtype).to(tl.float32)
    else:
        # The very function Inductor emits, so that the bits are the same.
        sigmoid = tl.sigmoid(gate_32)
    if NUMERICS != "fp32":
        attention = attention.to(DTYPE).to(tl.float32)
    return (attention * sigmoid).to(DTYPE)


@triton.jit
def gated_decode_reduce(
    query,
    key,
    value,
    gate,
    accumulator,
    statistics,
    output,
    kv_length,
    num_splits,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_vd,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_gd,
    SCALE: tl.constexpr,
    MASK_FILL: tl.constexpr,
    MASKED_ROW: tl.constexpr,
    NUMERICS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Merge the splits of one query row, gate the result and store it.

    Grid: (batch * query_heads * query_tokens, blocks of VALUE_DIM). MASKED_ROW says what a row
    without a live key gives: "zero", "nan", or "fill" (attend to all keys, shifted by MASK_FILL).
    """
    row = tl.program_id(0).to(tl.int64)
    token = row % QUERY_TOKENS
    head = (row // QUERY_TOKENS) % QUERY_HEADS
    batch = row // (QUERY_TOKENS * QUERY_HEADS)
    splits = tl.arange(0, BLOCK_SPLITS)
    value_dims = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    dim_valid = value_dims < VALUE_DIM

    split_valid = splits < num_splits
    row_statistics = statistics + row * (2 * num_splits) + splits
    split_max = tl.load(row_statistics, mask=split_valid, other=float("-inf"))
    split_sum = tl.load(row_statistics + num_splits, mask=split_valid, other=0.0)
    # The sum tells, not the maximum: a split whose logits are all NaN has maximum -inf.
    split_live = split_sum != 0.0
    # Its own variable: written inline, this condition was miscompiled by Triton 3.5.1.
    load_valid = split_live[:, None] & dim_valid[None, :]
    parts = tl.load(
        accumulator + (row * num_splits + splits)[:, None] * VALUE_DIM + value_dims[None, :],
        mask=load_valid,
        other=0.0,
    )  # [BLOCK_SPLITS, BLOCK_V]
    row_max = tl.max(split_max, axis=0)
    finite_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    weights = tl.exp2((split_max - finite_max) * LOG2_E)
    row_sum = tl.sum(split_sum * weights, axis=0)
    attention = tl.sum(parts * weights[:, None], axis=0)

    if row_sum == 0.0:
        if MASKED_ROW == "fill":
            kv_head = head // GROUP
            attention = attend_to_all(
                query + batch * stride_qb + head * stride_qh + token * stride_qt,
                key + batch * stride_kb + kv_head * stride_kh,
                value + batch * stride_vb + kv_head * stride_vh,
                kv_length,
                stride_qd,
                stride_kn,
                stride_kd,
                stride_vn,
                stride_vd,
                value_dims,
                SCALE,
                MASK_FILL,
                HEAD_DIM,
                VALUE_DIM,
                BLOCK_N,
                BLOCK_D,
            )
        elif MASKED_ROW == "nan":
            attention += float("nan")
    else:
        attention = tl.div_rn(attention, row_sum)

    gate_offsets = batch * stride_gb + token * stride_gt + head * stride_gh
    gate_offsets += value_dims.to(tl.int64) * stride_gd
    gates = tl.load(gate + gate_offsets, mask=dim_valid, other=0.0)
    gated = apply_gate(attention, gates, NUMERICS, output.dtype.element_ty)
    output_row = (batch * QUERY_TOKENS + token) * QUERY_HEADS + head
    tl.store(output + output_row * VALUE_DIM + value_dims, gated, mask=dim_valid)
