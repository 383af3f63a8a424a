"""Where tables lie, and which of them is in force.

A table that `python -m fusion_pass tune` wrote on this machine counts for exactly the device and
the versions of torch and triton that it was measured with. The one that the package ships for a
device counts with every version of them: both candidates are the libraries' and this package's
kernels, which a new compiler moves by a few percent. With other versions than its own it is
believed only where fusing wins by more than `FOREIGN_MARGIN`.
"""

from __future__ import annotations

import functools
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import torch

from fusion_pass import inductor
from fusion_pass.config import warn_once
from fusion_pass.environment import release, slug
from fusion_pass.tables import Table, TableError, parse

SHIPPED = Path(__file__).parent
FOREIGN_MARGIN = 1.05
LARGEST_FILE = 4 << 20


@dataclass(frozen=True)
class Key:
    """What a table is measured for: the device's name, and releases of torch and triton."""

    device: str
    torch: str
    triton: str

    @classmethod
    def of(cls, device: str) -> Key:
        """The key of a device by its name, with the installed versions."""
        return cls(device, release(torch.__version__), release(inductor.triton_version() or "none"))

    @property
    def words(self) -> str:
        """Such as "NVIDIA H200, torch 2.11.0, triton 3.6.0"."""
        return f"{self.device}, torch {self.torch}, triton {self.triton}"


def device_key(device: torch.device) -> Key | None:
    """The key of a device; None for one that no table is made for, or that is not there."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return Key.of(torch.cuda.get_device_name(device))


def user_path(key: Key) -> Path:
    """Where `tune` writes, and the pass looks first: in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME", "").strip() or os.path.expanduser("~/.cache")
    versions = f"torch-{key.torch}-triton-{key.triton}"
    return Path(cache) / "fusion_pass" / f"{slug(key.device)}-{versions}.json"


def shipped_path(key: Key) -> Path:
    """The file of the package that holds the device's table, if there is one."""
    return SHIPPED / f"{slug(key.device)}.json"


def in_force(key: Key | None, chosen: str | None = None) -> Table | None:
    """The table to decide by: the `chosen` file's, else the user's, else the shipped one.

    A file that cannot be read, is no table or was measured for another key warns once and is
    passed over; so is a `chosen` one that does not exist, even where no table decides.
    """
    if key is None:
        if chosen is not None:
            _read(Path(chosen), chosen, 1.0, is_expected=True)
        return None
    own = user_path(key) if chosen is None else Path(chosen)
    table = _read(own, str(own), 1.0, is_expected=chosen is not None)
    if table is None or _is_foreign(table, key, own):
        return _shipped(key)
    return table


def _shipped(key: Key) -> Table | None:
    path = shipped_path(key)
    table = _read(path, f"the table of {key.device} that fusion_pass ships", 1.0)
    if table is None or table.environment["device"] != key.device:
        return None
    if _measured_for(table) == key:
        return table
    return _read(path, table.origin, FOREIGN_MARGIN)


def _is_foreign(table: Table, key: Key, path: Path) -> bool:
    measured = _measured_for(table)
    if measured == key:
        return False
    warn_once(
        f"fusion_pass ignores the table {path}: it was measured for {measured.words}, and this is "
        f"{key.words}; run `python -m fusion_pass tune`"
    )
    return True


def _measured_for(table: Table) -> Key:
    found = table.environment
    return Key(found["device"], release(found["torch"]), release(found["triton"]))


def _read(path: Path, origin: str, margin: float, is_expected: bool = False) -> Table | None:
    """The table in a file; None if there is none, which warns unless the file need not exist."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise TableError("it is no regular file")
        return _parsed(path, status.st_mtime_ns, status.st_size, origin, margin)
    except FileNotFoundError:
        if is_expected:
            warn_once(
                f"fusion_pass finds no table {path} (the setting table, or FUSION_PASS_TABLE): "
                "it decides as without one"
            )
        return None
    except (OSError, ValueError) as fault:
        # A ValueError is a TableError, bytes that are no text, or a path with a null byte.
        warn_once(
            f"fusion_pass ignores the table {path}: {fault}; write it anew with "
            "`python -m fusion_pass tune`"
        )
        return None


@functools.lru_cache(maxsize=16)
def _parsed(path: Path, modified: int, size: int, origin: str, margin: float) -> Table:
    """Cached by what changes when the file does."""
    if size > LARGEST_FILE:
        raise TableError(f"{size} bytes are more than a table has")
    return parse(path.read_text(encoding="utf-8"), origin, margin)
