"""Calls to agents, independent of their transport, and the first of these calls: inventories.

An inventory lists the snapshots that one agent holds.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol

from autohet.driver.sources.protocol import Sign
from autohet.runtime.job.elastic import Timeouts
from autohet.runtime.messages import AgentEndpoint, DataState
from autohet.runtime.process.metadata_server import InstanceFacts

NOTHING_YET = DataState()
Agents = Mapping[str, Any]
"""Actor handle of each node's agent, by node."""
SAME_END_S = 1.0
"""Seconds within which two deadlines are the same: each is counted from its own report."""


@dataclass(frozen=True)
class AgentReport:
    """State of one node as its agent reports it.

    It has the agent's endpoint, the instance's facts, signs of its end, problems of its disk, the
    state of its data, and the number of Xid errors after which its GPUs are checked.
    """

    node: str
    endpoint: AgentEndpoint
    facts: InstanceFacts | None = None
    signs: tuple[Sign, ...] = ()
    problems: tuple[str, ...] = ()
    data: DataState = NOTHING_YET
    num_xids: int = 0

    def is_news_after(self, before: AgentReport, passed_s: float) -> bool:
        """Return true if this report differs from `before`, which is `passed_s` older.

        A deadline that has only come nearer by that time is the same deadline.
        """
        if replace(self, signs=()) != replace(before, signs=()):
            return True
        if len(self.signs) != len(before.signs):
            return True
        for old, new in zip(before.signs, self.signs, strict=True):
            if not _is_same(old, new, passed_s):
                return True
        return False


def _is_same(before: Sign, now: Sign, passed_s: float) -> bool:
    """Return true if a sign has not changed, apart from the time that has passed."""
    if before.in_s is None or now.in_s is None:
        return before == now
    if replace(before, in_s=now.in_s) != now:
        return False
    expected_s = before.in_s - passed_s
    return abs(expected_s - now.in_s) < SAME_END_S


class AgentCalls(Protocol):
    """Asynchronous calls to agents: asked now, answered later, and never waited for."""

    def ask(self, agent: Any, method: str, *arguments: Any) -> Hashable:
        """Start a call; return its handle."""
        ...

    def take(self, asked: dict[Any, str]) -> list[tuple[str, Any]]:
        """Return the answers that have come, each with the node that `asked` has for its call.

        These calls are removed from `asked`. A dead agent gives no answer.
        """
        ...


class Inventories:
    """Inventories of all agents: the snapshots that each of them holds.

    Owned by the workforce and called from its thread.
    """

    def __init__(self, calls: AgentCalls, timeouts: Timeouts) -> None:
        self._calls = calls
        # After `quiesce_s` orders are written without inventories: half of it is left for them.
        self._storage_patience_s = timeouts.quiesce_s / 2
        self._patience_s = min(timeouts.heartbeat_s, self._storage_patience_s)
        self._asked: dict[Any, str] = {}
        self._asked_at = 0.0
        self._found: dict[str, Any] | None = None

    def request(self, agents: Agents, now: float) -> None:
        """Ask every agent again, by node."""
        self._found = {}
        self._asked_at = now
        # A slow disk must not cost the whole answer: it has half of the time.
        disk_within_s = self._patience_s / 2
        self._asked = {}
        for node, agent in agents.items():
            call = self._calls.ask(agent, "inventory", disk_within_s)
            self._asked[call] = node

    def take(
        self, now: float, silent: Set[str] = frozenset(), *, fresh: bool = True
    ) -> Mapping[str, Any] | None:
        """Return the snapshots by node once all agents have answered or the wait is over.

        A slow agent hides no answers of the others, and nodes known to be `silent` are not waited
        for at all. Returns None before that, or if nothing was requested. Not `fresh`: the newest
        checkpoint is still being read. That is waited for too, but for a bounded time, so that the
        nodes' snapshots are still used.
        """
        if self._found is None:
            return None
        self._found.update(self._calls.take(self._asked))
        over = set(self._asked.values()) <= silent or now - self._asked_at > self._patience_s
        read = fresh or now - self._asked_at > self._storage_patience_s
        if not (over and read):
            return None
        return dict(self._found)

    @property
    def asked(self) -> bool:
        """True if inventories were requested and not dropped since."""
        return self._found is not None

    def drop(self) -> None:
        """Discard the inventories: they have been used and are stale now."""
        self._found = None
        self._asked = {}
