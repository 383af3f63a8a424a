# mypy: ignore-errors
"""Triton kernels that measure the device itself: an empty one, and one that only reads."""

import triton
import triton.language as tl


@triton.jit
def nothing(ignored):
    """Does nothing: a replay of it costs what any launch costs."""


@triton.jit
def read(source, sums, tiles, BLOCK: tl.constexpr):  # noqa: N803
    """Add up every `num_programs`-th tile of BLOCK float32 elements of `source`."""
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for tile in range(program, tiles, tl.num_programs(0)):
        total += tl.load(source + tile.to(tl.int64) * BLOCK + lanes)
    tl.store(sums + program, tl.sum(total, axis=0))


@triton.jit
def seek(key, value, found, needle, elements, BLOCK: tl.constexpr):  # noqa: N803
    """Read all int32 elements of two tensors; store those of a lane, or-ed, if they are `needle`.

    The store, which hardly ever happens, is what keeps the compiler from dropping the loads.
    """
    lanes = tl.arange(0, BLOCK)
    seen = tl.zeros([BLOCK], tl.int32)
    for start in range(tl.program_id(0) * BLOCK, elements, tl.num_programs(0) * BLOCK):
        valid = start + lanes < elements
        seen |= tl.load(key + start + lanes, mask=valid, other=0)
        seen |= tl.load(value + start + lanes, mask=valid, other=0)
    tl.store(found + lanes, seen, mask=seen == needle)
