"""The least that a decode attention can take: one launch that reads K and V and does nothing else.

A floor of bytes over bandwidth knows no latency. This does: a kernel that reads both can hardly be
faster than the fastest of several ways to read them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from bench.operands import Operands
from fusion_pass.timing import Arm, Summary, capture

NAME = "read"
# Elements and warps of a program, and programs an SM.
SHAPES = ((512, 4, 8), (1024, 4, 8), (2048, 4, 4), (2048, 4, 16), (4096, 8, 8))
# What the bits of several random numbers together hardly ever are.
NEEDLE = 0x12345678


def arms(given: Operands) -> list[Arm]:
    """One candidate for each of SHAPES that reads `key` and `value`, which are contiguous."""
    from bench import probe_kernels

    key, value = (tensor.view(torch.int32).flatten() for tensor in (given.key, given.value))
    device = key.device
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    found = torch.empty(max(block for block, _, _ in SHAPES), dtype=torch.int32, device=device)
    made = []
    for block, warps, waves in SHAPES:
        programs = min(math.ceil(key.numel() / block), processors * waves)

        def read(block: int = block, warps: int = warps, programs: int = programs) -> torch.Tensor:
            launch = probe_kernels.seek[(programs,)]
            launch(key, value, found, NEEDLE, key.numel(), block, num_warps=warps)
            return found

        made.append(Arm(f"{NAME} {block}/{warps}/{waves}", capture(read).replay))
    return made


def least(summaries: dict[str, Summary]) -> Mapping[str, float]:
    """Take the readers out of `summaries`; the cell's entry of the fastest, in microseconds."""
    readers = [name for name in summaries if name.startswith(f"{NAME} ")]
    medians = [summaries.pop(name).median for name in readers]
    return {"read_us": round(min(medians), 3)} if medians else {}
