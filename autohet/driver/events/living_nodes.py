"""Living nodes of a run, tracked by its events: their GPUs, zones and prices."""

from collections import Counter
from collections.abc import Mapping
from typing import Any


class LivingNodes:
    """Tracks the living nodes of a run from its events, given in order.

    Arrivals add nodes; deaths and departures remove them. A node with a notice is gone when its
    deadline has passed. A run begins with no node: its driver emits an arrival for each node that
    it finds.
    """

    def __init__(self) -> None:
        self._arrivals: dict[str, Mapping[str, Any]] = {}
        self._leaving: dict[str, float] = {}

    def take(self, event: Mapping[str, Any]) -> bool:
        """Record an event and return true if it changed the living nodes or their prices."""
        kind = event["kind"]
        node = event.get("node")
        has_changed = False
        gone = [name for name, at in self._leaving.items() if at <= event["time"]]
        if kind == "arrival":
            self._arrivals[event["node"]] = event
            has_changed = True
        elif kind == "price" and node in self._arrivals:
            known = self._arrivals[event["node"]]
            self._arrivals[event["node"]] = {**known, "usd_per_hour": event["usd_per_hour"]}
            has_changed = True
        elif kind == "notice" and event.get("deadline_s") is not None:
            self._leaving[event["node"]] = event["time"] + event["deadline_s"]
        elif kind == "death":
            # An older version's events have `nodes` alone.
            gone += event.get("gone", event.get("nodes", ()))
        elif kind == "departure":
            gone.append(event["node"])
        elif kind == "started":
            # A driver announces every node that it finds.
            gone = [*self._arrivals, *self._leaving]

        for name in gone:
            if name in self._arrivals:
                has_changed = True
            self._arrivals.pop(name, None)
            self._leaving.pop(name, None)
        return has_changed

    def gpus_by_type(self) -> Counter[str]:
        return self.gpus_by("gpu_type")

    def gpus_by(self, fact: str) -> Counter[str]:
        """Count GPUs by a fact of the nodes' arrivals.

        The fact is `gpu_type`, or `zone`, which is "" if a node does not know it.
        """
        found: Counter[str] = Counter()
        for event in self._arrivals.values():
            value = event.get(fact) or ""
            found[value] += int(event["num_gpus"])
        return found

    @property
    def usd_per_hour(self) -> float:
        """Total price of the living nodes whose price is known."""
        prices = []
        for event in self._arrivals.values():
            price = event.get("usd_per_hour")
            prices.append(price or 0.0)
        return float(sum(prices))
