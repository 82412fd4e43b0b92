"""Notices of several sources about one node become one (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autohet.driver.control.observation import Notice

SAME_MOMENT_S = 2.0
"""Deadlines this close are the same: they are told in whole seconds and counted from the moment of an answer."""


def merged(known: Notice | None, heard: Sequence[Notice]) -> Notice | None:
    """What stands of a node, given what stood before and what its sources say now: the earliest deadline counts, later news updates
    earlier, and a notice stays seen since it was first seen. Sources that fall silent withdraw nothing.
    """
    if not heard:
        return known
    first = min(heard, key=_deadline)
    if known is None:
        return first
    same = _deadline(first) == _deadline(known) or abs(_deadline(first) - _deadline(known)) < SAME_MOMENT_S
    return known if same else replace(first, seen_at=known.seen_at)


def _deadline(notice: Notice) -> float:
    return math.inf if notice.deadline is None else notice.deadline
