"""Replanning: stay, or move to another plan.

The criterion is the number of sequences trained until the next change, less the cost of the move.
For a plan with step time t that needs m seconds to move to and is expected to last h seconds, the
useful work is (h - m) / t steps of one batch each. m counts the bytes that workers must fetch
because they do not hold them yet. If the previous plan cannot continue, the cost that every move
has is not counted against h.
"""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from planner.cluster import NodeType
from planner.cost.model import CostModel
from planner.cost.prediction import Prediction
from planner.errors import ConfigError, InfeasibleError
from planner.plan import FINEST_TP_DEGREE, Pipeline, Plan, Stage
from planner.redundancy import layer_named, layers_of
from planner.search import limits
from planner.search.bound import NO_PROOF, proof_of
from planner.search.cost_tables import tables_of
from planner.search.improve import Improver, Judge, tries_for
from planner.search.judge import fewest_in_flight, unacceptable
from planner.search.memory import cost_like, may_be_without_room
from planner.search.moves import GpuGroup, Moves, groups_of
from planner.search.problem import Answer, Request, SearchReport
from planner.strategies import plan_with
from planner.strategies.pareto import search_objective
from planner.strategies.zones import search_zones, spans_zones
from planner.uneven import (
    is_bounded,
    plans_with_group,
    search_with_uneven,
    sentence,
    uneven_groups,
    uneven_stages,
)

Holders = Mapping[str, frozenset[tuple[str, int, int]]]


@dataclass(frozen=True, slots=True)
class MigrationCost:
    """Cost of moving to another plan.

    fixed_s: seconds to stop, rebuild groups and start.
    bytes_per_s: rate at which each worker fetches state; None: the worker's share of its node's
    NIC.
    state_bytes_per_parameter: by default fp32 master and two moments of AdamW.
    horizon_s: seconds in which the move must earn its cost.
    """

    fixed_s: float = 5.0
    bytes_per_s: float | None = None
    state_bytes_per_parameter: float = 12.0
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


def holders_of(plan: Plan, spec_layers: int) -> dict[str, frozenset[tuple[str, int, int]]]:
    """Worker -> (layer, first part, end part) that it holds under a plan, of FINEST_TP_DEGREE parts
    of a layer.
    """
    found = {}
    for pipeline in plan.pipelines:
        for index, stage in enumerate(pipeline.stages):
            names = layers_of(stage, index, len(pipeline.stages))
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
    request = replace(request, cost=cost_like(request.cost, previous))
    alive = set(request.fleet.workers)
    holders = holders or holders_of(previous, request.spec.num_layers)
    held = {worker: layers for worker, layers in holders.items() if worker in alive}
    if not set(previous.workers) <= alive:
        horizon_s += (
            migration.fixed_s
        )  # every candidate pays it; there may be less left to train than it takes
    begin = request.clock()
    judged = _Judged(previous, request, held, horizon_s, migration)
    scored = judged.scores([*_candidates(previous, request, alive, judged), *known])
    if thorough is None:
        thorough = len(alive) <= limits.WHOLE_SEARCH_GPUS or not scored
    searched = _search(request, [each.plan for each in scored]) if thorough else None
    if searched is not None:
        seen = {each.plan for each in scored}
        scored += judged.scores(
            p for p in (align(searched.plan, request, held), searched.plan) if p not in seen
        )
    if not scored and may_be_without_room(request):
        without = replace(request, needs_staging_room=False)
        return replan(previous, without, holders, migration, thorough, known)
    if not scored and request.max_transfer_share is not None and spans_zones(request):
        without = replace(request, max_transfer_share=None)
        return replan(previous, without, holders, migration, thorough, known)
    by_last_resort = not scored
    if by_last_resort:
        scored, searched = _last_resort(judged)
    if not scored:
        raise InfeasibleError(
            "no plan fits the fleet that is left; see the plan command for the tightest limit"
        )
    scored.sort(key=lambda s: (-s.useful, s.seconds))
    best = scored[0]
    kept = next((s for s in scored if s.plan == previous), None)
    if kept is not None and best.useful <= kept.useful * 1.01:
        best = kept
    if best.plan != previous and not by_last_resort:
        way = fewest_in_flight(request.cost, best.plan)
        best = replace(best, plan=way.plan, prediction=way.prediction)
    return _decision(best, kept, judged, searched, request.clock() - begin)


@dataclass(frozen=True)
class _Scored:
    plan: Plan
    prediction: Prediction
    seconds: float
    useful: float


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
        found = (self.score(plan) for plan in dict.fromkeys(plans))
        return [scored for scored in found if scored is not None]

    def score(self, plan: Plan) -> _Scored | None:
        request = self.request
        if plan != self.previous:
            plan = request.cost.stage_choices.working_ahead(plan)
        prediction = request.cost.predict(plan)
        asked = replace(request, needs_staging_room=False) if plan == self.previous else request
        if unacceptable(asked, plan, prediction) is not None:
            return None
        seconds = (
            0.0 if plan == self.previous else migration_s(plan, request, self.held, self.migration)
        )
        useful = (
            max(0.0, self.horizon_s - seconds)
            / prediction.step_time_s
            * request.global_batch_sequences
        )
        return _Scored(plan, prediction, seconds, useful)

    def seconds_a_batch(self, plan: Plan) -> float:
        """Return the seconds of the horizon per global batch, including the move.

        Infinite if the plan may not be chosen.
        """
        prediction = self.request.cost.predict(plan)
        left = self.horizon_s - migration_s(plan, self.request, self.held, self.migration)
        if left <= 0 or unacceptable(self.request, plan, prediction) is not None:
            return math.inf
        return prediction.step_time_s * self.horizon_s / left


def _last_resort(judged: _Judged) -> tuple[list[_Scored], Answer | None]:
    """Return a plan that saves memory by means of last resort, if there is one."""
    try:
        answer = plan_with("autohet", replace(judged.request, objective="time", spmd=False))
    except InfeasibleError:
        return [], None
    # As the answer has it: `working_ahead` of this cost model may choose anew.
    plan = answer.plan
    prediction = answer.prediction
    seconds = migration_s(plan, judged.request, judged.held, judged.migration)
    left = max(0.0, judged.horizon_s - seconds)
    useful = left / prediction.step_time_s * judged.request.global_batch_sequences
    return [_Scored(plan, prediction, seconds, useful)], answer


def _search(request: Request, seeds: Sequence[Plan]) -> Answer | None:
    """Search a plan on the whole fleet; None if no plan fits.

    Without seeds nothing else fits, so smaller sets of nodes are searched too, as a bound on their
    price may require it.
    """
    request = replace(request, objective="time")

    def search(part: Request) -> Answer:
        if seeds:
            return search_with_uneven(part, seeds)
        return search_objective(search_with_uneven, part)

    try:
        return search_zones(search, request)
    except InfeasibleError:
        return None


def _candidates(previous: Plan, request: Request, alive: set[str], judged: _Judged) -> list[Plan]:
    """The previous plan where its workers live and its batch is the request's; its repairs; the
    best of these improved.
    """
    out = list[Plan]()
    if (
        set(previous.workers) <= alive
        and previous.global_batch_sequences == request.global_batch_sequences
    ):
        out.append(previous)
    sizes = sorted({pipeline.microbatch_sequences for pipeline in previous.pipelines})
    tables = tables_of(request, sizes)
    moves = Moves(tables, random.Random(0), request.mixed_microbatch)
    repaired = [repair(previous, request, alive), recut(previous, request, alive, moves)]
    out += [request.cost.stage_choices.working_ahead(plan) for plan in repaired if plan is not None]
    cost = request.cost
    judge = Judge(
        judged.seconds_a_batch, cost.steps.pipelines_at_least_s, cost.stage_choices.working_ahead
    )
    best = min(out, key=judged.seconds_a_batch, default=None)
    if best is None or (set(best.workers) == alive and best == previous):
        return out
    touched = {
        worker for p in previous.pipelines if not set(p.workers) <= alive for worker in p.workers
    }

    def broken(plan: Plan) -> list[int]:
        return [i for i, each in enumerate(plan.pipelines) if not touched.isdisjoint(each.workers)]

    tries = tries_for(len(alive)) // limits.WALKS
    out.append(Improver(moves, judge).walk(best, tries, broken))
    if groups := uneven_groups(request):
        moves = Moves(
            tables_of(replace(request, uneven=groups), sizes),
            random.Random(0),
            request.mixed_microbatch,
        )
        cut = recut(previous, request, alive, moves)
        starts = list(
            map(
                cost.stage_choices.working_ahead,
                [*plans_with_group(moves, [out[-1]]), *([] if cut is None else [cut])],
            )
        )
        even_s = min(map(judged.seconds_a_batch, out))
        walked = (
            [Improver(moves, judge).walk(min(starts, key=judge.score), tries, broken)]
            if starts
            else []
        )
        out += [
            plan for plan in walked if judged.seconds_a_batch(plan) * limits.MIN_SPEEDUP <= even_s
        ]
    return out


def recut(previous: Plan, request: Request, alive: set[str], moves: Moves) -> Plan | None:
    """The previous plan with each pipeline that lost a worker cut anew over its whole groups, and
    those whose rest may have uneven shares, or where these cannot hold the model without it; the
    groups of those and free nodes, in groups as large, make new pipelines where they can.
    """
    made = list[Pipeline]()
    left = list[GpuGroup]()
    for pipeline in previous.pipelines:
        lives = (
            tuple(worker for worker in group if worker in alive) for group in groups_of(pipeline)
        )
        pairs = zip(groups_of(pipeline), lives, strict=True)
        groups = [rest for group, rest in pairs if rest == group or moves.is_uneven(rest)]
        whole = groups == groups_of(pipeline)
        anew = pipeline if whole else moves.cut(groups, pipeline.microbatch_sequences)
        made += [] if anew is None else [anew]
        left += groups if anew is None else []
    pipelines = [replace(pipeline, most_in_flight=()) for pipeline in made]
    several = (
        moves.cut(left[: moves.tables.deepest], previous.microbatch_sequences) if left else None
    )
    pipelines += [] if several is None else [several]
    plan = replace(previous, global_batch_sequences=request.global_batch_sequences)
    return moves.shared(plan, pipelines) if pipelines else None


def repair(previous: Plan, request: Request, alive: set[str]) -> Plan | None:
    """The previous plan without the pipelines that lost a worker; the rest share the batch so that
    the slowest ends earliest.
    """
    whole = [p for p in previous.pipelines if set(p.workers) <= alive]
    if not whole:
        return None
    seconds = _seconds_of(request.cost, replace(previous, pipelines=tuple(whole)))
    counts = _share(whole, seconds, request.global_batch_sequences)
    if counts is None:
        return None
    pipelines = tuple(
        Pipeline(p.stages, k, p.microbatch_sequences) for p, k in zip(whole, counts, strict=True)
    )
    return replace(
        previous, global_batch_sequences=request.global_batch_sequences, pipelines=pipelines
    )


def _seconds_of(cost: CostModel, plan: Plan) -> list[tuple[float, float]]:
    """(seconds of the first microbatch, of each further one) of each pipeline."""
    found = []
    for pipeline, total_s in zip(plan.pipelines, cost.steps.pipelines_s(plan), strict=True):
        stages = [sum(cost.stages.seconds(pipeline, i)) for i in range(len(pipeline.stages))]
        further = pipeline.num_microbatches - 1
        found.append((sum(stages), (total_s - sum(stages)) / further if further else max(stages)))
    return found


def _share(
    pipelines: Sequence[Pipeline], seconds: Sequence[tuple[float, float]], batch: int
) -> list[int] | None:
    """Microbatches by which the pipelines meet the batch; each next one goes where it ends
    earliest.
    """
    import heapq

    counts = [1] * len(pipelines)
    left = batch - sum(p.microbatch_sequences for p in pipelines)
    heap = [(fill + step, i) for i, (fill, step) in enumerate(seconds)]
    heapq.heapify(heap)
    while left > 0 and heap:
        end, i = heapq.heappop(heap)
        size = pipelines[i].microbatch_sequences
        if size > left:
            continue
        counts[i] += 1
        left -= size
        heapq.heappush(heap, (end + seconds[i][1], i))
    return counts if left == 0 else None


def migration_s(plan: Plan, request: Request, held: Holders, migration: MigrationCost) -> float:
    """Seconds of the move: the node with the longest fetch at its link's speed, after the fixed
    part.
    """
    by_node: dict[str, float] = {}
    for pipeline in plan.pipelines:
        for index, stage in enumerate(pipeline.stages):
            for rank, worker in enumerate(stage.workers):
                missing = _missing_bytes(
                    request,
                    stage,
                    layers_of(stage, index, len(pipeline.stages)),
                    rank,
                    held.get(worker, frozenset()),
                    migration,
                )
                node = request.fleet.node_of(worker)
                rate = migration.bytes_per_s or node.node_type.inter_node_bytes_per_s
                by_node[node.name] = by_node.get(node.name, 0.0) + missing / rate
    return migration.fixed_s + max(by_node.values(), default=0.0)


def _missing_bytes(
    request: Request,
    stage: Stage,
    layers: Iterable[str],
    rank: int,
    has: frozenset[tuple[str, int, int]],
    migration: MigrationCost,
) -> float:
    wanted = stage.share(rank).units(FINEST_TP_DEGREE)
    spec = request.spec
    total = 0.0
    covered: dict[str, int] = {}
    for layer, first, end in has:
        covered[layer] = covered.get(layer, 0) + max(
            0, min(wanted.stop, end) - max(wanted.start, first)
        )
    for name in layers:
        parameters = layer_named(spec, name).parameters
        total += parameters * (len(wanted) - covered.get(name, 0)) / FINEST_TP_DEGREE
    return total * migration.state_bytes_per_parameter


def align(plan: Plan, request: Request, held: Holders) -> Plan:
    """The same plan with equal groups exchanged so that layers stay where they are: each stage
    takes, among the groups of its node type and TP degree (and shares, where these are uneven), the
    one that already holds most of it; largest overlaps first.
    """
    slots: dict[tuple[tuple[NodeType, ...], tuple[int, ...]], list[tuple[int, int]]] = {}
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            kinds = tuple(request.fleet.node_of(worker).node_type for worker in stage.workers)
            slots.setdefault((kinds, stage.tp_shares), []).append((p, s))
    chosen: dict[tuple[int, int], tuple[str, ...]] = {}
    for places in slots.values():
        groups = [plan.pipelines[p].stages[s].workers for p, s in places]
        chosen.update(_match(plan, places, groups, held))
    pipelines = []
    for p, pipeline in enumerate(plan.pipelines):
        stages = tuple(replace(st, workers=chosen[p, s]) for s, st in enumerate(pipeline.stages))
        pipelines.append(Pipeline(stages, pipeline.num_microbatches, pipeline.microbatch_sequences))
    return Plan(
        plan.model,
        plan.global_batch_sequences,
        plan.microbatch_sequences,
        plan.sequence_length,
        tuple(pipelines),
    )


def _match(
    plan: Plan, places: list[tuple[int, int]], groups: list[tuple[str, ...]], held: Holders
) -> dict[tuple[int, int], tuple[str, ...]]:
    """Assignment of greatest overlap (Hungarian algorithm)."""
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    names = [
        set(layers_of(plan.pipelines[p].stages[s], s, len(plan.pipelines[p].stages)))
        for p, s in places
    ]
    has = [
        {layer for worker in group for layer, _, _ in held.get(worker, frozenset())}
        for group in groups
    ]
    overlap = np.array([[len(want & have) for have in has] for want in names], dtype=float)
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
    request = judged.request
    stay = best.plan == judged.previous
    report = searched.search if searched else SearchReport(seconds, 1, None, None)
    proof = NO_PROOF
    if report.lower_bound_s is not None and is_bounded(
        replace(request, uneven=uneven_groups(request)), best.plan
    ):
        proof = proof_of(report.lower_bound_s, best.prediction.step_time_s)
    report = SearchReport(
        seconds, report.plans_evaluated, proof.lower_bound_s, proof.gap, proof.says
    )
    idle = searched.idle if searched is not None and searched.plan == best.plan else ()
    answer = Answer(
        "autohet", best.plan, best.prediction, report, searched.rejected if searched else (), idle
    )
    return ReplanDecision(
        "stay" if stay else "move",
        answer,
        _reason(best, kept, searched, judged.horizon_s),
        best.seconds,
        best.useful,
        searched is not None,
    )


def _reason(best: _Scored, kept: _Scored | None, searched: Answer | None, horizon_s: float) -> str:
    step = best.prediction.step_time_s
    if kept is best:
        if searched is None or searched.prediction.step_time_s >= step * (1 - 1e-9):
            return f"staying: no plan of this fleet is faster than the present {step:.4g} s a step"
        gain = step / searched.prediction.step_time_s - 1
        return (
            f"staying at {step:.4g} s a step: a plan {gain:.1%} faster exists, but moving to it"
            f" would not earn its cost within {horizon_s:.0f} s"
        )
    text = f"moving in about {best.seconds:.1f} s to {step:.4g} s a step"
    if stages := uneven_stages(best.plan):
        text += f" ({sentence(stages)})"
    if kept is None:
        return text + ": the present plan uses workers that are gone"
    return (
        text + f" from {kept.prediction.step_time_s:.4g} s:"
        f" {best.useful / max(kept.useful, 1e-9) - 1:.1%} more sequences in {horizon_s:.0f} s"
    )
