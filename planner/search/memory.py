"""Memory in a search: recomputation and sharded optimizer state as variables.

If host memory alone may refuse every plan, the search runs again without that limit.

A search's tables have one assumption at a time: that nothing is done for memory, or as much as the
job allows. Each plan that it looks at then gets, stage by stage, the fastest choice with which it
fits (`StageChoices.working_ahead`), and is judged by the prediction as it would be run. Drafts of
several assumptions are predicted, as far as an estimate lets hope for the fastest, and the walks
begin from the best of them. Where no draft fills a worker's memory, only the first assumption is
used.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from planner.cost.layers.layer_costs import Assumed
from planner.cost.model import CostModel
from planner.errors import InfeasibleError
from planner.plans.plan import Plan, Stage
from planner.search.autohet import (
    Drafts,
    RankedDrafts,
    draft,
    improve,
    propose,
    rank_proposed,
    search_autohet,
)
from planner.search.bounds.bound import NO_PROOF, Proof, prove
from planner.search.problem import limits
from planner.search.problem.cost_tables import tables_of
from planner.search.problem.request import TIME_IS_OVER, Answer, Rejected, Request, SearchReport
from planner.search.walk.judge import Costed

_Found = TypeVar("_Found")
_Drafts = RankedDrafts | InfeasibleError


def search_with_memory(request: Request, seeds: Iterable[Plan] = ()) -> Answer:
    """Search as `search_autohet` does, and also use stages that save memory.

    Such stages recompute or share out optimizer state. They are used if there is a choice of them,
    and if nothing else fits or they are MIN_SPEEDUP faster. Assumptions are compared by their best
    drafts; one of them is searched further.
    """
    if request.cost.choices.is_fixed:
        return search_autohet(request, seeds)
    begin = request.clock()
    known = list(seeds)
    plain, *others = levels(request)
    needed = request.cost.choices.only_if_needed

    # where the first search may be the last, its bound is that of the answer
    as_it_is = _with_assumption(request, plain, prove=request.prove and needed)
    first = _try(lambda: draft(as_it_is, known))
    if needed and isinstance(first, RankedDrafts):
        return improve(first)

    drafts: dict[Assumed, _Drafts] = {plain: first}
    left = list[Rejected]()
    if isinstance(first, RankedDrafts):
        drafts |= _draft_beside(request, others, first, known)
    else:
        for most_holders in limits.SHARED_BY:
            group = [each for each in others if each.holders <= most_holders and each not in drafts]
            drafted, left_out = _draft_fastest(request, group, known)
            drafts |= drafted
            left += left_out
            if any(isinstance(each, RankedDrafts) for each in drafts.values()):
                break
    fastest = _fastest(list(drafts.values()))
    best = improve(fastest)

    plan = fewest_shared(request.cost, best.plan)
    prediction = request.cost.predict(plan)
    proof = proof_for(request, prediction.step_time_s)
    seconds = request.clock() - begin
    evaluated = 0
    for assumed, each in drafts.items():
        if isinstance(each, RankedDrafts):
            evaluated += len(each.ranked) + len(each.rejected)
        if each is not fastest:
            left.append(_why_left(assumed, each, fastest))
    if request.is_late:
        left.append(Rejected("stages that save memory", TIME_IS_OVER))
    report = SearchReport(seconds, evaluated, proof.lower_bound_s, proof.gap, proof.says)
    found = replace(best, plan=plan, prediction=prediction, search=report)
    return found.add_rejected(*left)


def _draft_fastest(
    request: Request, group: Sequence[Assumed], known: list[Plan]
) -> tuple[dict[Assumed, _Drafts], list[Rejected]]:
    """Draft under the assumptions that may lead to the fastest plan where none fits without.

    Their proposals are compared before any is predicted. Also returns the assumptions left out.
    """
    proposed, found = _propose_each(request, group, known)
    best_s = math.inf
    left = list[Rejected]()
    for assumed, drafts in proposed:
        if drafts.least_s * limits.MIN_SPEEDUP > best_s:
            why = f"{drafts.least_s:.4g} s a step by an estimate, slower than another"
            left.append(Rejected(_describe(assumed), why))
            continue
        outcome = _try(partial(rank_proposed, drafts))
        found[assumed] = outcome
        if isinstance(outcome, RankedDrafts):
            best_s = min(best_s, _best_s(outcome))
    return found, left


def _draft_beside(
    request: Request, others: Sequence[Assumed], first: RankedDrafts, known: list[Plan]
) -> dict[Assumed, _Drafts]:
    """Draft under assumptions that may lead to faster plans than those that fit without.

    Only few drafts are made, under the two assumptions with the fastest proposals, and only where
    memory is scarce.
    """
    best_s = _best_s(first)
    refused = any(each.lacks_memory_s * limits.MIN_SPEEDUP < best_s for each in first.rejected)
    if not refused and (request.brief or not _is_full(first.ranked[0])):
        return {}

    plans = [each.plan for each in first.ranked[: limits.SHORTLIST]]
    most_s = best_s if refused else first.least_s
    ways = request.cost.choices.recompute
    # Few plans have more holders, which estimates leave out; and beside plans that fit, the
    # heaviest of three ways was never the fastest.
    group = []
    for assumed in others:
        if assumed.holders <= limits.SHARED_BY[0] and assumed.recompute not in ways[2:]:
            group.append(assumed)
    in_time = itertools.takewhile(lambda _: not request.is_late, group)
    few = replace(request, brief=True)
    proposed, found = _propose_each(few, in_time, [*known, *plans], most_s)
    hopeful = [each for each in proposed if each[1].proposals]
    for assumed, drafts in hopeful[:2]:
        outcome = _try(partial(rank_proposed, drafts))
        if isinstance(outcome, RankedDrafts):
            outcome = replace(outcome, request=_with_assumption(request, assumed))
        found[assumed] = outcome
    return found


def _propose_each(
    request: Request, group: Iterable[Assumed], seeds: Sequence[Plan], most_s: float = math.inf
) -> tuple[list[tuple[Assumed, Drafts]], dict[Assumed, _Drafts]]:
    """Propose drafts under each assumption; return them, fastest first, and the refusals."""
    proposed = list[tuple[Assumed, Drafts]]()
    refused = dict[Assumed, _Drafts]()
    for assumed in group:
        try:
            proposed.append((assumed, propose(_with_assumption(request, assumed), seeds, most_s)))
        except InfeasibleError as error:
            refused[assumed] = error
    return sorted(proposed, key=lambda each: each[1].least_s), refused


def _is_full(draft: Costed) -> bool:
    """Return True if the fullest worker of a plan has no room for one block more."""
    worker, share = draft.prediction.tightest_worker
    (stage,) = [each for each in draft.plan.stages if worker in each.workers]
    return share * (stage.num_layers + 1) > stage.num_layers


def _fastest(drafts: Sequence[_Drafts]) -> RankedDrafts:
    """Return the drafts with the fastest one.

    The first ones, which do nothing for memory, are returned unless others are clearly faster.

    Raises:
        InfeasibleError: none fits; the reason of the first.
    """
    possible = [each for each in drafts if isinstance(each, RankedDrafts)]
    first = drafts[0]
    if not possible:
        assert isinstance(first, InfeasibleError)
        raise first
    best = min(possible, key=_best_s)
    if isinstance(first, RankedDrafts) and _best_s(first) <= limits.MIN_SPEEDUP * _best_s(best):
        return first
    return best


def _best_s(found: RankedDrafts) -> float:
    return found.ranked[0].step_time_s


def with_room_or_without(search: Callable[[Request], _Found], request: Request) -> _Found:
    """Return what a search finds; search again without room for staging if no plan is accepted.

    The second search runs only if host memory alone may be what refuses every plan.
    """
    try:
        return search(request)
    except InfeasibleError:
        if not may_be_without_room(request):
            raise
    return search(replace(request, needs_staging_room=False))


def may_be_without_room(request: Request) -> bool:
    """Return True if host memory alone may be what refuses plans, and more may be tried.

    See `Request.needs_staging_room`.
    """
    return request.needs_staging_room and request.cost.memory_of.may_lack_host_memory


def levels(request: Request) -> list[Assumed]:
    """Return the assumptions on all stages, beginning with nothing done for memory.

    Shared moments have one copy, so a job that wants each shard on several nodes shares none out.
    """
    allowed = request.cost.choices
    ways = allowed.recompute
    shared = list(limits.SHARED_BY) if _may_share(request) else []
    shared = [holders for holders in shared if holders <= len(request.fleet.workers)]
    # without choices, so that plans say nothing of memory where nothing is done for it
    found = [Assumed(ways[0])]
    for holders in (1, *shared):
        for way in ways:
            if (way, holders) != (ways[0], 1):
                found.append(Assumed(way, holders, choices=ways))
    return found


def cost_like(cost: CostModel, plan: Plan) -> CostModel:
    """Return the cost model whose searches save memory in the ways that a plan does."""
    allowed = cost.choices.recompute
    used = {stage.recompute for stage in plan.stages}
    ways = [how for how in allowed if how in used]
    shared = any(stage.shard_optimizer for stage in plan.stages)
    saves_memory = ways or shared
    if cost.choices.is_fixed or not saves_memory:
        return cost

    heaviest = ways[-1] if ways else allowed[-1]
    holders = max(2, len(plan.pipelines)) if shared else 1
    return cost.with_assumption(Assumed(heaviest, holders, choices=allowed))


def fewest_shared(cost: CostModel, plan: Plan) -> Plan:
    """Return the plan with optimizer state shared out only by stages that do not fit without it.

    The plan itself is returned if that is slower by more than MIN_SPEEDUP, or if it uses Muon.
    """
    if cost.spec.uses_muon:
        return plan
    over_full = set(cost.over_full(_share_only(plan, set())))
    fewer = _share_only(plan, over_full)
    before = cost.predict(plan)
    after = cost.predict(fewer)
    is_nearly_as_fast = after.step_time_s <= limits.MIN_SPEEDUP * before.step_time_s
    return fewer if after.fits and is_nearly_as_fast else plan


def _share_only(plan: Plan, workers: set[str]) -> Plan:
    """Return the plan with its optimizer state shared out only by stages with these workers."""

    def change(stage: Stage) -> Stage:
        shards = stage.shard_optimizer and not workers.isdisjoint(stage.workers)
        return replace(stage, shard_optimizer=shards)

    return plan.map_stages(change)


def _may_share(request: Request) -> bool:
    return request.cost.choices.shard_optimizer and request.min_node_disjoint_holders < 2


def _with_assumption(request: Request, assumed: Assumed, *, prove: bool = False) -> Request:
    return replace(request, cost=request.cost.with_assumption(assumed), prove=prove)


def _try(search: Callable[[], _Found]) -> _Found | InfeasibleError:
    try:
        return search()
    except InfeasibleError as error:
        return error


def _without_limits(request: Request) -> Request:
    """Return the request with layers as fast and as small as they can be.

    No plan takes less time or memory than its tables say.
    """
    ways = request.cost.choices.recompute
    holders = len(request.fleet.workers) if _may_share(request) else 1

    # as fast as with the lightest way to recompute, as small as with the heaviest
    assumed = Assumed(ways[0], holders, at_least=ways[-1])
    return replace(request, cost=request.cost.with_assumption(assumed))


def proof_for(request: Request, step_s: float) -> Proof:
    """Prove a bound for a plan of `step_s` seconds, over all that the job allows for memory."""
    if not request.prove:
        return NO_PROOF
    free = request if request.cost.choices.is_fixed else _without_limits(request)
    return prove(tables_of(free), step_s, lambda: request.is_late)


def _describe(assumed: Assumed) -> str:
    """Describe the stages of an assumption in words."""
    ways = assumed.choices or (assumed.recompute,)
    what = f"stages that recompute {' or '.join(ways)}"
    if assumed.holders > 1:
        what += ", optimizer state shared out"
    return what


def _why_left(assumed: Assumed, tried: _Drafts, best: RankedDrafts) -> Rejected:
    """Say in words why an assumption was left."""
    what = _describe(assumed)
    if isinstance(tried, InfeasibleError):
        return Rejected(what, str(tried))
    why = f"{_best_s(tried):.4g} s a step its best draft, "
    if _best_s(tried) < _best_s(best):
        why += "not clearly faster than one that does without"
    else:
        why += "slower than another that was improved"
    return Rejected(what, why)
