"""What a measurement depends on besides the code: the device, its driver, versions, the commit."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
from pathlib import Path

import torch

# A machine that gets a copy of a checkout without .git is told the commit by these.
COMMIT_VARIABLE, DIRTY_VARIABLE = "BENCH_COMMIT", "BENCH_DIRTY"
_VENDORS = ("nvidia", "amd", "geforce", "tesla", "instinct")


def device_name(device: torch.device) -> str:
    """The name that the driver gives the device; "cpu" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def slug(name: str) -> str:
    """A device name as part of a file name: "NVIDIA H200" gives "h200"."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join(word for word in words if word not in _VENDORS) or "unknown"


def release(version: str) -> str:
    """A version without its local part: "2.11.0+cu130" gives "2.11.0"."""
    return version.partition("+")[0]


def package_version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def nvidia_smi(device: torch.device, fields: tuple[str, ...]) -> dict[str, str] | None:
    """What nvidia-smi reads of the device now; None without nvidia-smi."""
    if device.type != "cuda":
        return None
    # nvidia-smi numbers devices without regard to CUDA_VISIBLE_DEVICES.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = "--id=0" if uuid is None else f"--id=GPU-{uuid}"
    query = f"--query-gpu={','.join(fields)}"
    output = _output(["nvidia-smi", query, "--format=csv,noheader", which], Path())
    if output is None:
        return None
    return dict(zip(fields, (value.strip() for value in output.split(",")), strict=False))


def commit(root: Path, *ignored: str) -> tuple[str | None, bool | None]:
    """The commit of the checkout `root` and whether the tree differs from it; None where unknown.

    Changes in the folders `ignored`, relative to `root`, do not count.
    """
    if told := os.environ.get(COMMIT_VARIABLE):
        return told, os.environ.get(DIRTY_VARIABLE, "0") != "0"
    if not (root / ".git").exists():
        return None, None
    head = _output(["git", "rev-parse", "HEAD"], root)
    paths = [".", *(f":!{folder}" for folder in ignored)]
    status = _output(["git", "status", "--porcelain", "--", *paths], root)
    return head, None if status is None else status != ""


def _output(command: list[str], folder: Path) -> str | None:
    """What a command prints, stripped; None if it cannot be run or fails."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
