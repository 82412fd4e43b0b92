"""`events.jsonl` as a trace in Chrome's format, which ui.perfetto.dev opens: steps, changes by part, transfers by worker, what happened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autohet.driver.report.events import Event

RUN, TRANSFERS = 1, 2
STEPS, CHANGES, NEWS = 1, 2, 3
PARTS = ("detect", "replan", "rebuild", "restore", "first_step")
NEWS_KINDS = (
    "started", "notice", "death", "departure", "arrival", "slow", "decision", "checkpoint", "finished", "failed",
)  # fmt: skip


def timeline(events: Sequence[Event]) -> dict[str, Any]:
    """The trace document; times in microseconds from the first event on."""
    begin = events[0]["time"]
    workers = sorted({worker for event in events for worker in event.get("workers_restored", ())})
    rows = {worker: index + 1 for index, worker in enumerate(workers)}
    found = _names(rows)
    for event in events:
        at = event["time"] - begin
        if event["kind"] == "step" and event.get("seconds"):
            facts = {name: event.get(name) for name in ("loss", "tokens", "generation")}
            found.append(_span(f"step {event['step']}", at - event["seconds"], event["seconds"], RUN, STEPS, facts))
        elif event["kind"] == "reconfigure":
            found += _change(event, at)
        elif event["kind"] == "restore":
            found += [
                _span("restore", at - part["seconds"], part["seconds"], TRANSFERS, rows[worker], part["bytes_by_tier"])
                for worker, part in event.get("workers_restored", {}).items()
            ]
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
    """A change ends with its first step, when its event is written; its parts follow one another."""
    seconds = event["seconds"]
    since = at - seconds["total"]
    facts = {"reason": event["reason"], "steps_lost": event["steps_lost"], **event["bytes_by_tier"]}
    found = [_span(f"change: {event['cause']}", since, seconds["total"], RUN, CHANGES, facts)]
    counted = [name for name in PARTS if event["cause"] == "death" or name not in ("detect", "replan")]
    for name in counted:
        duration = min(seconds[name], max(0.0, at - since))
        found.append(_span(name, since, duration, RUN, CHANGES, {}))
        since += duration
    return found


def _span(name: str, since: float, seconds: float, process: int, row: int, facts: Any) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "ts": since * 1e6,
        "dur": seconds * 1e6,
        "pid": process,
        "tid": row,
        "args": dict(facts),
    }


def _names(rows: dict[str, int]) -> list[dict[str, Any]]:
    threads = [(RUN, STEPS, "steps"), (RUN, CHANGES, "changes"), (RUN, NEWS, "what happened")]
    threads += [(TRANSFERS, row, worker) for worker, row in rows.items()]
    processes = [(RUN, "run"), (TRANSFERS, "restores by worker")]
    return [
        *({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}} for pid, name in processes),
        *(
            {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
            for pid, tid, name in threads
        ),
    ]
