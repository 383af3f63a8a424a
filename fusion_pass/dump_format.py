"""Names and version of a dump's files, for what writes them and what reads them."""

from __future__ import annotations

import hashlib
import re

SCHEMA = 1
"""Changes when a key of a graph's record does."""

REPORT = re.compile(r"graph-(?P<process>\d+)-(?P<number>\d+)\.report\.json")
KERNELS = re.compile(r"kernels-[0-9a-f]{12}\.py")


def stem(process: int, number: int) -> str:
    """What the names of a graph's files begin with: its process and its number there."""
    return f"graph-{process}-{number}"


def kernels_file(source: str) -> str:
    """The name of the file that holds a module of kernels."""
    return f"kernels-{hashlib.sha256(source.encode()).hexdigest()[:12]}.py"
