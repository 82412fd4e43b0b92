"""Fronts of step time and price over the parts of a fleet, from the fast end.

The fastest plan of all comes first, then the fastest that costs less, and so on (the epsilon
constraint method: Haimes, Lasdon and Wismer, IEEE Trans. SMC 1, 1971). A node more makes no plan
slower, so that of the fleets below a price only the largest are looked at; and no part of a fleet
that was searched is faster than the best plan known there. A fleet whose drafts are far behind is
not searched further; one whose best draft is also that of the nodes in use is searched without the
others.
"""

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from planner.search.problem import limits
from planner.search.problem.request import Answer
from planner.strategies.fleets import FleetSearch, TypeCounts, with_count


@dataclass(frozen=True)
class _Known:
    """A plan, the numbers of nodes that it uses, and their price."""

    used: TypeCounts
    usd_per_hour: float
    answer: Answer

    @property
    def step_time_s(self) -> float:
        return self.answer.prediction.step_time_s


class Front:
    """Searches fleets in full until the front is known, or a budget of counts is spent.

    found: the comparison that the fleets' drafts and answers belong to; its value is the step time.
    steps: the numbers of nodes of each machine that are looked at, ascending.
    """

    def __init__(self, found: FleetSearch, steps: list[list[int]]):
        self.found = found
        self.space = found.space
        self._steps = steps
        self.fleets = self._allowed_fleets()
        self._largest: dict[float, list[TypeCounts]] = {}
        self._known: list[_Known] = []
        self._searched: dict[TypeCounts, float] = {}  # with the least step time known within
        self._drafts: dict[TypeCounts, Answer | None] = {}
        self._spent_gpus = 0
        self.is_cut = False
        """True if the budget ended the search before the front was known."""
        self.has_all = math.prod(map(len, steps)) == self.space.num_combinations
        """True if no number of nodes was left out of `steps`."""

    def _allowed_fleets(self) -> list[TypeCounts]:
        fewest = self.space.request.min_node_disjoint_holders
        found = []
        for counts in itertools.product(*self._steps):
            has_enough_nodes = sum(counts) >= fewest
            if has_enough_nodes and self.space.allows(counts):
                found.append(counts)
        return found

    def plans(self) -> list[Answer]:
        """Return the front's plans, fastest first, as far as the budget lets them be found."""
        found = list[Answer]()
        best = self.fastest_below(math.inf)
        while best is not None:
            found.append(best.answer)
            best = self.fastest_below(best.usd_per_hour)
        return found

    def fastest_below(self, limit: float) -> _Known | None:
        """Return the fastest plan whose nodes cost less than `limit` dollars an hour.

        None if no plan is found below it. The fleet of its own nodes has been searched in full: the
        walk of a larger fleet may end behind it.
        """
        while True:
            best = self._best_below(limit)
            best_s = math.inf if best is None else best.step_time_s
            counts = self._next(limit, best_s)
            if counts is None:
                if best is None or best.used in self._searched:
                    return best
                counts = best.used
            if self._is_over():
                self.is_cut = True
                return best
            self._search(counts)

    def _best_below(self, limit: float) -> _Known | None:
        below = [each for each in self._known if _is_less(each.usd_per_hour, limit)]
        return min(below, key=lambda each: (each.step_time_s, each.usd_per_hour), default=None)

    def _next(self, limit: float, best_s: float) -> TypeCounts | None:
        """Return the fleet to search next: the one with the fastest draft; None if none may help.

        If all drafts are refused and no plan is known, the largest fleet is searched in full: a
        full search tries more.
        """
        was_any_searched = False
        hopeful = []
        for counts in self._largest_below(limit):
            if counts in self._searched:
                was_any_searched = True
            elif self._least_s(counts) < best_s:
                hopeful.append(counts)
        if not hopeful:
            return None

        # of equally fast drafts the larger fleet, whose search says more of the others
        drafts_s = {counts: self._draft_s(counts) for counts in hopeful}
        hopeful.sort(key=lambda counts: (drafts_s[counts], -self.space.gpus(counts)))
        for counts in hopeful:
            if not drafts_s[counts] <= limits.WALK_GAIN * best_s or math.isinf(drafts_s[counts]):
                break

            used = self._same_within(counts)
            if used not in self._searched:
                return used
            self._searched[counts] = self._fastest_within(counts)

        is_any_known = math.isfinite(best_s)
        return None if is_any_known or was_any_searched else hopeful[0]

    def _draft_s(self, counts: TypeCounts) -> float:
        """Return the step time of a fleet's best draft; infinite if it has none."""
        if counts not in self._drafts:
            if self._is_over():
                self.is_cut = True
                return math.inf
            self._spent_gpus += self.space.gpus(counts)
            self._drafts[counts] = self.found.draft(counts)
            self._keep(self._drafts[counts])

        # not what was just found: a full search may have found a faster one
        answer = self.found.answers.get(counts)
        return math.inf if answer is None else self.found.value(answer)

    def _same_within(self, counts: TypeCounts) -> TypeCounts:
        """Return the part of a fleet that its best draft uses, if that is the part's best too.

        The other nodes then help no draft. Else the fleet itself is returned.
        """
        draft = self._drafts[counts]
        assert draft is not None  # its step time is finite
        used = self.space.counts_of(draft.used_nodes)
        self._draft_s(used)
        of_part = self._drafts.get(used)
        is_same = of_part is not None and math.isclose(of_part.step_time_s, draft.step_time_s)
        return used if is_same else counts

    def _search(self, counts: TypeCounts) -> None:
        self._searched[counts] = self._fastest_within(counts)
        self._spent_gpus += self.space.gpus(counts) + limits.SEARCH_GPUS
        self._keep(self.found.search_in_full(counts))

    def _keep(self, answer: Answer | None) -> None:
        if answer is None:
            return

        used = self.space.counts_of(answer.used_nodes)
        known = _Known(used, self.space.price(used), answer)
        self._known.append(known)

        # a draft of a part may be faster than the plan that the walk of the whole ended with
        for counts, fastest_s in self._searched.items():
            if _is_part(used, counts):
                self._searched[counts] = min(fastest_s, known.step_time_s)

    def _is_over(self) -> bool:
        if self.space.request.is_late and self._known:
            return True
        budget = self.space.request.time_limit_s * limits.FLEET_GPUS_A_SECOND
        return self._spent_gpus >= max(budget, limits.FRONT_GPUS)

    def _least_s(self, counts: TypeCounts) -> float:
        """Return a step time that no part of the fleets searched so far is below: see the module.

        The bound holds as far as these fleets' best plans are known.
        """
        least_s = 0.0
        for searched, fastest_s in self._searched.items():
            if _is_part(counts, searched):
                least_s = max(least_s, fastest_s)
        return least_s

    def _fastest_within(self, counts: TypeCounts) -> float:
        fastest_s = math.inf
        for known in self._known:
            if _is_part(known.used, counts):
                fastest_s = min(fastest_s, known.step_time_s)
        return fastest_s

    def _largest_below(self, limit: float) -> list[TypeCounts]:
        """Return the fleets below a price to which no node can be added."""
        if limit not in self._largest:
            below: dict[TypeCounts, None] = {
                counts: None for counts in self.fleets if _is_less(self.space.price(counts), limit)
            }

            found = []
            for counts in below:
                is_largest = not any(more in below for more in self._more(counts))
                if is_largest:
                    found.append(counts)
            self._largest[limit] = found
        return self._largest[limit]

    def _more(self, counts: TypeCounts) -> Iterator[TypeCounts]:
        """Yield the fleets with the next larger number of nodes of one machine."""
        for index, numbers in enumerate(self._steps):
            at = bisect.bisect_right(numbers, counts[index])
            if at < len(numbers):
                yield with_count(counts, index, numbers[at])


def _is_less(price: float, limit: float) -> bool:
    """Return True if a price is below a limit by more than rounding.

    A plan of the same price is no further point of the front.
    """
    return price < limit * (1 - 1e-9)


def _is_part(counts: TypeCounts, other: TypeCounts) -> bool:
    """Return True if a fleet has no more nodes of any machine than another."""
    return all(mine <= its for mine, its in zip(counts, other, strict=True))
