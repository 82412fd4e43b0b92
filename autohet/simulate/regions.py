"""SIMULATED supervisor of `autohet sky`: the nodes of one region at a time along a trace.

The supervisor's own `decide_round` chooses. A region's capacity is what the trace says. Nodes of
other regions are neither used nor paid for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autohet.driver.sky.command import SkyCluster, SkyJob
from autohet.driver.sky.supervisor import POLL_S, Limits, Record, Seen, decide_round
from autohet.simulate.spot_trace import TraceEvent, in_order
from planner.errors import ConfigError
from planner.inputs.fleet import NodeType
from planner.inputs.zones import ZoneTable, refusal_of, region_of

_UP = SkyCluster("simulated", "UP")
_RUNNING = SkyJob("RUNNING", 0.0)
_ENDLESS = 10**9


@dataclass(frozen=True)
class Stay:
    """Time in one region: `from_s`, when its checkpoint is there, to `to_s`."""

    region: str
    from_s: float
    to_s: float


@dataclass(frozen=True)
class Move:
    """Change of region at `at_s`, with the copy of the newest checkpoint that precedes it."""

    at_s: float
    source: str
    target: str
    num_bytes: int
    copy_s: float
    usd: float


def regions_of(kinds: Mapping[str, NodeType]) -> dict[str, str]:
    """Return the region of each node type, in the order of the cluster file.

    Raises:
        ConfigError: a type's zone is unknown, or all are in one region.
    """
    found = {name: region_of(kind.zone) for name, kind in kinds.items()}
    unknown = [name for name, region in found.items() if not region]
    if unknown:
        raise ConfigError(
            f"node type '{unknown[0]}' has zone '{kinds[unknown[0]].zone}', whose region is"
            " unknown; set the label 'autohet.io/zone'"
        )
    if len(set(found.values())) < 2:
        raise ConfigError("all node types are in one region; the policies of regions need two")
    return found


def only(
    trace: Sequence[TraceEvent], region_by_type: Mapping[str, str], region: str
) -> list[TraceEvent]:
    """Return the events of one region."""
    return [event for event in trace if region_by_type[event.node_type] == region]


@dataclass(frozen=True)
class RegionWalk:
    """Inputs of a walk through regions.

    gpus_needed: with fewer a region starves. checkpoint_bytes: of each copy.
    """

    trace: Sequence[TraceEvent]
    kinds: Mapping[str, NodeType]
    zones: ZoneTable
    gpus_needed: int
    patience_s: float
    checkpoint_bytes: int
    end_s: float

    def stays(self) -> tuple[list[Stay], list[Move]]:
        """Return the stays and moves of the supervisor, from the first region on."""
        region_by_type = regions_of(self.kinds)
        regions = list(dict.fromkeys(region_by_type.values()))
        limits = Limits(None, self.patience_s, _ENDLESS)
        gpus = _Gpus(self.trace, self.kinds, region_by_type)
        record = Record(region=regions[0])
        began_s = 0.0
        now_s = 0.0
        stays: list[Stay] = []
        moves: list[Move] = []
        while now_s < self.end_s:
            seen = Seen(now_s, None, None, False, 0)
            if gpus.at(now_s, record.region) >= self.gpus_needed:
                seen = Seen(now_s, _UP, _RUNNING, False, 0)
            decision = decide_round(record, seen, regions, limits)
            if decision.action == "give_up":
                break

            following = decision.record
            if decision.action == "move":
                stays.append(Stay(record.region, began_s, now_s))
                move = self._move(now_s, record.region, following.region)
                moves.append(move)
                began_s = now_s + move.copy_s
            record = following
            # The supervisor copies the checkpoint before it looks again.
            now_s = max(now_s + POLL_S, began_s)

        left_s = max(began_s, min(now_s, self.end_s))
        stays.append(Stay(record.region, began_s, left_s))
        return stays, moves

    def _move(self, at_s: float, source: str, target: str) -> Move:
        if not self.zones.connects(source, target):
            raise ConfigError(refusal_of((source, target)))
        link = self.zones.link(source, target)
        assert link is not None, "two regions"
        usd = self.zones.usd(self.checkpoint_bytes, source, target)
        copy_s = self.checkpoint_bytes / link.bytes_per_s
        return Move(at_s, source, target, self.checkpoint_bytes, copy_s, usd)

    def events(self, stays: Sequence[Stay]) -> list[TraceEvent]:
        """Return the trace of the nodes that the supervisor has: each within its region's stays."""
        region_by_type = regions_of(self.kinds)
        found: list[TraceEvent] = []
        for stay in stays:
            mine = only(self.trace, region_by_type, stay.region)
            for life in _lives(mine):
                found += [event for event in _within(life, stay) if event.time_s < self.end_s]
        return list(in_order(found))


class _Gpus:
    """GPUs of each region over time, read forwards."""

    def __init__(
        self,
        trace: Sequence[TraceEvent],
        kinds: Mapping[str, NodeType],
        region_by_type: Mapping[str, str],
    ) -> None:
        self._events = [event for event in trace if event.kind != "notice"]
        self._kinds = kinds
        self._region_by_type = region_by_type
        self._count = dict.fromkeys(region_by_type.values(), 0)
        self._next = 0

    def at(self, now_s: float, region: str) -> int:
        while self._next < len(self._events) and self._events[self._next].time_s <= now_s:
            event = self._events[self._next]
            self._next += 1
            num_gpus = self._kinds[event.node_type].num_gpus
            region_of_event = self._region_by_type[event.node_type]
            if event.kind == "arrival":
                self._count[region_of_event] += num_gpus
            else:
                self._count[region_of_event] -= num_gpus
        return self._count[region]


def _lives(events: Sequence[TraceEvent]) -> list[list[TraceEvent]]:
    """Return the events of each node, one list from each arrival to the following death."""
    # A name may come again after a death: then it is another node.
    open_lives: dict[str, list[TraceEvent]] = {}
    found: list[list[TraceEvent]] = []
    for event in events:
        if event.kind == "arrival":
            open_lives[event.node] = [event]
            found.append(open_lives[event.node])
        elif event.node in open_lives:
            open_lives[event.node].append(event)
            if event.kind == "death":
                del open_lives[event.node]
    return found


def _within(life: Sequence[TraceEvent], stay: Stay) -> list[TraceEvent]:
    """Return the part of a node's life that lies in a stay."""
    first = life[0]
    last = life[-1]
    died_s = last.time_s if last.kind == "death" else math.inf
    from_s = max(first.time_s, stay.from_s)
    to_s = min(died_s, stay.to_s)
    if from_s >= to_s:
        return []

    found = [TraceEvent(from_s, "arrival", first.node, first.node_type)]
    if died_s <= stay.to_s:
        for event in life[1:]:
            found.append(replace(event, time_s=max(from_s, event.time_s)))
    elif stay.to_s < math.inf:
        # The supervisor moves away and ends the nodes of this region.
        found.append(TraceEvent(stay.to_s, "death", first.node, first.node_type, stay.to_s))
    return found


def stay_seconds(stays: Sequence[Stay]) -> dict[str, float]:
    """Return the seconds in each region."""
    found: dict[str, float] = {}
    for stay in stays:
        found[stay.region] = found.get(stay.region, 0.0) + stay.to_s - stay.from_s
    return found
