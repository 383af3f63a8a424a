"""Calls at an unlucky depth, of which each maps and unmaps memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from fusion_pass.frame_stack import roomy

CALLS = 300
# The frames of `at_depth` between two ends of chunks, and more.
DEPTHS = 150


def leaf(n: int, *, down: int = 2) -> int:
    """Several frames, so that one of `at_depth` more or less does not jump over the end."""
    return leaf(n, down=down - 1) if down else n + 1


def busy() -> int:
    total = 0
    for _ in range(CALLS):
        total = leaf(total)
    return total


def at_depth(depth: int, function: Callable[[], Any]) -> Any:
    return at_depth(depth - 1, function) if depth else function()


def faults(function: Callable[[], Any]) -> int:
    """Pages that a call of `function` maps."""
    import resource

    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    function()
    return int(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt) - before


def worst(function: Callable[[], Any]) -> int:
    """The most pages that its calls map, at any depth."""
    function()
    return max(at_depth(depth, lambda: faults(function)) for depth in range(DEPTHS))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone counts the pages of a thread")
def test_no_depth_is_unlucky_where_there_is_room() -> None:
    assert worst(roomy(busy)) < CALLS // 4
    if sys.version_info[:2] in ((3, 11), (3, 12)):
        assert worst(busy) >= CALLS


def test_a_call_is_as_it_was() -> None:
    @roomy
    def told(a: int, *rest: int, name: str = "x") -> tuple[Any, ...]:
        """Said."""
        if not rest:
            raise KeyError(name)
        return a, rest, name

    assert told(1, 2, 3, name="y") == (1, (2, 3), "y")
    assert (told.__name__, told.__doc__) == ("told", "Said.")
    with pytest.raises(KeyError, match="z"):
        told(1, name="z")
