"""Strategy `autohet`: draft near-equal pipelines, place them, and improve the best of them.

The prediction judges each improvement.
"""

import math
import random
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from planner.cost.memory.host_memory import host_memory_ceiling
from planner.cost.memory.training_bytes import OPTIMIZER_BYTES, STATE_BYTES
from planner.errors import InfeasibleError
from planner.plans.plan import Plan
from planner.search.bounds.bound import NO_PROOF, prove
from planner.search.drafts.families import Proposal, proposals_for
from planner.search.drafts.place import place, place_by_stage, place_ends_first
from planner.search.problem import limits
from planner.search.problem.cost_tables import tables_of
from planner.search.problem.request import (
    TIME_IS_OVER,
    Answer,
    Rejected,
    Request,
    SearchReport,
    check_request,
)
from planner.search.problem.stage_sums import Row
from planner.search.problem.tables import Tables
from planner.search.walk.improve import Improver, Judge, Likeness, tries_for
from planner.search.walk.judge import (
    Costed,
    fewest_in_flight,
    idle_workers,
    rank,
    seconds_of,
    simplest_near_fastest,
    slower,
    too_few_holders,
    why_infeasible,
)
from planner.search.walk.moves import Moves


@dataclass(frozen=True)
class RankedDrafts:
    """First half of a search: the plans it begins with, and those refused.

    ranked: drafts on workers and plans known before, with their predictions, fastest first.
    rejected: the plans refused. least_s: estimated seconds of the fastest proposal. begin_s: when
    the search began.
    """

    request: Request
    tables: Tables
    ranked: list[Costed]
    rejected: list[Rejected]
    least_s: float
    begin_s: float


def search_autohet(request: Request, seeds: Iterable[Plan] = ()) -> Answer:
    """Return the best plan of unequal pipelines.

    seeds: further plans to compare with. InfeasibleError names the tightest limit.
    """
    return improve(draft(request, seeds))


@dataclass(frozen=True)
class Drafts:
    """Proposals of a search before they are placed and predicted.

    known: plans that are compared with them. begin_s: when the search began.
    """

    request: Request
    tables: Tables
    known: list[Plan]
    proposals: list[Proposal]
    begin_s: float

    @property
    def least_s(self) -> float:
        """Estimated seconds of the fastest proposal; predictions are seldom below."""
        return min((each.seconds for each in self.proposals), default=math.inf)


def draft(request: Request, seeds: Iterable[Plan] = ()) -> RankedDrafts:
    """Run the first half of a search. InfeasibleError if no draft fits."""
    return rank_proposed(propose(request, seeds))


def propose(request: Request, seeds: Iterable[Plan] = (), most_s: float = math.inf) -> Drafts:
    """Propose the drafts of a search; none if a closed form of their seconds is above `most_s`.

    Raises:
        InfeasibleError: no GPU holds a part of the model.
    """
    check_request(request)
    begin = request.clock()
    tables = tables_of(request)
    shared = request.proposed
    if shared is None or math.isfinite(most_s):
        proposals = proposals_for(request, tables, most_s)
    else:
        key = request.fleet.nodes, request.cost.assumed, request.uneven, request.needs_staging_room
        if key not in shared:
            shared[key] = proposals_for(request, tables)
        proposals = shared[key]
    workers = set(request.fleet.workers)
    known = [plan for plan in seeds if workers.issuperset(plan.workers)]
    return Drafts(request, tables, known, proposals, begin)


def rank_proposed(drafts: Drafts) -> RankedDrafts:
    """Rank the drafts of a search. InfeasibleError if none fits."""
    request = drafts.request
    tables = drafts.tables
    ranked, rejected = rank_drafts(request, tables, drafts.known, drafts.proposals)
    if not ranked and request.is_late:  # what was left out may fit
        unhurried = replace(request, deadline_s=math.inf)
        proposals = proposals_for(unhurried, tables)
        ranked, rejected = rank_drafts(unhurried, tables, drafts.known, proposals)
    if not ranked:
        raise InfeasibleError(why_infeasible(request, tables, rejected))
    return RankedDrafts(request, tables, ranked, rejected, drafts.least_s, drafts.begin_s)


def improve(found: RankedDrafts) -> Answer:
    """Run the second half of a search: walks from the best drafts, the choice, the bound."""
    request = found.request
    tables = found.tables
    ranked = found.ranked
    chosen, walked, why, cut = _improve_best(request, tables, ranked)
    best = fewest_in_flight(request.cost, chosen)

    proof = NO_PROOF
    if request.prove:
        proof = prove(tables, best.step_time_s, lambda: request.is_late)
    tried = len(ranked) + len(found.rejected)
    seconds = request.clock() - found.begin_s
    report = SearchReport(seconds, tried, proof.lower_bound_s, proof.gap, proof.says)

    first_drafts = [each.plan for each in ranked[: limits.SHORTLIST]]
    others = dict.fromkeys([*walked, *first_drafts])
    others.pop(best.plan, None)
    return Answer(
        strategy="autohet",
        plan=best.plan,
        prediction=best.prediction,
        search=report,
        rejected=(*found.rejected, *cut, *slower(ranked[1:])),
        idle=idle_workers(request, tables, best.plan),
        candidates=tuple(others),
        choice=why,
    )


def rank_drafts(
    request: Request, tables: Tables, known: list[Plan], proposals: list[Proposal]
) -> tuple[list[Costed], list[Rejected]]:
    """Rank the known plans and the drafts, as `rank` does; add smaller drafts if memory refuses.

    Smaller drafts are added if no plan fits, or if good drafts fit by the tables but not by the
    prediction: they need more communicators than most plans, or more host memory. Smaller drafts
    leave room for one more communicator and need no more host memory than there is. They are as
    deep, or have fewer stages, which keep fewer microbatches.
    """
    first = dict.fromkeys([*known, *_place_drafts(request, tables, proposals)])
    ranked, rejected = rank(request, first)
    if not _may_be_too_large(request, ranked, rejected):
        return ranked, rejected

    rows = []
    for row in tables.rows:
        rows.append(replace(row, limit_bytes=_lower_limit(request, tables, row)))
    deepest = min(tables.deepest, len(request.fleet.workers))
    step = max(1, deepest // limits.SHORTLIST)
    stages = deepest
    while stages > deepest // 2:
        if ranked and request.is_late:
            rejected = [*rejected, Rejected("smaller drafts", TIME_IS_OVER)]
            break

        smaller = replace(tables, rows=tuple(rows), deepest=stages)
        proposals = proposals_for(request, smaller)
        placed = _place_drafts(request, smaller, proposals)
        # the same drafts are refused again
        unseen = [plan for plan in placed if plan not in first]
        first.update(dict.fromkeys(unseen))
        found, refused = rank(request, unseen)
        ranked = [*ranked, *found]
        rejected = [*rejected, *refused]
        if ranked:
            break
        # a limit that no draft reaches changes none
        depths = [len(shape.rows) for each in proposals for shape in each.draft.shapes]
        stages = min(stages - step, max(depths, default=0) - 1)

    unlike = {each.plan: each for each in ranked}
    return sorted(unlike.values(), key=lambda each: each.step_time_s), rejected


def _may_be_too_large(request: Request, ranked: list[Costed], rejected: list[Rejected]) -> bool:
    """Return True if no draft fits, or if a good one is refused for its memory."""
    if request.brief:
        lack_memory = any(math.isfinite(each.lacks_memory_s) for each in rejected)
        return lack_memory and not ranked
    if not ranked:
        return True

    near_s = limits.MAX_SLOWDOWN * ranked[0].step_time_s
    return any(each.lacks_memory_s <= near_s for each in rejected)


def _lower_limit(request: Request, tables: Tables, row: Row) -> float:
    """Return bytes of a worker that a smaller draft may use.

    They leave room for one more communicator, and all state can move from the device to host
    memory, whatever other workers move.
    """
    parameters = request.cost.parameters
    lower = row.limit_bytes - parameters.communicator_bytes
    if not parameters.elastic:
        return lower

    node_type = tables.resources[tables.kinds[row.kind].resource].node_type
    most = host_memory_ceiling(node_type, row.room_bytes)
    state_bytes = most * min(STATE_BYTES.values()) / OPTIMIZER_BYTES
    return min(lower, row.fixed_bytes + state_bytes)


def _place_drafts(request: Request, tables: Tables, proposals: list[Proposal]) -> Iterator[Plan]:
    """Yield the proposed drafts placed on the fleet's workers."""
    parts = {1, request.min_node_disjoint_holders}
    if request.brief:
        proposals = proposals[: limits.BRIEF_DRAFTS]
    for proposal in proposals:
        yield from placements(tables, proposal, parts)


def placements(tables: Tables, proposal: Proposal, parts: Iterable[int]) -> Iterator[Plan]:
    """Yield the proposal's placements.

    Each pipeline is on nodes of its own. If the pipelines are to lie side by side, the same stages
    of all pipelines lie side by side instead, or those of each of several parts. If embeddings are
    tied, there are also placements with the ends of pipelines together. parts: numbers of parts.
    """
    draft = proposal.draft
    by_stage = proposal.side_by_side
    possible = [number for number in parts if number <= len(draft.pipelines)]
    plans = []
    if by_stage:
        for number in possible:
            plans.append(place_by_stage(tables, draft, number))
    else:
        plans.append(place(tables, draft))
    if tables.is_tied:
        for number in possible:
            plans.append(place_ends_first(tables, draft, number, by_stage=by_stage))

    for plan in plans:
        if plan is not None:
            yield plan


def _improve_best(
    request: Request, tables: Tables, ranked: list[Costed]
) -> tuple[Plan, list[Plan], str, list[Rejected]]:
    """Improve the best plans of several sets of depths.

    Returns the plan chosen, the plan that each walk ended with, the reason for the choice, and the
    tries that a deadline left out.
    """
    timed = {each.plan: each.step_time_s for each in ranked}
    if request.brief:
        chosen, why = simplest_near_fastest(request.fleet, timed)
        return chosen, [], why, []

    tries = tries_for(len(request.fleet.workers))
    if request.uneven:  # a second search, after that of even stages
        tries //= limits.UNEVEN

    moves = Moves(tables, random.Random(0))
    judge = _judge(request, tables)
    improver = Improver(moves, judge, lambda: request.is_late)
    best = improver.best_of(_starts(ranked), tries)
    timed |= improver.timed
    timed |= {best: judge.score(best)}
    chosen, why = simplest_near_fastest(request.fleet, timed)

    cut = []
    if improver.num_tried < tries and request.is_late:
        left = tries - improver.num_tried
        cut.append(Rejected(f"{left} of {tries} tries", TIME_IS_OVER))
    return chosen, improver.walked, why, cut


def _starts(ranked: list[Costed]) -> list[Plan]:
    """Return the fastest plans with unlike pipelines, as far as they are near.

    The first half have other depths, the rest may differ in their microbatches alone: a walk seldom
    gets from one to another.
    """
    near_s = limits.MAX_SLOWDOWN * ranked[0].step_time_s
    near = [each.plan for each in ranked if each.step_time_s <= near_s]
    by_depths = dict[Hashable, Plan]()
    for plan in near:
        by_depths.setdefault(tuple(sorted(len(each.stages) for each in plan.pipelines)), plan)

    starts = dict[Hashable, Plan]()
    for plan in [*list(by_depths.values())[: limits.WALKS // 2], *near]:
        kinds = [(len(each.stages), each.microbatch_sequences) for each in plan.pipelines]
        starts.setdefault(tuple(sorted(kinds)), plan)
    return list(starts.values())[: limits.WALKS]


def _judge(request: Request, tables: Tables) -> Judge:
    """Return the judge of a request's improvements."""
    cost = request.cost
    # without transfers on the stages, the numbers in flight follow from the rest of a plan
    numbers_follow = cost.parameters.transfers == "none"
    alike = Likeness(tables.node_types, in_flight=not numbers_follow)
    # a bound of the plan as it is drawn holds only if getting it ready makes no stage faster
    is_prepared_faster = cost.assumed.choices or request.uneven
    has_bound = not is_prepared_faster and cost.choices.expert_dispatch == "sum"

    def by_work(plan: Plan) -> float:
        return cost.steps.work_at_least_s(plan) if has_bound else 0.0

    def at_first(plan: Plan) -> float:
        if too_few_holders(request, plan):
            return math.inf
        return cost.steps.step_by_work_at_least_s(plan) if has_bound else 0.0

    return Judge(
        # the first bound has counted the holders
        partial(seconds_of, replace(request, min_node_disjoint_holders=1)),
        cost.steps.step_at_least_s,
        cost.stage_choices.working_ahead,
        alike.key,
        at_first,
        by_work,
    )
