"""Timeline of `events.jsonl` as a trace in Chrome's format, which ui.perfetto.dev opens.

It shows steps, changes by part, and other events; restores, uploads and spills by worker; and
copies on other nodes by node.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from autohet.driver.events.event_log import WARNINGS
from autohet.driver.report.events import Event

Span = dict[str, Any]
"""Entry of the trace."""
RUN = 1
RESTORES = 2
UPLOADS = 3
COPIES = 4
SPILLS = 5
PROCESSES = {
    RUN: "run",
    RESTORES: "restores by worker",
    UPLOADS: "uploads to durable storage by worker",
    COPIES: "copies on other nodes by node",
    SPILLS: "spills to the node's own disk by worker",
}
TRANSFERS = {"s3": (UPLOADS, "upload"), "peer": (COPIES, "copy"), "disk": (SPILLS, "spill")}
"""Process and verb by the tier that a transfer went to."""
STEPS = 1
CHANGES = 2
NEWS = 3
PARTS = ("detect", "replan", "rebuild", "restore", "first_step")
NEWS_KINDS = (
    "started",
    "notice",
    "death",
    "departure",
    "arrival",
    "slow",
    "calibration",
    "decision",
    "checkpoint",
    *WARNINGS,
    "finished",
    "failed",
)


def timeline(events: Sequence[Event]) -> dict[str, Any]:
    """Return the trace document, with times in microseconds from the first event on."""
    begin = events[0]["time"]
    transfers: list[tuple[str, Span]] = []
    for event in events:
        transfers += _transfers(event, event["time"] - begin)
    found = _lay_out(transfers)

    for event in events:
        at = event["time"] - begin
        if event["kind"] == "step" and event.get("seconds"):
            facts = {name: event.get(name) for name in ("loss", "tokens", "generation")}
            seconds = event["seconds"]
            found.append(_span(f"step {event['step']}", at - seconds, seconds, RUN, STEPS, facts))
        elif event["kind"] == "reconfigure":
            found += _change(event, at)
        elif event["kind"] in NEWS_KINDS:
            found.append(_instant(event, at))
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def _instant(event: Event, at: float) -> Span:
    facts = dict(event)
    del facts["time"]
    del facts["kind"]
    return {
        "name": event["kind"],
        "ph": "i",
        "s": "p",
        "ts": at * 1e6,
        "pid": RUN,
        "tid": NEWS,
        "args": facts,
    }


def _change(event: Event, at: float) -> list[Span]:
    """Return the spans of a change, whose parts follow one another.

    A change ends with its first step, at which its event is written.
    """
    seconds = event["seconds"]
    since = at - seconds["total"]
    facts = {
        "reason": event["reason"],
        "steps_lost": event["steps_lost"],
        **event["bytes_by_tier"],
    }
    found = [_span(f"change: {event['cause']}", since, seconds["total"], RUN, CHANGES, facts)]
    for name in PARTS:
        # Before a planned change, workers train while it is decided on.
        is_overlapped = event["cause"] != "death" and name in ("detect", "replan")
        if is_overlapped:
            continue
        duration = min(seconds[name], max(0.0, at - since))
        found.append(_span(name, since, duration, RUN, CHANGES, {}))
        since += duration
    return found


def _span(name: str, since: float, seconds: float, process: int, row: int, facts: Any) -> Span:
    return {
        "name": name,
        "ph": "X",
        "ts": since * 1e6,
        "dur": seconds * 1e6,
        "pid": process,
        "tid": row,
        "args": dict(facts),
    }


def _transfers(event: Event, at: float) -> Iterator[tuple[str, Span]]:
    """Yield (worker or node, span without its row) of each transfer of this event.

    Transfers are restores, uploads, copies and spills.
    """
    if event["kind"] == "restore":
        # An older version's events have no part for each worker.
        parts = event.get("workers_restored", {})
        for worker, part in parts.items():
            seconds = part["seconds"]
            facts = part["bytes_by_tier"]
            yield worker, _span("restore", at - seconds, seconds, RESTORES, 0, facts)
    elif event["kind"] == "transfers":
        for part in event["transfers"]:
            process, verb = TRANSFERS[part["tier"]]
            name = f"{verb}: step {part['step']}"
            seconds = part["seconds"]
            since = at - part["ended_ago_s"] - seconds
            facts = {"step": part["step"], "bytes": part["bytes"]}
            yield part["source"], _span(name, since, seconds, process, 0, facts)


def _lay_out(transfers: Sequence[tuple[str, Span]]) -> list[Span]:
    """Return the trace events of these spans, with each process's rows sorted by name.

    The names of all rows come first. Spans of one row must not overlap, so a source whose spans do
    has several rows.
    """
    lanes: dict[tuple[int, str], list[list[Span]]] = {}
    by_time = sorted(transfers, key=lambda transfer: transfer[1]["ts"])
    for source, span in by_time:
        lane = (span["pid"], source)
        rows = lanes.setdefault(lane, [])
        _free_row(rows, span["ts"]).append(span)

    names = [
        (RUN, STEPS, "steps"),
        (RUN, CHANGES, "changes"),
        (RUN, NEWS, "what happened"),
    ]
    number = 0
    for (process, source), rows in sorted(lanes.items()):
        for row in rows:
            number += 1
            names.append((process, number, source))
            for span in row:
                span["tid"] = number

    found = _names(names)
    for rows in lanes.values():
        for row in rows:
            found += row
    return found


def _free_row(rows: list[list[Span]], at: float) -> list[Span]:
    """Return the first row whose last span has ended by then; a new one if there is none."""
    for row in rows:
        last = row[-1]
        if last["ts"] + last["dur"] <= at:
            return row
    new: list[Span] = []
    rows.append(new)
    return new


def _names(rows: Sequence[tuple[int, int, str]]) -> list[Span]:
    """Return the events that name the rows (process, row, name) and their processes."""
    found: list[Span] = []
    processes = {process for process, _, _ in rows}
    for pid in sorted(processes):
        facts = {"name": PROCESSES[pid]}
        found.append({"name": "process_name", "ph": "M", "pid": pid, "args": facts})
    for pid, tid, name in rows:
        found.append(
            {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        )
    return found
