"""The strategy `hap`: one SPMD program over all GPUs, or over the faster ones of them.

Each GPU has a share as it can carry.

Zhang et al., "HAP: SPMD DNN training on heterogeneous GPU clusters with automated program
synthesis", EuroSys'24; `planner/spmd/README.md` says what differs. No pipelines:
every layer lies on every GPU of the plan, whole or in part.
"""

from collections.abc import Callable, Iterator

from planner.cost.prediction import Prediction
from planner.errors import InfeasibleError
from planner.inputs.fleet import NodeType
from planner.plans.plan import Pipeline, Plan, Stage
from planner.search.problem import limits
from planner.search.problem.request import (
    NOT_LOOKED_AT,
    Answer,
    Rejected,
    Request,
    SearchReport,
    check_request,
)
from planner.search.walk.judge import unacceptable
from planner.spmd.costs import CostTable
from planner.spmd.document import StageProgram
from planner.spmd.graph import WHOLE
from planner.spmd.plan import SpmdPlan, synthesize


def search_hap(request: Request) -> Answer:
    """Return the fastest program found.

    Raises:
        InfeasibleError: none fits the fleet, or the model's graph is not known.
    """
    check_request(request)
    begin = request.clock()
    evaluated = 0
    best: Prediction | None = None
    rejected: list[Rejected] = []

    def is_late() -> bool:
        return request.is_late or request.clock() - begin > request.time_limit_s

    for workers in _subsets(request):
        if best is not None and is_late():
            over = f"{NOT_LOOKED_AT}: {request.time_limit_s:g} s were over"
            rejected.append(Rejected("programs on fewer GPUs", over))
            break
        for plan in _plans(request, workers, rejected, is_late):
            evaluated += 1
            prediction = request.cost.predict(plan)
            step_s = prediction.step_time_s
            why = unacceptable(request, plan, prediction)
            if why is None and best is not None and step_s >= best.step_time_s:
                why = f"{step_s:.4g} s a step, slower than the chosen plan"
            if why is not None:
                rejected.append(Rejected(_describe(plan), why))
                continue
            if best is not None and best.plan is not None:
                rejected.append(Rejected(_describe(best.plan), "slower than the chosen plan"))
            best = prediction

    if best is None or best.plan is None:
        why = rejected[0].why if rejected else "the fleet has no GPU"
        raise InfeasibleError(f"hap finds no program: {why}")
    report = SearchReport(request.clock() - begin, evaluated, None, None)
    answer = Answer("hap", best.plan, best, report, tuple(rejected))
    left = request.workers_beside(set(best.plan.workers))
    why = "with a share for them the program takes longer, or they hold none of it"
    return answer.add_idle(left, why)


def _subsets(request: Request) -> Iterator[tuple[str, ...]]:
    """Yield workers of the whole fleet, of its fastest types, and of one node of each type.

    Slow links may make fewer GPUs faster. GPU types that do not compute in the job's precision are
    left out: a program has one format.
    """
    nodes = []
    for node in request.fleet.nodes:
        has_another_format = node.node_type.gpu_type in request.cost.formats
        if node.workers and not has_another_format:
            nodes.append(node)
    if not nodes:
        raise InfeasibleError(
            f"no GPU type of the fleet computes in {request.cost.precision}, and an SPMD program"
            " has one format; use a strategy with pipelines (autohet, metis, fasop)"
        )

    seconds: dict[NodeType, float] = {}
    workers_of_one: dict[NodeType, tuple[str, ...]] = {}
    for node in nodes:
        if node.node_type not in seconds:
            costs = request.cost.layers.costs(node.node_type, 1, 1)
            forward_s = costs.forward_s.sum()
            backward_s = costs.backward_s.sum()
            seconds[node.node_type] = float(forward_s + backward_s)
            workers_of_one[node.node_type] = node.workers

    found: dict[tuple[str, ...], None] = {}
    slowest_first = sorted(set(seconds.values()), reverse=True)
    for limit in slowest_first:
        workers: list[str] = []
        for node in nodes:
            if seconds[node.node_type] <= limit:
                workers += node.workers
        found[tuple(workers)] = None
    found.update(dict.fromkeys(workers_of_one.values()))
    yield from found


def _plans(
    request: Request,
    workers: tuple[str, ...],
    rejected: list[Rejected],
    is_late: Callable[[], bool],
) -> Iterator[Plan]:
    """Yield a program on all the workers, with the fewest microbatches that fit.

    If it leaves some of them idle, a program on the others alone follows.
    """
    passes = _passes(request)
    tried = 0
    for count in passes:
        size = request.global_batch_sequences // count
        decoder = request.cost.programs.decoder(size)
        table = request.cost.programs.table(decoder.graph, workers, size, count)
        # the last one is tried in any case, since its refusal says why nothing fits
        cannot_fit = table.least_bytes > table.limits.sum()
        if cannot_fit and count != passes[-1]:
            continue

        tried += 1
        try:
            found = _synthesize(request, table, dict(decoder.split_dims), is_late)
        except InfeasibleError as error:
            what = f"one program on {len(workers)} GPUs, {count} microbatches"
            rejected.append(Rejected(what, str(error)))
            if tried == limits.TRIED_PASSES:
                return
            continue

        busy = []
        is_any_rounded_away = False
        for rank, worker in enumerate(workers):
            if not found.idle(rank):
                busy.append(worker)
            elif found.shares.ratios[0][rank]:
                is_any_rounded_away = True
        if not is_any_rounded_away:
            yield _plan(request, workers, count, found)
        if len(busy) < len(workers):
            yield from _plans(request, tuple(busy), rejected, is_late)
        return


def _passes(request: Request) -> list[int]:
    """Return the numbers of microbatches that divide the batch, or the one asked for."""
    batch = request.global_batch_sequences
    size = request.microbatch_sequences
    if size is not None:
        return [batch // size] if batch % size == 0 else []
    most = min(batch, limits.MOST_PASSES)
    return [count for count in range(1, most + 1) if batch % count == 0]


def _synthesize(
    request: Request, table: CostTable, pinned: dict[str, int], is_late: Callable[[], bool]
) -> SpmdPlan:
    """Synthesize the fastest program with one set of ratios, or with two if memory is short.

    With two sets, the shares of state need not follow those of samples. If layers must be held on
    several nodes, each worker holds the whole state.
    """
    if request.min_node_disjoint_holders > 1:
        pinned = dict.fromkeys(pinned, WHOLE)

    try:
        first = synthesize(table, 1, pinned, is_late=is_late)
    except InfeasibleError:
        return synthesize(table, 2, pinned, is_late=is_late)
    if is_late() or not first.is_short:
        return first

    try:
        second = synthesize(table, 2, pinned, is_late=is_late)
    except InfeasibleError:
        return first
    return min(first, second, key=lambda plan: plan.seconds)


def _plan(request: Request, workers: tuple[str, ...], count: int, found: SpmdPlan) -> Plan:
    batch = request.global_batch_sequences
    size = batch // count
    stage = Stage(0, request.spec.num_layers, workers, spmd=StageProgram.of(found))
    pipeline = Pipeline((stage,), count, size)
    return Plan(request.spec.name, batch, size, request.sequence_length, (pipeline,))


def _describe(plan: Plan) -> str:
    count = plan.pipelines[0].num_microbatches
    return f"one program on {len(plan.workers)} GPUs, {count} microbatches"
