"""Planner searches in another process, so that the driver sees what happens meanwhile."""

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from autohet.control.planning.proposals import Pending, PendingSearch, Planner, PlanProposal, Q, T
from autohet.driver.loop.planning import Planning, replanned
from autohet.runtime.process.background import run_in_background
from planner.inputs.fleet import Fleet

A = TypeVar("A")


class BackgroundPlanning(Planning):
    """`Planning` whose `search` runs in another process where there is a second processor."""

    def search(self, fleet: Fleet, current: PlanProposal | None) -> PendingSearch:
        is_fixed = self.job.parallelism.plan is not None
        if current is None or is_fixed or not self.can_repair:
            return super().search(fleet, current)
        cost = self.make_cost(fleet)
        question = self.question(current, self.request(fleet, cost), thorough=True)
        # A search here also says why there is no plan.
        here = partial(self.propose, fleet, current, thorough=True)
        return _InBackground(replanned, question, partial(self.concluded, cost=cost), here)

    def consider(self, work: Callable[[Planner, Q], T], question: Q) -> Pending[T]:
        call = partial(work, self)
        return _InBackground(call, question, lambda answer: answer, partial(call, question))


class _InBackground(Generic[Q, A, T]):
    """Answer of `work` to a question, started in another process.

    conclude: turns it into the result. here: computes the result where the other process failed,
    so that its error is raised here.
    """

    def __init__(
        self,
        work: Callable[[Q], A],
        question: Q,
        conclude: Callable[[A], T],
        here: Callable[[], T],
    ) -> None:
        self.background_call = run_in_background(work, question)
        self._conclude = conclude
        self._here = here

    def result(self) -> T | None:
        if not self.background_call.ended:
            return None
        answer = self.background_call()
        return self._here() if answer is None else self._conclude(answer)

    def drop(self) -> None:
        self.background_call.drop()
