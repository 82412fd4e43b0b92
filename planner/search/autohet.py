"""Strategy `autohet`: draft near-equal pipelines, place them, and improve the best of them.

The prediction judges each improvement.
"""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from planner.cost.host_memory import host_memory_ceiling
from planner.cost.memory import OPTIMIZER_BYTES, STATE_BYTES
from planner.errors import InfeasibleError
from planner.plan import Plan
from planner.search import limits
from planner.search.alike import Likeness
from planner.search.bound import NO_PROOF, prove
from planner.search.cost_tables import tables_of
from planner.search.families import Proposal, proposals_for
from planner.search.improve import Improver, Judge, tries_for
from planner.search.judge import (
    Costed,
    fewest_in_flight,
    idle_workers,
    rank,
    seconds_of,
    simplest_near_fastest,
    slower,
    why_infeasible,
)
from planner.search.moves import Moves
from planner.search.place import place, place_by_stage, place_ends_first
from planner.search.problem import (
    TIME_IS_OVER,
    Answer,
    Rejected,
    Request,
    SearchReport,
    check_request,
)
from planner.search.stage_sums import Row
from planner.search.tables import Tables


@dataclass(frozen=True)
class Drafted:
    """First half of a search: the plans it begins with, and those refused.

    ranked: drafts on workers and plans known before, with their predictions, fastest first.
    rejected: the plans refused. begin_s: when the search began.
    """

    request: Request
    tables: Tables
    ranked: list[Costed]
    rejected: list[Rejected]
    begin_s: float


def search_autohet(request: Request, seeds: Iterable[Plan] = ()) -> Answer:
    """Return the best plan of unequal pipelines.

    seeds: further plans to compare with. InfeasibleError names the tightest limit.
    """
    return improved(drafted(request, seeds))


def drafted(request: Request, seeds: Iterable[Plan] = ()) -> Drafted:
    """Run the first half of a search. InfeasibleError if no draft fits."""
    check_request(request)
    begin = request.clock()
    tables = tables_of(request)
    known = [plan for plan in seeds if set(plan.workers) <= set(request.fleet.workers)]
    ranked, rejected = _ranked(request, tables, known)
    if not ranked and request.is_late:  # what was left out may fit
        ranked, rejected = _ranked(replace(request, deadline_s=math.inf), tables, known)
    if not ranked:
        raise InfeasibleError(why_infeasible(request, tables, rejected))
    return Drafted(request, tables, ranked, rejected, begin)


def improved(found: Drafted) -> Answer:
    """Run the second half of a search: walks from the best drafts, the choice, the bound."""
    request = found.request
    tables = found.tables
    ranked = found.ranked
    chosen, walked, why, cut = _improved(request, tables, ranked)
    best = fewest_in_flight(request.cost, chosen)
    proof = NO_PROOF
    if request.prove:
        proof = prove(tables, best.step_time_s, lambda: request.is_late)
    tried = len(ranked) + len(found.rejected)
    report = SearchReport(
        request.clock() - found.begin_s, tried, proof.lower_bound_s, proof.gap, proof.says
    )
    idle = idle_workers(request, tables, best.plan)
    kept = dict.fromkeys([*walked, *(each.plan for each in ranked[: limits.SHORTLIST])])
    candidates = tuple(plan for plan in kept if plan != best.plan)
    others = (*found.rejected, *cut, *slower(ranked[1:]))
    return Answer(
        "autohet",
        best.plan,
        best.prediction,
        report,
        others,
        idle,
        candidates=candidates,
        choice=why,
    )


def _ranked(
    request: Request, tables: Tables, known: list[Plan]
) -> tuple[list[Costed], list[Rejected]]:
    """Rank the known plans and the drafts, as `rank` does; add smaller drafts if memory refuses.

    Smaller drafts are added if no plan fits, or if good drafts fit by the tables but not by the
    prediction: they need more communicators than most plans, or more host memory. Smaller drafts
    leave room for one more communicator and need no more host memory than there is. They are as
    deep, or have fewer stages, which keep fewer microbatches.
    """
    ranked, rejected = rank(request, [*known, *_placed(request, tables)])
    if ranked and all(
        each.lacks_memory_s > limits.MAX_SLOWDOWN * ranked[0].step_time_s for each in rejected
    ):
        return ranked, rejected
    if request.brief and not any(math.isfinite(each.lacks_memory_s) for each in rejected):
        return ranked, rejected
    rows = tuple(
        replace(row, limit_bytes=_lower_limit(request, tables, row)) for row in tables.rows
    )
    deepest = min(tables.deepest, len(request.fleet.workers))
    for stages in range(deepest, deepest // 2, -max(1, deepest // limits.SHORTLIST)):
        if ranked and request.is_late:
            rejected = [*rejected, Rejected("smaller drafts", TIME_IS_OVER)]
            break
        found, refused = rank(request, _placed(request, replace(tables, rows=rows, deepest=stages)))
        ranked = [*ranked, *found]
        rejected = [*rejected, *refused]
        if found:
            break
    unlike = {each.plan: each for each in ranked}
    return sorted(unlike.values(), key=lambda each: each.step_time_s), rejected


def _lower_limit(request: Request, tables: Tables, row: Row) -> float:
    """Return bytes of a worker that a smaller draft may use.

    They leave room for one more communicator, and all state can move from the device to host
    memory, whatever other workers move.
    """
    parameters = request.cost.parameters
    room = row.limit_bytes - row.fixed_bytes
    lower = row.limit_bytes - parameters.communicator_bytes
    if not parameters.elastic:
        return lower
    most = host_memory_ceiling(tables.resources[tables.kinds[row.kind].resource].node_type, room)
    return min(lower, row.fixed_bytes + most * min(STATE_BYTES.values()) / OPTIMIZER_BYTES)


def _placed(request: Request, tables: Tables) -> Iterator[Plan]:
    """Yield the proposed drafts placed on the fleet's workers."""
    parts = {1, request.min_node_disjoint_holders}
    proposals = proposals_for(request, tables)
    for proposal in proposals[: limits.BRIEF_DRAFTS] if request.brief else proposals:
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
    if by_stage:
        plans = [place_by_stage(tables, draft, number) for number in possible]
    else:
        plans = [place(tables, draft)]
    if tables.is_tied:
        plans += [place_ends_first(tables, draft, n, by_stage=by_stage) for n in possible]
    yield from (plan for plan in plans if plan is not None)


def _improved(
    request: Request, tables: Tables, ranked: list[Costed]
) -> tuple[Plan, list[Plan], str, list[Rejected]]:
    """Improve the best plans of several sets of depths.

    Returns the plan chosen, the plan that each walk ended with, the reason for the choice, and the
    tries that a deadline left out.
    """
    starts: dict[tuple[int, ...], Plan] = {}
    for each in ranked:
        if (
            each.step_time_s <= limits.MAX_SLOWDOWN * ranked[0].step_time_s
            and len(starts) < limits.WALKS
        ):
            starts.setdefault(tuple(sorted(len(p.stages) for p in each.plan.pipelines)), each.plan)
    if request.brief:
        chosen, why = simplest_near_fastest(
            request.fleet, {each.plan: each.step_time_s for each in ranked}
        )
        return chosen, [], why, []
    moves = Moves(tables, random.Random(0), request.mixed_microbatch)
    cost = request.cost
    numbers_follow = cost.parameters.transfers == "none"
    alike = Likeness(tables.node_types, in_flight=not numbers_follow)
    score = partial(seconds_of, request)
    judge = Judge(score, cost.steps.step_at_least_s, cost.stage_choices.working_ahead, alike.key)
    is_prepared_faster = cost.assumed.choices or request.uneven
    if not is_prepared_faster and cost.choices.expert_dispatch == "sum":
        judge = replace(judge, at_first=cost.steps.work_at_least_s)
    improver = Improver(moves, judge, lambda: request.is_late)
    tries = tries_for(len(request.fleet.workers)) // (
        limits.WALKS if request.uneven else 1
    )  # uneven groups: a second search
    best = improver.best_of(list(starts.values()), tries)
    met = {each.plan: each.step_time_s for each in ranked} | improver.timed
    chosen, why = simplest_near_fastest(request.fleet, met | {best: judge.score(best)})
    cut = []
    if improver.num_tried < tries and request.is_late:
        cut.append(Rejected(f"{tries - improver.num_tried} of {tries} tries", TIME_IS_OVER))
    return chosen, improver.walked, why, cut
