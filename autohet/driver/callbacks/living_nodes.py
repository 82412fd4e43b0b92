"""Living nodes of a run, tracked by its events: their GPUs, zones and prices."""

from __future__ import annotations

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
        known = event.get("node") in self._arrivals
        gone = [name for name, at in self._leaving.items() if at <= event["time"]]
        if kind == "arrival":
            self._arrivals[event["node"]] = event
        elif kind == "price" and known:
            self._arrivals[event["node"]] = {
                **self._arrivals[event["node"]],
                "usd_per_hour": event["usd_per_hour"],
            }
        elif kind == "notice" and event.get("deadline_s") is not None:
            self._leaving[event["node"]] = event["time"] + event["deadline_s"]
        elif kind == "death":
            gone += event.get("gone", event.get("nodes", ()))
        elif kind == "departure":
            gone.append(event["node"])
        elif kind == "started":
            gone = [*self._arrivals, *self._leaving]
        changed = (
            kind == "arrival"
            or (kind == "price" and known)
            or any(name in self._arrivals for name in gone)
        )
        for name in gone:
            self._arrivals.pop(name, None)
            self._leaving.pop(name, None)
        return changed

    def gpus_by_type(self) -> Counter[str]:
        return self.gpus_by("gpu_type")

    def gpus_by(self, fact: str) -> Counter[str]:
        """Count GPUs by a fact of the nodes' arrivals.

        The fact is `gpu_type`, or `zone`, which is "" if a node does not know it.
        """
        found: Counter[str] = Counter()
        for event in self._arrivals.values():
            found[event.get(fact) or ""] += int(event["num_gpus"])
        return found

    @property
    def usd_per_hour(self) -> float:
        """Total price of the living nodes whose price is known."""
        return float(sum(event.get("usd_per_hour") or 0.0 for event in self._arrivals.values()))
