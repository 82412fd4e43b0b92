"""Planner searches in another process, so that the driver sees what happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic

from autohet.driver.planning.proposals import (
    REPLANNING_STRATEGY,
    Pending,
    PendingSearch,
    Planning,
    PlanProposal,
    Q,
    T,
    replanned,
)
from autohet.runtime.process.background import run_in_background
from planner.cluster import Fleet


class BackgroundPlanning(Planning):
    """`Planning` whose `search` runs in another process where there is a second processor."""

    def search(self, fleet: Fleet, current: PlanProposal | None) -> PendingSearch:
        wishes = self.job.parallelism
        if (
            current is None
            or wishes.plan is not None
            or wishes.strategy != REPLANNING_STRATEGY
            or wishes.spmd
        ):
            return super().search(fleet, current)
        return _Aside(self, fleet, current)

    def consider(self, work: Callable[[Planning, Q], T], question: Q) -> Pending[T]:
        return _Considered(work, self, question)


class _Considered(Generic[Q, T]):
    def __init__(self, work: Callable[[Planning, Q], T], planning: Planning, question: Q) -> None:
        self._call = partial(work, planning)
        self._question = question
        self._errand = run_in_background(self._call, question)

    def result(self) -> T | None:
        return (self._errand() or self._call(self._question)) if self._errand.ended else None

    def drop(self) -> None:
        self._errand.drop()


class _Aside:
    def __init__(self, planning: Planning, fleet: Fleet, current: PlanProposal) -> None:
        self._planning = planning
        self._fleet = fleet
        self._current = current
        self._cost = planning.make_cost(fleet)
        request = planning.request(fleet, self._cost)
        self._errand = run_in_background(
            replanned, planning.question(current, request, thorough=True)
        )

    def result(self) -> PlanProposal | None:
        if not self._errand.ended:
            return None
        decision = self._errand()
        if decision is not None:
            return self._planning.concluded(decision, self._cost)
        return self._planning.propose(
            self._fleet, self._current, thorough=True
        )  # which also says why there is none

    def drop(self) -> None:
        self._errand.drop()
