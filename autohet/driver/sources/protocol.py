"""What every source of notices is asked, and what it is told of the nodes that it may speak of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from autohet.driver.control.observation import Notice


@dataclass(frozen=True)
class Sign:
    """What a node sees of its own end or trouble.

    source: who says so. risk: the node may be taken, or is not well, and stays in use. in_s:
    seconds until it is gone, counted from the moment at which this was said; None where no deadline
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
        """What stands of these nodes at `now` (the driver's clock); never blocks."""
        ...

    def close(self) -> None:
        """End what it started; bounded."""
        ...
