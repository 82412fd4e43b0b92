"""Timeline of `events.jsonl` as a trace in Chrome's format, which ui.perfetto.dev opens.

It shows steps, changes by part, and other events; restores, uploads and spills by worker; and
copies on other nodes by node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from autohet.driver.report.events import Event

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
    "checkpoint_failed",
    "finished",
    "failed",
)


def timeline(events: Sequence[Event]) -> dict[str, Any]:
    """Return the trace document, with times in microseconds from the first event on."""
    begin = events[0]["time"]
    found = _laid_out(
        [span for event in events for span in _transfers(event, event["time"] - begin)]
    )
    for event in events:
        at = event["time"] - begin
        if event["kind"] == "step" and event.get("seconds"):
            facts = {name: event.get(name) for name in ("loss", "tokens", "generation")}
            found.append(
                _span(
                    f"step {event['step']}",
                    at - event["seconds"],
                    event["seconds"],
                    RUN,
                    STEPS,
                    facts,
                )
            )
        elif event["kind"] == "reconfigure":
            found += _change(event, at)
        elif event["kind"] in NEWS_KINDS:
            facts = {name: value for name, value in event.items() if name not in ("time", "kind")}
            instant = {
                "name": event["kind"],
                "ph": "i",
                "s": "p",
                "ts": at * 1e6,
                "pid": RUN,
                "tid": NEWS,
                "args": facts,
            }
            found.append(instant)
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def _change(event: Event, at: float) -> list[dict[str, Any]]:
    """Return the spans of a change, whose parts follow one another.

    A change ends with its first step, at which its event is written.
    """
    seconds = event["seconds"]
    since = at - seconds["total"]
    facts = {"reason": event["reason"], "steps_lost": event["steps_lost"], **event["bytes_by_tier"]}
    found = [_span(f"change: {event['cause']}", since, seconds["total"], RUN, CHANGES, facts)]
    counted = [
        name for name in PARTS if event["cause"] == "death" or name not in ("detect", "replan")
    ]
    for name in counted:
        duration = min(seconds[name], max(0.0, at - since))
        found.append(_span(name, since, duration, RUN, CHANGES, {}))
        since += duration
    return found


def _span(
    name: str, since: float, seconds: float, process: int, row: int, facts: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "ts": since * 1e6,
        "dur": seconds * 1e6,
        "pid": process,
        "tid": row,
        "args": dict(facts),
    }


def _transfers(event: Event, at: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (worker or node, span without its row) of each transfer of this event.

    Transfers are restores, uploads, copies and spills.
    """
    if event["kind"] == "restore":
        for worker, part in event.get("workers_restored", {}).items():
            seconds = part["seconds"]
            yield (
                worker,
                _span("restore", at - seconds, seconds, RESTORES, 0, part["bytes_by_tier"]),
            )
    elif event["kind"] == "transfers":
        for part in event["transfers"]:
            process, verb = TRANSFERS[part["tier"]]
            since = at - part["ended_ago_s"] - part["seconds"]
            facts = {"step": part["step"], "bytes": part["bytes"]}
            yield (
                part["source"],
                _span(f"{verb}: step {part['step']}", since, part["seconds"], process, 0, facts),
            )


def _laid_out(transfers: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the trace events of these spans, with each process's rows sorted by name.

    The names of all rows come first. Spans of one row must not overlap, so a source whose spans do
    has several rows.
    """
    lanes: dict[tuple[int, str], list[list[dict[str, Any]]]] = {}
    for source, span in sorted(transfers, key=lambda transfer: transfer[1]["ts"]):
        rows = lanes.setdefault((span["pid"], source), [])
        free = next((row for row in rows if row[-1]["ts"] + row[-1]["dur"] <= span["ts"]), None)
        if free is None:
            rows.append(free := [])
        free.append(span)
    names = [(RUN, STEPS, "steps"), (RUN, CHANGES, "changes"), (RUN, NEWS, "what happened")]
    numbers = count(1)
    for (process, source), rows in sorted(lanes.items()):
        for row in rows:
            number = next(numbers)
            names.append((process, number, source))
            for span in row:
                span["tid"] = number
    return [*_names(names), *(span for rows in lanes.values() for row in rows for span in row)]


def _names(threads: Sequence[tuple[int, int, str]]) -> list[dict[str, Any]]:
    """Return the events that name the rows (process, row, name) and their processes."""
    processes = sorted({process for process, _, _ in threads})
    return [
        *(
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": PROCESSES[pid]}}
            for pid in processes
        ),
        *(
            {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
            for pid, tid, name in threads
        ),
    ]
