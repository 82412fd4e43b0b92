"""Plans before they have workers.

A pipeline is a list of stages, each a table row. This module estimates its time and assigns
microbatches to pipelines.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.in_flight import one_each, period_s, working_ahead
from planner.search.tables import Tables


@dataclass(frozen=True, slots=True)
class Shape:
    """Cut of a pipeline before it has workers.

    rows: table row of each stage. ends: layer before which each stage ends (the embedding is layer
    0).
    """

    rows: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        return (0, *self.ends[:-1])


@dataclass(frozen=True, slots=True)
class Draft:
    """Pipelines with their numbers of microbatches."""

    pipelines: tuple[tuple[Shape, int], ...]


@dataclass(frozen=True, slots=True)
class Way:
    """Times of a pipeline, in seconds.

    fill_s: one microbatch's way through the pipeline. period_s: a microbatch in the steady state.
    busy_s, hidden_s, backward_s: for each stage, a microbatch's time, the part that the warm-up
    hides, and its backward. most_in_flight: microbatches in flight at each stage.
    """

    fill_s: float
    period_s: float
    busy_s: list[float]
    hidden_s: list[float]
    backward_s: list[float]
    most_in_flight: tuple[int, ...]


class Estimator:
    """Estimates seconds of pipelines and drafts from the tables, and caches them."""

    def __init__(self, tables: Tables):
        self.tables = tables
        # plain floats: single entries of arrays cost ten times as much to read
        self._time_sums: list[list[float]] = tables.sums.time_sums.tolist()
        self._forward_sums: list[list[float]] = tables.sums.forward_sums.tolist()
        self._near: list[list[float]] = tables.boundaries.tolist()
        self._apart: list[list[float]] = tables.apart_s.tolist()
        self._groups: list[tuple[int, int, int]] = []
        for row in range(len(tables.rows)):
            kind = tables.kind(row)
            gpus = tables.resources[kind.resource].node_type.num_gpus
            self._groups.append((kind.resource, gpus, kind.tp_degree))
        self._ways: dict[Shape, Way] = {}

    def transfers(self, rows: tuple[int, ...], sharing: Sequence[int] = ()) -> list[float]:
        """Return seconds of each boundary, both ways together, if no other shares its NICs.

        sharing: groups of as many pipelines lie side by side on a stage's node (empty: of one).
        """
        return self._alone(rows, self._nodes(rows, sharing))

    def _alone(self, rows: tuple[int, ...], nodes: Sequence[tuple[int, int]]) -> list[float]:
        """Return seconds of each boundary of `transfers`, by the node of each stage."""
        places = zip(itertools.pairwise(rows), itertools.pairwise(nodes))
        return [self._alone_s(*pair, here != there) for pair, (here, there) in places]

    def _alone_s(self, one: int, other: int, is_apart: bool) -> float:
        apart_s = self._apart[one][other]
        return apart_s if is_apart and math.isfinite(apart_s) else self._near[one][other]

    def _nodes(self, rows: tuple[int, ...], sharing: Sequence[int] = ()) -> list[tuple[int, int]]:
        """Return the node of each stage: its resource, and which of the pipeline's nodes of it.

        Stages of a node type fill one node after the other, as `place` does.
        """
        taken: dict[int, int] = {}  # GPUs of the latest node of each resource
        latest: dict[int, int] = {}
        nodes = []
        for row, groups in itertools.zip_longest(rows, sharing, fillvalue=1):
            resource, gpus, degree = self._groups[row]
            if taken.setdefault(resource, 0) + groups * degree > gpus:
                taken[resource] = 0
                latest[resource] = latest.get(resource, 0) + 1
            taken[resource] += groups * degree
            nodes.append((resource, latest.get(resource, 0)))
        return nodes

    def _transfers(self, rows: tuple[int, ...], period_s: float) -> list[float]:
        """Return seconds of each boundary, with those of a node's other stages on the same NIC.

        They meet for the share of the time that the others use it (`BoundaryCosts`), at worst all
        at once. Transfers of one stage follow each other.
        """
        nodes = self._nodes(rows)
        send = self._alone(rows, nodes)
        used: dict[tuple[int, int], float] = {}
        of_stage = [0.0] * len(rows)
        for at, both_s in enumerate(send):
            if nodes[at] != nodes[at + 1]:
                for stage in (at, at + 1):
                    used[nodes[stage]] = used.get(nodes[stage], 0.0) + both_s / 2
                    of_stage[stage] += both_s / 2
        if all(used.get(node, 0.0) <= mine for node, mine in zip(nodes, of_stage)):
            return send
        out = list(send)
        for at, both_s in enumerate(send):
            if nodes[at] == nodes[at + 1]:
                continue
            others_s = max(used[nodes[stage]] - of_stage[stage] for stage in (at, at + 1))
            free = 1.0 - others_s / period_s
            out[at] = min(both_s / max(free, 1e-9), both_s + 2 * others_s)
        return out

    def pipeline_s(self, shape: Shape, microbatches: int) -> float:
        """Return a lower bound of a pipeline's seconds in a step, without gradient sync.

        It is the inequality of `planner.search.bound` for every stage.
        """
        way = self.way(shape)
        k = microbatches - 1
        stages = zip(way.busy_s, way.hidden_s, way.most_in_flight, strict=True)
        slowest = max(
            [k * busy - (k if k < most else most - 1) * hidden for busy, hidden, most in stages]
        )
        return max(way.fill_s + slowest, k * way.period_s)

    def _numbers(self, shape: Shape, send: list[float]) -> tuple[int, ...]:
        """Return microbatches in flight at each stage.

        As many as fit in memory, if transfers run beside the work; else 1F1B's.
        """
        if self.tables.transfers != "none" or len(shape.rows) == 1:
            return one_each(len(shape.rows))
        stages = zip(shape.rows, shape.starts, shape.ends)
        return working_ahead(send, [self.tables.sums.room(*stage) for stage in stages])

    def way(self, shape: Shape) -> Way:
        """Return the times of a pipeline, cached."""
        if (known := self._ways.get(shape)) is None:
            known = self._ways[shape] = self._new_way(shape)
        return known

    def _new_way(self, shape: Shape) -> Way:
        half = self.tables.stage_overhead_s / 2
        share = self.tables.boundary_share
        time = self._time_sums
        begun = self._forward_sums
        stages = list(zip(shape.rows, shape.starts, shape.ends))
        forward = [begun[r][e] - begun[r][s] + half for r, s, e in stages]
        backward = [time[r][e] - time[r][s] - f + 2 * half for (r, s, e), f in zip(stages, forward)]
        work = [f + b for f, b in zip(forward, backward)]
        send = self._transfers(shape.rows, max(work))
        tolls = [
            (a + b) / 2 for a, b in zip([0.0, *send], [*send, 0.0])
        ]  # half of each of its two boundaries
        hidden = [f + share * t for f, t in zip(forward, tolls)]
        busy = [h + b + share * t for h, b, t in zip(hidden, backward, tolls)]
        period = max(busy)
        numbers = self._numbers(shape, send)
        if self.tables.transfers == "none":
            cycles = period_s(work, send, numbers)
            period = max(cycles, *tolls)  # what a stage sends, either way, follows each other
        return Way(
            sum(forward) + sum(backward) + sum(tolls), period, busy, hidden, backward, numbers
        )

    def microbatch(self, shape: Shape) -> int:
        return self.tables.rows[shape.rows[0]].microbatch

    def most_in(self, shape: Shape, seconds: float) -> int:
        """Return the most microbatches that the pipeline completes in `seconds`."""
        way = self.way(shape)
        guess = max(0, int((seconds - way.fill_s) / way.period_s) + 1)
        while self.pipeline_s(shape, guess + 1) <= seconds:
            guess += 1
        while guess > 0 and self.pipeline_s(shape, guess) > seconds:
            guess -= 1
        return guess


def assign_microbatches(estimator: Estimator, shapes: Sequence[Shape], batch: int) -> Draft | None:
    """Assign microbatches so that the batch is met exactly and the slowest pipeline ends early.

    None if sizes cannot meet the batch. Each pipeline first gets what it does in the steady state.
    The next ones go to the pipeline that ends earliest, or large ones first if that ends earlier
    (small ones may leave less than a large one is). If there are too many, they are taken from the
    pipeline that ends last.
    """
    if len(set(shapes)) == 1:
        return _share_equally(shapes, batch, estimator.microbatch(shapes[0]))
    seconds = steady_s(estimator, [(shape, 1) for shape in shapes], batch)
    can = {shape: max(1, estimator.most_in(shape, seconds)) for shape in set(shapes)}
    counts, sizes = (
        [can[shape] for shape in shapes],
        [estimator.microbatch(shape) for shape in shapes],
    )
    left = batch - sum(map(math.prod, zip(counts, sizes, strict=True)))
    while left < 0 and (surplus := [i for i, count in enumerate(counts) if count > 1]):
        last = max(surplus, key=lambda i: estimator.pipeline_s(shapes[i], counts[i]))
        counts[last], left = counts[last] - 1, left + sizes[last]
    met = list[Draft]()
    for large in (0, 1)[: len(set(sizes))]:
        mine = [*counts]
        rest = left
        ends = sorted(
            (-large * sizes[i], estimator.pipeline_s(shape, mine[i] + 1), i)
            for i, shape in enumerate(shapes)
        )  # a heap
        while rest > 0 and ends:
            *_, i = heapq.heappop(ends)
            if sizes[i] <= rest:
                mine[i], rest = mine[i] + 1, rest - sizes[i]
                heapq.heappush(
                    ends, (-large * sizes[i], estimator.pipeline_s(shapes[i], mine[i] + 1), i)
                )
        met += [Draft(tuple(zip(shapes, mine, strict=True)))] if rest == 0 else []
    return (
        min(met, key=lambda d: max(estimator.pipeline_s(*p) for p in set(d.pipelines)))
        if len(met) > 1
        else next(iter(met), None)
    )


def steady_s(estimator: Estimator, numbers: Iterable[tuple[Shape, int]], sequences: float) -> float:
    """Return seconds after which all pipelines would end together in the steady state.

    numbers: pipelines of each shape. Microbatches are not rounded.
    """
    ways = [(n * estimator.microbatch(shape), estimator.way(shape)) for shape, n in numbers]
    left = sequences + sum(size * (way.fill_s / way.period_s - 1) for size, way in ways)
    return left / sum(size / way.period_s for size, way in ways)


def _share_equally(shapes: Sequence[Shape], batch: int, size: int) -> Draft | None:
    """Share the batch among equal pipelines: microbatches differ by one at most."""
    each, more = divmod(batch // size, len(shapes))
    return (
        None
        if batch % size or each < 1
        else Draft(tuple((shape, each + (i < more)) for i, shape in enumerate(shapes)))
    )


def fits(estimator: Estimator, shape: Shape, microbatches: int) -> bool:
    """Return True if each stage's memory holds what 1F1B keeps in flight there."""
    tables = estimator.tables
    depth = len(shape.rows)
    stages = enumerate(zip(shape.rows, shape.starts, shape.ends))
    return all(
        tables.sums.memory_bytes(*stage, min(microbatches, depth - i))
        <= tables.rows[stage[0]].limit_bytes
        for i, stage in stages
    )


def draft_fits(estimator: Estimator, draft: Draft) -> bool:
    """Return True if each pipeline of the draft fits in memory."""
    return all(fits(estimator, shape, microbatches) for shape, microbatches in set(draft.pipelines))
