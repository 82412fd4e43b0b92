"""Planner searches in another process, so that the driver sees what happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic

from autohet.control.planning.proposals import Pending, PendingSearch, Planner, PlanProposal, Q, T
from autohet.driver.loop.planning import Planning, replanned
from autohet.runtime.process.background import run_in_background
from planner.inputs.fleet import Fleet


class BackgroundPlanning(Planning):
    """`Planning` whose `search` runs in another process where there is a second processor."""

    def search(self, fleet: Fleet, current: PlanProposal | None) -> PendingSearch:
        is_fixed = self.job.parallelism.plan is not None
        if current is None or is_fixed or not self.can_repair:
            return super().search(fleet, current)
        return _BackgroundSearch(self, fleet, current)

    def consider(self, work: Callable[[Planner, Q], T], question: Q) -> Pending[T]:
        return _BackgroundAnswer(work, self, question)


class _BackgroundAnswer(Generic[Q, T]):
    """Answer of `work` to a question, started in another process."""

    def __init__(self, work: Callable[[Planner, Q], T], planning: Planning, question: Q) -> None:
        self._call = partial(work, planning)
        self._question = question
        self.background_call = run_in_background(self._call, question)

    def result(self) -> T | None:
        if not self.background_call.ended:
            return None
        # The errand has no answer where the other process failed; here the error is raised.
        return self.background_call() or self._call(self._question)

    def drop(self) -> None:
        self.background_call.drop()


class _BackgroundSearch:
    """Thorough `propose`, started in another process."""

    def __init__(self, planning: Planning, fleet: Fleet, current: PlanProposal) -> None:
        self._planning = planning
        self._fleet = fleet
        self._current = current
        self._cost = planning.make_cost(fleet)
        request = planning.request(fleet, self._cost)
        question = planning.question(current, request, thorough=True)
        self.background_call = run_in_background(replanned, question)

    def result(self) -> PlanProposal | None:
        if not self.background_call.ended:
            return None
        decision = self.background_call()
        if decision is not None:
            return self._planning.concluded(decision, self._cost)
        # This search also says why there is no plan.
        return self._planning.propose(self._fleet, self._current, thorough=True)

    def drop(self) -> None:
        self.background_call.drop()
