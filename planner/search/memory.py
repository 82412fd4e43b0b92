"""Memory in a search: recomputation and sharded optimizer state as variables.

If host memory alone may refuse every plan, the search runs again without that limit.

A search's tables have one assumption at a time: that nothing is done for memory, or as much as the
job allows. Each plan that it looks at then gets, stage by stage, the fastest choice with which it
fits (`StageChoices.working_ahead`), and is judged by the prediction as it would be run. Drafts of
all assumptions are predicted, and the walks begin from the best of them. If drafts on tables
without any limit of memory are not clearly faster, only the first assumption is used.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from planner.cost.layers.layer_costs import Assumed
from planner.cost.model import CostModel
from planner.errors import InfeasibleError
from planner.plans.plan import Plan, Stage
from planner.search.autohet import RankedDrafts, draft, improve, search_autohet
from planner.search.bounds.bound import NO_PROOF, Proof, prove
from planner.search.drafts.families import proposals_for
from planner.search.problem import limits
from planner.search.problem.cost_tables import tables_of
from planner.search.problem.request import TIME_IS_OVER, Answer, Rejected, Request, SearchReport

_Found = TypeVar("_Found")
_Outcome = Answer | RankedDrafts | InfeasibleError


def search_with_memory(request: Request, seeds: Iterable[Plan] = ()) -> Answer:
    """Search as `search_autohet` does, and also use stages that save memory.

    Such stages recompute or share out optimizer state. They are used if there is a choice of them,
    and if nothing else fits or they are MIN_SPEEDUP faster.
    """
    if request.cost.choices.is_fixed:
        return search_autohet(request, seeds)
    begin = request.clock()
    known = list(seeds)
    plain, *others = levels(request)
    needed = request.cost.choices.only_if_needed

    # where the first search may be the last, its bound is that of the answer
    as_it_is = _with_assumption(request, plain, prove=request.prove and needed)
    first = _try(lambda: search_autohet(as_it_is, known))
    is_cut = False
    if isinstance(first, Answer):
        if needed:
            return first
        is_cut = request.is_late
        if is_cut or not _promises(request, first.step_time_s):
            others = []
        known = [*known, first.plan]

    drafts = []
    for assumed in others:
        search = partial(draft, _with_assumption(request, assumed), known)
        drafts.append(_try(search))
    tried = [first, *_improve_fastest(drafts)]
    best = _choose(tried)

    plan = fewest_shared(request.cost, best.plan)
    prediction = request.cost.predict(plan)
    proof = proof_for(request, prediction.step_time_s)
    evaluated = _num_evaluated([first, *drafts])
    seconds = request.clock() - begin
    report = SearchReport(seconds, evaluated, proof.lower_bound_s, proof.gap, proof.says)

    left = []
    for assumed, each in zip([plain, *others], tried, strict=True):
        if each is not best:
            left.append(_why_left(assumed, each, best))
    if is_cut:
        left.append(Rejected("stages that save memory", TIME_IS_OVER))
    found = replace(best, plan=plan, prediction=prediction, search=report)
    return found.add_rejected(*left)


def _improve_fastest(drafts: Sequence[RankedDrafts | InfeasibleError]) -> list[_Outcome]:
    """Return the drafts, with the second half of the search for the fastest of them alone."""
    possible = [each for each in drafts if isinstance(each, RankedDrafts)]
    fastest = min(possible, key=lambda each: each.ranked[0].step_time_s, default=None)

    found: list[_Outcome] = []
    for each in drafts:
        if isinstance(each, RankedDrafts) and each is fastest:
            found.append(improve(each))
        else:
            found.append(each)
    return found


def _num_evaluated(tried: Sequence[_Outcome]) -> int:
    total = 0
    for each in tried:
        if isinstance(each, Answer):
            total += each.search.plans_evaluated
        elif isinstance(each, RankedDrafts):
            total += len(each.ranked) + len(each.rejected)
    return total


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
    lightest = ways[0]
    heaviest = ways[-1]
    first_choices = () if allowed.only_if_needed else (lightest,)
    found = [Assumed(lightest, choices=first_choices), Assumed(heaviest, choices=ways)]

    if _may_share(request):
        for holders in limits.SHARED_BY:
            if holders <= len(request.fleet.workers):
                found.append(Assumed(lightest, holders, choices=ways))
                found.append(Assumed(heaviest, holders, choices=ways))

    # with one way to recompute, the lightest and the heaviest are the same
    return list(dict.fromkeys(found))


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

    The plan itself is returned if that is slower by more than MIN_SPEEDUP.
    """
    needed = cost.memory_of.by_worker(_share_only(plan, set()))
    over_full = set[str]()
    for worker in plan.workers:
        node_type = cost.fleet.node_of(worker).node_type
        if needed[worker] > cost.worker_memory.limit_bytes(node_type):
            over_full.add(worker)

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


def _promises(request: Request, step_s: float) -> bool:
    """Return True if drafts whose stages save memory at no loss of time would be clearly faster."""
    free = _without_limits(request)
    drafts_s = [each.seconds for each in proposals_for(free, tables_of(free))]
    fastest_s = min(drafts_s, default=step_s)
    return fastest_s * limits.MIN_SPEEDUP < step_s


def proof_for(request: Request, step_s: float) -> Proof:
    """Prove a bound for a plan of `step_s` seconds, over all that the job allows for memory."""
    if not request.prove:
        return NO_PROOF
    free = request if request.cost.choices.is_fixed else _without_limits(request)
    return prove(tables_of(free), step_s, lambda: request.is_late)


def _choose(tried: Sequence[_Outcome]) -> Answer:
    """Return the fastest answer.

    The first, which does nothing for memory, is returned unless another is clearly faster.
    """
    found = []
    refusals = []
    for each in tried:
        if isinstance(each, Answer):
            found.append(each)
        elif isinstance(each, InfeasibleError):
            refusals.append(each)
    if not found:
        raise refusals[0]

    best = min(found, key=lambda each: each.step_time_s)
    plain = tried[0]
    if isinstance(plain, Answer):
        is_nearly_as_fast = plain.step_time_s <= limits.MIN_SPEEDUP * best.step_time_s
        if is_nearly_as_fast:
            return plain
    return best


def _why_left(assumed: Assumed, tried: _Outcome, best: Answer) -> Rejected:
    """Say in words why an assumption was left."""
    ways = assumed.choices or (assumed.recompute,)
    what = f"stages that recompute {' or '.join(ways)}"
    if assumed.holders > 1:
        what += ", optimizer state shared out"

    if isinstance(tried, InfeasibleError):
        return Rejected(what, str(tried))
    if isinstance(tried, RankedDrafts):
        draft_s = tried.ranked[0].step_time_s
        why = f"{draft_s:.4g} s a step its best draft, slower than another that was improved"
    elif tried.step_time_s < best.step_time_s:
        why = f"{tried.step_time_s:.4g} s a step, not clearly faster than a plan that does without"
    else:
        why = f"{tried.step_time_s:.4g} s a step, slower than the chosen plan"
    return Rejected(what, why)
