"""Prices of each node type over time: the cluster file's price, or a series of spot prices."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from planner.cluster import NodeType

PriceRow = tuple[float, str, float]
"""(second, node type, dollars an hour): a node of this type has this price from this second on.

Seconds are those of the trace; a negative one is before it.
"""


class PriceHistory:
    """Piecewise constant prices of node types.

    Before a type's first row, and without rows, its price is the cluster file's (label or
    catalogue).
    """

    def __init__(self, kinds: Mapping[str, NodeType], rows: Sequence[PriceRow] = ()) -> None:
        self._steps: dict[str, list[tuple[float, float]]] = {}
        self._given = {of for _, of, _ in rows}
        for name, kind in kinds.items():
            later = sorted((time_s, usd) for time_s, of, usd in rows if of == name)
            self._steps[name] = [(-math.inf, kind.usd_per_hour or 0.0), *later]

    def usd_per_hour(self, node_type: str, time_s: float) -> float:
        steps = self._steps[node_type]
        return steps[bisect_right(steps, (time_s, math.inf)) - 1][1]

    def usd(self, node_type: str, begin_s: float, end_s: float) -> float:
        """Return the dollars for one node from `begin_s` to `end_s`."""
        steps = self._steps[node_type]
        ends = [time_s for time_s, _ in steps[1:]] + [math.inf]
        hours = (
            max(0.0, min(end, end_s) - max(begin, begin_s)) / 3600.0
            for (begin, _), end in zip(steps, ends, strict=True)
        )
        return sum(hour * usd for hour, (_, usd) in zip(hours, steps, strict=True) if hour)

    def next_change_s(self, time_s: float) -> float:
        """Return the time of the first price change after `time_s`; infinite if there is none."""
        return min(
            (at for steps in self._steps.values() for at, _ in steps if at > time_s),
            default=math.inf,
        )

    def at(self, kinds: Mapping[str, NodeType], time_s: float) -> dict[str, NodeType]:
        """Return these node types at their prices of `time_s`."""
        return self._priced(kinds, lambda name: self.usd_per_hour(name, time_s))

    def cheapest(self, kinds: Mapping[str, NodeType], end_s: float) -> dict[str, NodeType]:
        """Return these node types at their lowest prices from 0 until `end_s`."""
        return self._priced(kinds, lambda name: min(usd for _, usd in self.steps(name, end_s)))

    def _priced(
        self, kinds: Mapping[str, NodeType], usd_per_hour: Callable[[str], float]
    ) -> dict[str, NodeType]:
        """Return these node types, with new prices for those that have rows.

        Other types keep the cluster file's price, also if it is None.
        """
        priced = [name for name in kinds if name in self._given]
        given = {name: replace(kinds[name], usd_per_hour=usd_per_hour(name)) for name in priced}
        return {**kinds, **given}

    def steps(self, node_type: str, end_s: float) -> list[tuple[float, float]]:
        """Return (second, dollars an hour from then on) at each change from 0 until `end_s`."""
        found = [(0.0, self.usd_per_hour(node_type, 0.0))]
        for at, usd in self._steps[node_type]:
            if 0.0 < at < end_s and usd != found[-1][1]:
                found.append((at, usd))
        return found
