# mypy: allow-untyped-defs, allow-untyped-calls
"""Split-KV decode attention in two launches, the second of which applies the sigmoid gate.

`gated_decode_split` computes an online softmax over one share of the keys for all query heads
of a KV head; `gated_decode_reduce` merges the shares of a query row and gates the result.
"""

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.libdevice import exp as accurate_exp

from fusion_pass.kernels.naming import named

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
def wait_for_split(DEPENDENT: tl.constexpr):
    """Wait until the grid launched before is complete and its writes are visible. Returns 0.

    Nothing but the result orders a load after the wait, so the load's address must contain it.
    """
    zero = 0
    if DEPENDENT:
        # "Pure", so that Inductor can tell which tensors the kernel writes.
        zero = tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
        )
    return zero


@triton.jit
def prefetch(pointers, DEPENDENT: tl.constexpr):
    """Fetch what the pointers point to, valid or not, into the L2 cache. Returns zeros."""
    zeros = 0
    if DEPENDENT:
        zeros = tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [pointers],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return zeros


@triton.jit
def start_reduce(split, DEPENDENT: tl.constexpr):
    """Let the next grid be launched once all programs have come here. Returns `split`."""
    if DEPENDENT:
        split = tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
            "=r,r",
            [split],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return split


@triton.jit
def tile_offsets(stride_n, stride_d, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """Offsets of a (ROWS, COLUMNS) tile, in 64 bits if WIDE."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    if WIDE:
        rows = rows.to(tl.int64)
        columns = columns.to(tl.int64)
    return rows[:, None] * stride_n + columns[None, :] * stride_d


@triton.jit
def look_at_tiles(
    mask_rows,
    row_valid,
    stride_mn,
    kv_length,
    split,
    tiles,
    MASK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return where a row attends to a key, and where the mask changes no logit that counts.

    Both are [tiles, rows, BLOCK_N]. Keys that there are not, and rows that are only padding, are
    not attended to, and not changed either.
    """
    total_tiles = (kv_length + BLOCK_N - 1) // BLOCK_N
    keys = ((split + tiles) * BLOCK_N)[:, None, None] + tl.arange(0, BLOCK_N)[None, None, :]
    in_range = (keys < kv_length) & (split + tiles < total_tiles)[:, None, None]
    needed = in_range & row_valid[None, :, None]
    bias = load_mask(mask_rows[None, :, None] + keys.to(tl.int64) * stride_mn, needed, MASK)
    return bias != float("-inf"), (bias == 0.0) | (needed == 0)


@triton.jit
def bound_tiles(attended, unchanged, tiles, num_tiles, num_splits):
    """For each tile, what it alone makes of the bounds of the live and of the full ones.

    Returns the first and the end of the live ones, the same of the full ones, and their number.
    """
    none: tl.constexpr = 0x7FFFFFFF
    live = tl.max(tl.max(attended.to(tl.int32), axis=2), axis=1) > 0
    full = tl.min(tl.min(unchanged.to(tl.int32), axis=2), axis=1) > 0
    full = full & (tiles < num_tiles)
    return (
        tl.where(live, tiles, none),
        tl.where(live, tiles + num_splits, 0),
        tl.where(full, tiles, none),
        tl.where(full, tiles + num_splits, 0),
        full.to(tl.int32),
    )


@triton.jit
def bound_all(first, end, full_first, full_end, full, num_splits):
    """The bounds of the live tiles, and of the full ones, from those of each tile."""
    live_end = tl.max(end, axis=0)
    run_first = tl.min(full_first, axis=0)
    run_end = tl.max(full_end, axis=0)
    # Only an unbroken run of full tiles counts: prefixes, windows and causal masks leave one.
    if run_end - run_first != tl.sum(full, axis=0) * num_splits:
        run_first = live_end
        run_end = live_end
    return tl.min(first, axis=0), live_end, run_first, run_end


@triton.jit
def find_live_tiles(
    mask_rows,
    row_valid,
    stride_mn,
    kv_length,
    split,
    num_splits,
    MASK: tl.constexpr,
    SCAN_TILES: tl.constexpr,
    SCAN_ONCE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return two half-open ranges of this split's tiles: the live ones and, in it, the full ones.

    Tiles are counted in steps of num_splits, beginning with 0 for tile number `split`. Outside the
    first range no row attends to a key; in the second the mask changes no logit of any row.
    SCAN_ONCE says that SCAN_TILES are all of them, and few.
    """
    none: tl.constexpr = 0x7FFFFFFF
    lanes = tl.arange(0, SCAN_TILES) * num_splits
    num_tiles = (kv_length + BLOCK_N - 1) // BLOCK_N - split
    live_first = 0
    live_end = num_tiles
    run_first = live_first
    run_end = live_end
    if SCAN_ONCE:
        # Without a loop, what comes after may be computed while the mask is on its way.
        attended, unchanged = look_at_tiles(
            mask_rows, row_valid, stride_mn, kv_length, split, lanes, MASK, BLOCK_N
        )
        # That a mask is nowhere false takes one reduction to tell.
        if tl.min(unchanged.to(tl.int32)) == 0:
            first, end, full_first, full_end, full = bound_tiles(
                attended, unchanged, lanes, num_tiles, num_splits
            )
            live_first, live_end, run_first, run_end = bound_all(
                first, end, full_first, full_end, full, num_splits
            )
    else:
        first = tl.full([SCAN_TILES], none, tl.int32)
        end = tl.zeros([SCAN_TILES], tl.int32)
        full_first = tl.full([SCAN_TILES], none, tl.int32)
        full_end = tl.zeros([SCAN_TILES], tl.int32)
        full = tl.zeros([SCAN_TILES], tl.int32)
        for base in range(0, num_tiles, SCAN_TILES * num_splits):
            tiles = base + lanes
            attended, unchanged = look_at_tiles(
                mask_rows, row_valid, stride_mn, kv_length, split, tiles, MASK, BLOCK_N
            )
            t_first, t_end, t_full_first, t_full_end, t_full = bound_tiles(
                attended, unchanged, tiles, num_tiles, num_splits
            )
            first = tl.minimum(first, t_first)
            end = tl.maximum(end, t_end)
            full_first = tl.minimum(full_first, t_full_first)
            full_end = tl.maximum(full_end, t_full_end)
            full += t_full
        if tl.sum(full, axis=0) * num_splits < live_end:
            live_first, live_end, run_first, run_end = bound_all(
                first, end, full_first, full_end, full, num_splits
            )
    return live_first, live_end, run_first, run_end


@triton.jit
def weigh(logits, row_max, row_sums):
    """The weights of a tile's keys by its logits, and what the rows' maxima become by them.

    Returns the row maximum, the sums [rows, BLOCK_N] whose sum is the row's, the weights, and what
    the output so far counts less by.
    """
    # Natural logarithms: log2(e) times a finfo.min mask would overflow to -inf.
    new_max = tl.maximum(row_max, tl.max(logits, axis=1))
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2((logits - finite_max[:, None]) * LOG2_E)
    decay = tl.exp2((row_max - finite_max) * LOG2_E)
    row_sums = row_sums * decay[:, None] + weights
    return new_max, row_sums, weights, decay


@triton.jit
def add_values(weights, decay, v, output, INPUT_PRECISION: tl.constexpr):
    """The unnormalised output with the weighted values of a tile added."""
    rounded = weights.to(v.dtype)
    output = tl.dot(rounded, v, output * decay[:, None], input_precision=INPUT_PRECISION)
    if v.dtype != tl.float32:
        # What the rounding dropped, so that the weights count with twice V's precision.
        dropped = (weights - rounded.to(tl.float32)).to(v.dtype)
        output = tl.dot(dropped, v, output, input_precision=INPUT_PRECISION)
    return output


@triton.jit
def attend_tile(
    q,
    key,
    value,
    mask_rows,
    mask_row_valid,
    start,
    kv_length,
    stride_kn,
    stride_kd,
    stride_vn,
    stride_vd,
    stride_mn,
    row_max,
    row_sums,
    output,
    SCALE: tl.constexpr,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
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
    tile_keys = tl.arange(0, BLOCK_N)
    start_64 = start.to(tl.int64)
    in_range = start + tile_keys < kv_length
    k = tl.load(
        key + start_64 * stride_kn + tile_offsets(stride_kn, stride_kd, BLOCK_N, BLOCK_D, WIDE),
        mask=in_range[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    logits = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION) * SCALE
    if MASK == "none":
        logits = tl.where(in_range[None, :], logits, float("-inf"))
        key_live = in_range
    else:
        mask_keys = (start_64 + tile_keys) * stride_mn
        if MASK_ROWS == 1:
            row_bias = load_mask(mask_rows + mask_keys, in_range, MASK)
            bias = row_bias[None, :]
            key_live = row_bias != float("-inf")
        else:
            bias = load_mask(
                mask_rows[:, None] + mask_keys[None, :],
                in_range[None, :] & mask_row_valid[:, None],
                MASK,
            )
            key_live = tl.max((bias != float("-inf")).to(tl.int32), axis=0) > 0
        # Selected, not added: a dead key's logit may be NaN.
        logits = tl.where(bias == float("-inf"), float("-inf"), logits + bias)

    new_max, row_sums, weights, decay = weigh(logits, row_max, row_sums)
    # Keys that no row attends to are not loaded, so that 0 * NaN cannot reach the sum.
    v = tl.load(
        value + start_64 * stride_vn + tile_offsets(stride_vn, stride_vd, BLOCK_N, BLOCK_V, WIDE),
        mask=key_live[:, None] & (value_dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    output = add_values(weights, decay, v, output, INPUT_PRECISION)
    return new_max, row_sums, output


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """The float32 `x`, rounded to what DTYPE, a name, can represent."""
    if DTYPE == "bf16":
        x = x.to(tl.bfloat16).to(tl.float32)
    elif DTYPE == "fp16":
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def apply_gate(
    attention,
    gate,
    NUMERICS: tl.constexpr,
    SIGMOID_DTYPE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Multiply by the gate's sigmoid, in float32, rounding before where the contract does.

    DTYPE is the attention's own dtype.
    """
    gate = gate.to(tl.float32)
    if NUMERICS == "eager":
        # torch's CUDA sigmoid: accurate exp and IEEE division.
        sigmoid = round_to(tl.div_rn(1.0, 1.0 + accurate_exp(-gate)), SIGMOID_DTYPE)
    else:
        # The very function Inductor emits, so that the bits are the same.
        sigmoid = tl.sigmoid(gate)
    if NUMERICS != "fp32":
        attention = attention.to(DTYPE).to(tl.float32)
    return attention * sigmoid


@triton.jit(repr=named("gated_decode_split"))
def gated_decode_split(
    query,
    key,
    value,
    mask,
    gate,
    sinks,
    accumulator,
    statistics,
    output,
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
    stride_gb,
    stride_gt,
    stride_gh,
    stride_gd,
    stride_sh,
    SCALE: tl.constexpr,
    MASK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    SCAN_ROWS: tl.constexpr,
    SCAN_TILES: tl.constexpr,
    SCAN_ONCE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    SINGLE: tl.constexpr,
    MASKED_ROW: tl.constexpr,
    SINKS: tl.constexpr,
    NUMERICS: tl.constexpr,
    SIGMOID_DTYPE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attend from the query rows of one KV head to every `num_splits`-th tile of its keys.

    Grid: (batch * kv_heads * row blocks, num_splits). A row is a (head of the group, token).
    Writes the row maximum and sum to `statistics` (rows, 2, num_splits) and the unnormalised output
    to `accumulator` (rows, num_splits, VALUE_DIM). A SINGLE split, which no reduce follows, gates
    and stores the result instead.
    """
    ROWS: tl.constexpr = GROUP * QUERY_TOKENS
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    split = start_reduce(tl.program_id(1), DEPENDENT and not SINGLE)
    num_splits = tl.num_programs(1)
    row_block = tl.program_id(0) % ROW_BLOCKS
    kv_head = (tl.program_id(0) // ROW_BLOCKS) % KV_HEADS
    batch = (tl.program_id(0) // (ROW_BLOCKS * KV_HEADS)).to(tl.int64)

    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_valid = rows < ROWS
    heads = (kv_head * GROUP + rows // QUERY_TOKENS).to(tl.int64)
    tokens = (rows % QUERY_TOKENS).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    query_rows = query + batch * stride_qb + heads * stride_qh + tokens * stride_qt
    q = tl.load(
        query_rows[:, None] + dims.to(tl.int64)[None, :] * stride_qd,
        mask=row_valid[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    key += batch * stride_kb + kv_head.to(tl.int64) * stride_kh
    value += batch * stride_vb + kv_head.to(tl.int64) * stride_vh
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Summed up once, in the end: a sum in every tile would make the warps wait for each other.
    row_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    attention = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)

    # Counted in tiles, from tile number `split` on.
    first = 0
    end = (kv_length + BLOCK_N - 1) // BLOCK_N - split
    run_first = first
    run_end = end
    if MASK != "none":
        mask += batch * stride_mb + kv_head.to(tl.int64) * (GROUP * stride_mh)
        # Heads that share a mask are scanned once.
        scan_row = tl.arange(0, SCAN_ROWS)
        scan_valid = scan_row < QUERY_TOKENS
        scan_rows = mask + scan_row.to(tl.int64) * stride_mt
        if SCAN_ROWS == BLOCK_M:
            scan_valid = row_valid
            scan_rows = mask + (rows // QUERY_TOKENS).to(tl.int64) * stride_mh + tokens * stride_mt
        first, end, run_first, run_end = find_live_tiles(
            scan_rows,
            scan_valid,
            stride_mn,
            kv_length,
            split,
            num_splits,
            MASK,
            SCAN_TILES,
            SCAN_ONCE,
            BLOCK_N,
        )
    # From 0: Triton 3.9 does not pipeline a loop whose lower bound is a variable.
    for tile in range(0, run_end - run_first, num_splits):
        row_max, row_sums, attention = attend_tile(
            q,
            key,
            value,
            None,
            None,
            (split + run_first + tile) * BLOCK_N,
            kv_length,
            stride_kn,
            stride_kd,
            stride_vn,
            stride_vd,
            stride_mn,
            row_max,
            row_sums,
            attention,
            SCALE,
            "none",
            1,
            INPUT_PRECISION,
            HEAD_DIM,
            VALUE_DIM,
            BLOCK_N,
            BLOCK_D,
            BLOCK_V,
            WIDE,
        )
    if MASK != "none":
        # One mask row serves all rows of the program unless the mask tells them apart.
        mask_row = row_block * BLOCK_M + tl.arange(0, MASK_ROWS)
        mask_rows = mask
        if MASK_ROWS > 1:
            mask_rows += (mask_row // QUERY_TOKENS).to(tl.int64) * stride_mh
            mask_rows += (mask_row % QUERY_TOKENS).to(tl.int64) * stride_mt
        run_length = run_end - run_first
        # Most programs of a causal or padded decode have no partial tile.
        if end - first > run_length:
            for rest in range(0, end - first - run_length, num_splits):
                tile = split + first + rest
                tile += tl.where(first + rest >= run_first, run_length, 0)
                row_max, row_sums, attention = attend_tile(
                    q,
                    key,
                    value,
                    mask_rows,
                    mask_row < ROWS,
                    tile * BLOCK_N,
                    kv_length,
                    stride_kn,
                    stride_kd,
                    stride_vn,
                    stride_vd,
                    stride_mn,
                    row_max,
                    row_sums,
                    attention,
                    SCALE,
                    MASK,
                    MASK_ROWS,
                    INPUT_PRECISION,
                    HEAD_DIM,
                    VALUE_DIM,
                    BLOCK_N,
                    BLOCK_D,
                    BLOCK_V,
                    WIDE,
                )

    value_dims = tl.arange(0, BLOCK_V)
    valid = row_valid[:, None] & (value_dims < VALUE_DIM)[None, :]
    row_sum = tl.sum(row_sums, axis=1)
    if SINGLE:
        gate_rows = gate + batch * stride_gb + tokens * stride_gt + heads * stride_gh
        gates = tl.load(
            gate_rows[:, None] + value_dims.to(tl.int64)[None, :] * stride_gd, mask=valid, other=0.0
        )
        live = row_sum != 0.0
        if SINKS:
            sink = tl.load(sinks + heads * stride_sh, mask=row_valid, other=0.0).to(tl.float32)
            total_max = tl.maximum(row_max, sink)
            total_max = tl.where(total_max == float("-inf"), 0.0, total_max)
            weight = tl.exp2((row_max - total_max) * LOG2_E)
            row_sum = row_sum * weight + tl.exp2((sink - total_max) * LOG2_E)
            attention *= weight[:, None]
        attention = tl.div_rn(attention, tl.where(live, row_sum, 1.0)[:, None])
        if MASKED_ROW == "nan":
            attention = tl.where(live[:, None], attention, float("nan"))
        gated = apply_gate(attention, gates, NUMERICS, SIGMOID_DTYPE, query.dtype.element_ty)
        output_rows = (batch * QUERY_TOKENS + tokens) * (KV_HEADS * GROUP) + heads
        tl.store(
            output + output_rows[:, None] * VALUE_DIM + value_dims[None, :],
            gated.to(output.dtype.element_ty),
            mask=valid,
        )
    else:
        scratch_rows = (batch * KV_HEADS + kv_head) * ROWS + rows
        row_statistics = statistics + scratch_rows * (2 * num_splits) + split
        tl.store(row_statistics, row_max, mask=row_valid)
        tl.store(row_statistics + num_splits, row_sum, mask=row_valid)
        # Zeros too, of a split without a live key: the reduce need not wait to know which they are.
        tl.store(
            accumulator
            + (scratch_rows * num_splits + split)[:, None] * VALUE_DIM
            + value_dims[None, :],
            attention,
            mask=valid,
        )


@triton.jit
def attend_to_all(
    query,
    key,
    value,
    sink,
    kv_length,
    stride_qd,
    stride_kn,
    stride_kd,
    stride_vn,
    stride_vd,
    value_dims,
    SINKS: tl.constexpr,
    SCALE: tl.constexpr,
    MASKED_ROW: tl.constexpr,
    MASK_FILL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend from one query row to every key, with the finite mask fill added to each logit.

    If MASKED_ROW is "mean" the fill takes the place of the logits, and K is not read.
    """
    dims = tl.arange(0, BLOCK_D)
    dim_valid = dims < HEAD_DIM
    q = tl.load(query + dims.to(tl.int64) * stride_qd, mask=dim_valid, other=0.0).to(tl.float32)
    row_max = float("-inf")
    row_sum = 0.0
    if SINKS:
        row_max = sink
        row_sum = 1.0
    output = value_dims * 0.0
    for start in range(0, kv_length, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        in_range = keys < kv_length
        if MASKED_ROW == "mean":
            logits = tl.full([BLOCK_N], MASK_FILL, tl.float32)
        else:
            key_rows = key + keys.to(tl.int64)[:, None] * stride_kn
            k = tl.load(
                key_rows + dims.to(tl.int64)[None, :] * stride_kd,
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


@triton.jit(repr=named("gated_decode_reduce"))
def gated_decode_reduce(
    query,
    key,
    value,
    gate,
    sinks,
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
    stride_sh,
    SCALE: tl.constexpr,
    MASK_FILL: tl.constexpr,
    MASKED_ROW: tl.constexpr,
    SINKS: tl.constexpr,
    NUMERICS: tl.constexpr,
    SIGMOID_DTYPE: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Merge the splits of one query row, gate the result and store it.

    Grid: (batch * query_heads * query_tokens, blocks of VALUE_DIM). MASKED_ROW says what a row
    without a live key gives: "zero", "nan", or attends to all keys, "fill" with logits shifted by
    MASK_FILL and "mean" with MASK_FILL in their place.
    With SINKS a head has one more logit, which takes its share of the weight and has no value.
    """
    token = (tl.program_id(0) % QUERY_TOKENS).to(tl.int64)
    head = (tl.program_id(0) // QUERY_TOKENS % QUERY_HEADS).to(tl.int64)
    batch = (tl.program_id(0) // (QUERY_TOKENS * QUERY_HEADS)).to(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    value_dims = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    dim_valid = value_dims < VALUE_DIM

    gate_offsets = batch * stride_gb + token * stride_gt + head * stride_gh
    gate_offsets += value_dims.to(tl.int64) * stride_gd
    gate_offsets += prefetch(gate + gate_offsets, DEPENDENT) * 16
    # A multiple of 16, as Triton's alignment analysis sees, though always 0.
    ordered = wait_for_split(DEPENDENT) * 16
    statistics += ordered
    accumulator += ordered
    # These as well: what computes them may have been launched after the split kernel. Until then
    # the gate may only be fetched into the L2 cache.
    gate += ordered
    if SINKS:
        sinks += ordered
    splits = tl.arange(0, BLOCK_SPLITS)
    split_valid = splits < num_splits
    row_statistics = statistics + row * (2 * num_splits) + splits
    split_max = tl.load(row_statistics, mask=split_valid, other=float("-inf"))
    split_sum = tl.load(row_statistics + num_splits, mask=split_valid, other=0.0)
    load_valid = split_valid[:, None] & dim_valid[None, :]
    parts = tl.load(
        accumulator + (row * num_splits + splits)[:, None] * VALUE_DIM + value_dims[None, :],
        mask=load_valid,
        other=0.0,
    )  # [BLOCK_SPLITS, BLOCK_V]
    gates = tl.load(gate + gate_offsets, mask=dim_valid, other=0.0)
    row_max = tl.max(split_max, axis=0)
    sink = float("-inf")
    if SINKS:
        sink = tl.load(sinks + head * stride_sh).to(tl.float32)
        row_max = tl.maximum(row_max, sink)
    finite_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    weights = tl.exp2((split_max - finite_max) * LOG2_E)
    row_sum = tl.sum(split_sum * weights, axis=0)
    # The sums tell, not the maxima: a split whose logits are all NaN has maximum -inf.
    live = row_sum != 0.0
    if SINKS:
        # The weight of every split may vanish beside the sink's.
        live = tl.max((split_sum != 0.0).to(tl.int32), axis=0) > 0
        row_sum += tl.exp2((sink - finite_max) * LOG2_E)
    attention = tl.sum(parts * weights[:, None], axis=0)

    if live:
        attention = tl.div_rn(attention, row_sum)
    else:
        if MASKED_ROW == "fill" or MASKED_ROW == "mean":
            kv_head = head // GROUP
            attention = attend_to_all(
                query + batch * stride_qb + head * stride_qh + token * stride_qt,
                key + batch * stride_kb + kv_head * stride_kh,
                value + batch * stride_vb + kv_head * stride_vh,
                sink,
                kv_length,
                stride_qd,
                stride_kn,
                stride_kd,
                stride_vn,
                stride_vd,
                value_dims,
                SINKS,
                SCALE,
                MASKED_ROW,
                MASK_FILL,
                HEAD_DIM,
                VALUE_DIM,
                BLOCK_N,
                BLOCK_D,
            )
        elif MASKED_ROW == "nan":
            attention += float("nan")

    gated = apply_gate(attention, gates, NUMERICS, SIGMOID_DTYPE, query.dtype.element_ty)
    output_row = (batch * QUERY_TOKENS + token) * QUERY_HEADS + head
    tl.store(
        output + output_row * VALUE_DIM + value_dims,
        gated.to(output.dtype.element_ty),
        mask=dim_valid,
    )
