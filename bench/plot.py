"""Line and scatter charts as small SVG files, written by hand to need no library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Point = tuple[float, float]
WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 40, 52
COLOURS = ("#0b6fb8", "#d1495b", "#2e8b57", "#8a5fbf", "#c77d0a", "#555555")


@dataclass(frozen=True)
class Chart:
    """Named series of points; both axes are logarithmic, `y_log` aside."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[Point]]
    y_log: bool = True
    lines: bool = True
    diagonal: bool = False


def svg(chart: Chart) -> str:
    """The chart as an SVG document. Raises ValueError if it has no points."""
    points = [point for series in chart.series.values() for point in series]
    if not points:
        raise ValueError(f"{chart.title} has no points")
    x = Axis.over([p[0] for p in points], LEFT, WIDTH - RIGHT, log=True)
    y = Axis.over([p[1] for p in points], HEIGHT - BOTTOM, TOP, log=chart.y_log)
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 20, chart.title, size=14),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, chart.x_label, anchor="middle"),
        f'<g transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)">'
        f"{_text(0, 0, chart.y_label, anchor='middle')}</g>",
        *_grid(x, y),
    ]
    if chart.diagonal:
        low, high = max(x.low, y.low), min(x.high, y.high)
        body.append(_path([(low, low), (high, high)], x, y, "#999999", dashed=True))
    for index, (name, series) in enumerate(chart.series.items()):
        colour = COLOURS[index % len(COLOURS)]
        if chart.lines:
            body.append(_path(sorted(series), x, y, colour))
        body += [
            f'<circle cx="{x.place(px):.1f}" cy="{y.place(py):.1f}" r="3" fill="{colour}"/>'
            for px, py in series
        ]
        body.append(_text(LEFT + 12, TOP + 16 + 16 * index, name, colour=colour))
    return "\n".join([*body, "</svg>", ""])


@dataclass(frozen=True)
class Axis:
    """A range of values and the pixels that its ends lie at."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, log: bool) -> Axis:
        """An axis a little wider than the values; a linear one begins at 0."""
        low, high = min(values), max(values)
        if log:
            return cls(low / 1.15, high * 1.15, start, end, log)
        return cls(0.0, high * 1.15, start, end, log)

    def place(self, value: float) -> float:
        """The pixel of a value."""
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values within the axis: powers of two, or five steps."""
        if not self.log:
            step = 10 ** math.floor(math.log10(self.high / 2))
            step *= 1 if self.high / step <= 6 else 2 if self.high / step <= 12 else 5
            return [step * index for index in range(int(self.high / step) + 1)]
        first, last = math.ceil(math.log2(self.low)), math.floor(math.log2(self.high))
        stride = max(1, (last - first) // 7 + 1)
        return [2.0**power for power in range(first, last + 1, stride)]


def _grid(x: Axis, y: Axis) -> list[str]:
    lines = []
    for value in x.ticks():
        at = f"{x.place(value):.1f}"
        lines.append(f'<path d="M{at} {TOP}V{HEIGHT - BOTTOM}" stroke="#e4e4e4"/>')
        lines.append(_text(x.place(value), HEIGHT - BOTTOM + 16, f"{value:g}", anchor="middle"))
    for value in y.ticks():
        at = f"{y.place(value):.1f}"
        lines.append(f'<path d="M{LEFT} {at}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        lines.append(_text(LEFT - 6, y.place(value) + 4, f"{value:g}", anchor="end"))
    return lines


def _path(points: Sequence[Point], x: Axis, y: Axis, colour: str, dashed: bool = False) -> str:
    places = "L".join(f"{x.place(px):.1f} {y.place(py):.1f}" for px, py in points)
    dash = ' stroke-dasharray="4 4"' if dashed else ""
    return f'<path d="M{places}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>'


def _text(
    x: float, y: float, text: str, anchor: str = "start", size: int = 12, colour: str = "#222222"
) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{colour}">{escaped}</text>'
    )
