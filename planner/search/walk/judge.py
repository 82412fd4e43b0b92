"""Judgement of plans by their predictions.

Decides which plans may be chosen and which is best, and says why others are not and what is left
idle.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.cost.model import CostModel
from planner.cost.prediction import Prediction
from planner.errors import InfeasibleError
from planner.inputs.cluster import GIB
from planner.inputs.fleet import Fleet, node_of
from planner.inputs.zones import known_zones, refusal_of
from planner.plans.plan import Pipeline, Plan
from planner.plans.plan_checks import check_plan
from planner.plans.redundancy import fewest_holders
from planner.search.problem import limits
from planner.search.problem.request import (
    TIME_IS_OVER,
    Answer,
    Idle,
    Rejected,
    Request,
    SearchReport,
)
from planner.search.problem.tables import Resource, Tables


@dataclass(frozen=True)
class Costed:
    """A plan with its prediction."""

    plan: Plan
    prediction: Prediction

    @property
    def step_time_s(self) -> float:
        return self.prediction.step_time_s


def fewest_in_flight(cost: CostModel, plan: Plan) -> Costed:
    """Return the plan with the fewest microbatches in flight that is as fast as with any number.

    A plan that is very nearly as fast counts too.
    """
    ways = cost.stage_choices.ways_ahead(plan)
    costed = [Costed(way, cost.predict(way)) for way in ways]
    fastest_s = min(each.step_time_s for each in costed)
    most_s = fastest_s * (1 + limits.FINE)
    nearly_as_fast = [each for each in costed if each.step_time_s <= most_s]
    return nearly_as_fast[0]  # the fewest in flight come first


def seconds_of(request: Request, plan: Plan) -> float:
    """Return the predicted step time; infinite if the plan may not be chosen."""
    if too_few_holders(request, plan):  # known without a prediction
        return math.inf
    prediction = request.cost.predict(plan)
    if _refused(request, plan, prediction):
        return math.inf
    return prediction.step_time_s


def rank(request: Request, plans: Iterable[Plan]) -> tuple[list[Costed], list[Rejected]]:
    """Return plans that may be chosen, fastest first, and plans that may not.

    Equally fast plans keep their order. Plans that a bound shows to be slower than another with
    the same depths are not predicted.
    """
    cost = request.cost
    best_s = dict[tuple[int, ...], float]()  # by depths of the pipelines
    found = list[Costed]()
    rejected = list[Rejected]()
    prepared = set[Plan]()
    working_ahead = cost.stage_choices.working_ahead
    distinct = dict.fromkeys(plans)
    for number, drawn in enumerate(distinct):
        if found and request.is_late:
            what = f"{len(distinct) - number} of {len(distinct)} drafts"
            rejected.append(Rejected(what, TIME_IS_OVER))
            break
        check_plan(drawn, request.spec.num_layers)
        too_few = too_few_holders(request, drawn)
        if too_few is not None:  # known without a prediction
            rejected.append(Rejected(describe(drawn), too_few))
            continue
        plan = working_ahead(drawn)
        if plan in prepared:
            continue
        prepared.add(plan)
        depths = tuple(sorted(len(pipeline.stages) for pipeline in plan.pipelines))
        if plan.spmd is None:
            least_s = cost.steps.step_at_least_s(plan)
            over_full = cost.over_full(plan)
            if over_full:
                fullest = _why_over_full(*max(over_full.items(), key=lambda each: each[1]))
                rejected.append(Rejected(describe(plan), fullest, least_s))
                continue
            if least_s >= best_s.get(depths, math.inf):
                behind = f"at least {least_s:.4g} s a step, slower than another plan"
                rejected.append(Rejected(describe(plan), behind))
                continue
        each = Costed(plan, cost.predict(plan))
        why = _refused(request, plan, each.prediction)
        if why is None:
            found.append(each)
            best_s[depths] = min(each.step_time_s, best_s.get(depths, math.inf))
            continue
        lacks_memory_s = math.inf if each.prediction.fits else each.step_time_s
        rejected.append(Rejected(describe(plan), why, lacks_memory_s))
    return sorted(found, key=lambda each: each.step_time_s), rejected


def choose(request: Request, plans: Iterable[Plan]) -> tuple[Costed | None, list[Rejected]]:
    """Return the fastest plan that may be chosen, and the reasons against the others.

    It has no more microbatches in flight than help.
    """
    ranked, rejected = rank(request, plans)
    if not ranked:
        return None, rejected
    best, *others = ranked
    return fewest_in_flight(request.cost, best.plan), rejected + slower(others)


def kind_of(fleet: Fleet, pipeline: Pipeline) -> tuple[object, ...]:
    """Key that is equal for pipelines that an operator would call equal.

    It has the microbatch size, cut, TP degrees and node types.
    """
    stages = []
    for stage in pipeline.stages:
        node_type = fleet.node_of(stage.workers[0]).node_type
        parts = stage.tp_shares or stage.tp_degree
        stages.append((stage.num_layers, parts, node_type.name))
    return (pipeline.microbatch_sequences, *stages)


def kinds_in(fleet: Fleet, plan: Plan) -> int:
    """Return the number of kinds of pipelines in a plan."""
    return len({kind_of(fleet, pipeline) for pipeline in plan.pipelines})


def simplest_near_fastest(fleet: Fleet, timed: Mapping[Plan, float]) -> tuple[Plan, str]:
    """Return the fastest plan, or one nearly as fast with fewer kinds of pipelines.

    timed: plans with their seconds. The second value says in words which of the two it is.
    """
    fastest = min(timed, key=timed.__getitem__)
    most_s = limits.PLAIN * timed[fastest]
    near = [plan for plan, seconds in timed.items() if seconds <= most_s]
    plain = min(near, key=lambda plan: (kinds_in(fleet, plan), timed[plan]))

    few = kinds_in(fleet, plain)
    many = kinds_in(fleet, fastest)
    if few == many:
        why = (
            f"the fastest plan ({_pipelines(many)}; no simpler plan is within"
            f" {limits.PLAIN - 1:.1%})"
        )
        return fastest, why
    slower_by = timed[plain] / timed[fastest] - 1
    why = (
        f"{_pipelines(few)}: with {_pipelines(many)} the step would be {slower_by:.2%}"
        " shorter, less than the model's error"
    )
    return plain, why


def _pipelines(kinds: int) -> str:
    return "one pipeline shape" if kinds == 1 else f"{kinds} pipeline shapes"


@dataclass(frozen=True)
class SearchEffort:
    """Effort of a search: its begin on the request's clock, plans tried, what its time cut off."""

    begin_s: float
    num_tried: int
    cut: str = ""


def answer_of(
    strategy: str,
    request: Request,
    tables: Tables,
    plans: Iterable[Plan],
    effort: SearchEffort,
) -> Answer:
    """Return the answer of a strategy that proposes these plans and proves nothing.

    Raises:
        InfeasibleError: none of them may be chosen.
    """
    best, rejected = choose(request, plans)
    if best is None:
        raise InfeasibleError(
            f"{strategy} finds no plan that fits: {why_infeasible(request, tables, rejected)}"
        )
    taken_s = request.clock() - effort.begin_s
    report = SearchReport(taken_s, effort.num_tried, None, None)
    idle = idle_workers(request, tables, best.plan)
    if effort.cut:
        rejected.append(Rejected(effort.cut, TIME_IS_OVER))
    return Answer(strategy, best.plan, best.prediction, report, tuple(rejected), idle)


def slower(others: Sequence[Costed]) -> list[Rejected]:
    """Return rejections that say how slow the other plans are."""
    rejected = []
    for each in others:
        why = f"{each.step_time_s:.4g} s a step, slower than the chosen plan"
        rejected.append(Rejected(describe(each.plan), why))
    return rejected


def unacceptable(request: Request, plan: Plan, prediction: Prediction) -> str | None:
    """Return why a plan may not be chosen, or None."""
    return _refused(request, plan, prediction) or too_few_holders(request, plan)


def _refused(request: Request, plan: Plan, prediction: Prediction) -> str | None:
    """Return why the prediction of a plan refuses it, or None."""
    if not prediction.fits_devices:
        return _why_over_full(*prediction.tightest_worker)
    if prediction.not_offloaded is not None:
        return prediction.not_offloaded
    if request.needs_staging_room and prediction.not_staged is not None:
        return prediction.not_staged
    limit = request.max_usd_per_hour
    price = prediction.usd_per_hour
    if limit is not None and price is not None and price > limit:
        return f"{price:.2f} $/h, above the limit of {limit:.2f}"
    if len(request.cost.zones) > 1:
        why = _crosses_zones(request, plan, prediction)
        if why is not None:
            return why
    deepest = plan.depths[-1]
    if request.max_stages is not None and deepest > request.max_stages:
        return f"{deepest} stages, at most {request.max_stages} are asked for"
    return None


def _why_over_full(worker: str, share: float) -> str:
    return f"worker {worker} would need {share:.0%} of its memory"


def zones_of(fleet: Fleet, plan: Plan) -> tuple[str, ...]:
    """Names of the zones that a plan lies in, as far as they are known."""
    zones = {fleet.node_of(worker).node_type.zone for worker in plan.workers}
    return known_zones(zones)


def _crosses_zones(request: Request, plan: Plan, prediction: Prediction) -> str | None:
    """Return why a plan may not lie in its zones, or None."""
    zones = zones_of(request.fleet, plan)
    if len(zones) < 2:
        return None
    apart = request.cost.links.zones.first_unconnected(zones)
    if apart is not None:
        return refusal_of(apart)
    if request.max_zones is not None and len(zones) > request.max_zones:
        return f"it lies in {len(zones)} zones, at most {request.max_zones} are asked for"
    if plan.spmd is not None:
        return "one SPMD program lies in one zone"
    share = request.max_transfer_share
    nodes = prediction.nodes_usd_per_hour
    usd = prediction.transfers_usd_per_hour
    if share is not None and nodes is not None and usd > share * nodes:
        return (
            f"data between zones costs {usd:.2f} $/h, more than {share:.0%} of its nodes'"
            f" {nodes:.2f} $/h (parallelism.max_zones allows it)"
        )
    return None


def too_few_holders(request: Request, plan: Plan) -> str | None:
    """Return a sentence if some layer lies on fewer nodes than asked for, else None."""
    wanted = request.min_node_disjoint_holders
    if wanted < 2:
        return None
    weakest = fewest_holders(plan, request.fleet, request.spec.num_layers)
    if weakest >= wanted:
        return None
    return f"some layer lies on {weakest} node only, {wanted} are asked for"


def describe(plan: Plan) -> str:
    """Describe a plan in a few words."""
    return (
        f"{len(plan.pipelines)} pipelines, {_either(plan.depths)} stages,"
        f" TP {_either(plan.tp_degrees)}, microbatch {_either(plan.microbatch_sizes)}"
    )


def _either(numbers: list[int]) -> str:
    return "/".join(map(str, numbers))


def idle_workers(request: Request, tables: Tables, plan: Plan) -> tuple[Idle, ...]:
    """Return the workers that the plan leaves unused, by node type, with the reason."""
    used = set(plan.workers)
    used_nodes = {node_of(worker) for worker in used}
    usable = {tables.kinds[row.kind].resource for row in tables.rows}
    out = []
    for index, resource in enumerate(tables.resources):
        workers = tuple(worker for worker in resource.workers if worker not in used)
        if workers:
            why = _why_idle(
                resource,
                len(workers),
                is_usable=index in usable,
                is_used=not used_nodes.isdisjoint(resource.node_names),
            )
            out.append(Idle(workers, why))
    return tuple(out)


def _why_idle(resource: Resource, number: int, *, is_usable: bool, is_used: bool) -> str:
    """Return why `number` workers of a resource are idle. is_used: others of it are not."""
    gpu = resource.node_type.gpu_type
    if not is_usable:
        return (
            f"{resource.node_type.gpu_memory_bytes / GIB:.0f} GiB of a {gpu} hold no layer of"
            " this model at any allowed TP degree"
        )
    if not is_used:
        return (
            f"a stage on {gpu} would slow its pipeline or the gradient sync more than it would add"
        )
    return (
        f"{number} {gpu} left over: neither one more pipeline nor one more stage with"
        " them shortens the step"
    )


def why_infeasible(request: Request, tables: Tables, rejected: Sequence[Rejected] = ()) -> str:
    """Return the tightest limit and by how much it is broken.

    If plans were found but refused, say why the first of them was.
    """
    wanted = request.min_node_disjoint_holders
    count = len(request.fleet.nodes)
    if wanted > count:
        return (
            f"every layer is asked for on {wanted} nodes (min_pipelines or redundancy), but the"
            f" fleet has {count}, {wanted - count} too few"
        )

    limit = request.max_usd_per_hour
    if limit is not None:
        rates = []
        for resource in tables.resources:
            rate = resource.node_type.usd_per_hour
            if rate is not None:
                rates.append(rate)
        cheapest = min(rates, default=limit)
        if cheapest > limit:
            return (
                f"the cheapest node costs {cheapest:.2f} $/h,"
                f" {cheapest - limit:.2f} above max_usd_per_hour"
            )

    if rejected:
        return (
            f"every plan found is refused, the first ({rejected[0].what}) since {rejected[0].why}"
        )
    return lack_of_memory(request, tables)


def lack_of_memory(request: Request, tables: Tables) -> str:
    """Say by how much one copy of the model exceeds the fleet's memory, and what may help."""
    remedies = "Add GPUs, or use a shorter sequence or a smaller microbatch"
    remedy = request.cost.choices.remedy
    if remedy:
        remedies = f"Add GPUs, or use {remedy} or a shorter sequence"

    needs = _needs_of_one_copy(tables)
    if not needs:
        # the row of which the least is lacking
        row = min(tables.rows, key=lambda row: row.fixed_bytes - row.limit_bytes)
        return (
            f"the model does not fit: with microbatch {row.microbatch} a stage holds"
            f" {row.fixed_bytes / GIB:.1f} GiB beside its layers (logits, buffers, workspace), a"
            f" GPU has {row.limit_bytes / GIB:.1f} GiB. {remedies}"
        )

    least_bytes, degree, size = min(needs)
    gpus, have_bytes = _gpus_and_their_bytes(tables)
    lack = "enough in sum, but no cut of the layers fits each GPU"
    if least_bytes > have_bytes:
        lack = f"{(least_bytes - have_bytes) / GIB:.1f} GiB too little"
    return (
        f"the model does not fit: with TP {degree} and microbatch {size} one copy needs"
        f" {least_bytes / GIB:.1f} GiB of GPU memory, the fleet's {gpus} GPUs have"
        f" {have_bytes / GIB:.1f} GiB to use: {lack}. {remedies}"
    )


def _needs_of_one_copy(tables: Tables) -> list[tuple[float, int, int]]:
    """Return the bytes of one copy of the model, TP degree and microbatch size of each row.

    A row whose GPUs have no room beside what each stage holds is left out.
    """
    needs = []
    for row in tables.rows:
        room = (row.limit_bytes - row.fixed_bytes) / row.limit_bytes
        if room <= 0:
            continue

        # a row's embedding and head are less a border each, which may be more than they are
        blocks_bytes = float(row.state_bytes[1:-1].sum() + row.activation_bytes.sum())
        ends_bytes = float(row.state_bytes[[0, -1]].sum())
        whole_bytes = max(blocks_bytes, blocks_bytes + ends_bytes - row.tied_bytes)
        degree = tables.kinds[row.kind].tp_degree
        needs.append((whole_bytes * degree / room, degree, row.microbatch))
    return needs


def _gpus_and_their_bytes(tables: Tables) -> tuple[int, float]:
    """Return the fleet's GPUs, and the bytes that the model may use on all of them."""
    most_bytes = [0.0] * len(tables.resources)
    for row in tables.rows:
        index = tables.kinds[row.kind].resource
        most_bytes[index] = max(most_bytes[index], row.limit_bytes)

    gpus = 0
    all_bytes = 0.0
    for resource, each_bytes in zip(tables.resources, most_bytes, strict=True):
        gpus += resource.num_gpus
        all_bytes += resource.num_gpus * each_bytes
    return gpus, all_bytes
