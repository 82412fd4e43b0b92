"""Events of a run, read for its report."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autohet.driver.events.living_nodes import LivingNodes
from planner.errors import ConfigError
from planner.inputs.documents import read_text

Event = dict[str, Any]
Points = list[tuple[float, float]]


def read_events(path: str | Path) -> list[Event]:
    """Read every event of the file, in order.

    A line that a killed driver cut off is left out, at the end or before the next driver's first
    event. Where a time lies before the one above it, since the next driver's clock is another, all
    times from there on are moved to follow it.

    Raises:
        ConfigError: the file cannot be read, or is no file of events.
    """
    lines = read_text(path, "events").splitlines()
    found: list[Event] = []
    moved_s = 0.0
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
            if not isinstance(event, dict) or "kind" not in event or "time" not in event:
                raise ValueError("no 'kind' and 'time'")
            if found:
                moved_s = max(moved_s, found[-1]["time"] - event["time"])
            event["time"] += moved_s
            found.append(event)
        except ValueError as error:
            is_last = number == len(lines)
            # Counted from 1, the number of this line is the index of the next one.
            if is_last or '"kind": "started"' in lines[number]:
                continue
            raise ConfigError(f"line {number} of '{path}' is no event: {error}") from None
    if not found:
        raise ConfigError(f"'{path}' has no event")
    return found


def last_run(events: Sequence[Event]) -> Sequence[Event]:
    """Return the events of the last run in a file.

    Several runs write to one file if each resumes where another ended. A driver that was killed and
    restarted continues its run.
    """
    first = 0
    for index, event in enumerate(events):
        if event["kind"] == "started" and not event.get("restart"):
            first = index
    return events[first:] if first else events


def of_kind(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event["kind"] == kind]


def kept_steps(events: Sequence[Event]) -> list[Event]:
    """Return the step events in order, without steps that a death took back.

    A step that was run again has the event of its last run.
    """
    by_step = {}
    for event in of_kind(events, "step"):
        step = int(event["step"])
        by_step[step] = event
    return [by_step[step] for step in sorted(by_step)]


@dataclass(frozen=True)
class FleetOverTime:
    """Living GPUs and their price over time.

    Points are (seconds, value), with one step at each change of the living nodes: arrivals, deaths,
    departures, and deadlines of notices that have passed.
    """

    gpus_by_type: dict[str, Points]
    gpus_by_zone: dict[str, Points]
    """Living GPUs over time by zone; empty if no node names its zone."""
    usd_per_hour: Points
    """Total price of the living nodes whose price is known."""


def fleet_over_time(events: Sequence[Event], begin: float) -> FleetOverTime:
    """Return the living fleet over time; `begin` is second 0."""
    living = LivingNodes()
    by_type: dict[str, Points] = {}
    by_zone: dict[str, Points] = {}
    for event in of_kind(events, "arrival"):
        gpu_type = event.get("gpu_type") or ""
        zone = event.get("zone") or ""
        by_type[gpu_type] = [(0.0, 0.0)]
        by_zone[zone] = [(0.0, 0.0)]

    dollars: Points = [(0.0, 0.0)]
    for event in events:
        if living.take(event):
            at = event["time"] - begin
            _extend(by_type, at, living.gpus_by("gpu_type"))
            _extend(by_zone, at, living.gpus_by("zone"))
            dollars.append((at, living.usd_per_hour))

    names_a_zone = any(by_zone)
    if not names_a_zone:
        return FleetOverTime(by_type, {}, dollars)
    named = {zone or "unknown": points for zone, points in by_zone.items()}
    return FleetOverTime(by_type, named, dollars)


def _extend(curves: dict[str, Points], at: float, gpus: Counter[str]) -> None:
    for name, points in curves.items():
        points.append((at, float(gpus[name])))
