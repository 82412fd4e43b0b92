"""Spot traces: CSV files of a fleet's history, read strictly.

A file has counts (`time_s, node_type, num_nodes`) or events (`time_s, event, node`). It is read
into arrivals, notices and departures of named nodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from planner.errors import ConfigError
from planner.inputs.cluster import Cluster
from planner.inputs.documents import parse_csv, parse_number, read_text
from planner.inputs.fleet import NodeType

COUNTS = ("time_s", "node_type", "num_nodes")
EVENTS = ("time_s", "event", "node")
EventKind = Literal["arrival", "notice", "death"]
RANK_BY_KIND: Mapping[EventKind, int] = {"arrival": 0, "notice": 1, "death": 2}
"""Order of the events of one moment: a node that arrives and dies at once arrives first."""


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
    columns, rows = parse_csv(read_text(path, "trace"), f"trace '{path}'")
    kinds = {kind.name: kind for kind in cluster.node_types}
    if columns == COUNTS:
        return from_counts(_read_counts(rows, str(path), kinds), notice_s)
    if columns == EVENTS:
        return _from_events(rows, str(path), kinds, notice_s)
    raise ConfigError(
        f"trace '{path}' has columns {', '.join(columns) or 'none'}; they must be"
        f" {', '.join(COUNTS)}, or {', '.join(EVENTS)}"
    )


def _time(row: Mapping[str, str], where: str) -> float:
    time_s = parse_number(row["time_s"])
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


def _read_counts(
    rows: list[dict[str, str]], path: str, kinds: Mapping[str, NodeType]
) -> dict[tuple[float, str], int]:
    """Return nodes by (time, type); of several rows at one moment the last counts."""
    found: dict[tuple[float, str], int] = {}
    for number, row in enumerate(rows, 1):
        where = f"row {number} of trace '{path}'"
        kind = _type_of(row["node_type"], kinds, where)
        count = -1
        if (row["num_nodes"] or "").strip().isdigit():
            count = int(row["num_nodes"])
        if not 0 <= count <= kind.max_nodes:
            raise ConfigError(
                f"'num_nodes' of {where} is {row['num_nodes']!r}; '{kind.name}' has 0 to"
                f" {kind.max_nodes} nodes (its max_workers)"
            )
        found[_time(row, where), kind.name] = count
    return dict(sorted(found.items()))


def from_counts(counts: Mapping[tuple[float, str], int], notice_s: float) -> tuple[TraceEvent, ...]:
    """Return the events of numbers of nodes by (time, type), in order of time; see `read_trace`."""
    alive: dict[str, list[str]] = {}
    num_started: Counter[str] = Counter()
    found: list[TraceEvent] = []
    born: dict[str, float] = {}
    for (time_s, kind), count in counts.items():
        names = alive.setdefault(kind, [])
        while len(names) < count:
            name = f"{kind}-{num_started[kind]}"
            num_started[kind] += 1
            names.append(name)
            born[name] = time_s
            found.append(TraceEvent(time_s, "arrival", name, kind))

        while len(names) > count:
            name = names.pop()
            if notice_s > 0:
                noticed_s = max(born[name], time_s - notice_s)
                found.append(TraceEvent(noticed_s, "notice", name, kind, time_s))
            found.append(TraceEvent(time_s, "death", name, kind, time_s))
    return in_order(found)


def _from_events(
    rows: list[dict[str, str]], path: str, kinds: Mapping[str, NodeType], notice_s: float
) -> tuple[TraceEvent, ...]:
    timed = []
    for number, row in enumerate(rows, 1):
        where = f"row {number} of trace '{path}'"
        timed.append((_time(row, where), where, row))
    # The sort is stable: rows of one moment keep the order of the file.
    timed.sort(key=lambda item: item[0])

    found: list[TraceEvent] = []
    # Node type of each node that is alive.
    type_by_node: dict[str, str] = {}
    for time_s, where, row in timed:
        event = row["event"]
        name = row["node"]
        if event not in ("arrival", "notice", "death"):
            raise ConfigError(
                f"'event' of {where} is {event!r}; it must be notice, death or arrival"
            )
        if event == "arrival" and name in type_by_node:
            raise ConfigError(f"{where}: node '{name}' is there already at {time_s:g} s")
        if event != "arrival" and name not in type_by_node:
            raise ConfigError(f"{where}: node '{name}' is not there at {time_s:g} s")

        if event == "arrival":
            type_name, _, _ = name.rpartition("-")
            type_by_node[name] = _type_of(type_name, kinds, where).name
        kind = type_by_node[name]
        if event == "death":
            del type_by_node[name]
        gone_s = time_s + notice_s if event == "notice" else time_s
        found.append(TraceEvent(time_s, cast(EventKind, event), name, kind, gone_s))
    return in_order(_with_ends(found))


def _with_ends(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Give each notice the death that follows it in the trace, or a death of its own."""
    found = list(events)
    for index, event in enumerate(found):
        if event.kind != "notice":
            continue
        death = _death_of(event.node, found[index + 1 :])
        gone_s = event.gone_s if death is None else death.time_s
        found[index] = replace(event, gone_s=gone_s)
        if death is None:
            found.append(TraceEvent(gone_s, "death", event.node, event.node_type, gone_s))
    return found


def _death_of(node: str, later: Iterable[TraceEvent]) -> TraceEvent | None:
    """Return the node's death; None if the name arrives anew before, or there is none."""
    for event in later:
        if event.node == node and event.kind == "arrival":
            return None
        if event.node == node and event.kind == "death":
            return event
    return None


def in_order(events: Iterable[TraceEvent]) -> tuple[TraceEvent, ...]:
    """Return the events in order of time; those of one moment by kind, then by node."""

    def key(event: TraceEvent) -> tuple[float, int, str]:
        return event.time_s, RANK_BY_KIND[event.kind], event.node

    return tuple(sorted(events, key=key))
