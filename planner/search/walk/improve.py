"""Improvement of placed plans: a walk of random moves.

A lower bound screens the moves, and the prediction judges the rest.

Tables decide order, groups and cuts pipeline by pipeline, with gradient sync in general. Only the
prediction knows which transfers share a NIC, what hides what, and the tied embedding. A move that
costs little is kept now and then (simulated annealing: Kirkpatrick et al., Science 220, 1983).
Random numbers come from a fixed seed and tries are counted, not timed, so equal input gives the
equal plan, unless a deadline ends the walks.
"""

import math
import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter

from planner.inputs.fleet import NodeType, node_of
from planner.plans.plan import Plan, Stage
from planner.search.problem import limits
from planner.search.walk.moves import Moves

Score = Callable[[Plan], float]


@dataclass(frozen=True)
class Judge:
    """Judge of plans by a score to minimize.

    score: seconds a step, or a number in proportion to them; infinite if a plan may not be chosen.
    by_work, at_first, at_least: lower bounds of the score that take less time to compute, the least
    first: two of a plan before it is prepared, the last after that. prepared: the plan as it would
    be run. likeness: a key that is equal only for plans with equal scores, before they are
    prepared.
    """

    score: Score
    at_least: Score = lambda plan: 0.0
    prepared: Callable[[Plan], Plan] = lambda plan: plan
    likeness: Callable[[Plan], Hashable] = lambda plan: plan
    at_first: Score = lambda plan: 0.0
    by_work: Score = lambda plan: 0.0


_Seen = dict[str, tuple[int, int]]
_STAGE_FIELDS = [each.name for each in fields(Stage)]
_STAGE_FIELDS.remove("workers")
_REST = attrgetter(*_STAGE_FIELDS)


class Likeness:
    """Keys that are equal for plans that are alike, so that one prediction serves all of them.

    node_types: node type of each node. in_flight: plans that differ in the microbatches that
    stages keep in flight are not alike; False if these numbers follow from the rest of a plan.
    """

    def __init__(self, node_types: Mapping[str, NodeType], *, in_flight: bool):
        distinct = list(dict.fromkeys(node_types.values()))
        self._kinds = {name: distinct.index(kind) for name, kind in node_types.items()}
        self._num_kinds = len(distinct)
        self._in_flight = in_flight

    def key(self, plan: Plan) -> Hashable:
        """Return the key of a plan: nodes of a type are numbered in the order of their first use.

        Plans of one key have equal predictions, up to rounding and the names of workers.
        """
        seen: _Seen = {}
        used = [0] * self._num_kinds
        pipelines: list[Hashable] = []
        for pipeline in plan.pipelines:
            stages = []
            for stage in pipeline.stages:
                stages.append(self._stage_key(stage, seen, used))  # numbers new nodes

            count = pipeline.num_microbatches
            most = pipeline.most_in_flight if self._in_flight else ()
            size = pipeline.microbatch_sequences
            pipelines.append((count, size, most, *stages))
        return tuple(pipelines)

    def _stage_key(self, stage: Stage, seen: _Seen, used: list[int]) -> Hashable:
        nodes = []
        for worker in stage.workers:
            name = node_of(worker)
            if name not in seen:
                kind = self._kinds[name]
                seen[name] = (kind, used[kind])
                used[kind] += 1
            nodes.append(seen[name])
        # a stage's workers count by their nodes alone: GPUs of one node are equal
        return (tuple(nodes), *_REST(stage))


class Improver:
    """Walks from plan to plan."""

    def __init__(self, moves: Moves, judge: Judge, is_late: Callable[[], bool] = lambda: False):
        self.moves = moves
        self.judge = judge
        self.is_late = is_late
        self.num_tried = 0
        self.walked: list[Plan] = []  # what the first walks ended with
        self.timed: dict[Plan, float] = {}  # every plan that was judged, with its seconds
        self._scores: dict[Hashable, float] = {}  # by likeness
        self._works: dict[Hashable, float] = {}
        self._bounds: dict[Hashable, float] = {}
        self._ready: dict[Hashable, Plan] = {}  # prepared plans; their bounds are of these

    def best_of(self, starts: Sequence[Plan], tries: int) -> Plan:
        """Return the best plan met in `tries` tries.

        Each round walks from the better half of the plans of the one before, with as many tries in
        all (successive halving: Karnin, Koren and Somekh, ICML 2013).
        """
        # a walk of fewer tries leads nowhere
        now = list(starts[: max(2, tries // limits.FEWEST_TRIES)])
        num_rounds = math.ceil(math.log2(len(now)))
        of_round = tries // (num_rounds + 1)
        left = tries
        self.walked = []
        while len(now) > 1:
            each = max(1, of_round // len(now))
            left -= each * len(now)
            ends = [self.walk(plan, each) for plan in now]
            self.walked = self.walked or ends
            unlike = dict.fromkeys(ends)
            now = sorted(unlike, key=self.judge.score)[: len(now) // 2]
        best = self.walk(now[0], max(1, left))
        self.walked = self.walked or [best]
        return best

    def walk(
        self, plan: Plan, tries: int, broken: Callable[[Plan], Collection[int]] | None = None
    ) -> Plan:
        """Return the best plan met in `tries` tries.

        A try is less likely to be kept the more it costs and the later it comes.
        """
        now = best = plan
        now_s = best_s = self.judge.score(plan)
        for number in range(tries):
            if self.is_late():
                break
            self.num_tried += 1
            # simulated annealing: the temperature falls with the square of the tries that are left
            heat = limits.HOT * (1 - number / tries) ** 2
            allowance = -heat * math.log(1 - self.moves.rng.random())
            most_s = now_s * (1 + allowance)
            begins = None if broken is None else broken(now)
            drawn = self.moves.draw(now, begins)
            if drawn is None:
                continue
            moved_s = self.score(drawn, most_s)
            if moved_s <= most_s:
                now = self.prepare(drawn, self.judge.likeness(drawn))
                now_s = moved_s
            if now_s < best_s * (1 - 1e-9):
                best = now
                best_s = now_s
        return best

    def score(self, drawn: Plan, most_s: float) -> float:
        """Return the score of a plan; infinite if a lower bound is above `most_s`.

        Most moves of a fleet with equal nodes lead to a plan that is like one seen before.
        """
        key = self.judge.likeness(drawn)
        known_s = self._scores.get(key)
        if known_s is not None:
            return known_s
        if key not in self._works:
            self._works[key] = self.judge.by_work(drawn)
        if self._works[key] > most_s:
            return math.inf
        if key not in self._bounds:
            self._bounds[key] = self.judge.at_first(drawn)
        if self._bounds[key] > most_s:
            return math.inf
        is_new = key not in self._ready
        plan = self.prepare(drawn, key)
        if is_new:
            self._bounds[key] = self.judge.at_least(plan)
        if self._bounds[key] > most_s:
            return math.inf
        score = self.judge.score(plan)
        self._scores[key] = score
        self.timed[plan] = score
        return score

    def prepare(self, drawn: Plan, key: Hashable) -> Plan:
        """Return a plan as it would be run: like the first one of its key, on its own workers."""
        known = self._ready.get(key)
        if known is None:
            known = self._ready[key] = self.judge.prepared(drawn)
            return known

        pipelines = []
        for mine, ready in zip(drawn.pipelines, known.pipelines, strict=True):
            stages = []
            for stage, other in zip(mine.stages, ready.stages, strict=True):
                same = stage if _REST(stage) == _REST(other) else None
                stages.append(same or replace(other, workers=stage.workers))
            is_unchanged = all(map(operator.is_, stages, mine.stages))
            kept = mine.stages if is_unchanged else tuple(stages)
            pipelines.append(replace(ready, stages=kept))
        return replace(drawn, pipelines=tuple(pipelines))


def tries_for(gpus: int) -> int:
    """Return the number of tries for a fleet of `gpus` GPUs."""
    tries = max(limits.FEWEST_TRIES, limits.TRIES_GPUS // gpus)
    return min(limits.MOST_TRIES, tries)
