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

from planner.cost.layer_costs import Assumed
from planner.cost.model import CostModel
from planner.errors import InfeasibleError
from planner.plan import Plan, Stage
from planner.search import limits
from planner.search.autohet import Drafted, drafted, improved, search_autohet
from planner.search.bound import NO_PROOF, Proof, prove
from planner.search.cost_tables import tables_of
from planner.search.families import proposals_for
from planner.search.problem import TIME_IS_OVER, Answer, Rejected, Request, SearchReport

_Found = TypeVar("_Found")


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
    first = _tried(
        lambda: search_autohet(_assuming(request, plain, prove=request.prove and needed), known)
    )
    if isinstance(first, Answer) and needed:
        return first
    is_cut = isinstance(first, Answer) and request.is_late
    if is_cut or (
        isinstance(first, Answer) and not _promises(request, first.prediction.step_time_s)
    ):
        others = []
    seeds = [*known, first.plan] if isinstance(first, Answer) else known
    drafts = [_tried(partial(drafted, _assuming(request, each), seeds)) for each in others]
    possible = [each for each in drafts if isinstance(each, Drafted)]
    quickest = min(possible, key=lambda each: each.ranked[0].step_time_s, default=None)
    tried = [first, *(improved(each) if each is quickest else each for each in drafts)]
    best = _chosen(tried)
    evaluated = sum(len(each.ranked) + len(each.rejected) for each in possible)
    evaluated += first.search.plans_evaluated if isinstance(first, Answer) else 0
    plan = fewest_shared(request.cost, best.plan)
    prediction = request.cost.predict(plan)
    proof = proof_for(request, prediction.step_time_s)
    report = SearchReport(
        request.clock() - begin, evaluated, proof.lower_bound_s, proof.gap, proof.says
    )
    pairs = zip([plain, *others], tried)
    rejected = tuple(_left(assumed, each, best) for assumed, each in pairs if each is not best)
    if is_cut:
        rejected = (*rejected, Rejected("stages that save memory", TIME_IS_OVER))
    return replace(
        best, plan=plan, prediction=prediction, search=report, rejected=(*best.rejected, *rejected)
    )


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
    lightest = allowed.recompute[0]
    heaviest = allowed.recompute[-1]
    found = [
        Assumed(lightest, choices=() if allowed.only_if_needed else (lightest,)),
        Assumed(heaviest, choices=allowed.recompute),
    ]
    if _may_share(request):
        for holders in (
            number for number in limits.SHARED_BY if number <= len(request.fleet.workers)
        ):
            found += [
                Assumed(how, holders, choices=allowed.recompute) for how in (lightest, heaviest)
            ]
    return list(dict.fromkeys(found))


def cost_like(cost: CostModel, plan: Plan) -> CostModel:
    """Return the cost model whose searches save memory in the ways that a plan does."""
    stages = plan.stages
    shared = any(stage.shard_optimizer for stage in stages)
    ways = [
        how for how in cost.choices.recompute if any(stage.recompute == how for stage in stages)
    ]
    if cost.choices.is_fixed or not (ways or shared):
        return cost
    holders = max(2, len(plan.pipelines)) if shared else 1
    return cost.assuming(
        Assumed((ways or cost.choices.recompute)[-1], holders, choices=cost.choices.recompute)
    )


def fewest_shared(cost: CostModel, plan: Plan) -> Plan:
    """Return the plan with optimizer state shared out only by stages that do not fit without it.

    The plan itself is returned if that is slower by more than MIN_SPEEDUP.
    """
    needed = cost.memory_of.by_worker(_shared_by(plan, set()))
    limit = {
        worker: cost.worker_memory.limit_bytes(cost.fleet.node_of(worker).node_type)
        for worker in plan.workers
    }
    fewer = _shared_by(plan, {worker for worker in plan.workers if needed[worker] > limit[worker]})
    before = cost.predict(plan)
    after = cost.predict(fewer)
    return (
        fewer
        if after.fits and after.step_time_s <= limits.MIN_SPEEDUP * before.step_time_s
        else plan
    )


def _shared_by(plan: Plan, workers: set[str]) -> Plan:
    def said(stage: Stage) -> Stage:
        return replace(
            stage, shard_optimizer=stage.shard_optimizer and not workers.isdisjoint(stage.workers)
        )

    return replace(
        plan, pipelines=tuple(replace(p, stages=tuple(map(said, p.stages))) for p in plan.pipelines)
    )


def _may_share(request: Request) -> bool:
    return request.cost.choices.shard_optimizer and request.min_node_disjoint_holders < 2


def _assuming(request: Request, assumed: Assumed, *, prove: bool = False) -> Request:
    return replace(request, cost=request.cost.assuming(assumed), prove=prove)


def _tried(search: Callable[[], _Found]) -> _Found | InfeasibleError:
    try:
        return search()
    except InfeasibleError as error:
        return error


def _unlimited(request: Request) -> Request:
    """Return the request with layers as fast and as small as they can be.

    No plan takes less time or memory than its tables say.
    """
    allowed = request.cost.choices
    sharing = _may_share(request)
    holders = len(request.fleet.workers) if sharing else 1
    return replace(
        request,
        cost=request.cost.assuming(
            Assumed(allowed.recompute[0], holders, at_least=allowed.recompute[-1])
        ),
    )


def _promises(request: Request, step_s: float) -> bool:
    """Return True if drafts whose stages save memory at no loss of time would be clearly faster."""
    free = _unlimited(request)
    return (
        min((each.seconds for each in proposals_for(free, tables_of(free))), default=step_s)
        * limits.MIN_SPEEDUP
        < step_s
    )


def proof_for(request: Request, step_s: float) -> Proof:
    """Prove a bound for a plan of `step_s` seconds, over all that the job allows for memory."""
    free = request if request.cost.choices.is_fixed else _unlimited(request)
    if not request.prove:
        return NO_PROOF
    return prove(tables_of(free), step_s, lambda: request.is_late)


def _chosen(tried: Sequence[Answer | Drafted | InfeasibleError]) -> Answer:
    """Return the fastest answer.

    The first, which does nothing for memory, is returned unless another is clearly faster.
    """
    found = [each for each in tried if isinstance(each, Answer)]
    if not found:
        raise next(each for each in tried if isinstance(each, InfeasibleError))
    best = min(found, key=lambda each: each.prediction.step_time_s)
    plain = tried[0]
    if (
        isinstance(plain, Answer)
        and plain.prediction.step_time_s <= limits.MIN_SPEEDUP * best.prediction.step_time_s
    ):
        return plain
    return best


def _left(assumed: Assumed, tried: Answer | Drafted | InfeasibleError, best: Answer) -> Rejected:
    """Say in words why an assumption was left."""
    what = f"stages that recompute {' or '.join(assumed.choices or (assumed.recompute,))}"
    what += ", optimizer state shared out" if assumed.holders > 1 else ""
    if isinstance(tried, InfeasibleError):
        return Rejected(what, str(tried))
    if isinstance(tried, Drafted):
        return Rejected(
            what,
            f"{tried.ranked[0].step_time_s:.4g} s a step its best draft, slower than another that"
            " was improved",
        )
    seconds = tried.prediction.step_time_s
    if seconds < best.prediction.step_time_s:
        return Rejected(
            what, f"{seconds:.4g} s a step, not clearly faster than a plan that does without"
        )
    return Rejected(what, f"{seconds:.4g} s a step, slower than the chosen plan")
