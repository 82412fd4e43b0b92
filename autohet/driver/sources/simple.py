"""Sources that need no thread: Ray's drains, and the script of a rehearsal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from autohet.control.values.observation import Notice
from autohet.driver.sources.protocol import WatchedNode


class RayDrains:
    """Source of the nodes that Ray drains.

    Ray is told to drain by the autoscaler, by `ray drain-node`, or by a node that had SIGTERM, as a
    pod of KubeRay gets when it is to go (`ray start --block` drains its own node for
    RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S).

    read: returns the seconds left by Ray's node id (None: no deadline named); called at most every
    `poll_s`. `known`: the deadlines of the last answer, by Ray's node id.
    """

    def __init__(self, read: Callable[[], Mapping[str, float | None]], poll_s: float = 0.0) -> None:
        self.known: dict[str, float | None] = {}
        self._read = read
        self._poll_s = poll_s
        self._read_at = -math.inf

    def notices(self, nodes: Sequence[WatchedNode], now: float) -> list[Notice]:
        if now - self._read_at >= self._poll_s:
            known: dict[str, float | None] = {}
            for ray_id, left_s in self._read().items():
                known[ray_id] = None if left_s is None else now + left_s
            # Only now: if the read fails, the last answer still counts.
            self.known = known
            self._read_at = now

        notices = []
        for node in nodes:
            if node.ray_id in self.known:
                deadline = self.known[node.ray_id]
                notices.append(Notice(node.name, "Ray is draining it", now, deadline))
        return notices

    def close(self) -> None:
        """Close the source: no-op."""


class Scripted:
    """Notices of a rehearsal, which writes them to `by_node`."""

    def __init__(self) -> None:
        self.by_node: dict[str, Notice] = {}
        self._ids: dict[str, str] = {}
        """Ray's id of each node that has a notice: a later node of the name is another."""

    def notices(self, nodes: Sequence[WatchedNode], now: float) -> list[Notice]:
        ids = {node.name: node.ray_id for node in nodes}
        kept = {}
        kept_ids = {}
        for name, notice in self.by_node.items():
            ray_id = ids.get(name)
            # A notice that was written since the last look has no id yet.
            if ray_id is not None and self._ids.get(name, ray_id) == ray_id:
                kept[name] = notice
                kept_ids[name] = ray_id
        self.by_node = kept
        self._ids = kept_ids
        return list(kept.values())

    def close(self) -> None:
        """Close the source: no-op."""
