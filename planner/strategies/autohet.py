"""The strategy `autohet`: the engine's drafts placed on the fleet, the best of them chosen by the cost model's own
prediction.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.cluster import Fleet, node_of
from planner.cost.model import Prediction
from planner.errors import InfeasibleError
from planner.plan import Plan, check_plan
from planner.redundancy import redundancy
from planner.search.bound import NO_PROOF, prove
from planner.search.cost_tables import FEW_GPUS, GIB, check_request, tables_of
from planner.search.narrow import narrowed
from planner.search.place import place
from planner.search.problem import Answer, Idle, Rejected, Request, SearchReport
from planner.search.tables import Tables
from planner.strategies.ahead import least_ahead, settled
from planner.strategies.alike import alike_plans
from planner.strategies.anneal import Annealer
from planner.strategies.assembly import ASSEMBLED_GPUS, FEW, assembled_plans
from planner.strategies.companion import begin_companion
from planner.strategies.disjoint import disjoint_plans
from planner.strategies.early_shifts import early_shifts
from planner.strategies.effort import Effort
from planner.strategies.engine import Engine, Found
from planner.strategies.housing import housed
from planner.strategies.interleave import interleaved
from planner.strategies.rebalance import rebalanced
from planner.strategies.refine import FAR_BEHIND
from planner.strategies.rehouse import rehoused
from planner.strategies.rivals import MOST_GPUS, grids, rival_plans
from planner.strategies.symmetric import draft_of

CANDIDATES = 6
_FEWEST = 8
_FEWER_GPUS = 192
_WALKS = 4  # of up to `_FEWEST` GPUs, of more one
_WALKS_APART = 8  # where each layer has to lie on several nodes: fewer changes keep that
_ROUNDS = 3
_HASTY = 0.985
_NOTHING = Found((), 0.0, 0)


@dataclass(frozen=True)
class Costed:
    """A plan with its prediction."""

    plan: Plan
    prediction: Prediction


def search_autohet(request: Request, seeds: Iterable[Plan] = (), effort: Effort | None = None) -> Answer:
    """The best plan of unequal pipelines. InfeasibleError names the tightest limit."""
    check_request(request)
    begin = request.clock()
    tables = tables_of(request)
    effort = effort or effort_for(len(request.fleet.workers))
    companion, asked_bound = begin_companion(request) if effort.bounded else None, request.prove and effort.bounded
    effort = replace(effort, bounded=False)

    def hurry() -> bool:
        return request.clock() - begin > request.time_limit_s

    engine = Engine(
        tables, request.global_batch_sequences, request.deepest(tables.num_blocks), effort,
        hurry, request.mixed_microbatch, request.mixed_tp,
        least_pipelines=request.min_node_disjoint_holders,
    )  # fmt: skip
    known = [plan for plan in seeds if set(plan.workers) <= set(request.fleet.workers)]
    drafts = [d for d in (draft_of(tables, plan, request.fleet) for plan in known) if d is not None]
    rivals = [*grids(request, tables, engine.estimator), *rival_plans(request)]
    starts = drafts + [d for d in (draft_of(tables, p, request.fleet) for p in rivals) if d is not None]
    drafted_s = min(map(engine.estimator.draft_s, starts), default=math.inf)
    hasty = _may_assemble(request, tables)
    alike = alike_plans(request, tables, drafted_s, hasty=hasty)
    quickest = choose(request, alike)[0] if len(request.fleet.workers) > FEW_GPUS else None
    assembled = _assembled(request, tables, quickest, hurry) if hasty else None
    if not hasty and quickest is not None:
        quickest = _rehoused(request, quickest)
    if hasty and (assembled is None or quickest is None or not _far_before(assembled, quickest)):
        alike += alike_plans(request, tables, drafted_s)
        quickest = choose(request, alike)[0]
        quickest = None if quickest is None else _rehoused(request, quickest)
        if assembled and quickest and assembled.prediction.step_time_s >= quickest.prediction.step_time_s:
            assembled = None
    known_s = quickest.prediction.step_time_s if quickest else math.inf
    found = _NOTHING if assembled else engine.run(tuple(starts), known_s)
    apart = disjoint_plans(request, tables, engine.estimator) if request.min_node_disjoint_holders > 1 else []
    fewer = [] if hurry() or not effort.fewer else _without_slowest(request, tables, effort)
    plans = [
        *known,
        *_placed(request, tables, found),
        *rivals,
        *alike,
        *(costed.plan for costed in (quickest, assembled) if costed),
        *apart,
        *fewer,
    ]
    best, rejected = choose(request, plans)
    beside = companion() if companion is not None else None
    if beside is not None and beside.plans:
        best, more = choose(request, [*([best.plan] if best else []), *beside.plans])
        rejected += more
    if best is None:
        raise InfeasibleError(why_infeasible(request, tables, rejected))
    if len(request.fleet.workers) <= MOST_GPUS:
        best = _climb(request, best, lambda plan: interleaved(request, tables, engine.estimator, plan), _ROUNDS)
    if len(request.fleet.workers) <= FEW_GPUS:
        best = _anneal(request, tables, plans, best, effort.tries, hurry)
    elif len(request.fleet.workers) <= MOST_GPUS:
        best = _climb(request, best, early_shifts, _ROUNDS)
    if best.plan not in [costed.plan for costed in (quickest, assembled) if costed]:
        best = _rehoused(request, best)
    best = _share_anew(request, best)
    proof = prove(request, tables, best.prediction.step_time_s, hurry) if asked_bound else NO_PROOF
    report = SearchReport(
        request.clock() - begin, found.evaluated + len(plans), proof.lower_bound_s, proof.gap, proof.says
    )
    return Answer(
        "autohet", best.plan, best.prediction, report, tuple(rejected), idle_workers(request, tables, best.plan)
    )


def _may_assemble(request: Request, tables: Tables) -> bool:
    """Of many GPUs, where pipelines may be as unlike as generated ones are."""
    return len(request.fleet.workers) > ASSEMBLED_GPUS and request.mixed_tp and tables.begun_ahead > 1


def _far_before(one: Costed, other: Costed) -> bool:
    """By more than a hasty look at equal pipelines misses."""
    return one.prediction.step_time_s < _HASTY * other.prediction.step_time_s


def _assembled(request: Request, tables: Tables, known: Costed | None, hurry: Callable[[], bool]) -> Costed | None:
    """What generated pipelines make, where that is better than a known plan."""
    draft = None if known is None else draft_of(tables, known.plan, request.fleet)
    if known is None or draft is None:
        return None
    known_s = known.prediction.step_time_s
    found = (choose(request, [plan])[0] for plan in assembled_plans(request, tables, draft, known_s, hurry))
    shared = [_share_anew(request, _housed(request, costed)) for costed in found if costed is not None]
    best = min(shared, key=lambda costed: costed.prediction.step_time_s, default=None)
    if best is None or best.prediction.step_time_s >= known_s:
        return None
    return best if len(draft.pipelines) <= FEW else _share_anew(request, _rehoused(request, best))


def _without_slowest(request: Request, tables: Tables, effort: Effort) -> list[Plan]:
    """What a search without the node type of the slowest GPUs finds, of fleets of three types or more: tables rank what they use
    among the first. Not of few GPUs, where everything is looked at, nor of many, where that takes long."""
    if len(tables.resources) < 3 or not FEW_GPUS < len(request.fleet.workers) <= _FEWER_GPUS:
        return []
    speed = [0.0] * len(tables.resources)
    for row, whole_s in zip(tables.rows, tables.time_sums[:, -1], strict=True):
        kind = tables.kinds[row.kind]
        speed[kind.resource] = max(speed[kind.resource], row.microbatch / float(whole_s) / kind.tp_degree)
    slowest = tables.resources[speed.index(min(speed))].node_type
    nodes = tuple(node for node in request.fleet.nodes if node.node_type != slowest)
    smaller = narrowed(request, Fleet(request.fleet.generation, nodes))
    try:
        return [search_autohet(smaller, (), replace(effort, bounded=False, fewer=False)).plan]
    except InfeasibleError:
        return []


def _anneal(
    request: Request, tables: Tables, plans: Sequence[Plan], best: Costed, tries: int, hurry: Callable[[], bool]
) -> Costed:
    """The best that walks from the best plans of the most promising sets of depths meet."""

    def seconds(plan: Plan) -> float:
        prediction = request.cost.predict(plan)
        return math.inf if unacceptable(request, plan, prediction) else prediction.step_time_s

    annealer = Annealer(request, tables, seconds)
    starts: dict[tuple[int, ...], Plan] = {}
    for plan in sorted(dict.fromkeys([best.plan, *plans]), key=seconds):
        if seconds(plan) <= FAR_BEHIND * best.prediction.step_time_s:
            starts.setdefault(tuple(sorted(len(pipeline.stages) for pipeline in plan.pipelines)), plan)
    gpus, apart = len(request.fleet.workers), request.min_node_disjoint_holders > 1
    walks = _WALKS_APART if apart else _WALKS if gpus <= _FEWEST else 1
    several = itertools.islice(itertools.cycle(starts.values()), walks)
    walked = [annealer.walk(plan, tries // gpus, hurry) for plan in several]
    found = choose(request, [best.plan, *walked])[0] or best
    return min(best, found, key=lambda costed: costed.prediction.step_time_s)


def _rehoused(request: Request, best: Costed) -> Costed:
    """With the stages of each node type beside other ones."""
    return _climb(request, best, lambda plan: rehoused(plan, request.fleet), _ROUNDS)


def _housed(request: Request, best: Costed) -> Costed:
    """With stages exchanged between nodes, where NICs are done sooner then."""
    return _climb(request, best, lambda plan: [housed(plan, request.cost, request.fleet)], 1)


def _share_anew(request: Request, best: Costed) -> Costed:
    """Microbatches by what the placed pipelines take."""

    def shared(plan: Plan) -> Iterator[Plan]:
        yield rebalanced(plan, request.cost.pipelines_s(plan))

    return _climb(request, best, shared, _ROUNDS)


def _climb(request: Request, best: Costed, changes: Callable[[Plan], Iterable[Plan]], rounds: int) -> Costed:
    """The best change of a plan, of that again, until none is better."""
    for _ in range(rounds):
        moved, _ = choose(request, [best.plan, *changes(best.plan)])
        if moved is None or moved.prediction.step_time_s >= best.prediction.step_time_s * (1 - 1e-9):
            return best
        best = moved
    return best


def effort_for(gpus: int) -> Effort:
    """A large fleet gets fewer orders a column; a small one everything."""
    if gpus <= 64:
        return Effort(columns=40_000, exact=600, candidates=8 if gpus > FEW_GPUS else 2, packed=80)
    if gpus <= MOST_GPUS:
        return Effort(candidates=8)
    return Effort(packed=20, integer_program_nodes=40)  # larger programs find the same plans in twice the time


def _placed(request: Request, tables: Tables, found: Found) -> Iterator[Plan]:
    count = 0
    for _, draft in found.drafts:
        plan = place(tables, draft, request.spec.name, request.global_batch_sequences, request.sequence_length)
        if plan is not None and _too_few_holders(request, plan) is None:
            yield plan
            count += 1
        if count == (CANDIDATES if len(request.fleet.workers) > FEW_GPUS else 4 * CANDIDATES):
            return


def choose(request: Request, plans: Iterable[Plan]) -> tuple[Costed | None, list[Rejected]]:
    """The plan with the least predicted step time among those that fit memory, price and redundancy; the first of
    equals. Where transfers run beside the work, stages work ahead as far as helps.
    """
    best: Costed | None = None
    rejected: list[Rejected] = []
    seen: set[Plan] = set()
    for each in plans:
        plan = settled(request.cost, each)
        if plan in seen:
            continue
        seen.add(plan)
        check_plan(plan, request.spec.num_layers)
        prediction = request.cost.predict(plan)
        why = unacceptable(request, plan, prediction)
        if why is not None:
            rejected.append(Rejected(describe(plan), why))
        elif best is None or prediction.step_time_s < best.prediction.step_time_s * (1 - 1e-9):
            if best is not None:
                rejected.append(
                    Rejected(
                        describe(best.plan), f"{best.prediction.step_time_s:.4g} s a step, slower than the chosen plan"
                    )
                )
            best = Costed(plan, prediction)
        else:
            rejected.append(
                Rejected(describe(plan), f"{prediction.step_time_s:.4g} s a step, slower than the chosen plan")
            )
    if best is not None:
        plan = least_ahead(request.cost, best.plan)
        best = Costed(plan, request.cost.predict(plan))
    return best, rejected


def unacceptable(request: Request, plan: Plan, prediction: Prediction) -> str | None:
    """Why a plan may not be chosen, or None."""
    if not prediction.fits:
        worker, share = prediction.tightest_worker
        return f"worker {worker} would need {share:.0%} of its memory"
    limit, price = request.max_usd_per_hour, prediction.usd_per_hour
    if limit is not None and price is not None and price > limit:
        return f"{price:.2f} $/h, above the limit of {limit:.2f}"
    deepest = max(len(pipeline.stages) for pipeline in plan.pipelines)
    if request.max_stages is not None and deepest > request.max_stages:
        return f"{deepest} stages, at most {request.max_stages} are asked for"
    degrees = {stage.tp_degree for pipeline in plan.pipelines for stage in pipeline.stages}
    if not request.mixed_tp and len(degrees) > 1:
        return f"TP {_either(sorted(degrees))}, one degree is asked for"
    sizes = {pipeline.microbatch_sequences for pipeline in plan.pipelines}
    if not request.mixed_microbatch and len(sizes) > 1:
        return f"microbatches of {_either(sorted(sizes))} sequences, one size is asked for"
    return _too_few_holders(request, plan)


def _too_few_holders(request: Request, plan: Plan) -> str | None:
    """That some layer lies on fewer nodes than asked for, or None."""
    wanted = request.min_node_disjoint_holders
    if wanted < 2:
        return None
    weakest = redundancy(plan, request.fleet, request.spec.num_layers).weakest
    return f"some layer lies on {weakest} node only, {wanted} are asked for" if weakest < wanted else None


def describe(plan: Plan) -> str:
    """A plan in a few words."""
    depths = sorted({len(pipeline.stages) for pipeline in plan.pipelines})
    degrees = sorted({stage.tp_degree for pipeline in plan.pipelines for stage in pipeline.stages})
    sizes = sorted({pipeline.microbatch_sequences for pipeline in plan.pipelines})
    text = [
        f"{len(plan.pipelines)} pipelines",
        f"{_either(depths)} stages",
        f"TP {_either(degrees)}",
        f"microbatch {_either(sizes)}",
    ]
    return ", ".join(text)


def _either(numbers: list[int]) -> str:
    return "/".join(map(str, numbers))


def idle_workers(request: Request, tables: Tables, plan: Plan) -> tuple[Idle, ...]:
    """What the plan leaves unused, by node type, with the reason."""
    used = set(plan.workers)
    usable = {tables.kinds[row.kind].resource for row in tables.rows}
    out = []
    for index, resource in enumerate(tables.resources):
        workers = tuple(
            f"{name}/{gpu}"
            for name in resource.node_names
            for gpu in range(resource.node_type.num_gpus)
            if f"{name}/{gpu}" not in used
        )
        if not workers:
            continue
        gpu = resource.node_type.gpu_type
        if index not in usable:
            why = f"{resource.node_type.gpu_memory_bytes / GIB:.0f} GiB of a {gpu} hold no layer of this model at any allowed TP degree"
        elif not any(node_of(worker) in resource.node_names for worker in used):
            why = f"a stage on {gpu} would slow its pipeline or the gradient sync more than it would add"
        else:
            why = f"{len(workers)} {gpu} left over: neither one more pipeline nor one more stage with them shortens the step"
        out.append(Idle(workers, why))
    return tuple(out)


def why_infeasible(request: Request, tables: Tables, rejected: Sequence[Rejected] = ()) -> str:
    """The tightest limit and by how much it is broken; where plans were found but refused, why the first of them was."""
    wanted = request.min_node_disjoint_holders
    if wanted > len(request.fleet.nodes):
        count = len(request.fleet.nodes)
        return (
            f"every layer is asked for on {wanted} nodes (min_pipelines or redundancy), but the fleet has {count},"
            f" {wanted - count} too few"
        )
    if request.max_usd_per_hour is not None:
        prices = [r.node_type.usd_per_hour for r in tables.resources if r.node_type.usd_per_hour is not None]
        if prices and min(prices) > request.max_usd_per_hour:
            over = min(prices) - request.max_usd_per_hour
            return f"the cheapest node costs {min(prices):.2f} $/h, {over:.2f} above max_usd_per_hour"
    if rejected:
        return f"every plan found is refused, the first ({rejected[0].what}) since {rejected[0].why}"
    have = sum(r.num_gpus * float(r.node_type.gpu_memory_bytes) for r in tables.resources)
    need = []
    for row in tables.rows:
        kind = tables.kinds[row.kind]
        room = (row.limit_bytes - row.fixed_bytes) / row.limit_bytes
        whole = float(row.state_bytes.sum() + row.activation_bytes.sum() - row.tied_bytes) * kind.tp_degree
        need.append((whole / room, kind.tp_degree, row.microbatch))
    least, tp, size = min(need)
    lack = (
        f"{(least - have) / GIB:.1f} GiB too little"
        if least > have
        else "enough in sum, but no cut of the layers fits each GPU"
    )
    return (
        f"the model does not fit: with TP {tp} and microbatch {size} one copy needs {least / GIB:.1f} GiB of GPU memory, the fleet's"
        f" {sum(r.num_gpus for r in tables.resources)} GPUs have {have / GIB:.1f} GiB:"
        f" {lack}. Add GPUs, or use recomputation or a shorter sequence"
    )
