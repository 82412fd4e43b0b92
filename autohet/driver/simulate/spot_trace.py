"""Spot traces: CSV files of a fleet's history, read strictly.

A file has counts (`time_s, node_type, num_nodes`) or events (`time_s, event, node`). It is read
into arrivals, notices and departures of named nodes.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from planner.cluster import Cluster, NodeType
from planner.errors import ConfigError

COUNTS = ("time_s", "node_type", "num_nodes")
EVENTS = ("time_s", "event", "node")
EventKind = Literal["arrival", "notice", "death"]


@dataclass(frozen=True, order=True)
class TraceEvent:
    """Event of `node` at `time_s`.

    A notice's `gone_s` is the second at which the node will be taken.
    """

    time_s: float
    kind: EventKind
    node: str
    node_type: str
    gone_s: float = math.inf


def read_trace(path: str | Path, cluster: Cluster, notice_s: float) -> tuple[TraceEvent, ...]:
    """Read a trace's events in order of time.

    If counts fall, the youngest nodes of the type leave at that time, with a notice `notice_s`
    before (0: without). A notice in a trace of events gives its node `notice_s`, unless the trace
    says when it dies.

    Raises:
        ConfigError: a column, a value, a node type or a node that does not fit; more nodes than the
        cluster may have.
    """
    try:
        with Path(path).open(newline="") as file:
            reader = csv.DictReader(line for line in file if not line.startswith("#"))
            rows = list(reader)
            columns = tuple(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"cannot read trace '{path}': {getattr(error, 'strerror', None) or error}"
        ) from None
    kinds = {kind.name: kind for kind in cluster.node_types}
    if columns == COUNTS:
        return _from_counts(_counted(rows, str(path), kinds), notice_s)
    if columns == EVENTS:
        return _from_events(rows, str(path), kinds, notice_s)
    raise ConfigError(
        f"trace '{path}' has columns {', '.join(columns) or 'none'}; they must be"
        f" {', '.join(COUNTS)}, or {', '.join(EVENTS)}"
    )


def _time(row: Mapping[str, str], where: str) -> float:
    try:
        time_s = float(row["time_s"])
    except (TypeError, ValueError):
        time_s = math.nan
    if not 0.0 <= time_s < math.inf:
        raise ConfigError(
            f"'time_s' of {where} must be a number of at least 0, not {row['time_s']!r}"
        )
    return time_s


def _type_of(name: str, kinds: Mapping[str, NodeType], where: str) -> NodeType:
    if name not in kinds:
        raise ConfigError(
            f"{where} names node type '{name}'; the cluster has {', '.join(sorted(kinds))}"
        )
    return kinds[name]


def _counted(
    rows: list[dict[str, str]], path: str, kinds: Mapping[str, NodeType]
) -> dict[tuple[float, str], int]:
    """Return nodes by (time, type); of several rows at one moment the last counts."""
    found: dict[tuple[float, str], int] = {}
    for number, row in enumerate(rows, 1):
        where = f"row {number} of trace '{path}'"
        kind = _type_of(row["node_type"], kinds, where)
        count = int(row["num_nodes"]) if (row["num_nodes"] or "").strip().isdigit() else -1
        if not 0 <= count <= kind.max_nodes:
            raise ConfigError(
                f"'num_nodes' of {where} is {row['num_nodes']!r}; '{kind.name}' has 0 to"
                f" {kind.max_nodes} nodes (its max_workers)"
            )
        found[_time(row, where), kind.name] = count
    return dict(sorted(found.items()))


def _from_counts(
    counts: Mapping[tuple[float, str], int], notice_s: float
) -> tuple[TraceEvent, ...]:
    alive: dict[str, list[str]] = {}
    started: dict[str, int] = {}
    found: list[TraceEvent] = []
    born: dict[str, float] = {}
    for (time_s, kind), count in counts.items():
        names = alive.setdefault(kind, [])
        while len(names) < count:
            name = f"{kind}-{started.get(kind, 0)}"
            started[kind] = started.get(kind, 0) + 1
            names.append(name)
            born[name] = time_s
            found.append(TraceEvent(time_s, "arrival", name, kind))
        while len(names) > count:
            name = names.pop()
            if notice_s > 0:
                found.append(
                    TraceEvent(max(born[name], time_s - notice_s), "notice", name, kind, time_s)
                )
            found.append(TraceEvent(time_s, "death", name, kind, time_s))
    return _ordered(found)


def _from_events(
    rows: list[dict[str, str]], path: str, kinds: Mapping[str, NodeType], notice_s: float
) -> tuple[TraceEvent, ...]:
    found: list[TraceEvent] = []
    alive: dict[str, str] = {}
    numbered = [
        (_time(row, f"row {number} of trace '{path}'"), number, row)
        for number, row in enumerate(rows, 1)
    ]
    for time_s, number, row in sorted(numbered, key=lambda item: item[:2]):
        where = f"row {number} of trace '{path}'"
        event = row["event"]
        name = row["node"]
        if event not in ("arrival", "notice", "death"):
            raise ConfigError(
                f"'event' of {where} is {event!r}; it must be notice, death or arrival"
            )
        if (event == "arrival") == (name in alive):
            raise ConfigError(
                f"{where}: node '{name}'"
                f" {'is there already' if event == 'arrival' else 'is not there'} at {time_s:g} s"
            )
        if event == "arrival":
            alive[name] = _type_of(name.rpartition("-")[0], kinds, where).name
        kind = alive[name] if event != "death" else alive.pop(name)
        gone_s = time_s + notice_s if event == "notice" else time_s
        found.append(TraceEvent(time_s, cast(EventKind, event), name, kind, gone_s))
    return _ordered(_with_ends(found))


def _with_ends(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Give each notice the death that follows it in the trace, or a death of its own."""
    found = list(events)
    for index, event in enumerate(found):
        if event.kind != "notice":
            continue
        later = (each for each in found[index + 1 :] if each.node == event.node)
        end = next((each for each in later if each.kind in ("death", "arrival")), None)
        gone_s = end.time_s if end is not None and end.kind == "death" else event.gone_s
        found[index] = TraceEvent(event.time_s, "notice", event.node, event.node_type, gone_s)
        if end is None or end.kind != "death":
            found.append(TraceEvent(gone_s, "death", event.node, event.node_type, gone_s))
    return found


def _ordered(events: Iterable[TraceEvent]) -> tuple[TraceEvent, ...]:
    rank = {"arrival": 0, "notice": 1, "death": 2}
    return tuple(sorted(events, key=lambda event: (event.time_s, rank[event.kind], event.node)))
