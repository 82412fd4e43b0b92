"""SIMULATED autoscaler: starts what is requested as far as the trace has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from autohet.control.planning.buyer import LOOK_S
from autohet.control.values.observation import Launches
from autohet.simulate.fleet.machines import SimulatedMachines
from autohet.simulate.fleet.no_agents import NoAutoscaler

TRY_S = 30.0
"""Seconds between two launches of a machine that cannot be had."""
EAGER_S = 60.0
"""Seconds after a change for which a buyer looks as often as it does in a run."""
BUSY_S = 420.0
"""Seconds after a change for which a buyer may have something to do at each of its looks."""
CALM_LOOK_S = 600.0


class SimulatedAutoscaler(NoAutoscaler):
    """Implements `Autoscaler`. Machines that nobody requests come and go by themselves."""

    def __init__(self, machines: SimulatedMachines) -> None:
        self._machines = machines
        self._failed: Counter[str] = Counter()
        self._tried_at = 0.0

    def ask_for_nodes(self, counts: Mapping[str, int]) -> None:
        self._machines.request(counts)

    def give_back(self, node: str) -> None:
        self._machines.give_back(node)

    def launches(self, now: float) -> Launches:
        """Return the machines that boot, and the failed launches up to now."""
        found = self._machines.launches()
        if self._machines.wanted is None:
            return found
        if now - self._tried_at >= TRY_S:
            self._tried_at = now
            self._failed.update(self._machines.shortage().keys())
        return replace(found, failed=dict(self._failed), cause="the trace has none now")

    def looks(self, now: float, changed_at: float) -> list[float]:
        """Return when a buyer looks next: often after a change, seldom while all is quiet."""
        if self._machines.wanted is None:
            return []
        if now - changed_at < EAGER_S:
            return [now + LOOK_S]
        is_busy = now - changed_at < BUSY_S or self._machines.shortage()
        return [now + (TRY_S if is_busy else CALM_LOOK_S)]
