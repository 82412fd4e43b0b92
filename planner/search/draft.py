"""Plans before they have workers: pipelines as stages of table rows, their time, and how many microbatches each
should do.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.cost.schedule import run_1f1b
from planner.in_flight import one_each, period_s, working_ahead
from planner.search import limits
from planner.search.tables import SyncShape, Tables

# A time, and the totals of microbatches of each size with which the batch is met in it.
_Trial = tuple[float, dict[int, int]]


@dataclass(frozen=True, slots=True)
class Shape:
    """One pipeline: the table row of each stage and the layer that each stage ends before (embedding is layer 0)."""

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
class _Way:
    """One microbatch's seconds through a pipeline, the steady state's, and each stage's: all, and what the warm-up hides; microbatches in
    flight at each stage."""

    fill_s: float
    period_s: float
    busy_s: list[float]
    hidden_s: list[float]
    most_in_flight: tuple[int, ...]


class Estimator:
    """Seconds of pipelines and drafts by the tables; remembers what it has computed."""

    def __init__(self, tables: Tables):
        self.tables = tables
        # plain floats: single entries of arrays cost ten times as much to read
        self._time_sums: list[list[float]] = tables.time_sums.tolist()
        self._forward_sums: list[list[float]] = tables.forward_sums.tolist()
        self._boundaries: list[list[float]] = tables.boundaries.tolist()
        self._crossings: list[float] = tables.crossings.tolist()
        self._groups: list[int] = tables.groups_a_node.tolist()
        self._times: dict[tuple[Shape, int], float] = {}
        self._ends: dict[Shape, float] = {}
        self._ways: dict[Shape, _Way] = {}
        self._stages: dict[Shape, tuple[list[float], list[float], list[float]]] = {}

    def stages(self, shape: Shape) -> tuple[list[float], list[float], list[float]]:
        """Forward and backward seconds of each stage, and of each boundary both ways together."""
        if shape not in self._stages:
            time, forward = self._time_sums, self._forward_sums
            first = [forward[r][e] - forward[r][s] for r, s, e in zip(shape.rows, shape.starts, shape.ends)]
            both = [time[r][e] - time[r][s] for r, s, e in zip(shape.rows, shape.starts, shape.ends)]
            send = self._transfers(shape.rows)
            half = self.tables.stage_overhead_s / 2
            self._stages[shape] = ([f + half for f in first], [b - f + half for b, f in zip(both, first)], send)
        return self._stages[shape]

    def _transfers(self, rows: tuple[int, ...]) -> list[float]:
        """Seconds of each boundary; equal neighbours fill one node after the other, as `place` does."""
        out, inside = [], 1
        for one, other in itertools.pairwise(rows):
            inside = inside % self._groups[one] + 1 if one == other else 1
            out.append(self._crossings[one] if one == other and inside == 1 else self._boundaries[one][other])
        return out

    def pipeline_s(self, shape: Shape, microbatches: int) -> float:
        """Seconds of one pipeline's part of a step, without gradient sync."""
        key = (shape, microbatches)
        if key not in self._times:
            self._times[key] = self._time(shape, microbatches)
        return self._times[key]

    def _time(self, shape: Shape, microbatches: int) -> float:
        if not self.tables.overlaps_warmup:
            return self.quick_s(shape, microbatches)
        near = self._near(shape)
        if microbatches <= near:
            return self._simulated(shape, microbatches)
        return self.quick_s(shape, microbatches) + self._far(shape) - self.quick_s(shape, near)

    def _near(self, shape: Shape) -> int:
        """Microbatches after which a pipeline's time grows as its bound does: 0.03% off on average, 0.9% at worst; where
        stages work ahead 0.14% and 3%."""
        return 2 * len(shape.rows) + 4

    def _far(self, shape: Shape) -> float:
        """When it ends with so many microbatches."""
        if shape not in self._ends:
            self._ends[shape] = self._simulated(shape, self._near(shape))
        return self._ends[shape]

    def _simulated(self, shape: Shape, k: int) -> float:
        """End of the last backward."""
        forward, backward, send = self.stages(shape)
        half, numbers = [seconds / 2 for seconds in send], self._way(shape).most_in_flight
        backwards = run_1f1b(forward, backward, half, half, k, self.tables.transfers, numbers)[1]
        return max(done[-1] for done in backwards)

    def _numbers(self, shape: Shape) -> tuple[int, ...]:
        """Microbatches in flight at each stage: as many as fit memory, where these run beside the work."""
        if self.tables.transfers != "none" or not self.tables.overlaps_warmup or len(shape.rows) == 1:
            return one_each(len(shape.rows))
        room = [self.tables.room(*stage) for stage in zip(shape.rows, shape.starts, shape.ends)]
        return working_ahead(self.stages(shape)[2], room)

    def quick_s(self, shape: Shape, microbatches: int) -> float:
        """A lower bound of `pipeline_s`, by the inequality of `Columns.microbatches_in` for every stage."""
        way, k = self._way(shape), microbatches - 1
        if not self.tables.overlaps_warmup:
            return way.fill_s + k * way.period_s
        stages = zip(way.busy_s, way.hidden_s, way.most_in_flight, strict=True)
        slowest = max([k * busy - (k if k < most else most - 1) * hidden for busy, hidden, most in stages])
        return way.fill_s + max(slowest, k * way.period_s - way.fill_s)

    def _way(self, shape: Shape) -> "_Way":
        """What `quick_s` and `affine` need, computed once."""
        known = self._ways.get(shape)
        if known is None:
            forward, backward, send = self.stages(shape)
            share, first, last = self.tables.boundary_share, *self.tables.boundary_ends(len(forward))
            tolls = [(a + b) / 2 for a, b in zip([0.0, *send], [*send, 0.0])]  # half of each of its two boundaries
            tolls[0] *= first
            tolls[-1] *= last
            hidden = [f + share * t for f, t in zip(forward, tolls)]
            busy = [h + b + share * t for h, b, t in zip(hidden, backward, tolls)]
            period, numbers = max(busy), self._numbers(shape)
            if self.tables.transfers == "none":
                period = period_s([f + b for f, b in zip(forward, backward)], send, numbers)
            known = _Way(sum(forward) + sum(backward) + sum(tolls), period, busy, hidden, numbers)
            self._ways[shape] = known
        return known

    def sync_s(self, draft: Draft) -> float:
        """Estimated seconds after the pipelines end."""
        return self.tables.sync_s(self.sync_shape(draft))

    def sync_shape(self, draft: Draft) -> SyncShape:
        tables = self.tables
        worker = stage = 0.0
        least = 10**6
        resources: set[int] = set()
        for shape in {shape for shape, _ in draft.pipelines}:
            for row, start, end in zip(shape.rows, shape.starts, shape.ends):
                kind = tables.kinds[tables.rows[row].kind]
                size = tables.stage_sync_bytes(row, start, end)
                worker, stage = max(worker, size), max(stage, size * kind.tp_degree)
                least = min(least, kind.tp_degree)
                resources.add(kind.resource)
        return SyncShape(worker, stage, least, len(draft.pipelines), tuple(sorted(resources)))

    def draft_s(self, draft: Draft) -> float:
        """Estimated seconds of a step."""
        return max(self.pipeline_s(shape, k) for shape, k in set(draft.pipelines)) + self.sync_s(draft)

    def microbatch(self, shape: Shape) -> int:
        return self.tables.rows[shape.rows[0]].microbatch

    def affine(self, shape: Shape) -> tuple[float, float]:
        """(seconds of the first microbatch, seconds of each further one) in the steady state."""
        way = self._way(shape)
        return way.fill_s, way.period_s

    def most_in(self, shape: Shape, seconds: float) -> int:
        """The most microbatches that the pipeline completes in so many seconds."""
        guess = self._guess(shape, seconds)
        while self.pipeline_s(shape, guess + 1) <= seconds:
            guess += 1
        while guess > 0 and self.pipeline_s(shape, guess) > seconds:
            guess -= 1
        return guess

    def _guess(self, shape: Shape, seconds: float) -> int:
        """Microbatches in so many seconds by the steady state, from the number at which it is reached."""
        way, near = self._way(shape), self._near(shape)
        if self.tables.overlaps_warmup and seconds > (known := self.pipeline_s(shape, near)):
            return near + int((seconds - known) / way.period_s)
        return max(0, int((seconds - way.fill_s) / way.period_s) + 1) if seconds >= way.fill_s else 0


def assign_microbatches(estimator: Estimator, shapes: Sequence[Shape], batch: int) -> Draft | None:
    """Gives each pipeline microbatches so that the batch is met exactly and the slowest ends earliest; None if sizes
    cannot meet it.

    For a trial time each pipeline can do so many; per microbatch size a total between one each and that is chosen;
    the surplus is taken
    from whichever pipeline would end last.
    """
    if len(set(shapes)) == 1:
        return _share_equally(shapes, batch, estimator.microbatch(shapes[0]))
    high = max(estimator.pipeline_s(s, -(-batch // estimator.microbatch(s))) for s in set(shapes))
    totals = _totals(estimator, shapes, batch, high)
    if totals is None:
        return None
    counts = _trim(estimator, shapes, *_shortest(estimator, shapes, batch, (high, totals)))
    return Draft(tuple((shape, k) for shape, k in zip(shapes, counts)))


def _shortest(estimator: Estimator, shapes: Sequence[Shape], batch: int, most: _Trial) -> _Trial:
    """The shortest trial time near the steady state's. With one microbatch size any will do, since trimming shortens it."""
    low, seconds, longer = 0.0, _steady_s(estimator, shapes, batch), limits.LONGER
    high = most
    while low < seconds < high[0]:
        totals = _totals(estimator, shapes, batch, seconds)
        if totals is not None:
            high = seconds, totals
            break
        low, seconds, longer = seconds, seconds * longer, longer**2
    if len(most[1]) == 1:
        return high
    low = low or high[0] / limits.LONGER**2
    while high[0] - low > limits.SHARED_WITHIN * high[0]:
        middle = (low + high[0]) / 2
        totals = _totals(estimator, shapes, batch, middle)
        low, high = (middle, high) if totals is None else (low, (middle, totals))
    return high


def _steady_s(estimator: Estimator, shapes: Sequence[Shape], batch: int) -> float:
    """When all pipelines would end together in the steady state, microbatches not rounded."""
    ways = [(estimator.microbatch(shape), *estimator.affine(shape)) for shape in shapes]
    left = batch + sum(size * (fill / step - 1) for size, fill, step in ways)
    return left / sum(size / step for size, _, step in ways)


def _share_equally(shapes: Sequence[Shape], batch: int, size: int) -> Draft | None:
    """Equal pipelines: numbers of microbatches that differ by one at most."""
    each, more = divmod(batch // size, len(shapes))
    if batch % size or each < 1:
        return None
    return Draft(tuple((shape, each + (i < more)) for i, shape in enumerate(shapes)))


def _totals(estimator: Estimator, shapes: Sequence[Shape], batch: int, seconds: float) -> dict[int, int] | None:
    most: dict[int, int] = {}
    least: dict[int, int] = {}
    can = {shape: estimator.most_in(shape, seconds) for shape in set(shapes)}
    if min(can.values()) < 1:
        return None
    for shape in shapes:
        size = estimator.microbatch(shape)
        most[size] = most.get(size, 0) + can[shape]
        least[size] = least.get(size, 0) + 1
    sizes = sorted(most, reverse=True)
    return next(_split(sizes, least, most, batch), None)


def _split(sizes: list[int], least: dict[int, int], most: dict[int, int], rest: int) -> Iterator[dict[int, int]]:
    """Numbers of microbatches a size that sum to `rest` sequences, largest sizes first as full as possible."""
    size, others = sizes[0], sizes[1:]
    if not others:
        if rest % size == 0 and least[size] <= rest // size <= most[size]:
            yield {size: rest // size}
        return
    reserve = sum(b * least[b] for b in others)
    room = sum(b * most[b] for b in others)
    top = min(most[size], (rest - reserve) // size)
    bottom = max(least[size], -(-(rest - room) // size))
    for count in range(top, max(bottom, top - 64) - 1, -1):
        for tail in _split(others, least, most, rest - count * size):
            yield {size: count} | tail


def _trim(estimator: Estimator, shapes: Sequence[Shape], seconds: float, totals: dict[int, int]) -> list[int]:
    counts = [estimator.most_in(shape, seconds) for shape in shapes]
    for size, total in totals.items():
        mine = [i for i, shape in enumerate(shapes) if estimator.microbatch(shape) == size]
        surplus = sum(counts[i] for i in mine) - total
        heap = [(-estimator.pipeline_s(shapes[i], counts[i]), i) for i in mine if counts[i] > 1]
        heapq.heapify(heap)
        for _ in range(surplus):
            _, i = heapq.heappop(heap)
            counts[i] -= 1
            if counts[i] > 1:
                heapq.heappush(heap, (-estimator.pipeline_s(shapes[i], counts[i]), i))
    return counts


def well_formed(shape: Shape) -> bool:
    """Whether every stage has at least one block: the embedding comes before the first, the head after the last."""
    layers = shape.ends[-1]
    bounds = [1, *shape.ends[:-1], layers - 1]
    return all(a < b for a, b in itertools.pairwise(bounds))


def fits(estimator: Estimator, shape: Shape, microbatches: int) -> bool:
    """Whether each stage's memory holds what 1F1B keeps in flight there."""
    tables, depth = estimator.tables, len(shape.rows)
    for stage, (row, start, end) in enumerate(zip(shape.rows, shape.starts, shape.ends)):
        if tables.memory_bytes(row, start, end, min(microbatches, depth - stage)) > tables.rows[row].limit_bytes:
            return False
    return True


def draft_fits(estimator: Estimator, draft: Draft) -> bool:
    """Whether each of its pipelines does."""
    return all(fits(estimator, shape, microbatches) for shape, microbatches in set(draft.pipelines))
