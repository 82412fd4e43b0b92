"""Sources that need no thread: Ray's drains, and the script of a rehearsal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from autohet.driver.control.observation import Notice
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
            self.known = {
                node: None if left is None else now + left for node, left in self._read().items()
            }
            self._read_at = now
        draining = [node for node in nodes if node.ray_id in self.known]
        text = "Ray is draining it"
        return [Notice(node.name, text, now, self.known[node.ray_id]) for node in draining]

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
        for name, notice in self.by_node.items():
            if name in ids and self._ids.get(name, ids[name]) == ids[name]:
                kept[name] = notice
        self.by_node = kept
        self._ids = {name: ids[name] for name in self.by_node}
        return list(self.by_node.values())

    def close(self) -> None:
        """Close the source: no-op."""
