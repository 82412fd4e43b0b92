"""Merging of several sources' notices about one node into one (pure)."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autohet.control.values.observation import Notice
from autohet.driver.sources.protocol import NoticeSource, WatchedNode

logger = logging.getLogger("autohet")
SAME_MOMENT_S = 2.0
"""Seconds within which two deadlines are the same.

Sources give whole seconds, counted from the moment of an answer.
"""


class AgentSigns:
    """Source of the signs that nodes' agents report from instance metadata and GPUs."""

    def notices(self, nodes: Sequence[WatchedNode], now: float) -> list[Notice]:
        notices = []
        for node in nodes:
            for sign in node.signs:
                text = f"{sign.source}: {sign.text}"
                deadline = None if sign.in_s is None else node.heard_at + sign.in_s
                notices.append(Notice(node.name, text, now, deadline, sign.risk))
        return notices

    def close(self) -> None:
        """Close the source: no-op, since the workforce ends the agents."""


def merge_notices(known: Notice | None, heard: Sequence[Notice]) -> Notice | None:
    """Merge a node's standing notice with the notices that its sources give now.

    The earliest deadline counts, later news updates earlier, and a notice keeps the time at which
    it was first seen. A source that falls silent withdraws nothing, and one that names no deadline
    contradicts none.
    """
    if not heard:
        return known
    first = min(heard, key=_deadline)
    if known is None:
        return first
    if first.deadline is None:
        # Nothing new, or a source that knows less than the one before it.
        return known
    if abs(first.deadline - _deadline(known)) < SAME_MOMENT_S:
        return known
    return replace(first, seen_at=known.seen_at)


def _deadline(notice: Notice) -> float:
    """Return the deadline, or infinity: a notice that names none is the least urgent."""
    return math.inf if notice.deadline is None else notice.deadline


@dataclass
class NoticeMerger:
    """Merges the notices of all sources into at most one departure and one risk for each node.

    Both stand as long as the node is there. A risk stands while a source reports it, and never
    together with a departure.
    """

    sources: Sequence[NoticeSource]
    departures: dict[str, Notice] = field(default_factory=dict)
    risks: dict[str, Notice] = field(default_factory=dict)
    _ids: dict[str, str] = field(default_factory=dict)
    """Ray's id by name: a notice ends with its node, not with the name."""
    _broken: set[str] = field(default_factory=set)

    def look(self, nodes: Sequence[WatchedNode], now: float) -> None:
        """Poll all sources once, and update `departures` and `risks`."""
        ids = {node.name: node.ray_id for node in nodes}
        same = {name for name, ray_id in ids.items() if self._ids.get(name, ray_id) == ray_id}
        self._ids = ids
        before = {name: notice for name, notice in self.departures.items() if name in same}
        self.risks = {name: notice for name, notice in self.risks.items() if name in same}

        risks: list[Notice] = []
        departures_by_node: dict[str, list[Notice]] = {name: [] for name in ids}
        for source in self.sources:
            for notice in self._ask(source, nodes, now):
                # A source may still name a node that is gone.
                if notice.node not in ids:
                    continue
                if notice.risk:
                    risks.append(notice)
                else:
                    departures_by_node[notice.node].append(notice)

        departures = {}
        for name, heard in departures_by_node.items():
            departure = merge_notices(before.get(name), heard)
            if departure is not None:
                departures[name] = departure
        self.departures = departures
        self.risks = self._standing_risks(risks)

    def _standing_risks(self, heard: Sequence[Notice]) -> dict[str, Notice]:
        found: dict[str, Notice] = {}
        for notice in heard:
            if notice.node not in self.departures and notice.node not in found:
                known = self.risks.get(notice.node, notice)
                found[notice.node] = replace(notice, seen_at=known.seen_at)
        return found

    def _ask(self, source: NoticeSource, nodes: Sequence[WatchedNode], now: float) -> list[Notice]:
        """Poll one source; if it fails, log the failure once and return no notices."""
        try:
            return source.notices(nodes, now)
        except Exception as error:  # noqa: BLE001
            what = f"{type(source).__name__} failed: {type(error).__name__}: {error}"
            if what not in self._broken:
                self._broken.add(what)
                logger.warning("A source of notices, %s", what)
            return []

    def close(self) -> None:
        for source in self.sources:
            source.close()
