"""What the device can do at best, measured in the run that uses it: launch cost and bandwidth."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from fusion_pass.timing import Arm, CudaClock, capture, interleave

READ_BYTES = 2 << 30
READ_BLOCK = 4096
READ_WAVES = (4, 8, 16)


@dataclass(frozen=True)
class Ceilings:
    """An empty kernel's replay in microseconds and the best read rate in TB/s."""

    empty_us: float
    read_tb_s: float

    def floor_us(self, read_bytes: int) -> float:
        """The least time of a replay that must read this many bytes."""
        return self.empty_us + read_bytes / (self.read_tb_s * 1e6)

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def measure(clock: CudaClock, device: torch.device) -> Ceilings:
    """Replay an empty kernel, and read 2 GiB in several ways of which the fastest counts."""
    from bench import probe_kernels

    source = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    total = torch.empty((), device=device)
    programs = torch.cuda.get_device_properties(device).multi_processor_count

    def empty() -> torch.Tensor:
        probe_kernels.nothing[(1,)](total)
        return total

    def torch_sum() -> torch.Tensor:
        return torch.sum(source, dim=0, out=total)

    arms = [Arm("empty", capture(empty).replay), Arm("sum", capture(torch_sum).replay)]
    sums = torch.empty(programs * max(READ_WAVES), device=device)
    for waves in READ_WAVES:

        def read(waves: int = waves) -> torch.Tensor:
            tiles = source.numel() // READ_BLOCK
            probe_kernels.read[(programs * waves,)](source, sums, tiles, READ_BLOCK, num_warps=4)
            return sums

        arms.append(Arm(f"read {waves}", capture(read).replay))
    taken = interleave(arms, clock, rounds=30)
    empty_us = taken.pop("empty").median
    fastest = min(summary.median for summary in taken.values())
    return Ceilings(empty_us, READ_BYTES / (fastest - empty_us) / 1e6)
