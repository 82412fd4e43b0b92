"""Stages and paths that the bound prices.

Stages have times that nothing can beat; the paths are the cheapest through the model's blocks.
"""

import bisect
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from planner.search import limits
from planner.search.stage_sums import Floats, Ints
from planner.search.tables import Tables


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
        self.stages = min(tables.deepest, sum(resource.num_gpus for resource in tables.resources))
        self.rows = np.flatnonzero([row.microbatch == microbatch for row in tables.rows])
        kinds = [tables.kind(row) for row in self.rows.tolist()]
        self.resource = np.array([kind.resource for kind in kinds], dtype=np.int64)
        self.degree = np.array([kind.tp_degree for kind in kinds], dtype=np.int64)
        self.speed = self.microbatch / (tables.sums.time_sums[self.rows, -1] * self.degree)
        self.begun_ahead = tables.begun_ahead
        start = np.arange(self.blocks)[:, None]
        size = np.arange(1, self.blocks + 1)[None, :]
        stop = np.minimum(start + size, self.blocks)
        first = np.where(start == 0, 0, start + 1)
        last = np.where(stop == self.blocks, self.blocks + 2, stop + 1)
        room = self._room_of(first, last, start + size <= self.blocks)
        self.wide = wide = max(1, int(room[0].any(axis=(0, 1)).sum())) if len(self.rows) else 1
        inner = 2.0 - (start == 0) - (stop == self.blocks)
        self._time(
            first[:, :wide],
            last[:, :wide],
            inner[:, :wide],
            (start + size <= self.blocks)[:, :wide],
        )
        self.room = [
            _by_place(np.where(part[..., :wide], 0.0, np.inf), part[..., :wide], np.inf) == 0.0
            for part in room
        ]
        self.held_busy = np.where(self.room[0], self.busy, np.inf)
        self._limits()

    def _room_of(
        self, first: Ints, last: Ints, allowed: NDArray[np.bool_]
    ) -> list[NDArray[np.bool_]]:
        """Return for each band whether memory holds layers [first, last) on each row."""
        fits = self.tables.sums.last_layer_that_fits[self.rows]
        return [
            (fits[:, min(depth, fits.shape[1] - 1)][:, first] >= last) & allowed
            for depth in limits.BANDS
        ]

    def _time(self, first: Ints, last: Ints, inner: Floats, allowed: NDArray[np.bool_]) -> None:
        """Set the seconds of layers [first, last) with `inner` boundaries.

        busy: includes the time for which transfers occupy the stage. fill: includes the transfer
        into it. forward: the forward alone.
        """
        tables = self.tables
        rows = self.rows
        toll = np.minimum(tables.near_s, tables.apart_s).min(axis=0)[rows, None, None]
        toll = np.where(np.isfinite(toll), toll, 0.0)  # of groups without any neighbour
        apart = tables.transfers == "none"
        if (
            apart
        ):  # the longest loosens the limits of all stages, so none counts for more than is of use
            longest = float(tables.sums.time_sums[rows, -1].max(initial=0.0)) / self.blocks
            toll = np.minimum(toll, longest)
        times, forwards = (
            sums[rows][:, last] - sums[rows][:, first]
            for sums in (tables.sums.time_sums, tables.sums.forward_sums)
        )
        seconds = np.where(allowed, times + tables.stage_overhead_s, np.inf)
        occupied = toll * tables.boundary_share * inner
        forward = forwards + (tables.stage_overhead_s + occupied) / 2
        fill = seconds + toll * (first > 0)
        possible = np.broadcast_to(allowed, seconds.shape)
        # every transfer that the fill counts occupies a stage beside each microbatch or runs beside
        # its work
        self.beside_s = float(np.max(toll, initial=0.0)) if apart else 0.0
        self.longer = (
            1.0
            if apart
            else float(np.max(fill[possible] / (seconds + occupied)[possible], initial=1.0))
        )
        self.busy, self.fill = (
            _by_place(values, possible, np.inf) for values in (seconds + occupied, fill)
        )
        self.forward = -_by_place(-forward, possible, 0.0)
        self.begun = -_by_place(-self._begun(first, last), possible, 0.0)
        self.finite_fill = np.where(np.isfinite(self.fill), self.fill, 0.0)

    def _begun(self, first: Ints, last: Ints) -> Floats:
        """Return (rows, start, blocks - 1) microbatches that memory lets a stage begin ahead.

        They are begun before the first backward of a stage of layers [first, last), less that one.
        """
        tables = self.tables
        state, kept = (
            part[:, last] - part[:, first]
            for part in (tables.sums.state_sums, tables.sums.activation_sums)
        )
        limits = np.array(
            [row.limit_bytes - row.fixed_bytes + row.tied_bytes for row in tables.rows]
        )
        further = (limits[:, None, None] - state) / np.maximum(kept, 1.0) - 1.0
        return np.asarray(np.maximum(further, 0.0)[self.rows])

    def _limits(self) -> None:
        """Set the range of bottlenecks that occur, and the largest share of forwards in a stage."""
        busy = self.busy[self.room[0]]
        forward = self.forward[self.room[0]]
        self.quickest = float((busy - forward).min()) if len(busy) else np.inf
        self.slowest = float(busy.max()) if len(busy) else 0.0
        self.share = float((forward / busy).max()) if len(busy) else 0.0

    def cheapest(
        self, weight: Floats, high: Floats, prices: Floats, after: Floats, depths: Ints
    ) -> tuple[Floats, Floats, Floats]:
        """Return each interval's least cost of a pipeline, with that path's GPUs and fill.

        GPUs are counted by resource. The cost weights the fill by `weight`. after: microbatches
        that its pipelines do at least after their first. depths: (intervals, 2) least and most
        stages.
        """
        cost = prices[self.resource] * self.degree
        order = np.lexsort((high, depths[:, 1]))
        least = np.empty(len(high))
        gpus = np.empty((len(high), len(prices)))
        fill = np.empty(len(high))
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
        return own + self.beside_s / high, self.longer / after * own

    def microbatches_after(self, high: Floats, fewest: float, most: Ints, step_s: float) -> Floats:
        """Return (intervals,) microbatches that a pipeline does at least after its first.

        most: stages at most; the deeper a pipeline, the longer its fill may be. fewest:
        `fewest_microbatches`. step_s: a bound of the step time known before.

        A pipeline does (T - F) / m microbatches after its first, where F is at most its stages'
        seconds, each stage's at most what `Paths` allows.
        """
        after = np.full(len(high), max(fewest - 1, 1e-9))
        for _ in range(limits.REPEATS):
            hidden = np.minimum(1.0, self.begun_ahead * (most - 1) / after)
            longest, more = self.growth(high, after)
            with np.errstate(over="ignore"):
                fill = most * (1 / (1 - self.share * hidden) + self.beside_s / high)
                fill = np.minimum(fill, longest * np.expm1(most * np.log1p(more)) / more)
            after = np.maximum(after, step_s / high - fill)
        return after

    def fewest_microbatches(self, prices: Floats) -> float:
        """Return the fewest microbatches with which a pipeline pays for the model's memory.

        Prices are in sequences.
        """
        cost = prices[self.resource] * self.degree
        each = np.where(self.room[0], cost[:, None, None], np.inf).min(axis=(0, 1))
        least = np.full(self.blocks + 1, np.inf)
        least[0] = 0.0
        for blocks in range(1, self.blocks + 1):
            size = min(blocks, len(each))
            least[blocks] = (each[:size] + least[blocks - size : blocks][::-1]).min()
        return float(least[-1] / self.microbatch)


def _by_place(values: Floats, possible: NDArray[np.bool_], absent: float) -> Floats:
    """Reduce (rows, starts, sizes) to (rows, 3, sizes): the least over the starts of each place."""
    starts, sizes = values.shape[1:]
    stop = np.arange(starts)[:, None] + np.arange(1, sizes + 1)[None, :]
    places = (
        np.arange(starts)[:, None] == 0,
        (np.arange(starts)[:, None] > 0) & (stop < starts),
        stop == starts,
    )
    known = np.where(possible, values, absent)
    return np.stack([np.where(place, known, absent).min(axis=1) for place in places], axis=1)


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
        self.depths = depths
        self.most, self.fewest = int(depths[:, 1].max()), int(max(float(after.min()), 0.0))
        limits = self._limits(high)
        shortest = stages.busy.min(axis=(0, 1)) * (1 - stages.share)
        self.wide = wide = int(np.flatnonzero(shortest <= limits[-1].max()).max(initial=0)) + 1
        self.value = (
            weight[:, None, None, None] * stages.finite_fill[:, :, :wide] + cost[:, None, None]
        )
        self.from_depth = self._from_depth(np.minimum(high * (1 + 1e-9), 1e300), limits)
        # [step, :, i]: least cost of the blocks from i on with so many stages
        self.afters = np.full((self.most + 1, len(high), stages.blocks + wide + 1), np.inf)
        # [step, :, size, i]: of what follows a stage from block i + 1 on
        self.beyond = sliding_window_view(self.afters[:, :, 2:], max(1, stages.blocks - 1), axis=2)
        self.arcs: list[Floats] = []

    def _limits(self, high: Floats) -> Floats:
        """Return (depths, intervals) the most seconds of a stage by number of stages after it."""
        longest, more = self.relaxed.growth(high, self.after)
        with np.errstate(over="ignore"):
            factors = (
                longest * np.exp(np.arange(self.most)[:, None] * np.log1p(more))
                - self.relaxed.beside_s / high
            )
            return np.asarray(np.minimum(high * (1 + 1e-9) * factors, 1e300))

    def _from_depth(self, high: Floats, limits: Floats) -> NDArray[np.int16]:
        """Return (intervals, rows, place, size) the number of stages that have to follow a stage.

        With so many, the warm-up hides enough of it.
        """
        stages = self.relaxed
        busy = self.relaxed.held_busy[:, :, : self.wide]
        out = np.empty(self.value.shape, dtype=np.int16)
        for i, (limit, after) in enumerate(zip(high, self.after, strict=True)):
            over = busy - limit
            each = np.maximum(stages.forward[:, :, : self.wide], 1e-30) / after
            begun = np.where(
                over > np.minimum(stages.begun[:, :, : self.wide], after) * each,
                np.inf,
                over / each,
            )
            by_forwards = np.ceil(begun / stages.begun_ahead - 1e-9)
            by_way = np.searchsorted(limits[:, i], busy)
            out[i] = np.minimum(np.maximum(by_forwards, by_way), self.most)
        return out

    def _room(self, depth: int) -> NDArray[np.bool_]:
        """Return (rows, place, size) whether memory allows a stage with `depth` stages after it."""
        return np.asarray(self.relaxed.room[self._band(depth)][:, :, : self.wide])

    def _band(self, depth: int) -> int:
        return bisect.bisect_right(limits.BANDS, min(depth, self.fewest)) - 1

    def _least_arcs(self) -> Iterator[Floats]:
        """Yield (intervals, place, size) cost of the cheapest stage by stages after it.

        First with no stage after it, for all places. Then with one after it, two and so on, for the
        first and inner places. Within a band of memory more stages only become possible.
        """
        yield self._least_arc(0, 3)
        depth = self.from_depth[:, :, :2]
        later = np.flatnonzero((depth > 1) & (depth < self.most))
        depth = depth.ravel()[later]
        value = self.value[:, :, :2].ravel()[later]
        order = np.argsort(depth, kind="stable")
        later = later[order]
        value = value[order]
        begin = np.searchsorted(depth[order], np.arange(self.most + 1))
        _, rows, _, wide = self.value.shape
        interval, stage = np.divmod(later, rows * 2 * wide)
        at = interval * 2 * wide + stage % (2 * wide)
        arc = self._least_arc(1, 2)
        for step in range(1, self.most):
            if self._band(step) != self._band(step - 1):
                arc = self._least_arc(step, 2)
            else:
                mine = slice(begin[step], begin[step + 1])
                arc = arc.copy()
                room = self._room(step)[:, :2].ravel()[stage[mine]]
                np.minimum.at(arc.reshape(-1), at[mine][room], value[mine][room])
            yield arc

    def _least_arc(self, depth: int, places: int) -> Floats:
        """Return the arcs of `_least_arcs` for `depth` stages after it."""
        possible = (self.from_depth[:, :, :places] <= depth) & self._room(depth)[:, :places]
        return np.asarray(np.where(possible, self.value[:, :, :places], np.inf).min(axis=1))

    def solve(self) -> Floats:
        """Return (intervals,) the least cost."""
        m = len(self.after)
        n = self.relaxed.blocks
        best = np.full(m, np.inf)
        self.depth = np.zeros(m, dtype=np.int64)
        for step, arc in enumerate(self._least_arcs()):
            after = self.afters[step + 1]
            self.arcs.append(arc)
            first = self._further(step, arc, after, n - step) if step else self._last(arc, after)
            better = (
                (first < best) & (self.depths[:, 0] <= step + 1) & (step + 1 <= self.depths[:, 1])
            )
            best = np.where(better, first, best)
            self.depth = np.where(better, step, self.depth)
            if (
                (after[:, 1:n].min(axis=1, initial=np.inf) >= best)
                | (self.depths[:, 1] <= step + 1)
            ).all():
                break
        return best

    def _last(self, arc: Floats, after: Floats) -> Floats:
        """Return the cost of a single stage with all blocks.

        Writes into `after` the cost of a last stage with the blocks from each one on.
        """
        n = self.relaxed.blocks
        begin = max(0, n - self.wide)
        after[:, begin:n] = arc[:, 2, : n - begin][:, ::-1]
        whole = after[:, 0].copy()
        after[:, 0] = np.inf
        return whole

    def _further(self, step: int, arc: Floats, after: Floats, top: int) -> Floats:
        """Return the cost with one stage more from the first block on.

        Writes into `after` the cost from each other block on. top: later blocks leave too few for
        the stages after.
        """
        if top > 1:
            wide = int(np.flatnonzero(np.isfinite(arc[:, 1]).any(axis=0)).max(initial=0)) + 1
            np.add(self.beyond[step, :, :wide, : top - 1], arc[:, 1, :wide, None]).min(
                axis=1, out=after[:, 1:top]
            )
        return np.asarray((arc[:, 0] + self.afters[step, :, 1 : self.wide + 1]).min(axis=1))

    def stages(self) -> Iterator[Traced]:
        """Yield the stages of the paths found, first stages first."""
        n = self.relaxed.blocks
        which = np.arange(len(self.after))
        block = np.zeros(len(which), dtype=np.int64)
        for step in range(int(self.depth.max()), -1, -1):
            at = which[self.depth >= step]
            begin = block[at]
            if step:
                place = np.where(begin == 0, 0, 1)
                beyond = self.afters[step][at[:, None], begin[:, None] + 1 + np.arange(self.wide)]
                size = (self.arcs[step][at, place] + beyond).argmin(axis=1)
            else:
                place = np.full(len(at), 2)
                size = np.minimum(n - begin, self.wide) - 1
            possible = self.from_depth[at, :, place, size] <= step
            possible &= self._room(step)[:, place, size].T
            row = np.where(possible, self.value[at, :, place, size], np.inf).argmin(axis=1)
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
