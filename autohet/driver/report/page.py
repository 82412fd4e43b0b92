"""HTML report of a run: one page that needs no network.

It has curves as inline SVG, and each change with its seconds.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from html import escape
from itertools import pairwise
from textwrap import shorten

from autohet.driver.events.event_log import WARNINGS
from autohet.driver.events.zone_bill import ZoneBill
from autohet.driver.report.chart import chart
from autohet.driver.report.events import Event, Points, fleet_over_time, kept_steps, of_kind
from autohet.driver.report.plans import plan_pictures
from autohet.driver.report.timeline import PARTS
from planner.inputs.zones import GB

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
    end = events[-1]["time"] - begin
    steps = kept_steps(events)
    changes = of_kind(events, "reconfigure")
    sentence = "The run has not ended, or its driver died."
    for event in reversed(events):
        if event["kind"] in ("finished", "failed"):
            sentence = f"{event['kind'].capitalize()}: {event['reason']}"
            break
    parts = [
        "<!doctype html><html lang=en><meta",
        f" charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>",
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(sentence)}</p>",
        _facts(events, steps, changes, end),
        *_curves(events, steps, changes),
        _section("Plans", plan_pictures(events, begin)),
        _section("Data between zones", _zones(events)),
        _section("Changes", _changes(changes, begin)),
        _section("Decisions", _decisions(events, begin)),
        "</html>",
    ]
    return "".join(parts)


def _curves(
    events: Sequence[Event], steps: Sequence[Event], changes: Sequence[Event]
) -> Iterator[str]:
    """Yield the sections with a chart."""
    begin = events[0]["time"]
    end = events[-1]["time"] - begin
    of_steps: Points = [
        (float(step["step"]), float(step["loss"])) for step in steps if step["loss"] is not None
    ]
    losses = {"loss": of_steps}
    evaluations = evaluation_points(events)
    if evaluations:
        losses["evaluation loss"] = evaluations
    yield _section("Loss by step", chart(losses, x_unit="step"))

    # All that follow share one time axis, so that a change is at the same place in each.
    marks = []
    for event in changes:
        at = event["time"] - begin
        marks.append((at, str(event["cause"])))
    speed = {"tokens/s": throughput(steps, begin)}
    yield _section("Tokens a second", chart(speed, marks, until=end, from_zero=True))

    fleet = fleet_over_time(events, begin)
    draw = partial(chart, marks=marks, until=end, from_zero=True, stepped=True)
    by_type = _held(fleet.gpus_by_type, end)
    yield _section("GPUs alive, by type", draw(by_type))
    by_zone = _held(fleet.gpus_by_zone, end)
    yield _section("GPUs alive, by zone", draw(by_zone))

    prices = {}
    dollars = fleet.usd_per_hour
    is_priced = any(usd for _, usd in dollars)
    if is_priced:
        prices = _held({"USD an hour": dollars}, end)
    yield _section("Price of the living nodes, USD an hour", draw(prices))


def evaluation_points(events: Sequence[Event]) -> Points:
    """Return the newest evaluation loss of each step."""
    loss_by_step = {}
    for event in of_kind(events, "evaluation"):
        loss = event["evaluation_loss"]
        if loss is not None:
            step = float(event["step"])
            loss_by_step[step] = float(loss)
    return sorted(loss_by_step.items())


def throughput(steps: Sequence[Event], begin: float) -> Points:
    """Return the tokens of each step over the seconds since the step before it.

    These seconds include any change between the steps, so that its cost shows.
    """
    found: Points = []
    for before, step in pairwise(steps):
        seconds = step["time"] - before["time"]
        if seconds > 0:
            at = step["time"] - begin
            found.append((at, step["tokens"] / seconds))
    return found


def _held(curves: Mapping[str, Points], end: float) -> dict[str, Points]:
    """Return the curves, each with its last value held up to `end`."""
    found = {}
    for name, points in curves.items():
        _, last = points[-1]
        found[name] = [*points, (end, last)]
    return found


def _facts(
    events: Sequence[Event], steps: Sequence[Event], changes: Sequence[Event], end: float
) -> str:
    tokens = sum(step["tokens"] for step in steps)
    tokens_per_s = tokens / end if end else 0
    changing = sum(event["seconds"]["total"] for event in changes)
    steps_lost = sum(event["steps_lost"] for event in changes)
    goodputs = [event["goodput"] for event in events if event.get("goodput") is not None]
    prices = [event.get("usd_lost") for event in changes]
    dollars = [price for price in prices if price is not None]
    loss = "-"
    if steps and steps[-1]["loss"] is not None:
        loss = f"{steps[-1]['loss']:.4f}"
    facts = {
        "steps": f"{len(steps):,}",
        "tokens": f"{tokens:,}",
        "seconds": f"{end:,.0f}",
        "tokens a second": f"{tokens_per_s:,.0f}",
        "final loss": loss,
        "changes": str(len(changes)),
        "seconds in changes": f"{changing:,.1f}",
        "steps lost": str(steps_lost),
        "goodput": f"{goodputs[-1]:.1%}" if goodputs else "-",
        "USD lost in changes": f"{sum(dollars):,.2f}" if dollars else "-",
        "checkpoints": str(len(of_kind(events, "checkpoint"))),
        **_failed_checkpoints(events),
        **_saved(events),
    }
    cells = [f"<span><b>{escape(value)}</b>{name}</span>" for name, value in facts.items()]
    return f"<div class=facts>{''.join(cells)}</div>"


def _failed_checkpoints(events: Sequence[Event]) -> dict[str, str]:
    """Return the number of failed checkpoints as a row; empty if none failed."""
    steps = {event["step"] for event in of_kind(events, "checkpoint_failed")}
    if not steps:
        return {}
    return {"checkpoints that failed": str(len(steps))}


def _saved(events: Sequence[Event]) -> dict[str, str]:
    """Return megabytes of state saved beyond its nodes' memory, one row for each tier in use."""
    saved: Counter[str] = Counter()
    for event in of_kind(events, "transfers"):
        for part in event["transfers"]:
            saved[part["tier"]] += part["bytes"]
    names = {"s3": "MB uploaded", "peer": "MB copied to other nodes", "disk": "MB spilled to disks"}
    return {name: f"{saved[tier] / 1e6:,.1f}" for tier, name in names.items() if tier in saved}


def _section(title: str, body: str) -> str:
    if not body:
        return ""
    return f"<h2>{escape(title)}</h2>{body}"


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
    if not rows:
        return ""
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _changes(changes: Sequence[Event], begin: float) -> str:
    if not changes:
        return "<p>None.</p>"
    names = ("at, s", *PARTS, "total, s", "stalled, s", "redone, s", "steps lost", "moved, MB")
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = [_change_row(event, begin) for event in changes]
    return f"<table><tr><th class=text>cause</th>{head}</tr>{''.join(rows)}</table>"


def _change_row(event: Event, begin: float) -> str:
    reason = escape(shorten(event["reason"], 90, placeholder=" …"))
    whole_reason = escape(event["reason"], quote=True)
    cause = escape(event["cause"])
    why = f"<td class=text title='{whole_reason}'>{cause}: {reason}</td>"

    seconds = [event["time"] - begin]
    for name in (*PARTS, "total", "stalled", "redone"):
        # Events of earlier releases lack the last two.
        seconds.append(event["seconds"].get(name, 0.0))
    cells = "".join(f"<td>{value:,.2f}</td>" for value in seconds)

    megabytes = []
    for tier, num_bytes in event["bytes_by_tier"].items():
        if num_bytes:
            megabytes.append(f"{tier} {num_bytes / 1e6:,.1f}")
    moved = escape(", ".join(megabytes) or "-")
    return f"<tr>{why}{cells}<td>{event['steps_lost']:,}</td><td>{moved}</td></tr>"


def _decisions(events: Sequence[Event], begin: float) -> str:
    items = []
    for event in events:
        if event["kind"] in ("decision", *WARNINGS):
            at = event["time"] - begin
            items.append(f"<li>{at:,.1f} s: {escape(event['reason'])}</li>")
    if not items:
        return "<p>None.</p>"
    return f"<ul>{''.join(items)}</ul>"
