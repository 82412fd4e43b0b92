"""The strategy `hap`: one SPMD program over all GPUs, or the faster ones of them, with a share for
each as it can carry.

Zhang et al., "HAP: SPMD DNN training on heterogeneous GPU clusters with automated program
synthesis", EuroSys'24; what differs from it is said in `planner/spmd/README.md`. No pipelines:
every layer lies on every GPU of the plan, whole or in part.
"""

from collections.abc import Callable, Iterator

from planner.cost.prediction import Prediction
from planner.errors import InfeasibleError
from planner.plan import Pipeline, Plan, Stage
from planner.search import limits
from planner.search.judge import unacceptable
from planner.search.problem import (
    NOT_LOOKED_AT,
    Answer,
    Idle,
    Rejected,
    Request,
    SearchReport,
    check_request,
)
from planner.spmd.costs import CostTable
from planner.spmd.decoder import WHOLE
from planner.spmd.document import StageProgram
from planner.spmd.fleet import decoder_of, table_of
from planner.spmd.plan import SpmdPlan, synthesize


def search_hap(request: Request) -> Answer:
    """The fastest program found.

    InfeasibleError where none fits the fleet, or the model's graph is not known.
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
            why = unacceptable(request, plan, prediction)
            if why is None and best is not None and prediction.step_time_s >= best.step_time_s:
                why = f"{prediction.step_time_s:.4g} s a step, slower than the chosen plan"
            if why is not None:
                rejected.append(Rejected(_described(plan), why))
                continue
            if best is not None and best.plan is not None:
                rejected.append(Rejected(_described(best.plan), "slower than the chosen plan"))
            best = prediction
    if best is None or best.plan is None:
        raise InfeasibleError(
            f"hap finds no program: {rejected[0].why if rejected else 'the fleet has no GPU'}"
        )
    report = SearchReport(request.clock() - begin, evaluated, None, None)
    return Answer("hap", best.plan, best, report, tuple(rejected), _idle(request, best.plan))


def _subsets(request: Request) -> Iterator[tuple[str, ...]]:
    """Workers of the whole fleet, of its fastest types, and of one node of each type: slow links
    may make fewer GPUs faster.

    GPU types that do not compute in the job's precision are left out: a program has one format.
    """
    with_gpus = [node for node in request.fleet.nodes if node.workers]
    formats = request.cost.formats
    nodes = [node for node in with_gpus if node.node_type.gpu_type not in formats]
    if not nodes:
        raise InfeasibleError(
            f"no GPU type of the fleet computes in {request.cost.precision}, and an SPMD program"
            " has one format; use a strategy with pipelines (autohet, metis, fasop)"
        )
    found: dict[tuple[str, ...], None] = {}
    seconds = {}
    for kind in dict.fromkeys(node.node_type for node in nodes):
        costs = request.cost.layers.costs(kind, 1, 1)
        seconds[kind] = float(costs.forward_s.sum() + costs.backward_s.sum())
    for limit in sorted(set(seconds.values()), reverse=True):
        found[
            tuple(w for node in nodes if seconds[node.node_type] <= limit for w in node.workers)
        ] = None
    for kind in seconds:
        found[next(node.workers for node in nodes if node.node_type == kind)] = None
    yield from found


def _plans(
    request: Request,
    workers: tuple[str, ...],
    rejected: list[Rejected],
    is_late: Callable[[], bool],
) -> Iterator[Plan]:
    batch = request.global_batch_sequences
    passes = [count for count in range(1, min(batch, limits.MOST_PASSES) + 1) if batch % count == 0]
    if request.microbatch_sequences is not None:
        passes = (
            [batch // request.microbatch_sequences]
            if batch % request.microbatch_sequences == 0
            else []
        )
    tried = 0
    for count in passes:
        decoder = decoder_of(request.cost, batch // count)
        table = table_of(request.cost, decoder.graph, workers, batch // count, count)
        if count != passes[-1] and table.least_bytes > table.limits.sum():
            continue
        tried += 1
        try:
            found = _synthesized(request, table, dict(decoder.split_dims), is_late)
        except InfeasibleError as error:
            rejected.append(
                Rejected(f"one program on {len(workers)} GPUs, {count} microbatches", str(error))
            )
        else:
            busy = tuple(worker for rank, worker in enumerate(workers) if not found.idle(rank))
            if busy == workers or not any(
                found.shares.ratios[0][workers.index(w)] for w in workers if w not in busy
            ):
                yield _plan(request, workers, count, found)
            if len(busy) < len(workers):
                yield from _plans(request, busy, rejected, is_late)
            return
        if tried == limits.TRIED_PASSES:
            return


def _synthesized(
    request: Request, table: CostTable, pinned: dict[str, int], is_late: Callable[[], bool]
) -> SpmdPlan:
    """Synthesize the fastest program with one set of ratios, or with two if memory is short.

    With two sets, the shares of state need not follow those of samples. If layers must be held on
    several nodes, each worker holds the whole state.
    """
    if request.min_node_disjoint_holders > 1:
        pinned = dict.fromkeys(pinned, WHOLE)
    found = list[SpmdPlan]()
    refused = None
    for segments in (1, 2):
        if found and (is_late() or not all(plan.is_short for plan in found)):
            break
        try:
            found.append(synthesize(table, segments, pinned, is_late=is_late))
        except InfeasibleError as error:
            refused = error
    if not found:
        assert refused is not None
        raise refused
    return min(found, key=lambda plan: plan.seconds)


def _plan(request: Request, workers: tuple[str, ...], count: int, found: SpmdPlan) -> Plan:
    batch = request.global_batch_sequences
    size = request.global_batch_sequences // count
    stage = Stage(0, request.spec.num_layers, workers, spmd=StageProgram.of(found))
    return Plan(
        request.spec.name, batch, size, request.sequence_length, (Pipeline((stage,), count, size),)
    )


def _described(plan: Plan) -> str:
    return (
        f"one program on {len(plan.workers)} GPUs, {plan.pipelines[0].num_microbatches}"
        " microbatches"
    )


def _idle(request: Request, plan: Plan) -> tuple[Idle, ...]:
    left = tuple(worker for worker in request.fleet.workers if worker not in set(plan.workers))
    return (
        (Idle(left, "with a share for them the program takes longer, or they hold none of it"),)
        if left
        else ()
    )
