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
    """A node of this job under the names that sources use.

    `signs`: what its agent said last, at `heard_at` on the driver's clock.
    """

    name: str
    ray_id: str
    instance_id: str | None = None
    signs: tuple[Sign, ...] = ()
    heard_at: float = 0.0


class NoticeSource(Protocol):
    """Says which nodes have notice. Called by the driver's one thread, many times a second: what
    takes time has its own.

    tests/driver/test_notice_source_conformance.py holds for each: garbage and replays change
    nothing; what is said of others is not passed on; a source whose first question fails asks
    again; later news stands in the place of earlier.
    """

    def notices(self, nodes: Sequence[WatchedNode], now: float) -> list[Notice]:
        """Return the notices that stand for these nodes at `now` (driver's clock); never blocks."""
        ...

    def close(self) -> None:
        """End what it started; bounded."""
        ...
