"""Curves as inline SVG."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from autohet.driver.report.events import Points

WIDTH = 980
HEIGHT = 230
LEFT = 74
RIGHT = 12
BOTTOM = 26
TOP = 34
"""Size of a drawing and of its margins, in pixels."""
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Colors that people with any color vision can tell apart (Okabe and Ito, 2008)."""
MOST_POINTS = 2000


@dataclass(frozen=True)
class _Scale:
    """Range of a chart's values, and their place on the drawing."""

    low_x: float
    span_x: float
    low_y: float
    span_y: float

    def left(self, x: float) -> float:
        """Return the pixels of `x` from the left edge."""
        return LEFT + (x - self.low_x) / self.span_x * (WIDTH - LEFT - RIGHT)

    def top(self, y: float) -> float:
        """Return the pixels of `y` from the upper edge."""
        return HEIGHT - BOTTOM - (y - self.low_y) / self.span_y * (HEIGHT - BOTTOM - TOP)


def chart(
    series: Mapping[str, Points],
    marks: Sequence[tuple[float, str]] = (),
    *,
    x_unit: str = "s",
    until: float | None = None,
    from_zero: bool = False,
    stepped: bool = False,
) -> str:
    """Return an SVG of curves over one axis; empty without points.

    `marks` are dashed lines with a word. With `until` the axis goes from 0 to there, so that
    several charts share one. Values that are not finite are not drawn.
    """
    curves = _finite_curves(series)
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return ""

    if until is None:
        low_x = min(x for x, _ in points)
        high_x = max(x for x, _ in points)
    else:
        low_x = 0.0
        high_x = until
    span_x = (high_x - low_x) or 1.0
    low_y = 0.0 if from_zero else min(y for _, y in points)
    high_y = max(y for _, y in points)
    rows = round_values(low_y, high_y)
    span_y = rows[-1] - rows[0]
    scale = _Scale(low_x=low_x, span_x=span_x, low_y=rows[0], span_y=span_y)
    # The y axis grows to round values; the x axis ends where the data do.
    end_x = low_x + span_x
    columns = [x for x in round_values(low_x, end_x) if low_x <= x <= end_x]

    parts = _axis(scale, columns, rows, x_unit)
    for x, word in marks:
        if low_x <= x <= high_x:
            parts += _mark(scale.left(x), word)
    for index, (name, curve) in enumerate(curves.items()):
        color = COLORS[index % len(COLORS)]
        parts.append(_polyline(scale, _as_steps(curve) if stepped else curve, color))
        if len(curves) > 1:
            # Above the curves, and the words of marks between both.
            left = LEFT + 110 * index
            parts.append(
                f"<text x={left} y=11 class=name style='fill:{color}'>{escape(name)}</text>"
            )
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img>{''.join(parts)}</svg>"


def _finite_curves(series: Mapping[str, Points]) -> dict[str, Points]:
    """Return the points that can be drawn, thinned, of each curve that has any."""
    found = {}
    for name, points in series.items():
        finite = [(x, y) for x, y in points if math.isfinite(y)]
        if finite:
            found[name] = _thin(finite)
    return found


def _mark(left: float, word: str) -> list[str]:
    return [
        f"<line x1={left:.1f} x2={left:.1f} y1={TOP} y2={HEIGHT - BOTTOM} stroke=#bbb"
        " stroke-dasharray='3 3'/>",
        f"<text x={left + 3:.1f} y={TOP - 5}>{escape(word)}</text>",
    ]


def _polyline(scale: _Scale, points: Points, color: str) -> str:
    placed = [f"{scale.left(x):.1f},{scale.top(y):.1f}" for x, y in points]
    return f"<polyline points='{' '.join(placed)}' fill=none stroke='{color}' stroke-width=1.8 />"


def round_values(low: float, high: float) -> list[float]:
    """Return four to ten round values from at most `low` to more than `high`.

    Their distance is 1, 2 or 5 times a power of ten.
    """
    span = (high - low) or abs(high) or 1.0
    exponent = math.floor(math.log10(span / 4))
    power = 10.0**exponent
    # The logarithm of a round span may be off by a rounding error: hence the tolerance.
    most = 1.001 * span / 4
    apart = power
    for step in (2 * power, 5 * power):
        if step <= most:
            apart = step

    first = math.floor(low / apart)
    last = math.floor(high / apart) + 1
    return [index * apart for index in range(first, last + 1)]


def _axis(scale: _Scale, columns: Sequence[float], rows: Sequence[float], x_unit: str) -> list[str]:
    parts = []
    for value in rows:
        y = scale.top(value)
        parts.append(f"<line x1={LEFT} x2={WIDTH - RIGHT} y1={y:.1f} y2={y:.1f} stroke=#eee />")
        parts.append(f"<text x={LEFT - 6} y={y + 4:.1f} text-anchor=end>{_number(value)}</text>")
    for value in columns:
        x = scale.left(value)
        if x < WIDTH - 60:
            parts.append(
                f"<text x={x:.1f} y={HEIGHT - 8} text-anchor=middle>{_number(value)}</text>"
            )
        else:
            # The unit has this place: the number goes into one text with it.
            x_unit = f"{_number(value)} {x_unit}"
    parts.append(f"<text x={WIDTH - RIGHT} y={HEIGHT - 8} text-anchor=end>{escape(x_unit)}</text>")
    return parts


def _number(value: float) -> str:
    return f"{value:,.10g}" if abs(value) >= 1 else f"{value:.4g}"


def _as_steps(points: Points) -> Points:
    """Return the points of a curve that keeps each value until the next one."""
    found = points[:1]
    for (_, before), (x, y) in pairwise(points):
        found.append((x, before))
        found.append((x, y))
    return found


def _thin(points: Points) -> Points:
    """Return at most about MOST_POINTS points, evenly chosen, and the last point."""
    stride = math.ceil(len(points) / MOST_POINTS)
    if stride == 1:
        return points
    return [*points[::stride], points[-1]]
