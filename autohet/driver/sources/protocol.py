"""Interface of every source of notices, and of the nodes that a source may speak of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from autohet.driver.control.observation import Notice


@dataclass(frozen=True)
class Sign:
    """Sign that a node sees of its own end or trouble.

    source: reporter of the sign. risk: the node may be taken, or is not well, and stays in use.
    in_s: seconds until the node is gone, counted from the moment of the report; None if no deadline
    is named.
    """

    source: str
    text: str
    risk: bool = False
    in_s: float | None = None


@dataclass(frozen=True)
class WatchedNode:
    """Node of this job under the names that sources use.

    `signs`: the newest signs of its agent, reported at `heard_at` on the driver's clock.
    """

    name: str
    ray_id: str
    instance_id: str | None = None
    signs: tuple[Sign, ...] = ()
    heard_at: float = 0.0


class NoticeSource(Protocol):
    """Source of notices; called by the driver's one thread, many times a second.

    Work that takes time runs in a thread of the source.
    tests/driver/test_notice_source_conformance.py holds for each source: garbage and replays change
    nothing; notices of other nodes are not passed on; a source whose first poll fails polls again;
    later news replaces earlier.
    """

    def notices(self, nodes: Sequence[WatchedNode], now: float) -> list[Notice]:
        """Return the notices that stand for these nodes at `now` (driver's clock); never blocks."""
        ...

    def close(self) -> None:
        """Close the source and end its threads, within bounded time."""
        ...
