"""Plans before they have workers.

A pipeline is a list of stages, each a table row. This module estimates its time and assigns
microbatches to pipelines.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.plans.in_flight import one_each, period_s, working_ahead
from planner.search.problem.tables import Tables

_FloatLists = list[list[float]]
_NodeIndex = tuple[int, int]
"""Resource, and which of a pipeline's nodes of it."""


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

    @property
    def stages(self) -> list[tuple[int, int, int]]:
        """Row, first layer and end of each stage."""
        layers = zip(self.rows, self.starts, self.ends, strict=True)
        return list(layers)


@dataclass(frozen=True, slots=True)
class Draft:
    """Pipelines with their numbers of microbatches."""

    pipelines: tuple[tuple[Shape, int], ...]

    @property
    def shapes(self) -> list[Shape]:
        """Shape of each pipeline."""
        return [shape for shape, _ in self.pipelines]


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

    def step_s(self, microbatches: int) -> float:
        """Return a lower bound of the pipeline's seconds in a step, without gradient sync.

        It is the inequality of `planner.search.bounds.bound` for every stage.
        """
        further = microbatches - 1
        slowest_s = -math.inf
        # no calls of `min` and `max` here: the search asks a hundred thousand times
        stages = zip(self.busy_s, self.hidden_s, self.most_in_flight)
        for busy_s, hidden_s, most in stages:
            num_hidden = further if further < most else most - 1
            stage_s = further * busy_s - num_hidden * hidden_s
            if stage_s > slowest_s:
                slowest_s = stage_s
        return max(self.fill_s + slowest_s, further * self.period_s)


class Estimator:
    """Estimates seconds of pipelines and drafts from the tables, and caches them."""

    def __init__(self, tables: Tables):
        self.tables = tables
        # plain floats: single entries of arrays take ten times as long to read
        self._time_sums: _FloatLists = tables.sums.time_sums.tolist()
        self._forward_sums: _FloatLists = tables.sums.forward_sums.tolist()
        self._near: _FloatLists = tables.boundaries.tolist()
        self._apart: _FloatLists = tables.apart_s.tolist()
        self._groups: list[tuple[int, int, int]] = []
        for row in range(len(tables.rows)):
            kind = tables.kind(row)
            node_type = tables.resources[kind.resource].node_type
            self._groups.append((kind.resource, node_type.num_gpus, kind.tp_degree))
        self._ways: dict[Shape, Way] = {}

    def transfers(self, rows: tuple[int, ...], sharing: Sequence[int] = ()) -> list[float]:
        """Return seconds of each boundary, both ways together, if no other shares its NICs.

        sharing: groups of as many pipelines lie side by side on a stage's node (empty: of one).
        """
        return self._unshared_s(rows, self._nodes(rows, sharing))

    def _unshared_s(self, rows: tuple[int, ...], nodes: Sequence[_NodeIndex]) -> list[float]:
        """Return seconds of each boundary of `transfers`, by the node of each stage."""
        seconds = []
        for at, row in enumerate(rows[:-1]):
            following = rows[at + 1]
            boundary_s = self._near[row][following]
            if nodes[at] != nodes[at + 1]:
                apart_s = self._apart[row][following]
                # infinite between two nodes of a type that has only one
                if math.isfinite(apart_s):
                    boundary_s = apart_s
            seconds.append(boundary_s)
        return seconds

    def _nodes(self, rows: tuple[int, ...], sharing: Sequence[int] = ()) -> list[_NodeIndex]:
        """Return the node of each stage: its resource, and which of the pipeline's nodes of it.

        Stages of a node type fill one node after the other, as `place` does.
        """
        taken: dict[int, int] = {}  # GPUs of the latest node of each resource
        latest: dict[int, int] = {}
        nodes = []
        for at, row in enumerate(rows):
            resource, gpus_of_node, degree = self._groups[row]
            gpus = degree * sharing[at] if sharing else degree
            before = taken.get(resource, 0)
            if before + gpus > gpus_of_node:
                before = 0
                latest[resource] = latest.get(resource, 0) + 1
            taken[resource] = before + gpus
            nodes.append((resource, latest.get(resource, 0)))
        return nodes

    def _transfers(self, rows: tuple[int, ...], period_s: float) -> list[float]:
        """Return seconds of each boundary, with those of a node's other stages on the same NIC.

        They meet for the share of the time that the others use it (`BoundaryCosts`), at worst all
        at once. Transfers of one stage follow each other.
        """
        nodes = self._nodes(rows)
        alone = self._unshared_s(rows, nodes)

        of_node: dict[_NodeIndex, float] = dict.fromkeys(nodes, 0.0)
        of_stage = [0.0] * len(rows)
        for at, both_s in enumerate(alone):
            if nodes[at] == nodes[at + 1]:
                continue  # inside a node it uses no NIC
            for stage in (at, at + 1):
                of_node[nodes[stage]] += both_s / 2
                of_stage[stage] += both_s / 2

        of_others = [of_node[node] - mine_s for node, mine_s in zip(nodes, of_stage, strict=True)]
        if max(of_others) <= 0:
            return alone

        seconds = []
        for at, both_s in enumerate(alone):
            if nodes[at] == nodes[at + 1]:
                seconds.append(both_s)
                continue
            others_s = max(of_others[at], of_others[at + 1])
            free = max(1.0 - others_s / period_s, 1e-9)
            all_at_once_s = both_s + 2 * others_s
            seconds.append(min(both_s / free, all_at_once_s))
        return seconds

    def draft_s(self, draft: Draft) -> float:
        """Return `Way.step_s` of the draft's slowest pipeline."""
        kinds = set(draft.pipelines)
        return max(self.way(shape).step_s(microbatches) for shape, microbatches in kinds)

    def _numbers(self, shape: Shape, send: list[float]) -> tuple[int, ...]:
        """Return microbatches in flight at each stage.

        As many as fit in memory, if transfers run beside the work; else 1F1B's.
        """
        if self.tables.transfers != "none" or len(shape.rows) == 1:
            return one_each(len(shape.rows))
        sums = self.tables.sums
        rooms = [sums.room(*stage) for stage in shape.stages]
        return working_ahead(send, rooms)

    def way(self, shape: Shape) -> Way:
        """Return the times of a pipeline, cached."""
        known = self._ways.get(shape)
        if known is None:
            known = self._new_way(shape)
            self._ways[shape] = known
        return known

    def _new_way(self, shape: Shape) -> Way:
        half_s = self.tables.stage_overhead_s / 2
        forward = []
        backward = []
        work = []
        for row, start, end in shape.stages:
            whole_sums = self._time_sums[row]
            forward_sums = self._forward_sums[row]
            forward_s = forward_sums[end] - forward_sums[start] + half_s
            backward_s = whole_sums[end] - whole_sums[start] - forward_s + 2 * half_s
            forward.append(forward_s)
            backward.append(backward_s)
            work.append(forward_s + backward_s)

        share = self.tables.boundary_share
        send = self._transfers(shape.rows, max(work))
        tolls = []  # half of each of a stage's two boundaries
        hidden = []
        busy = []
        before_s = 0.0
        after = [*send, 0.0]
        for forward_s, backward_s, after_s in zip(forward, backward, after, strict=True):
            toll_s = (before_s + after_s) / 2
            hidden_s = forward_s + share * toll_s
            tolls.append(toll_s)
            hidden.append(hidden_s)
            busy.append(hidden_s + backward_s + share * toll_s)
            before_s = after_s

        numbers = self._numbers(shape, send)
        period = max(busy)
        if self.tables.transfers == "none":
            # what a stage sends, either way, follows each other
            cycles_s = period_s(work, send, numbers)
            period = max(cycles_s, *tolls)
        fill_s = sum(forward) + sum(backward) + sum(tolls)
        return Way(fill_s, period, busy, hidden, backward, numbers)

    def microbatch(self, shape: Shape) -> int:
        """Return the sequences of a pipeline's microbatch."""
        return self.tables.rows[shape.rows[0]].microbatch

    def microbatches(self, shapes: Iterable[Shape]) -> list[int]:
        """Return the sequences of each pipeline's microbatch."""
        return [self.microbatch(shape) for shape in shapes]

    def most_in(self, shape: Shape, seconds: float) -> int:
        """Return the most microbatches that the pipeline completes in `seconds`."""
        way = self.way(shape)
        in_steady_state = (seconds - way.fill_s) / way.period_s
        guess = max(0, int(in_steady_state) + 1)
        while way.step_s(guess + 1) <= seconds:
            guess += 1
        while guess > 0 and way.step_s(guess) > seconds:
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

    counts = _steady_counts(estimator, shapes, batch)
    sizes = estimator.microbatches(shapes)
    left = batch
    for count, size in zip(counts, sizes, strict=True):
        left -= count * size

    while left < 0:
        # each pipeline keeps one microbatch at least
        ends_s = {}
        for i, count in enumerate(counts):
            if count > 1:
                ends_s[i] = estimator.way(shapes[i]).step_s(count)
        if not ends_s:
            break

        last = max(ends_s, key=ends_s.__getitem__)
        counts[last] -= 1
        left += sizes[last]

    orders = [False]
    has_several_sizes = len(set(sizes)) > 1
    if has_several_sizes:
        orders.append(True)

    met = []
    for large_first in orders:
        draft = _hand_out(estimator, shapes, counts, left, large_first=large_first)
        if draft is not None:
            met.append(draft)
    if len(met) == 2:
        return min(met, key=estimator.draft_s)
    return met[0] if met else None


def _steady_counts(estimator: Estimator, shapes: Sequence[Shape], batch: int) -> list[int]:
    """Return the microbatches that each pipeline completes while all end together, at least 1."""
    one_of_each = [(shape, 1) for shape in shapes]
    seconds = steady_s(estimator, one_of_each, batch)
    count_of = {}
    for shape in set(shapes):
        count = estimator.most_in(shape, seconds)
        count_of[shape] = max(1, count)
    return [count_of[shape] for shape in shapes]


def _hand_out(
    estimator: Estimator,
    shapes: Sequence[Shape],
    counts: Sequence[int],
    left: int,
    *,
    large_first: bool,
) -> Draft | None:
    """Hand out `left` sequences beside `counts` microbatches; None if some would be left.

    A microbatch goes to the pipeline that would end earliest with it.
    """
    sizes = estimator.microbatches(shapes)
    ways = [estimator.way(shape) for shape in shapes]
    counts = list(counts)

    def end_with_next(i: int) -> tuple[int, float, int]:
        rank = -sizes[i] if large_first else 0
        end_s = ways[i].step_s(counts[i] + 1)
        return rank, end_s, i

    ends = [end_with_next(i) for i in range(len(shapes))]
    heapq.heapify(ends)
    while left > 0 and ends:
        *_, earliest = heapq.heappop(ends)
        # what is left only becomes less, so a size that is too large now is never asked again
        if sizes[earliest] <= left:
            counts[earliest] += 1
            left -= sizes[earliest]
            heapq.heappush(ends, end_with_next(earliest))

    if left != 0:
        return None
    return Draft(tuple(zip(shapes, counts, strict=True)))


def steady_s(estimator: Estimator, numbers: Iterable[tuple[Shape, int]], sequences: float) -> float:
    """Return seconds after which all pipelines would end together in the steady state.

    numbers: pipelines of each shape. Microbatches are not rounded.
    """
    # a pipeline does (t - fill) / period + 1 microbatches in t seconds; the sum over all of them,
    # times their size, is `sequences`
    late = 0.0
    rate = 0.0
    for shape, number in numbers:
        way = estimator.way(shape)
        size = number * estimator.microbatch(shape)
        late += size * (way.fill_s / way.period_s - 1)
        rate += size / way.period_s
    return (sequences + late) / rate


def _share_equally(shapes: Sequence[Shape], batch: int, size: int) -> Draft | None:
    """Share the batch among equal pipelines: microbatches differ by one at most."""
    if batch % size:
        return None
    each, num_larger = divmod(batch // size, len(shapes))
    if each < 1:
        return None
    counts = [each] * len(shapes)
    for i in range(num_larger):
        counts[i] += 1
    return Draft(tuple(zip(shapes, counts, strict=True)))


def fits(estimator: Estimator, shape: Shape, microbatches: int) -> bool:
    """Return True if each stage's memory holds what 1F1B keeps in flight there."""
    tables = estimator.tables
    depth = len(shape.rows)
    for at, (row, start, end) in enumerate(shape.stages):
        in_flight = min(microbatches, depth - at)
        needed_bytes = tables.sums.memory_bytes(row, start, end, in_flight)
        if needed_bytes > tables.rows[row].limit_bytes:
            return False
    return True


def draft_fits(estimator: Estimator, draft: Draft) -> bool:
    """Return True if each pipeline of the draft fits in memory."""
    kinds = set(draft.pipelines)
    return all(fits(estimator, shape, microbatches) for shape, microbatches in kinds)
