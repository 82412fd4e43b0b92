"""The strategy `exhaustive`: every plan of a small case, costed in full.

It is an independent judge of the other strategies.

A plan is a set of pipelines; a pipeline is a sequence of tensor-parallel groups, each of some GPUs
of one node, with a cut of the blocks, a microbatch size and a number of microbatches. All of them
are tried: every placement, up to exchanges of equal nodes and of the GPUs of a node; every size
that divides the batch or is a power of two; every number of microbatches in flight that the cost
model offers. What is left out is proved to be slower than the best plan so far: a pipeline's stages
alone, without transfers and sums, take longer. Nothing here comes from a search that it judges. The
one exception is whether there is something that it does not try: stages have even shares and do for
memory what the cost model assumes.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.errors import ConfigError, InfeasibleError
from planner.inputs.fleet import Node, NodeType
from planner.plans.plan import Pipeline, Plan, Stage
from planner.plans.plan_checks import check_plan
from planner.plans.redundancy import redundancy
from planner.search.problem import limits
from planner.search.problem.cost_tables import microbatch_sizes
from planner.search.problem.request import (
    TIME_IS_OVER,
    Answer,
    Rejected,
    Request,
    SearchReport,
    check_request,
)
from planner.strategies.autohet_uneven import uneven_groups
from planner.strategies.staged import differences

_Groups = tuple[tuple[int, int], ...]  # of each stage: number of the node, TP degree


@dataclass(frozen=True, slots=True, order=True)
class _Load:
    """Option of one pipeline: blocks of each stage, microbatch size and number of microbatches.

    least_s: seconds that its stages alone take, a lower bound.
    """

    blocks: tuple[int, ...]
    size: int
    count: int
    least_s: float


def search_exhaustive(request: Request) -> Answer:
    """Return the best of all plans. ConfigError if the case is not small."""
    begin = request.clock()
    check_request(request)
    _check_small(request)
    every = _Every(request)
    alone_s: list[float] = []
    for loads in every.loads.values():
        alone_s += [load.least_s for load in loads]

    # plans in rounds, by what their stages alone take: once that is as much as the best plan's
    # step, no plan of a later round can be better
    best = None
    seconds = float("inf")
    limit = 0.0
    looked_at = min(alone_s, default=float("inf"))
    longest_s = max(alone_s, default=0.0)
    while limit < seconds and limit < longest_s:
        for plan in every.plans(limit, looked_at):
            if best is not None and request.is_late:
                return _answer_at_deadline(every, best, begin)
            step_s, way = every.best(plan)
            # of plans that are equal but for rounding the first one stays
            if step_s < seconds * (1 - 1e-12):
                best = way
                seconds = step_s
        limit = looked_at
        looked_at = looked_at * limits.WIDER

    if best is None:
        remedies = "a shorter sequence"
        remedy = every.request.cost.choices.remedy
        if remedy:
            remedies = f"{remedy} or {remedies}"
        raise InfeasibleError(
            f"none of {every.count} plans fits memory; add GPUs, or use {remedies}"
        )
    report = _report(every, seconds, request.clock() - begin)
    return Answer("exhaustive", best, request.cost.predict(best), report)


def _report(every: "_Every", step_s: float, seconds: float) -> SearchReport:
    """Return the report of a search that came to its end with a plan of `step_s` seconds."""
    request = every.request
    tried_all = request.cost.choices.is_fixed and not uneven_groups(request)
    if not tried_all:
        says = "no lower bound (uneven shares and memory choices were not tried)"
        return SearchReport(seconds, every.count, None, None, says)

    says = "no plan of the searched family, under this cost model, is faster: all were tried"
    return SearchReport(seconds, every.count, step_s, 0.0, says)


def _answer_at_deadline(every: "_Every", best: Plan, begin_s: float) -> Answer:
    """Return the best plan at the deadline; nothing is proved of it."""
    request = every.request
    placements = len(every.placements)
    left = placements - every.num_placed
    what = f"{left} of {placements} placements of the last round"
    says = f"no lower bound (the time limit was over after {every.count} plans)"
    report = SearchReport(request.clock() - begin_s, every.count, None, None, says)
    rejected = (Rejected(what, TIME_IS_OVER),)
    return Answer("exhaustive", best, request.cost.predict(best), report, rejected)


def _check_small(request: Request) -> None:
    most_gpus, most_layers, most_sequences = limits.EXHAUSTIVE
    sizes = (
        ("GPUs", len(request.fleet.workers), most_gpus),
        ("layers", request.spec.num_layers, most_layers),
        ("sequences in the global batch", request.global_batch_sequences, most_sequences),
    )
    for what, have, limit in sizes:
        if have > limit:
            raise ConfigError(
                f"strategy exhaustive takes at most {limit} {what}, not {have}; use autohet"
            )


class _Every:
    """Enumeration of all plans of a request.

    count: plans costed so far. num_placed: placements that this round has come to.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.count = 0
        self.num_placed = 0
        self.nodes = [node for node in request.fleet.nodes if node.node_type.num_gpus]

    @cached_property
    def placements(self) -> list[tuple[_Groups, ...]]:
        """Sets of pipelines that the nodes can hold.

        Of the sets that an exchange of equal nodes makes of each other, there is one.
        """
        free = [node.node_type.num_gpus for node in self.nodes]
        pipelines = sorted(self._pipelines(free))
        found = list[tuple[_Groups, ...]]()
        seen = set[tuple[_Groups, ...]]()

        def extend(chosen: tuple[_Groups, ...], first: int, left: Sequence[int]) -> None:
            same = _canonical(chosen, self.nodes)
            if chosen and same not in seen:
                seen.add(same)
                found.append(chosen)

            # from the last one's index on, since a set of pipelines has no order
            for index in range(first, len(pipelines)):
                rest = list(left)
                for node, degree in pipelines[index]:
                    rest[node] -= degree
                if min(rest) >= 0:
                    extend((*chosen, pipelines[index]), index, rest)

        extend((), 0, free)
        return found

    def _pipelines(self, free: Sequence[int]) -> Iterator[_Groups]:
        """Yield every sequence of groups, no more of them than blocks."""
        request = self.request
        top = request.highest_tp_degree
        # no higher ones, since there are five GPUs at most
        degrees = [degree for degree in (1, 2, 4) if degree <= top]

        def extend(groups: _Groups, left: Sequence[int]) -> Iterator[_Groups]:
            if groups:
                yield groups
            if len(groups) == request.deepest:
                return
            for node, degree in itertools.product(range(len(left)), degrees):
                if degree <= left[node]:
                    rest = list(left)
                    rest[node] -= degree
                    yield from extend((*groups, (node, degree)), rest)

        return extend((), free)

    @cached_property
    def loads(self) -> dict[_Groups, list[_Load]]:
        """Options of each pipeline."""
        every = set(itertools.chain.from_iterable(self.placements))
        return {groups: list(self._loads(groups)) for groups in every}

    def _loads(self, groups: _Groups) -> Iterator[_Load]:
        batch = self.request.global_batch_sequences
        num_blocks = self.request.spec.num_layers
        for cut in itertools.combinations(range(1, num_blocks), len(groups) - 1):
            ends = (0, *cut, num_blocks)
            blocks = tuple(differences(ends))
            for size in microbatch_sizes(self.request):
                pipeline = self._pipeline(groups, blocks, size, 1, Counter())
                work = []
                for stage in range(len(groups)):
                    forward_s, backward_s = self.request.cost.stages.seconds(pipeline, stage)
                    work.append(forward_s + backward_s)
                for count in range(1, batch // size + 1):
                    yield _Load(blocks, size, count, _least_s(work, count))

    def _pipeline(
        self, groups: _Groups, blocks: tuple[int, ...], size: int, count: int, taken: Counter[int]
    ) -> Pipeline:
        """Place a pipeline on the first GPUs of each node that are not `taken`; add them to it."""
        stages = []
        first = 0
        for (node, degree), number in zip(groups, blocks, strict=True):
            workers = self.nodes[node].workers[taken[node] : taken[node] + degree]
            taken[node] += degree
            stages.append(Stage(first, number, tuple(workers)))
            first += number
        return Pipeline(tuple(stages), count, size)

    def plans(self, above_s: float, limit_s: float) -> Iterator[Plan]:
        """Yield the plans whose slowest pipeline takes between `above_s` and `limit_s` seconds.

        That is the time of its stages alone: more than `above_s`, at most `limit_s`.
        """
        for number, placement in enumerate(self.placements):
            self.num_placed = number
            options = []
            for groups in placement:
                options.append([load for load in self.loads[groups] if load.least_s <= limit_s])
            for loads in _shares(options, self.request.global_batch_sequences):
                slowest_s = max(load.least_s for load in loads)
                if slowest_s > above_s and not _is_exchanged(placement, loads):
                    yield self._plan(placement, loads)

    def _plan(self, placement: tuple[_Groups, ...], loads: tuple[_Load, ...]) -> Plan:
        request = self.request
        taken = Counter[int]()
        pipelines = [
            self._pipeline(groups, load.blocks, load.size, load.count, taken)
            for groups, load in zip(placement, loads, strict=True)
        ]
        return Plan(
            request.spec.name,
            request.global_batch_sequences,
            loads[0].size,
            request.sequence_length,
            tuple(pipelines),
        )

    def best(self, plan: Plan) -> tuple[float, Plan]:
        """Return the least step time with any number of microbatches in flight, and the plan.

        Infinite if the plan may not be.
        """
        best_s = float("inf")
        best = plan
        for way in self.request.cost.stage_choices.ways_ahead(plan):
            self.count += 1
            check_plan(way, self.request.spec.num_layers)
            prediction = self.request.cost.predict(way)
            is_faster = prediction.step_time_s < best_s
            if is_faster and prediction.fits and self._is_wanted(way, prediction.usd_per_hour):
                best_s = prediction.step_time_s
                best = way
        return best_s, best

    def _is_wanted(self, plan: Plan, usd_per_hour: float | None) -> bool:
        """Return True if a plan meets the request's limits other than memory and depth."""
        request = self.request
        limit = request.max_usd_per_hour
        if limit is not None and usd_per_hour is not None and usd_per_hour > limit:
            return False

        holders = request.min_node_disjoint_holders
        if holders < 2:
            return True
        return redundancy(plan, request.fleet, request.spec.num_layers).weakest >= holders


def _least_s(work: Sequence[float], count: int) -> float:
    """Return the least seconds of `count` microbatches through stages that take `work` each."""
    least_s = sum(work)
    for stage, each in enumerate(work):
        before_s = sum(work[:stage])
        least_s = max(least_s, before_s + count * each)
    return least_s


def _is_exchanged(placement: Sequence[_Groups], loads: Sequence[_Load]) -> bool:
    """Return True if the loads of two equal neighbours ascend.

    The same plan with these loads exchanged is tried as well.
    """
    for index in range(1, len(placement)):
        is_twin = placement[index] == placement[index - 1]
        if is_twin and loads[index - 1] < loads[index]:
            return True
    return False


def _canonical(placement: Sequence[_Groups], nodes: Sequence[Node]) -> tuple[_Groups, ...]:
    """Return the least of what exchanges of equal nodes make of a placement."""
    by_type: dict[NodeType, list[int]] = {}
    for number, node in enumerate(nodes):
        by_type.setdefault(node.node_type, []).append(number)
    numbers = [*itertools.chain(*by_type.values())]
    orders = [itertools.permutations(alike) for alike in by_type.values()]

    least = None
    for exchange in itertools.product(*orders):
        name = dict(zip(numbers, itertools.chain(*exchange), strict=True))
        renamed = []
        for groups in placement:
            renamed.append(tuple((name[node], degree) for node, degree in groups))
        candidate = tuple(sorted(renamed))
        if least is None or candidate < least:
            least = candidate
    assert least is not None
    return least


def _shares(options: Sequence[Sequence[_Load]], sequences: int) -> Iterator[tuple[_Load, ...]]:
    """Yield one load per pipeline, so that all together take `sequences` sequences."""
    if not options:
        if sequences == 0:
            yield ()
        return

    first, *further = options
    for load in first:
        left = sequences - load.size * load.count
        # a sequence at least for each of the others
        if left >= len(further):
            for others in _shares(further, left):
                yield (load, *others)
