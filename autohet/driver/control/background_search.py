"""Searches in a process of their own while training goes on, so that the driver sees what happens meanwhile."""

from __future__ import annotations

from autohet.driver.control.planning import REPLANNING_STRATEGY, Planning, Proposal, Search, replanned
from autohet.runtime.background_process import run_in_background
from planner.cluster import Fleet


class AsidePlanning(Planning):
    """`Planning` whose `search` goes on in another process where there is a second processor."""

    def search(self, fleet: Fleet, current: Proposal | None) -> Search:
        wishes = self.job.parallelism
        if current is None or wishes.plan is not None or wishes.strategy != REPLANNING_STRATEGY or wishes.spmd:
            return super().search(fleet, current)
        return _Aside(self, fleet, current)


class _Aside:
    def __init__(self, planning: Planning, fleet: Fleet, current: Proposal) -> None:
        self._planning, self._fleet, self._current = planning, fleet, current
        self._cost = planning.make_cost(fleet)
        request = planning.request(fleet, self._cost)
        self._errand = run_in_background(replanned, planning.question(current, request, thorough=True))

    def proposal(self) -> Proposal | None:
        if not self._errand.ended:
            return None
        decision = self._errand()
        if decision is not None:
            return self._planning.concluded(decision, self._cost)
        return self._planning.propose(self._fleet, self._current, thorough=True)  # which also says why there is none

    def drop(self) -> None:
        self._errand.drop()
