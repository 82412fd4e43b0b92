"""Improvement of placed plans: a walk of random moves, screened by a lower bound, judged by the prediction.

Tables decide order, groups and cuts pipeline by pipeline, with gradient sync in general; who shares a network card, what hides what
and the tied embedding only the prediction knows. A move that costs little is kept now and then (simulated annealing:
Kirkpatrick et al., Science 220, 1983). Random numbers come from a fixed seed and tries are counted, not timed, so equal input gives the
equal plan.
"""

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from planner.plan import Plan
from planner.search import limits
from planner.search.moves import Moves

Score = Callable[[Plan], float]


@dataclass(frozen=True)
class Judge:
    """What is to be least. score: seconds a step, or in proportion to them; infinite where a plan may not be chosen. at_least: a lower
    bound of it that takes less time. prepared: the plan as it would be run. ends_s: when each of its pipelines ends; None: not known."""

    score: Score
    at_least: Score = lambda plan: 0.0
    prepared: Callable[[Plan], Plan] = lambda plan: plan
    ends_s: Callable[[Plan], Sequence[float]] | None = None


class Improver:
    """Walks from plan to plan."""

    def __init__(self, moves: Moves, judge: Judge):
        self.moves, self.judge = moves, judge
        self.walked: list[Plan] = []  # what the first walks ended with
        self._known: dict[Plan, tuple[Plan, float]] = {}

    @property
    def timed(self) -> dict[Plan, float]:
        """Every plan that was judged, with its seconds."""
        return dict(self._known.values())

    def best_of(self, starts: Sequence[Plan], tries: int) -> Plan:
        """Half the tries are walked from all starts, the others from the best that was met."""
        some = max(1, tries // 2 // max(1, len(starts)))
        self.walked = [self.walk(plan, some) for plan in starts]
        best = min(self.walked, key=self.judge.score)
        return self.walk(best, max(1, tries - some * len(starts)))

    def walk(self, plan: Plan, tries: int, broken: Callable[[Plan], Collection[int]] | None = None) -> Plan:
        """The best plan met in so many tries, each of which is less likely to be kept the more it costs and the later it comes."""
        now = best = plan
        now_s = best_s = self.judge.score(plan)
        for number in range(tries):
            heat = now_s * (limits.HOT * (1 - number / tries) ** 2 + limits.COLD)
            drawn = self.moves.draw(now, None if broken is None else broken(now))
            if drawn is None:
                continue
            moved, moved_s = self._timed(self.judge.prepared(drawn), now_s + limits.HOPELESS * heat)
            if moved_s <= now_s or self.moves.rng.random() < math.exp((now_s - moved_s) / heat):
                now, now_s = moved, moved_s
            if now_s < best_s * (1 - 1e-9):
                best, best_s = now, now_s
            elif now_s > best_s * limits.STRAYED:
                now, now_s = best, best_s
        return best

    def _timed(self, plan: Plan, most_s: float) -> tuple[Plan, float]:
        """Where it matters with microbatches by what the placed pipelines take."""
        known = self._known.get(plan)
        if known is not None:
            return known
        found, judge = (plan, math.inf), self.judge
        if judge.at_least(plan) <= most_s:
            found = plan, judge.score(plan)
            if judge.ends_s is not None and found[1] <= most_s * limits.STRAYED and len(plan.pipelines) > 1:
                other = rebalanced(plan, judge.ends_s(plan))
                if other != plan and (other_s := judge.score(other)) < found[1]:
                    found = other, other_s
        self._known[plan] = found
        return found


def walker(seed: int = 0) -> random.Random:
    """The stream of random numbers of a search."""
    return random.Random(seed)


def tries_for(gpus: int) -> int:
    """Of a fleet of so many GPUs."""
    return min(limits.MOST_TRIES, max(limits.FEWEST_TRIES, limits.TRIES_GPUS // gpus))


def rebalanced(plan: Plan, ends_s: Sequence[float]) -> Plan:
    """Moves microbatches, one at a time, from the pipeline that ends last to the one that would end first, among pipelines of one
    microbatch size. ends_s: when each pipeline of the plan ends as it is; one microbatch more is charged the mean of its slots,
    (K + depth - 1) of which 1F1B takes."""
    counts = [pipeline.num_microbatches for pipeline in plan.pipelines]
    slots = [k + len(p.stages) - 1 for k, p in zip(counts, plan.pipelines, strict=True)]
    each = [end / n for end, n in zip(ends_s, slots, strict=True)]
    ends = list(ends_s)
    for size in sorted({pipeline.microbatch_sequences for pipeline in plan.pipelines}):
        mine = [i for i, pipeline in enumerate(plan.pipelines) if pipeline.microbatch_sequences == size]
        for _ in range(sum(counts[i] for i in mine)):
            late = max(mine, key=lambda i: ends[i])
            early = min(mine, key=lambda i: ends[i] + each[i])
            if counts[late] == 1 or ends[early] + each[early] >= ends[late]:
                break
            for i, step in ((late, -1), (early, 1)):
                counts[i] += step
                ends[i] += step * each[i]
    pipelines = tuple(replace(p, num_microbatches=k) for p, k in zip(plan.pipelines, counts, strict=True))
    return replace(plan, pipelines=pipelines)
