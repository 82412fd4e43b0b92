"""Simulated annealing of placed plans under the full prediction (Kirkpatrick et al., Science 220, 1983), for small fleets.

Searches by tables decide order, groups and cuts pipeline by pipeline, with gradient sync in general; who shares a NIC, what hides what
and the tied embedding only the prediction knows. Random numbers come from a fixed seed and tries are counted, not timed, so equal
input gives the equal plan.
"""

import math
import random
from collections.abc import Callable

from planner.plan import Plan
from planner.search.problem import Request
from planner.search.tables import Tables
from planner.strategies.changes import Changes
from planner.strategies.rebalance import rebalanced

_HOT = 4e-4  # share of the step time that a change may cost at first
_COLD = 1e-6
_HOPELESS = 12.0  # times the heat: such a change is taken once in 160,000
_NEAR = 1.03


class Annealer:
    """Walks from plan to plan of one request. seconds: the step time of a plan, infinite where it may not be chosen."""

    def __init__(self, request: Request, tables: Tables, seconds: Callable[[Plan], float]):
        self.cost, self.seconds = request.cost, seconds
        self.rng = random.Random(0)
        self.changes = Changes(request, tables, self.rng)
        self._known: dict[Plan, tuple[Plan, float]] = {}

    def walk(self, plan: Plan, tries: int, hurry: Callable[[], bool]) -> Plan:
        """The best plan met in so many changes, each of which is less likely to be kept the more it costs and the later it comes."""
        now = best = plan
        now_s = best_s = self.seconds(plan)
        for number in range(tries):
            if hurry():
                break
            heat = now_s * (_HOT * (1 - number / tries) ** 2 + _COLD)
            changed = self.changes.draw(now)
            if changed is None:
                continue
            drawn = self.cost.working_ahead(changed)
            known = self._known.get(drawn)
            if known is None:
                hopeless = self.cost.pipelines_at_least_s(drawn) > now_s + _HOPELESS * heat
                known = self._known[drawn] = (drawn, math.inf) if hopeless else self._timed(drawn, now_s)
            changed, changed_s = known
            if changed_s <= now_s or self.rng.random() < math.exp((now_s - changed_s) / heat):
                now, now_s = changed, changed_s
            if now_s < best_s * (1 - 1e-9):
                best, best_s = now, now_s
            elif now_s > best_s * _NEAR:
                now, now_s = best, best_s
        return best

    def _timed(self, plan: Plan, now_s: float) -> tuple[Plan, float]:
        """Where it matters with microbatches by what the placed pipelines take."""
        seconds = self.seconds(plan)
        if seconds < now_s * _NEAR and len(plan.pipelines) > 1:
            other = rebalanced(plan, self.cost.pipelines_s(plan))
            other_s = self.seconds(other) if other != plan else math.inf
            if other_s < seconds:
                return other, other_s
        return plan, seconds
