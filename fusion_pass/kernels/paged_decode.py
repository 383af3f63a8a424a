# mypy: allow-untyped-defs, allow-untyped-calls
"""Split-KV decode attention over a paged cache in two launches, with an optional sigmoid gate.

`paged_decode_split` computes an online softmax over one share of a request's keys for all query
heads of a KV head; `paged_decode_reduce` merges the shares of a query row and gates the result.
Lengths and pages are read on the device.
"""

import triton
import triton.language as tl

from fusion_pass.kernels.gated_decode import (
    LOG2_E,
    add_values,
    apply_gate,
    prefetch,
    start_reduce,
    tile_offsets,
    wait_for_split,
    weigh,
)
from fusion_pass.kernels.naming import named


@triton.jit
def load_pages(
    indices, stride_ip, start, num_pages, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Page numbers of the BLOCK_N keys from `start`: a scalar if the tile lies inside a page.

    A key beyond the request's pages gets page 0.
    """
    slots = start
    if PAGE_SIZE % BLOCK_N != 0:
        slots += tl.arange(0, BLOCK_N)
    slots = slots // PAGE_SIZE
    return tl.load(indices + slots.to(tl.int64) * stride_ip, mask=slots < num_pages, other=0)


@triton.jit
def clamp(number, most):
    """An int32 or int64 number as int32, at most `most`, and not negative unless that is."""
    # In 64 bits, of which the lower 32 may be any number.
    number = tl.maximum(number.to(tl.int64), 0)
    return tl.minimum(number, most).to(tl.int32)


@triton.jit
def paged_offsets(
    pages,
    start,
    stride_p,
    stride_n,
    stride_d,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Offsets of the (BLOCK_N, COLUMNS) tile of keys from `start`, which lie in `pages`."""
    pages = pages.to(tl.int64)
    if PAGE_SIZE % BLOCK_N == 0:
        first = pages * stride_p + (start % PAGE_SIZE).to(tl.int64) * stride_n
        offsets = first + tile_offsets(stride_n, stride_d, BLOCK_N, COLUMNS, WIDE)
    else:
        slots = (start + tl.arange(0, BLOCK_N)) % PAGE_SIZE
        rows = pages * stride_p + slots.to(tl.int64) * stride_n
        columns = tl.arange(0, COLUMNS)
        if WIDE:
            columns = columns.to(tl.int64)
        offsets = rows[:, None] + columns[None, :] * stride_d
    return offsets


@triton.jit
def attend_pages(
    q,
    key,
    value,
    pages,
    start,
    first_key,
    kv_length,
    row_end,
    stride_kp,
    stride_kn,
    stride_kd,
    stride_vp,
    stride_vn,
    stride_vd,
    row_max,
    row_sums,
    output,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One step of the online softmax, over the BLOCK_N keys from `start`.

    Returns the row maximum, the sums [rows, BLOCK_N] whose sum is the row's, and the unnormalised
    output, in float32.
    """
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    keys = start + tl.arange(0, BLOCK_N)
    in_range = keys < kv_length
    visible = keys[None, :] < row_end[:, None]
    if WINDOW > 0:
        in_range &= keys >= first_key
        visible &= keys[None, :] >= row_end[:, None] - WINDOW
    k = tl.load(
        key
        + paged_offsets(
            pages, start, stride_kp, stride_kn, stride_kd, PAGE_SIZE, BLOCK_N, BLOCK_D, WIDE
        ),
        mask=in_range[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    logits = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION) * SCALE
    # Selected, not added: a dead key's logit may be NaN.
    logits = tl.where(visible, logits, float("-inf"))
    new_max, row_sums, weights, decay = weigh(logits, row_max, row_sums)
    # Keys that no row attends to are not loaded, so that 0 * NaN cannot reach the sum.
    v = tl.load(
        value
        + paged_offsets(
            pages, start, stride_vp, stride_vn, stride_vd, PAGE_SIZE, BLOCK_N, BLOCK_V, WIDE
        ),
        mask=in_range[:, None] & (value_dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    output = add_values(weights, decay, v, output, INPUT_PRECISION)
    return new_max, row_sums, output


@triton.jit(repr=named("paged_decode_split"))
def paged_decode_split(
    query,
    key,
    value,
    kv_indptr,
    kv_indices,
    kv_lengths,
    query_indptr,
    accumulator,
    statistics,
    capacity,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kp,
    stride_kn,
    stride_kh,
    stride_kd,
    stride_vp,
    stride_vn,
    stride_vh,
    stride_vd,
    stride_ir,
    stride_ip,
    stride_br,
    stride_lr,
    stride_tr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_TOKENS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attend from the query rows of one KV head to every `num_splits`-th tile of a request's keys.

    Grid: (requests * kv_heads * row blocks, num_splits). A row is a (head of the group, token).
    `capacity` is how many page numbers a request (a table's row) or all of them may have. Writes
    the row maximum and sum to `statistics` (rows, 2, num_splits) and the unnormalised output to
    `accumulator` (rows, num_splits, VALUE_DIM), where rows are (query token, head).
    """
    ROWS: tl.constexpr = GROUP * QUERY_TOKENS
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    split = start_reduce(tl.program_id(1), DEPENDENT)
    num_splits = tl.num_programs(1)
    row_block = tl.program_id(0) % ROW_BLOCKS
    kv_head = (tl.program_id(0) // ROW_BLOCKS) % KV_HEADS
    request = (tl.program_id(0) // (ROW_BLOCKS * KV_HEADS)).to(tl.int64)

    num_pages = capacity
    kv_indices += request * stride_ir
    if kv_indptr is not None:
        bounds = kv_indptr + request * stride_br
        begin = clamp(tl.load(bounds), capacity).to(tl.int64)
        num_pages = clamp(tl.load(bounds + stride_br), capacity) - begin.to(tl.int32)
        kv_indices += begin * stride_ip
    # No key past the pages is looked up, whatever the lengths say.
    kv_length = num_pages * PAGE_SIZE
    if kv_lengths is not None:
        kv_length = clamp(tl.load(kv_lengths + request * stride_lr), kv_length)
    first_token = request
    num_tokens = 1
    if query_indptr is not None:
        bounds = query_indptr + request * stride_tr
        first_token = tl.load(bounds).to(tl.int64)
        num_tokens = (tl.load(bounds + stride_tr).to(tl.int64) - first_token).to(tl.int32)
        kv_length = tl.where(num_tokens > 0, kv_length, 0)

    first_key = 0
    first_tile = split
    if WINDOW > 0:
        first_key = tl.maximum(kv_length - num_tokens + 1 - WINDOW, 0)
        first_tile += first_key // BLOCK_N
    # One tile ahead, so that no load of keys waits for the number of its page.
    pages = load_pages(kv_indices, stride_ip, first_tile * BLOCK_N, num_pages, PAGE_SIZE, BLOCK_N)

    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = (kv_head * GROUP + rows // QUERY_TOKENS).to(tl.int64)
    tokens = rows % QUERY_TOKENS
    row_valid = (rows < ROWS) & (tokens < num_tokens)
    # A request's query tokens are its last ones: the keys before `row_end` are its past.
    row_end = tl.where(row_valid, kv_length - num_tokens + 1 + tokens, 0)
    dims = tl.arange(0, BLOCK_D)
    query_rows = query + (first_token + tokens) * stride_qt + heads * stride_qh
    q = tl.load(
        query_rows[:, None] + dims.to(tl.int64)[None, :] * stride_qd,
        mask=row_valid[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    key += kv_head.to(tl.int64) * stride_kh
    value += kv_head.to(tl.int64) * stride_vh
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Summed up once, in the end: a sum in every tile would make the warps wait for each other.
    row_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    output = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)

    end = (kv_length + BLOCK_N - 1) // BLOCK_N - first_tile
    # From 0: Triton 3.9 does not pipeline a loop whose lower bound is a variable.
    for tile in range(0, end, num_splits):
        start = (first_tile + tile) * BLOCK_N
        next_pages = load_pages(
            kv_indices, stride_ip, start + num_splits * BLOCK_N, num_pages, PAGE_SIZE, BLOCK_N
        )
        row_max, row_sums, output = attend_pages(
            q,
            key,
            value,
            pages,
            start,
            first_key,
            kv_length,
            row_end,
            stride_kp,
            stride_kn,
            stride_kd,
            stride_vp,
            stride_vn,
            stride_vd,
            row_max,
            row_sums,
            output,
            SCALE,
            WINDOW,
            INPUT_PRECISION,
            PAGE_SIZE,
            HEAD_DIM,
            VALUE_DIM,
            BLOCK_N,
            BLOCK_D,
            BLOCK_V,
            WIDE,
        )
        pages = next_pages

    value_dims = tl.arange(0, BLOCK_V)
    scratch_rows = (first_token + tokens) * (KV_HEADS * GROUP) + heads
    row_statistics = statistics + scratch_rows * (2 * num_splits) + split
    tl.store(row_statistics, row_max, mask=row_valid)
    tl.store(row_statistics + num_splits, tl.sum(row_sums, axis=1), mask=row_valid)
    # Zeros too, of a split without a live key: the reduce need not wait to know which they are.
    tl.store(
        accumulator
        + (scratch_rows * num_splits + split)[:, None] * VALUE_DIM
        + value_dims[None, :],
        output,
        mask=row_valid[:, None] & (value_dims < VALUE_DIM)[None, :],
    )


@triton.jit(repr=named("paged_decode_reduce", "VALUE_DIM"))
def paged_decode_reduce(
    query,
    gate,
    sinks,
    query_indptr,
    accumulator,
    statistics,
    output,
    requests,
    num_splits,
    stride_gt,
    stride_gh,
    stride_gd,
    stride_sh,
    stride_tr,
    NUMERICS: tl.constexpr,
    SIGMOID_DTYPE: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Merge the splits of one query row, gate the result unless NUMERICS is "none", and store it.

    Grid: (query tokens * query_heads, blocks of VALUE_DIM). A row without a live key gives zeros,
    and so does a token that `query_indptr` gives to no request. A sink, one logit a head, takes
    its share of the weight and has no value.
    """
    row = tl.program_id(0).to(tl.int64)
    token = row // QUERY_HEADS
    head = row % QUERY_HEADS
    value_dims = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    dim_valid = value_dims < VALUE_DIM

    if NUMERICS != "none":
        gate_offsets = token * stride_gt + head * stride_gh + value_dims.to(tl.int64) * stride_gd
        gate_offsets += prefetch(gate + gate_offsets, DEPENDENT) * 16
    # A multiple of 16, as Triton's alignment analysis sees, though always 0.
    ordered = wait_for_split(DEPENDENT) * 16
    statistics += ordered
    accumulator += ordered
    # What computes the other operands may have been launched after the split kernel.
    splits = tl.arange(0, BLOCK_SPLITS)
    written_splits = num_splits
    if query_indptr is not None:
        bounds = query_indptr + ordered
        written_splits = tl.where(token < tl.load(bounds), 0, num_splits)
        last = tl.load(bounds + requests * stride_tr)
        written_splits = tl.where(token < last, written_splits, 0)
    split_valid = splits < written_splits
    row_statistics = statistics + row * (2 * num_splits) + splits
    split_max = tl.load(row_statistics, mask=split_valid, other=float("-inf"))
    split_sum = tl.load(row_statistics + num_splits, mask=split_valid, other=0.0)
    load_valid = split_valid[:, None] & dim_valid[None, :]
    parts = tl.load(
        accumulator + (row * num_splits + splits)[:, None] * VALUE_DIM + value_dims[None, :],
        mask=load_valid,
        other=0.0,
    )  # [BLOCK_SPLITS, BLOCK_V]
    if NUMERICS != "none":
        gates = tl.load(gate + ordered + gate_offsets, mask=dim_valid, other=0.0)
    row_max = tl.max(split_max, axis=0)
    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + ordered + head * stride_sh).to(tl.float32)
        row_max = tl.maximum(row_max, sink)
    finite_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    weights = tl.exp2((split_max - finite_max) * LOG2_E)
    row_sum = tl.sum(split_sum * weights, axis=0)
    if sinks is not None:
        row_sum += tl.exp2((sink - finite_max) * LOG2_E)
    attention = tl.sum(parts * weights[:, None], axis=0)
    # The sums tell, not the maxima: a split whose logits are all NaN has maximum -inf.
    if tl.max((split_sum != 0.0).to(tl.int32), axis=0) != 0:
        attention = tl.div_rn(attention, row_sum)

    if NUMERICS != "none":
        attention = apply_gate(attention, gates, NUMERICS, SIGMOID_DTYPE, query.dtype.element_ty)
    tl.store(
        output + row * VALUE_DIM + value_dims,
        attention.to(output.dtype.element_ty),
        mask=dim_valid,
    )
