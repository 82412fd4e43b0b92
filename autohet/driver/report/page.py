"""HTML report of a run: one page that needs no network.

It has curves as inline SVG, and each change with its seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from textwrap import shorten

from autohet.driver.report.events import Event, Points, fleet_over_time, kept_steps, of_kind
from autohet.driver.report.timeline import PARTS
from autohet.driver.zone_bill import ZoneBill
from planner.zones import GB

WIDTH = 980
HEIGHT = 210
LEFT = 74
BOTTOM = 26
TOP = 12
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MOST_POINTS = 2000
ToPixels = Callable[[float, float], tuple[float, float]]
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1020px;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.5em;margin-bottom:.2em}h2{font-size:1.1em;margin:1.4em 0 .3em}svg{width:100%;height:auto}
table{border-collapse:collapse;width:100%;font-size:13px}td,th{padding:.25em .5em;border-bottom:1px solid #ddd;text-align:right}
td.text,th.text{text-align:left}.facts{display:flex;flex-wrap:wrap;gap:1.6em;margin:.8em 0}.facts b{display:block;font-size:1.3em}
text{font:12px system-ui,sans-serif;fill:#555}.name{font-weight:bold;paint-order:stroke;stroke:#fff;stroke-width:3px}li{margin:.15em 0}
"""  # noqa: E501


def report_page(events: Sequence[Event], title: str) -> str:
    """Return the page of a run's events.

    Losses are by step, all else by seconds since the first event.
    """
    begin = events[0]["time"]
    steps = kept_steps(events)
    changes = of_kind(events, "reconfigure")
    fleet = fleet_over_time(events, begin)
    dollars = fleet.usd_per_hour
    end = events[-1]["time"] - begin
    marks = [(event["time"] - begin, str(event["cause"])) for event in changes]
    losses = {
        "loss": [
            (float(step["step"]), float(step["loss"])) for step in steps if step["loss"] is not None
        ]
    }
    if evaluations := evaluation_points(events):
        losses["evaluation loss"] = evaluations
    prices = (
        {"USD an hour": [*dollars, (end, dollars[-1][1])]} if any(usd for _, usd in dollars) else {}
    )
    return "".join(
        (
            (
                "<!doctype html><html lang=en><meta"
                f" charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>"
            ),
            f"<h1>{escape(title)}</h1>",
            _outcome(events),
            _facts(events, steps, changes, end),
            _section("Loss by step", chart(losses, x_unit="step")),
            _section(
                "Tokens a second",
                chart({"tokens/s": throughput(steps, begin)}, marks, until=end, from_zero=True),
            ),
            _section(
                "GPUs alive, by type",
                chart(
                    _held(fleet.gpus_by_type, end), marks, until=end, from_zero=True, stepped=True
                ),
            ),
            _section(
                "GPUs alive, by zone",
                chart(
                    _held(fleet.gpus_by_zone, end), marks, until=end, from_zero=True, stepped=True
                ),
            ),
            _section(
                "Price of the living nodes, USD an hour",
                chart(prices, marks, until=end, from_zero=True, stepped=True),
            ),
            _section("Data between zones", _zones(events)),
            _section("Changes", _changes(changes, begin)),
            _section("Decisions", _decisions(events, begin)),
            "</html>",
        )
    )


def evaluation_points(events: Sequence[Event]) -> Points:
    """Return the newest evaluation loss of each step."""
    found = {}
    for event in of_kind(events, "evaluation"):
        if event["evaluation_loss"] is not None:
            found[float(event["step"])] = float(event["evaluation_loss"])
    return sorted(found.items())


def throughput(steps: Sequence[Event], begin: float) -> Points:
    """Return the tokens of each step over the seconds since the step before it.

    These seconds include any change between the steps, so that its cost shows.
    """
    found: Points = []
    for before, step in pairwise(steps):
        seconds = step["time"] - before["time"]
        if seconds > 0:
            found.append((step["time"] - begin, step["tokens"] / seconds))
    return found


def _held(gpus: Mapping[str, Points], end: float) -> dict[str, Points]:
    return {name: [*points, (end, points[-1][1])] for name, points in gpus.items()}


def _outcome(events: Sequence[Event]) -> str:
    last = next(
        (event for event in reversed(events) if event["kind"] in ("finished", "failed")), None
    )
    said = (
        "The run has not ended, or its driver died."
        if last is None
        else f"{last['kind'].capitalize()}: {last['reason']}"
    )
    return f"<p>{escape(said)}</p>"


def _facts(
    events: Sequence[Event], steps: Sequence[Event], changes: Sequence[Event], end: float
) -> str:
    tokens = sum(step["tokens"] for step in steps)
    changing = sum(event["seconds"]["total"] for event in changes)
    loss = steps[-1]["loss"] if steps else None
    facts = {
        "steps": f"{len(steps):,}",
        "tokens": f"{tokens:,}",
        "seconds": f"{end:,.0f}",
        "tokens a second": f"{tokens / end if end else 0:,.0f}",
        "final loss": "-" if loss is None else f"{loss:.4f}",
        "changes": str(len(changes)),
        "seconds in changes": f"{changing:,.1f}",
        "steps lost": str(sum(event["steps_lost"] for event in changes)),
        "checkpoints": str(len(of_kind(events, "checkpoint"))),
        **_failed_checkpoints(events),
        **_saved(events),
    }
    return (
        "<div class=facts>"
        + "".join(f"<span><b>{escape(value)}</b>{name}</span>" for name, value in facts.items())
        + "</div>"
    )


def _failed_checkpoints(events: Sequence[Event]) -> dict[str, str]:
    """Return the number of failed checkpoints as a row; empty if none failed."""
    steps = {event["step"] for event in of_kind(events, "checkpoint_failed")}
    return {"checkpoints that failed": str(len(steps))} if steps else {}


def _saved(events: Sequence[Event]) -> dict[str, str]:
    """Return megabytes of state saved beyond its nodes' memory, one row for each tier in use."""
    saved: Counter[str] = Counter()
    for event in of_kind(events, "transfers"):
        for part in event["transfers"]:
            saved[part["tier"]] += part["bytes"]
    names = {"s3": "MB uploaded", "peer": "MB copied to other nodes", "disk": "MB spilled to disks"}
    return {name: f"{saved[tier] / 1e6:,.1f}" for tier, name in names.items() if tier in saved}


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}" if body else ""


def _zones(events: Sequence[Event]) -> str:
    """Return a table of gigabytes and dollars by pair of zones; empty for a run in one zone."""
    bill = ZoneBill()
    for event in events:
        bill.take(event)
    rows = []
    for row in bill.rows():
        rows.append(
            f"<tr><td class=text>{escape(row.name)}</td><td class=text>{row.use}</td>"
            f"<td>{row.num_bytes / GB:,.3f}</td><td>{row.usd:,.2f}</td></tr>"
        )
    head = "<th class=text>zones</th><th class=text>of</th><th>GB</th><th>USD</th>"
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>" if rows else ""


def _changes(changes: Sequence[Event], begin: float) -> str:
    if not changes:
        return "<p>None.</p>"
    head = "".join(
        f"<th>{name}</th>" for name in ("at, s", *PARTS, "total, s", "steps lost", "moved, MB")
    )
    rows = []
    for event in changes:
        counts = event["bytes_by_tier"].items()
        moved = ", ".join(f"{tier} {count / 1e6:,.1f}" for tier, count in counts if count) or "-"
        seconds = [event["time"] - begin, *(event["seconds"][name] for name in (*PARTS, "total"))]
        cells = "".join(f"<td>{value:,.2f}</td>" for value in seconds)
        reason = escape(shorten(event["reason"], 90, placeholder=" …"))
        why = (
            "<td class=text"
            f" title='{escape(event['reason'], quote=True)}'>{escape(event['cause'])}:"
            f" {reason}</td>"
        )
        rows.append(
            f"<tr>{why}{cells}<td>{event['steps_lost']:,}</td><td>{escape(moved)}</td></tr>"
        )
    return f"<table><tr><th class=text>cause</th>{head}</tr>{''.join(rows)}</table>"


def _decisions(events: Sequence[Event], begin: float) -> str:
    shown = [event for event in events if event["kind"] in ("decision", "checkpoint_failed")]
    said = [
        f"<li>{event['time'] - begin:,.1f} s: {escape(event['reason'])}</li>" for event in shown
    ]
    return f"<ul>{''.join(said)}</ul>" if said else "<p>None.</p>"


# curves
# ------------------------------------------------------------------------------


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
    finite = {
        name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in series.items()
    }
    series = {name: _thinned(points) for name, points in finite.items() if points}
    points = [point for of in series.values() for point in of]
    if not points:
        return ""
    low_x, high_x = (
        (min(x for x, _ in points), max(x for x, _ in points)) if until is None else (0.0, until)
    )
    rows = _around((0.0 if from_zero else min(y for _, y in points)), max(y for _, y in points))
    low_y = rows[0]
    high_y = rows[-1]
    span_x = (high_x - low_x) or 1.0
    span_y = high_y - low_y

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (x - low_x) / span_x * (WIDTH - LEFT - 12), HEIGHT - BOTTOM - (
            y - low_y
        ) / span_y * (HEIGHT - BOTTOM - TOP)

    columns = [x for x in _around(low_x, low_x + span_x) if low_x <= x <= low_x + span_x]
    parts = [_axis(place, columns, rows, x_unit)]
    for x, word in marks:
        if low_x <= x <= high_x:
            at, _ = place(x, low_y)
            parts.append(
                f"<line x1={at:.1f} x2={at:.1f} y1={TOP} y2={HEIGHT - BOTTOM} stroke=#bbb"
                " stroke-dasharray='3 3'/>"
            )
            parts.append(f"<text x={at + 3:.1f} y={TOP + 9}>{escape(word)}</text>")
    for index, (name, of) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        placed = " ".join(
            f"{x:.1f},{y:.1f}"
            for x, y in (place(*point) for point in (_stepped(of) if stepped else of))
        )
        parts.append(f"<polyline points='{placed}' fill=none stroke='{colour}' stroke-width=1.8 />")
        if len(series) > 1:
            parts.append(
                f"<text x={LEFT + 8 + 110 * index} y={HEIGHT - BOTTOM - 6} class=name"
                f" style='fill:{colour}'>{escape(name)}</text>"
            )
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img>{''.join(parts)}</svg>"


def _around(low: float, high: float) -> list[float]:
    """Return four to ten round values from at most `low` to more than `high`.

    Their distance is 1, 2 or 5 times a power of ten.
    """
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 4))
    apart = max(step for step in (power, 2 * power, 5 * power) if step <= 1.001 * span / 4)
    first = math.floor(low / apart)
    last = math.floor(high / apart) + 1
    return [index * apart for index in range(first, last + 1)]


def _axis(place: ToPixels, columns: Sequence[float], rows: Sequence[float], x_unit: str) -> str:
    parts = []
    for value in rows:
        _, y = place(columns[0], value)
        parts.append(f"<line x1={LEFT} x2={WIDTH - 12} y1={y:.1f} y2={y:.1f} stroke=#eee />")
        parts.append(f"<text x={LEFT - 6} y={y + 4:.1f} text-anchor=end>{_number(value)}</text>")
    for value in columns:
        x, _ = place(value, rows[0])
        if x < WIDTH - 60:
            parts.append(
                f"<text x={x:.1f} y={HEIGHT - 8} text-anchor=middle>{_number(value)}</text>"
            )
        else:  # there stands the unit
            x_unit = f"{_number(value)} {x_unit}"
    parts.append(f"<text x={WIDTH - 12} y={HEIGHT - 8} text-anchor=end>{escape(x_unit)}</text>")
    return "".join(parts)


def _number(value: float) -> str:
    return f"{value:,.10g}" if abs(value) >= 1 else f"{value:.4g}"


def _stepped(points: Points) -> Points:
    found = points[:1]
    for (_, before), (x, y) in pairwise(points):
        found += [(x, before), (x, y)]
    return found


def _thinned(points: Points) -> Points:
    """Return at most about MOST_POINTS points, evenly chosen, and the last point."""
    stride = -(-len(points) // MOST_POINTS)
    return points if stride == 1 else [*points[::stride], points[-1]]
