"""Where a run took place: device, driver, clocks as read, versions, commit."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from fusion_pass.environment import commit, device_name, nvidia_smi, package_version

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "fa3-fwd",
    "flashinfer-python",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
)
SMI_FIELDS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
    "temperature.gpu",
)


def describe(device: torch.device) -> dict[str, Any]:
    """All that is known of the environment, JSON-serialisable; what cannot be read is None."""
    from fusion_pass.graph_pass import source_digest

    head, dirty = commit(ROOT, "bench/results")
    return {
        "device": device_name(device),
        "nvidia_smi": nvidia_smi(device, SMI_FIELDS),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "packages": {name: package_version(name) for name in PACKAGES},
        "commit": head,
        "dirty": dirty,
        "source": source_digest()[:16],
    }


def clocks(device: torch.device) -> dict[str, str] | None:
    """SM and memory clocks as nvidia-smi reads them now."""
    return nvidia_smi(device, ("clocks.sm", "clocks.mem"))
