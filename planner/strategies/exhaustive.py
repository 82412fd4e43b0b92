"""The strategy `exhaustive`: every plan of a small case, costed in full; an independent judge of
the other strategies.

A plan is a set of pipelines; a pipeline is a sequence of tensor-parallel groups, each of some GPUs
of one node, with a cut of the blocks, a microbatch size and a number of microbatches. All of them
are tried: every placement, up to exchanges of equal nodes and of the GPUs of a node; every size
that divides the batch or is a power of two; every number of microbatches in flight that the cost
model offers. What is left out is proved to be slower than the best plan so far: a pipeline's stages
alone, without transfers and sums, take longer. Nothing here comes from a search that it judges, but
for whether there is something that it does not try: stages have even shares and do for memory what
the cost model assumes.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.cluster import Node
from planner.errors import ConfigError, InfeasibleError
from planner.plan import Pipeline, Plan, Stage, check_plan
from planner.redundancy import redundancy
from planner.search import limits
from planner.search.problem import (
    TIME_IS_OVER,
    Answer,
    Rejected,
    Request,
    SearchReport,
    check_request,
)
from planner.uneven import uneven_groups

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
    """The best of all plans. ConfigError where the case is not small."""
    begin = request.clock()
    check_request(request)
    _check_small(request)
    every = _Every(request)
    alone_s = [load.least_s for loads in every.loads.values() for load in loads]
    best = None
    seconds = float("inf")
    limit = 0.0
    looked_at = min(alone_s, default=float("inf"))
    while limit < seconds and limit < max(alone_s, default=0.0):
        for plan in every.plans(limit, looked_at):
            if best is not None and request.is_late:
                return _cut(every, best, begin)
            step_s, way = every.best(plan)
            if step_s < seconds * (1 - 1e-12):
                best = way
                seconds = step_s
        limit = looked_at
        looked_at = looked_at * limits.WIDER
    if best is None:
        remedies = " or ".join(filter(None, (request.cost.choices.remedy, "a shorter sequence")))
        raise InfeasibleError(
            f"none of {every.count} plans fits memory; add GPUs, or use {remedies}"
        )
    bound = None
    gap = None
    says = "unproved: uneven shares and memory choices were not tried"
    if request.cost.choices.is_fixed and not uneven_groups(request):
        bound = seconds
        gap = 0.0
        says = "no plan of the searched family, under this cost model, is faster: all were tried"
    report = SearchReport(request.clock() - begin, every.count, bound, gap, says)
    return Answer("exhaustive", best, request.cost.predict(best), report)


def _cut(every: "_Every", best: Plan, begin_s: float) -> Answer:
    """Return the best plan at the deadline; nothing is proved of it."""
    request = every.request
    left = len(every.placements) - every.num_placed
    what = f"{left} of {len(every.placements)} placements of the last round"
    says = f"unproved: the time limit was over after {every.count} plans"
    report = SearchReport(request.clock() - begin_s, every.count, None, None, says)
    rejected = (Rejected(what, TIME_IS_OVER),)
    return Answer("exhaustive", best, request.cost.predict(best), report, rejected)


def _check_small(request: Request) -> None:
    sizes = (len(request.fleet.workers), request.spec.num_layers, request.global_batch_sequences)
    for what, have, limit in zip(
        ("GPUs", "layers", "sequences in the global batch"), sizes, limits.EXHAUSTIVE, strict=True
    ):
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
        """Sets of pipelines that the nodes can hold, one of those that equal nodes' exchange makes
        of each other.
        """
        free = [node.node_type.num_gpus for node in self.nodes]
        pipelines, found, seen = (
            sorted(self._pipelines(free)),
            list[tuple[_Groups, ...]](),
            set[tuple[_Groups, ...]](),
        )

        def extend(chosen: tuple[_Groups, ...], first: int, left: Sequence[int]) -> None:
            same = _canonical(chosen, self.nodes)
            if chosen and same not in seen:
                seen.add(same)
                found.append(chosen)
            for index in range(first, len(pipelines)):
                used = Counter[int]()
                for node, degree in pipelines[index]:
                    used[node] += degree
                if all(used[node] <= left[node] for node in used):
                    rest = [have - used[node] for node, have in enumerate(left)]
                    extend((*chosen, pipelines[index]), index, rest)

        extend((), 0, free)
        return found

    def _pipelines(self, free: Sequence[int]) -> Iterator[_Groups]:
        """Every sequence of groups, no more of them than blocks."""
        request = self.request
        top = min(request.spec.max_tp_degree, request.max_tp_degree or request.spec.max_tp_degree)
        degrees = [degree for degree in (1, 2, 4) if request.min_tp_degree <= degree <= top]
        deepest = min(request.spec.num_layers, request.max_stages or request.spec.num_layers)

        def extend(groups: _Groups, left: Sequence[int]) -> Iterator[_Groups]:
            if groups:
                yield groups
            for node, degree in itertools.product(range(len(left)), degrees):
                if len(groups) < deepest and degree <= left[node]:
                    rest = [have - degree * (other == node) for other, have in enumerate(left)]
                    yield from extend((*groups, (node, degree)), rest)

        return extend((), free)

    @cached_property
    def loads(self) -> dict[_Groups, list[_Load]]:
        """Options of each pipeline."""
        every = {groups for placement in self.placements for groups in placement}
        return {groups: list(self._loads(groups)) for groups in every}

    def _loads(self, groups: _Groups) -> Iterator[_Load]:
        batch = self.request.global_batch_sequences
        blocks = self.request.spec.num_layers
        for cut in itertools.combinations(range(1, blocks), len(groups) - 1):
            of = tuple(b - a for a, b in itertools.pairwise((0, *cut, blocks)))
            for size in self._sizes():
                pipeline = self._pipeline(groups, of, size, 1, Counter())
                work = [
                    sum(self.request.cost.stages.seconds(pipeline, stage))
                    for stage in range(len(groups))
                ]
                for count in range(1, batch // size + 1):
                    least_s = max(
                        sum(work[:stage]) + count * each for stage, each in enumerate(work)
                    )
                    yield _Load(of, size, count, max(least_s, sum(work)))

    def _sizes(self) -> list[int]:
        """Divisors of the batch and powers of two."""
        request = self.request
        if request.microbatch_sequences is not None:
            return [request.microbatch_sequences]
        batch = request.global_batch_sequences
        top = min(request.max_microbatch_sequences, batch)
        return [size for size in range(1, top + 1) if batch % size == 0 or size & (size - 1) == 0]

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
            options = [
                [load for load in self.loads[groups] if load.least_s <= limit_s]
                for groups in placement
            ]
            for loads in _shares(options, self.request.global_batch_sequences):
                twins = zip(placement, placement[1:], loads, loads[1:], strict=False)
                again = any(a == b and one < other for a, b, one, other in twins)
                if not again and max(load.least_s for load in loads) > above_s:
                    yield self._plan(placement, loads)

    def _plan(self, placement: tuple[_Groups, ...], loads: tuple[_Load, ...]) -> Plan:
        request = self.request
        taken = Counter[int]()
        pipelines = tuple(
            self._pipeline(groups, of.blocks, of.size, of.count, taken)
            for groups, of in zip(placement, loads, strict=True)
        )
        return Plan(
            request.spec.name,
            request.global_batch_sequences,
            loads[0].size,
            request.sequence_length,
            pipelines,
        )

    def best(self, plan: Plan) -> tuple[float, Plan]:
        """The least step time with any number of microbatches in flight; infinite where the plan
        may not be.
        """
        found = float("inf"), plan
        for way in self.request.cost.stage_choices.ways_ahead(plan):
            self.count += 1
            check_plan(way, self.request.spec.num_layers)
            prediction = self.request.cost.predict(way)
            if (
                prediction.step_time_s < found[0]
                and prediction.fits
                and self._wanted(way, prediction.usd_per_hour)
            ):
                found = prediction.step_time_s, way
        return found

    def _wanted(self, plan: Plan, usd_per_hour: float | None) -> bool:
        """Return True if a plan meets the request's limits other than memory and depth."""
        request = self.request
        limit = request.max_usd_per_hour
        holders = request.min_node_disjoint_holders
        degrees = {stage.tp_degree for stage in plan.stages}
        sizes = {pipeline.microbatch_sequences for pipeline in plan.pipelines}
        return (
            (limit is None or usd_per_hour is None or usd_per_hour <= limit)
            and (request.mixed_tp or len(degrees) == 1)
            and (request.mixed_microbatch or len(sizes) == 1)
            and (
                holders < 2
                or redundancy(plan, request.fleet, request.spec.num_layers).weakest >= holders
            )
        )


def _canonical(placement: Sequence[_Groups], nodes: Sequence[Node]) -> tuple[_Groups, ...]:
    """The least of what exchanges of equal nodes make of a placement."""
    alike: dict[object, list[int]] = {}
    for number, node in enumerate(nodes):
        alike.setdefault(node.node_type, []).append(number)
    exchanges = itertools.product(*(itertools.permutations(each) for each in alike.values()))
    renamed = []
    for exchange in exchanges:
        name = dict(zip(itertools.chain(*alike.values()), itertools.chain(*exchange), strict=True))
        renamed.append(
            tuple(
                sorted(
                    tuple((name[node], degree) for node, degree in groups) for groups in placement
                )
            )
        )
    return min(renamed)


def _shares(options: Sequence[Sequence[_Load]], sequences: int) -> Iterator[tuple[_Load, ...]]:
    """Yield one load per pipeline, so that all together take `sequences` sequences."""
    if not options:
        if sequences == 0:
            yield ()
        return
    for load in options[0]:
        left = sequences - load.size * load.count
        if left >= len(options) - 1:
            yield from ((load, *others) for others in _shares(options[1:], left))
