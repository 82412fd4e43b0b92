"""Replanning: stay, or move to another plan.

The criterion is the number of sequences trained until the next change, less the cost of the move.
For a plan with step time t that needs m seconds to move to and is expected to last h seconds, the
useful work is (h - m) / t steps of one batch each. m counts the bytes that workers must fetch
because they do not hold them yet. If the previous plan cannot continue, the cost that every move
has is not counted against h. Under the objective "cost" the criterion is the dollars of the plan's
nodes in h, divided by that work.
"""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from planner.answers.repair import recut, repair
from planner.cost.memory.training_bytes import optimizer_bytes_each
from planner.cost.prediction import Prediction
from planner.errors import ConfigError, InfeasibleError
from planner.inputs.fleet import NodeType
from planner.plans.model_spec import ModelSpec
from planner.plans.plan import FINEST_TP_DEGREE, Plan
from planner.plans.redundancy import layer_named, layers_of, stages_with_layers
from planner.search.bounds.bound import NO_PROOF, proof_of
from planner.search.memory import cost_like, may_be_without_room
from planner.search.problem import limits
from planner.search.problem.cost_tables import tables_of
from planner.search.problem.request import (
    Answer,
    Idle,
    Rejected,
    Request,
    SearchReport,
    narrow_to,
)
from planner.search.walk.improve import Improver, Judge, tries_for
from planner.search.walk.judge import fewest_in_flight, unacceptable
from planner.search.walk.moves import Moves
from planner.strategies import plan_with
from planner.strategies.autohet_uneven import (
    is_bounded,
    plans_with_group,
    search_with_uneven,
    sentence,
    uneven_groups,
    uneven_stages,
)
from planner.strategies.pareto import may_use_all, search_objective
from planner.strategies.zones import search_zones, spans_zones

LayerPart = tuple[str, int, int]
"""A layer's name, and the first and end part of it, of FINEST_TP_DEGREE parts."""
Holders = Mapping[str, frozenset[LayerPart]]
"""Parts of layers that each worker holds."""
_Slot = tuple[int, int]
"""A stage of a plan: index of its pipeline, and its own there."""


@dataclass(frozen=True, slots=True)
class MigrationCost:
    """Cost of moving to another plan.

    fixed_s: seconds to stop, rebuild groups and start.
    horizon_s: seconds in which the move must earn its cost.
    """

    fixed_s: float = 5.0
    horizon_s: float = 3600.0


@dataclass(frozen=True)
class ReplanDecision:
    """Decision of a replanning.

    kind: "stay": keep `answer.plan`, which is the previous plan; "move": reconfigure to it.
    reason: a sentence.
    migration_s: predicted seconds of the move.
    useful_sequences: sequences that the choice trains within the horizon.
    searched: True if a whole search was among the candidates.
    """

    kind: Literal["stay", "move"]
    answer: Answer
    reason: str
    migration_s: float
    useful_sequences: float
    searched: bool


def holders_of(plan: Plan) -> dict[str, frozenset[LayerPart]]:
    """Return the parts of layers that each worker holds under a plan."""
    found = {}
    for pipeline in plan.pipelines:
        for stage, names in stages_with_layers(pipeline):
            for rank, worker in enumerate(stage.workers):
                held = stage.share(rank).units(FINEST_TP_DEGREE)
                found[worker] = frozenset((name, held.start, held.stop) for name in names)
    return found


def replan(
    previous: Plan,
    request: Request,
    holders: Holders | None = None,
    migration: MigrationCost | None = None,
    thorough: bool | None = None,
    known: Sequence[Plan] = (),
) -> ReplanDecision:
    """Choose the plan for the fleet in `request`.

    The candidates are
    - the previous plan, if all its workers live;
    - its repairs: lost pipelines dropped, or cut again over the workers that they have left, and
    the batch shared again;
    - the best of these, improved by moves that begin at pipelines that lost something and at free
    workers; the judgement includes the cost of the move;
    - `known` plans for the fleet from elsewhere;
    - with `thorough`, a whole search seeded with these. That is the default on fleets of up to 64
    GPUs, and if nothing else fits.

    holders: shards that each live worker holds (default: `holders_of` of the previous plan).

    Raises:
        InfeasibleError: no plan fits the fleet.
    """
    migration = migration or MigrationCost()
    horizon_s = migration.horizon_s
    if horizon_s <= 0:
        raise ConfigError(f"horizon_s is {horizon_s}; it must be above 0")
    request = _without_unpriced(replace(request, cost=cost_like(request.cost, previous)))
    alive = set(request.fleet.workers)
    holders = holders or holders_of(previous)
    held = {worker: layers for worker, layers in holders.items() if worker in alive}
    if not set(previous.workers) <= alive:
        # Every candidate pays the fixed part, and less may be left to train than it takes.
        horizon_s += migration.fixed_s

    begin = request.clock()
    judged = _Judged(previous, request, held, horizon_s, migration)
    scored = judged.scores(_candidates(previous, request, alive, judged) + list(known))
    if thorough is None:
        thorough = len(alive) <= limits.WHOLE_SEARCH_GPUS or not scored
    searched = None
    if thorough:
        searched = _search(request, [each.plan for each in scored])
    if searched is not None:
        seen = {each.plan for each in scored}
        found = (align(searched.plan, request, held), searched.plan)
        scored += judged.scores(plan for plan in found if plan not in seen)

    if not scored:
        relaxed = _relax(request)
        if relaxed is not None:
            return replan(previous, relaxed, holders, migration, thorough, known)
    by_last_resort = not scored
    if by_last_resort:
        scored, searched = _last_resort(judged)
    if not scored:
        raise InfeasibleError(
            "no plan fits the fleet that is left; see the plan command for the tightest limit"
        )
    best, kept = _choice(scored, previous)
    if best.plan != previous and not by_last_resort:
        way = fewest_in_flight(request.cost, best.plan)
        best = replace(best, plan=way.plan, prediction=way.prediction)
    return _decision(best, kept, judged, searched, request.clock() - begin)


def _without_unpriced(request: Request) -> Request:
    """Return the request without nodes that have no price, if the price decides and others have.

    They would count as free.
    """
    if request.objective == "time" and request.max_usd_per_hour is None:
        return request
    nodes = request.fleet.nodes
    priced = tuple(node for node in nodes if node.node_type.usd_per_hour is not None)
    if not priced or len(priced) == len(nodes):
        return request
    return narrow_to(request, replace(request.fleet, nodes=priced))


def _relax(request: Request) -> Request | None:
    """Return the request without the first limit that may be dropped if no plan fits.

    None if there is no such limit.
    """
    if may_be_without_room(request):
        return replace(request, needs_staging_room=False)
    if request.max_transfer_share is not None and spans_zones(request):
        return replace(request, max_transfer_share=None)
    return None


@dataclass(frozen=True)
class _Scored:
    """Plan with the seconds of the move to it and its useful work.

    spent: what a sequence costs by the request's objective: seconds of the horizon, or dollars.
    """

    plan: Plan
    prediction: Prediction
    seconds: float
    useful: float
    spent: float


@dataclass(frozen=True)
class _Judged:
    """Judge of plans on one fleet: the sequences that each trains within the horizon."""

    previous: Plan
    request: Request
    held: Holders
    horizon_s: float
    migration: MigrationCost

    def scores(self, plans: Iterable[Plan]) -> list[_Scored]:
        """Score each distinct plan; leave out plans that may not be chosen."""
        found = []
        for plan in dict.fromkeys(plans):
            scored = self.score(plan)
            if scored is not None:
                found.append(scored)
        return found

    def score(self, plan: Plan) -> _Scored | None:
        request = self.request
        if plan != self.previous:
            plan = request.cost.stage_choices.working_ahead(plan)
        prediction = request.cost.predict(plan)
        asked = request
        seconds = 0.0
        if plan == self.previous:
            # No state arrives at workers that go on as they are, so no room is needed for it.
            asked = replace(request, needs_staging_room=False)
        if unacceptable(asked, plan, prediction) is not None:
            return None
        if plan != self.previous:
            seconds = migration_s(plan, request, self.held, self.migration)
        return self.scored(plan, prediction, seconds)

    def scored(self, plan: Plan, prediction: Prediction, seconds: float) -> _Scored:
        useful = self.useful_sequences(prediction, seconds)
        spent = math.inf
        if useful:
            spent = self.horizon_s * self._usd_or_one(prediction) / useful
        return _Scored(plan, prediction, seconds, useful, spent)

    def pace(self, prediction: Prediction) -> float:
        """Return what a step costs by the objective, without a move."""
        return prediction.step_time_s * self._usd_or_one(prediction)

    def _usd_or_one(self, prediction: Prediction) -> float:
        """Return the factor by which the objective weighs a plan's seconds."""
        if self.request.objective == "time":
            return 1.0
        return prediction.usd_per_hour or 0.0

    def useful_sequences(self, prediction: Prediction, seconds: float) -> float:
        """Return the sequences that a plan trains within the horizon after its move."""
        left = max(0.0, self.horizon_s - seconds)
        return left / prediction.step_time_s * self.request.global_batch_sequences

    def spent_a_batch(self, plan: Plan) -> float:
        """Return the seconds of the horizon per global batch, including the move.

        Under the objective "cost" they are weighed by the plan's price. Infinite if the plan may
        not be chosen.
        """
        prediction = self.request.cost.predict(plan)
        left = self.horizon_s - migration_s(plan, self.request, self.held, self.migration)
        if left <= 0 or unacceptable(self.request, plan, prediction) is not None:
            return math.inf
        batch_s = prediction.step_time_s * self.horizon_s / left
        return batch_s * self._usd_or_one(prediction)


def _choice(scored: list[_Scored], previous: Plan) -> tuple[_Scored, _Scored | None]:
    """Return the plan to have and, if it is among the candidates, the previous plan."""
    best = min(scored, key=lambda each: (each.spent, -each.useful, each.seconds))
    stays = [each for each in scored if each.plan == previous]
    kept = stays[0] if stays else None
    # A move must earn clearly more than no move, as predictions have errors.
    if kept is None:
        return best, None
    are_both_free = kept.spent == best.spent == 0.0
    is_better = (
        best.useful > kept.useful * 1.01 if are_both_free else best.spent * 1.01 < kept.spent
    )
    if not is_better:
        best = kept
    return best, kept


def _last_resort(judged: _Judged) -> tuple[list[_Scored], Answer | None]:
    """Return a plan that saves memory by means of last resort, if there is one."""
    try:
        answer = plan_with("autohet", replace(judged.request, spmd=False))
    except InfeasibleError:
        return [], None
    # Not `judged.score`: `working_ahead` of this cost model may choose other numbers in flight.
    seconds = migration_s(answer.plan, judged.request, judged.held, judged.migration)
    return [judged.scored(answer.plan, answer.prediction, seconds)], answer


def _search(request: Request, seeds: Sequence[Plan]) -> Answer | None:
    """Search a plan on the whole fleet; None if no plan fits.

    Smaller sets of nodes are searched too if the price decides, or without seeds, when nothing else
    fits.
    """

    def search(part: Request) -> Answer:
        if seeds and part.objective == "time" and may_use_all(part):
            return search_with_uneven(part, seeds)
        return search_objective(search_with_uneven, part)

    try:
        return search_zones(search, request)
    except InfeasibleError:
        return None


def _candidates(previous: Plan, request: Request, alive: set[str], judged: _Judged) -> list[Plan]:
    """Return the previous plan, its repairs, and the best of these improved.

    The previous plan is one of them if its workers live and its batch is the request's.
    """
    found = list[Plan]()
    is_whole = set(previous.workers) <= alive
    if is_whole and previous.global_batch_sequences == request.global_batch_sequences:
        found.append(previous)
    sizes = previous.microbatch_sizes
    moves = Moves(tables_of(request, sizes), random.Random(0))
    working_ahead = request.cost.stage_choices.working_ahead
    repaired = [repair(previous, request, alive), recut(previous, request, alive, moves)]
    for plan in repaired:
        if plan is not None:
            found.append(working_ahead(plan))

    best = min(found, key=judged.spent_a_batch, default=None)
    if best is None:
        return found
    uses_whole_fleet = set(best.workers) == alive
    if uses_whole_fleet and best == previous:
        return found

    # Walks begin at pipelines that lost something; their workers may have new pipelines by now.
    touched = set[str]()
    for pipeline in previous.pipelines:
        if not alive.issuperset(pipeline.workers):
            touched.update(pipeline.workers)

    def broken(plan: Plan) -> list[int]:
        return [i for i, each in enumerate(plan.pipelines) if not touched.isdisjoint(each.workers)]

    judge = Judge(judged.spent_a_batch, request.cost.steps.pipelines_at_least_s, working_ahead)
    tries = tries_for(len(alive)) // limits.WALKS
    found.append(Improver(moves, judge).walk(best, tries, broken))

    groups = uneven_groups(request)
    if not groups:
        return found
    tables = tables_of(replace(request, uneven=groups), sizes)
    moves = Moves(tables, random.Random(0))
    cut = recut(previous, request, alive, moves)
    starts = [working_ahead(plan) for plan in plans_with_group(moves, [found[-1]])]
    if cut is not None:
        starts.append(working_ahead(cut))
    if starts:
        even_s = min(judged.spent_a_batch(plan) for plan in found)
        quickest = min(starts, key=judge.score)
        uneven = Improver(moves, judge).walk(quickest, tries, broken)
        if judged.spent_a_batch(uneven) * limits.MIN_SPEEDUP <= even_s:
            found.append(uneven)
    return found


def migration_s(plan: Plan, request: Request, held: Holders, migration: MigrationCost) -> float:
    """Return the seconds of the move: the fixed part and the longest fetch of a node.

    The workers of a node fetch one after the other at the rate of its link.
    """
    each_bytes = optimizer_bytes_each(request.spec)
    seconds_by_node: dict[str, float] = {}
    for pipeline in plan.pipelines:
        for stage, layers in stages_with_layers(pipeline):
            for rank, worker in enumerate(stage.workers):
                wanted = stage.share(rank).units(FINEST_TP_DEGREE)
                has = held.get(worker, frozenset())
                missing = _missing_parameters(request.spec, layers, wanted, has)
                num_bytes = missing * each_bytes
                node = request.fleet.node_of(worker)
                rate = node.node_type.inter_node_bytes_per_s
                before = seconds_by_node.get(node.name, 0.0)
                seconds_by_node[node.name] = before + num_bytes / rate
    return migration.fixed_s + max(seconds_by_node.values(), default=0.0)


def _missing_parameters(
    spec: ModelSpec, layers: Iterable[str], wanted: range, has: frozenset[LayerPart]
) -> float:
    """Return the scalars of a worker's layers that it does not hold.

    wanted: its parts of each layer, of FINEST_TP_DEGREE.
    """
    covered: dict[str, int] = {}
    for layer, first, end in has:
        overlap = min(wanted.stop, end) - max(wanted.start, first)
        covered[layer] = covered.get(layer, 0) + max(0, overlap)
    total = 0.0
    for name in layers:
        parameters = layer_named(spec, name).parameters
        num_missing = len(wanted) - covered.get(name, 0)
        total += parameters * num_missing / FINEST_TP_DEGREE
    return total


def align(plan: Plan, request: Request, held: Holders) -> Plan:
    """Return the same plan with equal groups exchanged so that layers stay where they are.

    Groups are equal if their node types, TP degrees and uneven shares are. Each stage takes the one
    that already holds most of it; largest overlaps first.
    """
    slots: dict[tuple[tuple[NodeType, ...], tuple[int, ...]], list[_Slot]] = {}
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            kinds = request.fleet.node_types_of(stage.workers)
            slots.setdefault((kinds, stage.tp_shares), []).append((p, s))

    chosen: dict[_Slot, tuple[str, ...]] = {}
    for places in slots.values():
        chosen.update(_match(plan, places, held))

    pipelines = []
    for p, pipeline in enumerate(plan.pipelines):
        stages = [replace(stage, workers=chosen[p, s]) for s, stage in enumerate(pipeline.stages)]
        pipelines.append(replace(pipeline, stages=tuple(stages), most_in_flight=()))
    return Plan(
        plan.model,
        plan.global_batch_sequences,
        plan.microbatch_sequences,
        plan.sequence_length,
        tuple(pipelines),
    )


def _match(plan: Plan, places: list[_Slot], held: Holders) -> dict[_Slot, tuple[str, ...]]:
    """Return the assignment of greatest overlap (Hungarian algorithm).

    places: the stages whose groups are exchanged with each other.
    """
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    wanted: list[set[str]] = []
    groups: list[tuple[str, ...]] = []
    has: list[set[str]] = []
    for p, s in places:
        pipeline = plan.pipelines[p]
        stage = pipeline.stages[s]
        names = layers_of(stage, s, len(pipeline.stages))
        wanted.append(set(names))
        groups.append(stage.workers)
        found = set[str]()
        for worker in stage.workers:
            for layer, _, _ in held.get(worker, frozenset()):
                found.add(layer)
        has.append(found)

    overlap = np.zeros((len(places), len(places)))
    for row, want in enumerate(wanted):
        for column, have in enumerate(has):
            overlap[row, column] = len(want & have)
    # Of equal overlaps, a stage keeps its group.
    overlap += 1e-6 * np.eye(len(places))
    rows, columns = linear_sum_assignment(-overlap)
    return {places[i]: groups[j] for i, j in zip(rows, columns, strict=True)}


def _decision(
    best: _Scored,
    kept: _Scored | None,
    judged: _Judged,
    searched: Answer | None,
    seconds: float,
) -> ReplanDecision:
    report = SearchReport(seconds, 1, None, None)
    rejected: tuple[Rejected, ...] = ()
    idle: tuple[Idle, ...] = ()
    if searched is not None:
        report = searched.search
        rejected = searched.rejected
        if searched.plan == best.plan:
            idle = searched.idle

    proof = NO_PROOF
    if report.lower_bound_s is not None:
        asked = replace(judged.request, uneven=uneven_groups(judged.request))
        if is_bounded(asked, best.plan):
            proof = proof_of(report.lower_bound_s, best.prediction.step_time_s)
    evaluated = report.plans_evaluated
    report = SearchReport(seconds, evaluated, proof.lower_bound_s, proof.gap, proof.says)
    return ReplanDecision(
        "stay" if best.plan == judged.previous else "move",
        Answer("autohet", best.plan, best.prediction, report, rejected, idle),
        _reason(best, kept, searched, judged),
        best.seconds,
        best.useful,
        searched is not None,
    )


def _reason(best: _Scored, kept: _Scored | None, searched: Answer | None, judged: _Judged) -> str:
    by_cost = judged.request.objective == "cost"
    horizon_s = judged.horizon_s
    now = _rate_phrase(best, by_cost)
    better = "cheaper" if by_cost else "faster"
    if kept is best:
        found = math.inf if searched is None else judged.pace(searched.prediction)
        present = judged.pace(best.prediction)
        if found >= present * (1 - 1e-9):
            return f"staying: no plan of this fleet is {better} than the present {now}"
        gain = present / found - 1 if found else math.inf
        return (
            f"staying at {now}: a plan {gain:.1%} {better} exists, but moving to it would not earn"
            f" its cost within {horizon_s:.0f} s"
        )
    text = f"moving in about {best.seconds:.1f} s to {now}"
    stages = uneven_stages(best.plan)
    if stages:
        text += f" ({sentence(stages)})"
    if kept is None:
        return f"{text}: the present plan {_why_not_kept(judged)}"
    if by_cost:
        return f"{text} from {_rate_phrase(kept, by_cost)}"
    gain = best.useful / max(kept.useful, 1e-9) - 1
    return (
        f"{text} from {kept.prediction.step_time_s:.4g} s:"
        f" {gain:.1%} more sequences in {horizon_s:.0f} s"
    )


def _rate_phrase(scored: _Scored, by_cost: bool) -> str:
    prediction = scored.prediction
    phrase = f"{prediction.step_time_s:.4g} s a step"
    if by_cost:
        phrase += f" and {prediction.usd_per_million_tokens or 0.0:.4g} $ a million tokens"
    return phrase


def _why_not_kept(judged: _Judged) -> str:
    """Return why the previous plan is no candidate, as the predicate of a sentence."""
    request = judged.request
    previous = judged.previous
    if not set(previous.workers) <= set(request.fleet.workers):
        return "uses workers that are gone"
    limit = request.max_usd_per_hour
    usd = request.cost.predict(previous).usd_per_hour
    if limit is not None and usd is not None and usd > limit:
        return f"costs {usd:.2f} $/h, and max_usd_per_hour is {limit:.2f}"
    return "does not fit any more"
