"""Interface of every source of notices, and of the nodes that a source may speak of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from autohet.control.values.observation import Notice

FAR_S = 3600.0
"""Seconds beyond which an announced end is a risk until it is near.

Clouds announce maintenance days ahead, and no job leaves a node for a day that is far away.
"""


@dataclass(frozen=True)
class Sign:
    """Sign that a node sees of its own end or trouble.

    source: reporter of the sign. risk: the node may be taken, or is not well, and stays in use.
    in_s: seconds until the node is gone, counted from the moment of the report; None if no deadline
    is named. wants_answer: the cloud waits for the node's acknowledgement, no longer than `in_s`.
    """

    source: str
    text: str
    risk: bool = False
    in_s: float | None = None
    wants_answer: bool = False


@dataclass(frozen=True)
class WatchedNode:
    """Node of this job under the names that sources use.

    `name` is not unique in time: a replacement may have the name of the node that left.

    `signs`: the newest signs of its agent, reported at `heard_at` on the driver's clock.
    """

    name: str
    ray_id: str
    instance_id: str | None = None
    signs: tuple[Sign, ...] = ()
    heard_at: float = 0.0
    aliases: tuple[str, ...] = ()
    """Other names of the node's machine: Ray's id, address, host name and the cloud's name.

    A machine with several Ray nodes shares some of them; empty ones are unknown.
    """


class NoticeSource(Protocol):
    """Source of notices; called by the driver's one thread, many times a second.

    Work that takes time runs in a thread of the source.

    A notice belongs to one node by `ray_id` or `instance_id`, never by `name`, and ends with that
    node. A source whose messages give only a name binds each message to the `ray_id` of the node
    that has the name when the message is first read (`script_file`).

    Times of a notice are on the driver's clock: a source that reads another clock adds `now` less
    that clock's time.

    tests/driver/test_notice_source_conformance.py holds for each source: garbage and replays change
    nothing; notices of other nodes, or of an earlier node of the name, are not passed on; a source
    whose first poll fails polls again; later news replaces earlier.
    """

    def notices(self, nodes: Sequence[WatchedNode], now: float) -> list[Notice]:
        """Return the notices that stand for these nodes at `now` (driver's clock); never blocks."""
        ...

    def close(self) -> None:
        """Close the source and end its threads, within bounded time."""
        ...
