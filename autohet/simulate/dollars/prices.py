"""Prices of each node type over time: the cluster file's price, or a series of spot prices."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autohet.driver.sources.spot_prices import POLL_S, usual_price
from planner.inputs.fleet import NodeType

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
        """Price changes of each type, in order of time: (second, dollars an hour from then on)."""
        self.given: set[str] = set()
        """Types that have rows."""

        later_steps: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        for time_s, node_type, usd in rows:
            self.given.add(node_type)
            if node_type in later_steps:
                later_steps[node_type].append((time_s, usd))

        for name, kind in kinds.items():
            at_first = (-math.inf, kind.usd_per_hour or 0.0)
            self._steps[name] = [at_first, *sorted(later_steps[name])]

    def usd_per_hour(self, node_type: str, time_s: float) -> float:
        steps = self._steps[node_type]
        # No price is infinite, so a change at `time_s` itself is left of this key and counts.
        following = bisect_right(steps, (time_s, math.inf))
        _, usd = steps[following - 1]
        return usd

    def usual(self, node_type: str, now: float) -> float:
        """Return the median price of the last days, as far as they are known."""
        changes = [(at, usd) for at, usd in self._steps[node_type][1:] if at <= now]
        return usual_price(changes, now) if changes else self.usd_per_hour(node_type, now)

    def usd(self, node_type: str, begin_s: float, end_s: float) -> float:
        """Return the dollars for one node from `begin_s` to `end_s`."""
        steps = self._steps[node_type]
        ends = [time_s for time_s, _ in steps[1:]]
        ends.append(math.inf)

        amounts = []
        for (begin, usd_per_hour), end in zip(steps, ends, strict=True):
            seconds = min(end, end_s) - max(begin, begin_s)
            if seconds > 0.0:
                amounts.append(seconds / 3600.0 * usd_per_hour)
        return sum(amounts)

    def next_change_s(self, time_s: float) -> float:
        """Return the time of the first price change after `time_s`; infinite if there is none."""
        change_s = math.inf
        for steps in self._steps.values():
            following = bisect_right(steps, (time_s, math.inf))
            if following < len(steps):
                change_s = min(change_s, steps[following][0])
        return change_s

    def changes(self, end_s: float) -> list[float]:
        """Return the seconds from 0 until `end_s` at which a price changes, and 0."""
        found = [0.0]
        while (change_s := self.next_change_s(found[-1])) < end_s:
            found.append(change_s)
        return found

    def at(self, kinds: Mapping[str, NodeType], time_s: float) -> dict[str, NodeType]:
        """Return these node types at their prices of `time_s`."""
        return self._with_prices(kinds, lambda name: self.usd_per_hour(name, time_s))

    def cheapest(self, kinds: Mapping[str, NodeType], end_s: float) -> dict[str, NodeType]:
        """Return these node types at their lowest prices from 0 until `end_s`."""

        def lowest(name: str) -> float:
            return min(usd for _, usd in self.steps(name, end_s))

        return self._with_prices(kinds, lowest)

    def _with_prices(
        self, kinds: Mapping[str, NodeType], usd_per_hour: Callable[[str], float]
    ) -> dict[str, NodeType]:
        """Return these node types, with new prices for those that have rows.

        Other types keep the cluster file's price, also if it is None.
        """
        priced = dict(kinds)
        for name, kind in kinds.items():
            if name in self.given:
                priced[name] = replace(kind, usd_per_hour=usd_per_hour(name))
        return priced

    def steps(self, node_type: str, end_s: float) -> list[tuple[float, float]]:
        """Return (second, dollars an hour from then on) at each change from 0 until `end_s`."""
        found = [(0.0, self.usd_per_hour(node_type, 0.0))]
        for at, usd in self._steps[node_type]:
            if 0.0 < at < end_s and usd != found[-1][1]:
                found.append((at, usd))
        return found


class SeenPrices:
    """Node types at the prices that a driver knows: it looks every `POLL_S` seconds."""

    def __init__(self, kinds: Mapping[str, NodeType], history: PriceHistory) -> None:
        self._history = history
        self._change_s = history.next_change_s(0.0)
        self.kinds = history.at(kinds, 0.0)

    @property
    def by_type(self) -> dict[str, float]:
        """Prices of the types whose price is recorded over time."""
        return {name: self.kinds[name].usd_per_hour or 0.0 for name in self._history.given}

    def usual(self, now: float) -> dict[str, float]:
        """Return the usual prices of the same types."""
        return {name: self._history.usual(name, now) for name in self._history.given}

    @property
    def next_s(self) -> float:
        """Second at which the driver sees the next change; infinite if there is none."""
        if math.isinf(self._change_s):
            return math.inf
        return math.ceil(self._change_s / POLL_S) * POLL_S

    def look(self, now: float) -> bool:
        """Take the prices of `now` if the driver sees a change; return True if it does."""
        if now < self.next_s:
            return False
        self.kinds = self._history.at(self.kinds, now)
        self._change_s = self._history.next_change_s(now)
        return True
