"""Where a run took place: device, driver, clocks as read, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

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
# A machine that gets a copy of the working tree without .git is told the commit by these.
COMMIT_VARIABLE, DIRTY_VARIABLE = "BENCH_COMMIT", "BENCH_DIRTY"


def describe(device: torch.device) -> dict[str, Any]:
    """All that is known of the environment, JSON-serialisable; what cannot be read is None."""
    from fusion_pass.graph_pass import source_digest

    commit, dirty = _commit()
    return {
        "device": device_name(device),
        "nvidia_smi": _nvidia_smi(device, SMI_FIELDS),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": commit,
        "dirty": dirty,
        "source": source_digest()[:16],
    }


def device_name(device: torch.device) -> str:
    """The name that the driver gives the device; "cpu" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def slug(name: str) -> str:
    """A device name as part of a file name: "NVIDIA H200" gives "h200"."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    kept = [word for word in words if word not in ("nvidia", "amd", "geforce", "tesla", "instinct")]
    return "-".join(kept) or "unknown"


def clocks(device: torch.device) -> dict[str, str] | None:
    """SM and memory clocks as nvidia-smi reads them now."""
    return _nvidia_smi(device, ("clocks.sm", "clocks.mem"))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia_smi(device: torch.device, fields: tuple[str, ...]) -> dict[str, str] | None:
    if device.type != "cuda":
        return None
    # nvidia-smi numbers devices without regard to CUDA_VISIBLE_DEVICES.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = "--id=0" if uuid is None else f"--id=GPU-{uuid}"
    query = f"--query-gpu={','.join(fields)}"
    output = _output(["nvidia-smi", query, "--format=csv,noheader", which])
    if output is None:
        return None
    return dict(zip(fields, (value.strip() for value in output.split(",")), strict=False))


def _commit() -> tuple[str | None, bool | None]:
    """The commit and whether the tree differs from it, results aside."""
    if commit := os.environ.get(COMMIT_VARIABLE):
        return commit, os.environ.get(DIRTY_VARIABLE, "0") != "0"
    commit = _output(["git", "rev-parse", "HEAD"])
    status = _output(["git", "status", "--porcelain", "--", ".", ":!bench/results"])
    return commit, None if status is None else status != ""


def _output(command: list[str]) -> str | None:
    """What a command prints, stripped; None if it cannot be run or fails."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
