"""Stages and paths that the bound prices.

Stages have times that nothing can beat; the paths are the cheapest through the model's blocks.
"""

import bisect
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from planner.arrays import Bools, Floats, Ints
from planner.search.problem import limits
from planner.search.problem.tables import Tables


class PricedStages:
    """Stages of one microbatch size with times that nothing can beat.

    No neighbour, node, place in the model or schedule gives less. Arrays are (rows, place, blocks -
    1). The places are first (with the embedding), inner, and last (with the head). room[band]:
    memory allows the stage with `BANDS[band]` stages after it.
    """

    busy: Floats

    def __init__(self, tables: Tables, microbatch: int):
        self.tables = tables
        self.microbatch = microbatch
        self.blocks = tables.num_blocks
        self.stages = min(tables.deepest, tables.num_gpus)
        self.begun_ahead = tables.begun_ahead

        self.rows = np.flatnonzero(np.array(tables.sums.microbatch_by_row) == microbatch)
        resources = [tables.kind(row).resource for row in self.rows.tolist()]
        self.resource = np.array(resources, dtype=np.int64)
        self.degree = np.array(tables.tp_degree_by_row, dtype=np.int64)[self.rows]
        whole_s = tables.sums.time_sums[self.rows, -1]
        self.speed = self.microbatch / (whole_s * self.degree)

        start = np.arange(self.blocks)[:, None]
        size = np.arange(1, self.blocks + 1)[None, :]
        exists = start + size <= self.blocks
        stop = np.minimum(start + size, self.blocks)
        is_first = start == 0
        is_last = stop == self.blocks

        # layers: the embedding is layer 0, so that block i is layer i + 1
        first = np.where(is_first, 0, start + 1)
        last = np.where(is_last, self.blocks + 2, stop + 1)
        inner = 2.0 - is_first - is_last

        # sizes that fit nowhere, even with no stage after them, are left out of all arrays
        room = self._room_of(first, last, exists)
        self.wide = 1
        if len(self.rows):
            fits_somewhere = room[0].any(axis=(0, 1))
            self.wide = max(1, int(fits_somewhere.sum()))
        wide = self.wide

        self._time(first[:, :wide], last[:, :wide], inner[:, :wide], exists[:, :wide])
        self.room = [_any_by_place(part[..., :wide]) for part in room]
        self.held_busy = np.where(self.room[0], self.busy, np.inf)
        self._limits()

    def _room_of(self, first: Ints, last: Ints, allowed: Bools) -> list[Bools]:
        """Return for each band whether memory holds layers [first, last) on each row."""
        fits = self.tables.sums.last_layer_that_fits[self.rows]
        deepest = fits.shape[1] - 1

        found = []
        for depth in limits.BANDS:
            most = fits[:, min(depth, deepest)]
            found.append((most[:, first] >= last) & allowed)
        return found

    def _time(self, first: Ints, last: Ints, inner: Floats, allowed: Bools) -> None:
        """Set the seconds of layers [first, last) with `inner` boundaries.

        busy: includes the time for which transfers occupy the stage. fill: includes the transfer
        into it. forward: the forward alone.
        """
        tables = self.tables
        overhead_s = tables.stage_overhead_s
        run_beside = tables.transfers == "none"
        toll = self._least_toll(run_beside)

        times = _of_layers(tables.sums.time_sums[self.rows], first, last)
        forwards = _of_layers(tables.sums.forward_sums[self.rows], first, last)
        seconds = np.where(allowed, times + overhead_s, np.inf)
        occupied = toll * tables.boundary_share * inner
        busy = seconds + occupied
        forward = forwards + (overhead_s + occupied) / 2
        fill = seconds + toll * (first > 0)
        possible = np.broadcast_to(allowed, seconds.shape)

        # every transfer that the fill counts occupies a stage beside each microbatch or runs beside
        # its work
        self.beside_s = 0.0
        self.longer = 1.0
        if run_beside:
            self.beside_s = float(np.max(toll, initial=0.0))
        else:
            ratio = fill[possible] / busy[possible]
            self.longer = float(np.max(ratio, initial=1.0))

        self.busy = _by_place(busy, possible, np.inf)
        self.fill = _by_place(fill, possible, np.inf)
        self.finite_fill = np.where(np.isfinite(self.fill), self.fill, 0.0)

        # the largest of each: forwards ahead hide time
        self.forward = -_by_place(-forward, possible, 0.0)
        self.begun = -_by_place(-self._begun(first, last), possible, 0.0)

    def _least_toll(self, run_beside: bool) -> Floats:
        """Return (rows, 1, 1) the least seconds of a transfer into a stage of each row.

        run_beside: transfers run beside the work of stages.
        """
        tables = self.tables
        toll = np.minimum(tables.near_s, tables.apart_s).min(axis=0)[self.rows, None, None]
        toll = np.where(np.isfinite(toll), toll, 0.0)  # of groups without any neighbour
        if not run_beside:
            return toll

        # the longest loosens the limits of all stages, so none counts for more than is of use
        longest_s = float(tables.sums.time_sums[self.rows, -1].max(initial=0.0))
        return np.minimum(toll, longest_s / self.blocks)

    def _begun(self, first: Ints, last: Ints) -> Floats:
        """Return (rows, start, blocks - 1) microbatches that memory lets a stage begin ahead.

        They are begun before the first backward of a stage of layers [first, last), less that one.
        """
        sums = self.tables.sums
        state = _of_layers(sums.state_sums[self.rows], first, last)
        a_microbatch = _of_layers(sums.activation_sums[self.rows], first, last)

        # more than most have: only a stage with both ends of the model saves the tied bytes
        room = np.array([row.room_bytes + row.tied_bytes for row in self.tables.rows])
        left = room[self.rows, None, None] - state
        further = left / np.maximum(a_microbatch, 1.0) - 1.0
        return np.asarray(np.maximum(further, 0.0))

    def _limits(self) -> None:
        """Set the range of bottlenecks that occur, and the largest share of forwards in a stage."""
        busy = self.busy[self.room[0]]
        forward = self.forward[self.room[0]]
        self.quickest = np.inf
        self.slowest = 0.0
        self.share = 0.0
        if len(busy):
            self.quickest = float((busy - forward).min())
            self.slowest = float(busy.max())
            self.share = float((forward / busy).max())

    def cheapest(
        self, weight: Floats, high: Floats, prices: Floats, after: Floats, depths: Ints
    ) -> tuple[Floats, Floats, Floats]:
        """Return each interval's least cost of a pipeline, with that path's GPUs and fill.

        GPUs are counted by resource. The cost weights the fill by `weight`. after: microbatches
        that its pipelines do at least after their first. depths: (intervals, 2) least and most
        stages.
        """
        cost = prices[self.resource] * self.degree
        least = np.empty(len(high))
        gpus = np.empty((len(high), len(prices)))
        fill = np.empty(len(high))

        # alike ones together: an array is as deep and as wide as its largest interval
        most_stages = depths[:, 1]
        order = np.lexsort((high, most_stages))
        for i in range(0, len(order), limits.TOGETHER):
            mine = order[i : i + limits.TOGETHER]
            paths = Paths(self, weight[mine], high[mine], cost, after[mine], depths[mine])
            least[mine] = paths.solve()
            gpus[mine], fill[mine] = paths.totals()
        return least, gpus, fill

    def growth(self, high: Floats, after: Floats) -> tuple[Floats, Floats]:
        """Return limits of the time of a stage and a transfer beside it, in units of m.

        First the multiple of m with no stage after it, then the share more for each stage after it.

        By its own K microbatches and the way to it and back: busy <= m + (F's share of the stages
        after it) / (K - 1), and what of F its own share exceeds busy by. high: at least m. after:
        at most K - 1.
        """
        own = 1 / np.maximum(1 - (self.longer - 1) / after, 1e-30)
        longest = own + self.beside_s / high
        more = self.longer / after * own
        return longest, more

    def microbatches_after(self, high: Floats, fewest: float, most: Ints, step_s: float) -> Floats:
        """Return (intervals,) microbatches that a pipeline does at least after its first.

        most: stages at most; the deeper a pipeline, the longer its fill may be. fewest:
        `fewest_microbatches`. step_s: a bound of the step time known before.

        A pipeline does (T - F) / m microbatches after its first, where F is at most its stages'
        seconds, each stage's at most what `Paths` allows.
        """
        after = np.full(len(high), max(fewest - 1, 1e-9))

        # a fixed point: a larger number bounds the fill more tightly, which raises the number
        for _ in range(limits.REPEATS):
            hidden = np.minimum(1.0, self.begun_ahead * (most - 1) / after)
            longest, more = self.growth(high, after)
            with np.errstate(over="ignore"):
                by_forwards = most * (1 / (1 - self.share * hidden) + self.beside_s / high)
                by_way = longest * np.expm1(most * np.log1p(more)) / more
                fill = np.minimum(by_forwards, by_way)
            after = np.maximum(after, step_s / high - fill)
        return after

    def fewest_microbatches(self, prices: Floats) -> float:
        """Return the fewest microbatches with which a pipeline pays for the model's memory.

        Prices are in sequences.
        """
        cost = prices[self.resource] * self.degree

        # the cheapest stage of each size, then the cheapest stages of so many blocks together
        each = np.where(self.room[0], cost[:, None, None], np.inf).min(axis=(0, 1))
        least = np.full(self.blocks + 1, np.inf)
        least[0] = 0.0
        for blocks in range(1, self.blocks + 1):
            size = min(blocks, len(each))
            others = least[blocks - size : blocks][::-1]
            least[blocks] = (each[:size] + others).min()
        return float(least[-1] / self.microbatch)


def _of_layers(sums: Floats, first: Ints, last: Ints) -> Floats:
    """Return (rows, starts, sizes) the part of layers [first, last) of each row's sums."""
    return np.asarray(sums[:, last] - sums[:, first])


def _by_place(values: Floats, possible: Bools, absent: float) -> Floats:
    """Reduce (rows, starts, sizes) to (rows, 3, sizes): the least over the starts of each place."""
    starts, sizes = values.shape[1:]
    start = np.arange(starts)[:, None]
    stop = start + np.arange(1, sizes + 1)[None, :]
    is_first = start == 0
    is_last = stop == starts
    is_inner = (start > 0) & (stop < starts)

    known = np.where(possible, values, absent)
    places = (is_first, is_inner, is_last)
    return np.stack([np.where(place, known, absent).min(axis=1) for place in places], axis=1)


def _any_by_place(possible: Bools) -> Bools:
    """Return (rows, 3, sizes) whether any start of each place is possible."""
    values = np.where(possible, 0.0, np.inf)
    return np.asarray(_by_place(values, possible, np.inf) == 0.0)


class Traced(NamedTuple):
    """Stage of each path of some intervals.

    at: the intervals. row: as in `PricedStages.rows`. place: place in the model. size: its blocks
    less one.
    """

    at: Ints
    row: Ints
    place: Ints
    size: Ints


class Paths:
    """Shortest paths from the last stage to the first, for all intervals at once.

    after: (intervals,) microbatches that each pipeline does at least after its first. depths: as in
    `PricedStages.cheapest`.
    """

    def __init__(
        self,
        stages: PricedStages,
        weight: Floats,
        high: Floats,
        cost: Floats,
        after: Floats,
        depths: Ints,
    ):
        self.relaxed = stages
        self.after = after
        self.least_stages = depths[:, 0]
        self.most_stages = depths[:, 1]
        self.most = int(self.most_stages.max())
        self.fewest = int(max(float(after.min()), 0.0))

        # sizes that no interval's limit allows are left out
        limits = self._limits(high)
        shortest = stages.busy.min(axis=(0, 1)) * (1 - stages.share)
        allowed = np.flatnonzero(shortest <= limits[-1].max())
        self.wide = int(allowed.max(initial=0)) + 1

        fill = stages.finite_fill[:, :, : self.wide]
        self.value = weight[:, None, None, None] * fill + cost[:, None, None]
        bottleneck = np.minimum(high * (1 + 1e-9), 1e300)
        self.from_depth = self._from_depth(bottleneck, limits)

        # [step, :, i]: least cost of the blocks from i on with so many stages
        self.afters = np.full((self.most + 1, len(high), stages.blocks + self.wide + 1), np.inf)
        # [step, :, size, i]: of what follows a stage from block i + 1 on
        num_starts = max(1, stages.blocks - 1)
        self.beyond = sliding_window_view(self.afters[:, :, 2:], num_starts, axis=2)
        self.arcs: list[Floats] = []

    def _limits(self, high: Floats) -> Floats:
        """Return (depths, intervals) the most seconds of a stage by number of stages after it."""
        longest, more = self.relaxed.growth(high, self.after)
        stages_after = np.arange(self.most)[:, None]

        # of deep pipelines the power overflows; then nothing limits a stage
        with np.errstate(over="ignore"):
            growth = np.exp(stages_after * np.log1p(more))
            factors = longest * growth - self.relaxed.beside_s / high
            return np.asarray(np.minimum(high * (1 + 1e-9) * factors, 1e300))

    def _from_depth(self, high: Floats, limits: Floats) -> NDArray[np.int16]:
        """Return (intervals, rows, place, size) the number of stages that have to follow a stage.

        With so many, the warm-up hides enough of it.
        """
        stages = self.relaxed
        busy = stages.held_busy[:, :, : self.wide]
        forward = np.maximum(stages.forward[:, :, : self.wide], 1e-30)
        held = stages.begun[:, :, : self.wide]

        out = np.empty(self.value.shape, dtype=np.int16)
        for i, (limit, after) in enumerate(zip(high, self.after, strict=True)):
            # microbatches begun ahead whose forwards, over the K - 1, hide what is over the limit
            over = busy - limit
            each = forward / after
            is_too_long = over > np.minimum(held, after) * each
            begun = np.where(is_too_long, np.inf, over / each)

            by_forwards = np.ceil(begun / stages.begun_ahead - 1e-9)
            by_way = np.searchsorted(limits[:, i], busy)
            out[i] = np.minimum(np.maximum(by_forwards, by_way), self.most)
        return out

    def _room(self, depth: int) -> Bools:
        """Return (rows, place, size) whether memory allows a stage with `depth` stages after it."""
        return np.asarray(self.relaxed.room[self._band(depth)][:, :, : self.wide])

    def _band(self, depth: int) -> int:
        # a stage keeps no more in flight than its pipeline has, which may be as few as `fewest`
        in_flight = min(depth, self.fewest)
        return bisect.bisect_right(limits.BANDS, in_flight) - 1

    def _least_arcs(self) -> Iterator[Floats]:
        """Yield (intervals, place, size) cost of the cheapest stage by stages after it.

        First with no stage after it, for all places. Then with one after it, two and so on, for the
        first and inner places. Within a band of memory more stages only become possible.
        """
        yield self._least_arc(0, 3)

        # stages that become possible at some depth after 1, by that depth
        depth = self.from_depth[:, :, :2]
        later = np.flatnonzero((depth > 1) & (depth < self.most))
        later_depth = depth.ravel()[later]
        order = np.argsort(later_depth, kind="stable")
        later = later[order]
        value = self.value[:, :, :2].ravel()[later]
        begin = np.searchsorted(later_depth[order], np.arange(self.most + 1))

        # where each lies in (rows, place, size), and in an arc, (intervals, place, size)
        _, rows, _, wide = self.value.shape
        interval, stage = np.divmod(later, rows * 2 * wide)
        at = interval * 2 * wide + stage % (2 * wide)

        arc = self._least_arc(1, 2)
        for step in range(1, self.most):
            # memory as in the step before: stages are only added, which is less work than all anew
            if self._band(step) == self._band(step - 1):
                mine = slice(begin[step], begin[step + 1])
                has_room = self._room(step)[:, :2].ravel()[stage[mine]]
                arc = arc.copy()
                np.minimum.at(arc.reshape(-1), at[mine][has_room], value[mine][has_room])
            else:
                arc = self._least_arc(step, 2)
            yield arc

    def _least_arc(self, depth: int, places: int) -> Floats:
        """Return the arcs of `_least_arcs` for `depth` stages after it."""
        is_deep_enough = self.from_depth[:, :, :places] <= depth
        possible = is_deep_enough & self._room(depth)[:, :places]
        value = np.where(possible, self.value[:, :, :places], np.inf)
        return np.asarray(value.min(axis=1))

    def solve(self) -> Floats:
        """Return (intervals,) the least cost."""
        num_intervals = len(self.after)
        blocks = self.relaxed.blocks
        best = np.full(num_intervals, np.inf)
        self.depth = np.zeros(num_intervals, dtype=np.int64)

        for step, arc in enumerate(self._least_arcs()):
            after = self.afters[step + 1]
            self.arcs.append(arc)
            if step == 0:
                first = self._last(arc, after)
            else:
                first = self._further(step, arc, after, blocks - step)

            stages = step + 1
            is_asked = (self.least_stages <= stages) & (stages <= self.most_stages)
            better = (first < best) & is_asked
            best = np.where(better, first, best)
            self.depth = np.where(better, step, self.depth)

            # another stage costs something, so a part that costs more already is no way to less
            is_dearer = after[:, 1:blocks].min(axis=1, initial=np.inf) >= best
            is_deepest = self.most_stages <= stages
            if (is_dearer | is_deepest).all():
                break
        return best

    def _last(self, arc: Floats, after: Floats) -> Floats:
        """Return the cost of a single stage with all blocks.

        Writes into `after` the cost of a last stage with the blocks from each one on.
        """
        blocks = self.relaxed.blocks
        begin = max(0, blocks - self.wide)
        by_size = arc[:, 2, : blocks - begin]
        after[:, begin:blocks] = by_size[:, ::-1]

        # complete, so no stage may come before it
        whole = after[:, 0].copy()
        after[:, 0] = np.inf
        return whole

    def _further(self, step: int, arc: Floats, after: Floats, top: int) -> Floats:
        """Return the cost with one stage more from the first block on.

        Writes into `after` the cost from each other block on. top: later blocks leave too few for
        the stages after.
        """
        first = arc[:, 0]
        inner = arc[:, 1]
        if top > 1:
            sizes = np.flatnonzero(np.isfinite(inner).any(axis=0))
            wide = int(sizes.max(initial=0)) + 1
            cost = np.add(self.beyond[step, :, :wide, : top - 1], inner[:, :wide, None])
            cost.min(axis=1, out=after[:, 1:top])

        following = self.afters[step, :, 1 : self.wide + 1]
        return np.asarray((first + following).min(axis=1))

    def stages(self) -> Iterator[Traced]:
        """Yield the stages of the paths found, first stages first."""
        which = np.arange(len(self.after))
        block = np.zeros(len(which), dtype=np.int64)
        sizes = np.arange(self.wide)

        # the arrays have the least cost alone, so the stage that had it is found anew
        deepest = int(self.depth.max())
        for step in range(deepest, -1, -1):
            at = which[self.depth >= step]
            begin = block[at]
            if step == 0:
                place = np.full(len(at), 2)
                left = self.relaxed.blocks - begin
                size = np.minimum(left, self.wide) - 1
            else:
                place = np.where(begin == 0, 0, 1)
                end = begin[:, None] + 1 + sizes
                beyond = self.afters[step][at[:, None], end]
                size = (self.arcs[step][at, place] + beyond).argmin(axis=1)

            possible = self.from_depth[at, :, place, size] <= step
            possible &= self._room(step)[:, place, size].T
            value = np.where(possible, self.value[at, :, place, size], np.inf)
            row = value.argmin(axis=1)
            yield Traced(at, row, place, size)
            block[at] = begin + size + 1

    def totals(self) -> tuple[Floats, Floats]:
        """Return (intervals, resources) GPUs and (intervals,) fill of the paths found."""
        stages = self.relaxed
        gpus = np.zeros((len(self.after), len(stages.tables.resources)))
        fill = np.zeros(len(self.after))
        for at, row, place, size in self.stages():
            gpus[at, stages.resource[row]] += stages.degree[row]
            fill[at] += stages.fill[row, place, size]
        return gpus, fill
