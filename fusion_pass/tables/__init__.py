"""Tables of measured attentions: how much time fusing saves, by shape."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

SCHEMA = 1
MASKS = ("none", "bool")
TOLERATED_LOSS = 0.03
LARGEST_SIZE = 1 << 40
SHORTEST_US, LONGEST_US = 1e-3, 1e9
_SIZES = ("query_heads", "kv_heads", "head_dim", "batch", "kv_length", "query_tokens")
_VERSIONS = ("device", "torch", "triton")

Point = tuple[int, int]


class TableError(ValueError):
    """Data that is no table of this schema; the message says where."""


@dataclass(frozen=True)
class Shape:
    """An attention's sizes; `mask` is "none" or "bool". A size that is not known is None."""

    query_heads: int
    kv_heads: int
    head_dim: int
    batch: int | None
    kv_length: int | None
    query_tokens: int
    mask: str

    @property
    def family(self) -> tuple[int, int, int]:
        """What is not interpolated over: query heads that share a K/V head, width, tokens."""
        return self.query_heads // self.kv_heads, self.head_dim, self.query_tokens

    @property
    def sequences(self) -> int | None:
        """K/V heads of the whole batch, each of which is attended to by itself."""
        return None if self.batch is None else self.batch * self.kv_heads


@dataclass(frozen=True)
class Table:
    """Stock time over fused time of some shapes, measured on one device.

    Attributes:
        environment: of the measurement; "device", "torch" and "triton" are always there.
        ratios: of each measured shape, whose sizes are all known.
        origin: where the table comes from, in words.
        margin: a ratio counts as a win above this.
        digest: of the file's content.
    """

    environment: Mapping[str, Any]
    ratios: Mapping[Shape, float]
    origin: str
    margin: float
    digest: str

    @cached_property
    def _families(self) -> dict[tuple[str, tuple[int, int, int]], dict[Point, float]]:
        found: dict[tuple[str, tuple[int, int, int]], dict[Point, float]] = {}
        for shape, ratio in self.ratios.items():
            assert shape.sequences is not None
            assert shape.kv_length is not None
            points = found.setdefault((shape.mask, shape.family), {})
            points[shape.sequences, shape.kv_length] = ratio
        return found

    def ratio(self, shape: Shape) -> float | None:
        """Stock time over fused time at `shape`; None if nothing like it was measured.

        Interpolated between the measured sequences and KV lengths of the nearest family, on
        logarithmic axes and never beyond their ends. Over a size that is not known, the geometric
        mean, or the least where that is a loss of more than `TOLERATED_LOSS`.
        """
        families = [family for mask, family in self._families if mask == shape.mask]
        if not families:
            return None
        nearest = min(families, key=lambda family: (_distance(family, shape.family), family))
        points = self._families[shape.mask, nearest]
        lengths = _known(shape.kv_length, (point[1] for point in points))
        counts = _known(shape.sequences, (point[0] for point in points))
        found = [_interpolate(points, (count, length)) for count in counts for length in lengths]
        ratios = [ratio for ratio in found if ratio is not None]
        if not ratios:
            return None
        if min(ratios) < 1 - TOLERATED_LOSS:
            return min(ratios)
        return math.exp(sum(map(math.log, ratios)) / len(ratios))


def parse(text: str, origin: str, margin: float) -> Table:
    """The table that a JSON file of this schema holds.

    Raises:
        TableError: the text is no JSON, of another schema, or a value is missing or impossible.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise TableError(f"it is no JSON: {fault}") from None
    _require(isinstance(data, dict) and data.get("schema") == SCHEMA, f"it is not schema {SCHEMA}")
    environment, cells = data.get("environment"), data.get("cells")
    _require(isinstance(environment, dict), "it has no environment")
    for name in _VERSIONS:
        _require(isinstance(environment.get(name), str), f"its environment has no {name}")
    _require(isinstance(cells, list) and bool(cells), "it has no cells")
    ratios = dict(_cell(cell, f"cell {index}") for index, cell in enumerate(cells))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Table(environment, ratios, origin, margin, digest)


def _cell(cell: Any, where: str) -> tuple[Shape, float]:
    _require(
        isinstance(cell, dict) and isinstance(cell.get("shape"), dict), f"{where} has no shape"
    )
    shape = cell["shape"]
    for name in _SIZES:
        size = shape.get(name)
        whole = isinstance(size, int) and not isinstance(size, bool)
        _require(whole and 0 < size <= LARGEST_SIZE, f"{where} has no possible {name}")
    _require(shape.get("mask") in MASKS, f"the mask of {where} is none of {MASKS}")
    sizes = {name: shape[name] for name in _SIZES}
    _require(sizes["query_heads"] % sizes["kv_heads"] == 0, f"the heads of {where} do not divide")
    ratio = _time(cell, "stock", where) / _time(cell, "fused", where)
    return Shape(**sizes, mask=shape["mask"]), ratio


def _time(cell: Mapping[str, Any], name: str, where: str) -> float:
    entry = cell.get(name)
    taken: Any = entry.get("median_us") if isinstance(entry, dict) else None
    number = isinstance(taken, (int, float)) and not isinstance(taken, bool)
    # Compared, not converted: an integer may be longer than a float holds. NaN is in no interval.
    possible = number and SHORTEST_US <= taken <= LONGEST_US
    _require(possible, f"{where} has no possible time of {name}")
    return float(taken)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise TableError(otherwise)


def _distance(family: Sequence[int], wanted: Sequence[int]) -> float:
    """How many doublings apart two families are."""
    return sum(abs(math.log2(a / b)) for a, b in zip(family, wanted, strict=True))


def _known(size: int | None, measured: Iterable[int]) -> list[int]:
    """The size, or all that it might be."""
    return sorted(set(measured)) if size is None else [size]


def _interpolate(points: Mapping[Point, float], at: Point) -> float | None:
    """The weighted geometric mean of the measured corners around `at`; None if there are none."""
    first = _bracket([point[0] for point in points], at[0])
    second = _bracket([point[1] for point in points], at[1])
    corners = [
        (points[a, b], weight_a * weight_b)
        for a, weight_a in first
        for b, weight_b in second
        if (a, b) in points and weight_a * weight_b > 0
    ]
    total = sum(weight for _, weight in corners)
    if not corners:
        return None
    return math.exp(sum(weight * math.log(ratio) for ratio, weight in corners) / total)


def _bracket(values: Iterable[int], at: int) -> list[tuple[int, float]]:
    """The measured values on both sides of `at`, each with its weight; the end one beyond them."""
    measured = sorted(set(values))
    at = min(max(at, measured[0]), measured[-1])
    low = max(value for value in measured if value <= at)
    high = min(value for value in measured if value >= at)
    if low == high:
        return [(low, 1.0)]
    weight = math.log(at / low) / math.log(high / low)
    return [(low, 1 - weight), (high, weight)]
