"""Best cut of the layers for many pipelines at once, with the stages in a given order.

The best cut has the smallest bottleneck that memory allows.

For a fixed order of stages and a fixed bottleneck, giving each stage as many layers as time and
memory allow is optimal (any other cut ends no later at every stage). So a bisection on the
bottleneck finds the optimum; every step is done for all pipelines together, stage by stage.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.arrays import Bools, Floats, Ints
from planner.search.drafts.draft import Shape
from planner.search.problem import limits
from planner.search.problem.tables import Tables

_UncutStage = tuple[int, float, float]
"""Row of a stage, its seconds beside its layers, and how far it may exceed the bottleneck."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Shape of a pipeline with its seconds.

    bottleneck_s: inf if the pipeline cannot hold the model. fill_s: one microbatch's way through
    all stages and boundaries.
    """

    shape: Shape
    bottleneck_s: float
    fill_s: float


class Balancer:
    """Cuts pipelines over one set of tables, and caches the cuts."""

    def __init__(self, tables: Tables):
        self.tables = tables
        self.fits = tables.sums.last_layer_that_fits
        sums = tables.sums.time_sums

        # all rows one after the other, each further up by more than any row is long: one ascending
        # array, in which one call of `searchsorted` serves pipelines of all rows
        self._gap = float(sums.max()) * 4 + 1.0
        offsets = self._gap * np.arange(len(sums))
        self._flat = (sums + offsets[:, None]).ravel()

        # a stage that takes exactly the limit must not end a layer early by rounding
        self._begin = self._flat * (1 + 1e-12)
        self._width = sums.shape[1]
        self._fits = self.fits.ravel()
        self._known: dict[tuple[tuple[int, ...], float | None], Cut] = {}

    def cut_each(
        self, pipelines: Sequence[tuple[int, ...]], microbatches: Sequence[float] = ()
    ) -> list[Cut]:
        """Return the best cut of each pipeline, given by the table row of each of its stages.

        microbatches: number for each pipeline. With these, early stages may exceed the bottleneck
        as far as they work ahead, if memory allows; the bottleneck does not include that.
        """
        keys = list(itertools.zip_longest(pipelines, microbatches))
        new = [key for key in dict.fromkeys(keys) if key not in self._known]
        if new:
            # deepest first: the stages at one position are then those of the first few pipelines
            new.sort(key=lambda key: -len(key[0]))
            rows, numbers = zip(*new, strict=True)
            counts = np.array(numbers) if microbatches else None
            cuts = self._cut_new(rows, counts)
            self._known.update(zip(new, cuts, strict=True))
        return [self._known[key] for key in keys]

    def _cut_new(
        self, pipelines: Sequence[tuple[int, ...]], microbatches: Floats | None
    ) -> list[Cut]:
        """Cut pipelines that are sorted by depth, deepest first."""
        rows = padded_rows(pipelines)
        if microbatches is None:
            slopes = np.ones(rows.shape)
        else:
            slopes = slopes_of(self.tables, rows, microbatches)

        ends, bottleneck_s, fill_s = self._cut(rows, slopes)
        cuts = []
        each = zip(pipelines, ends.tolist(), bottleneck_s.tolist(), fill_s.tolist(), strict=True)
        for its_rows, its_ends, its_bottleneck_s, its_fill_s in each:
            shape = Shape(its_rows, tuple(its_ends[: len(its_rows)]))
            cuts.append(Cut(shape, its_bottleneck_s, its_fill_s))
        if microbatches is None:
            return cuts

        # a pipeline whose memory does not hold what it begins ahead is cut as if it began nothing
        holds = memory_holds(self.tables, rows, np.maximum(ends, 0), microbatches)
        again = np.flatnonzero(~(np.isfinite(bottleneck_s) & holds)).tolist()
        even = self.cut_each([pipelines[i] for i in again])
        for i, cut in zip(again, even, strict=True):
            cuts[i] = cut
        return cuts

    def _cut(self, rows: Ints, slopes: Floats) -> tuple[Ints, Floats, Floats]:
        """Cut pipelines without the cache.

        rows: (n, P), -1 beyond a pipeline's end, deepest first. Returns (n, P) ends of stages, -1
        if a pipeline cannot hold the model, and (n,) seconds of bottleneck and of fill.
        """
        depth = (rows >= 0).sum(axis=1)
        boundary = self._boundary(rows, depth)

        # a transfer takes its whole time of the fill, and occupies its stages for a share of it
        overhead_s = self.tables.stage_overhead_s
        own = boundary * (2 * self.tables.boundary_share) + overhead_s
        extra = boundary + overhead_s

        ends = self._search(rows, depth, own, slopes)
        return self._measure(rows, ends, extra, own, slopes)

    def _boundary(self, rows: Ints, num_stages: Ints) -> Floats:
        """Return (n, P) seconds charged to each stage: half of each of its boundaries."""
        out = np.zeros(rows.shape)
        width = rows.shape[1]
        if width < 2:
            return out

        senders = rows[:, :-1]
        receivers = rows[:, 1:]
        crossing_s = self.tables.crossings[receivers]
        inside_s = self.tables.boundaries[senders, receivers]
        between = np.where(self._crosses(rows), crossing_s, inside_s)

        exists = np.arange(1, width)[None, :] < num_stages[:, None]
        half = np.where(exists, between, 0.0) / 2
        out[:, :-1] += half
        out[:, 1:] += half
        return out

    def _crosses(self, rows: Ints) -> Bools:
        """Return (n, P - 1) a mask of boundaries between equal groups on two nodes.

        Equal groups fill one node after the other, as `place` does.
        """
        groups = self.tables.groups_a_node
        n, width = rows.shape
        out = np.zeros((n, width - 1), dtype=np.bool_)

        # number of this group on its node, from 1 on
        inside = np.ones(n, dtype=np.int64)
        for s in range(1, width):
            row = rows[:, s]
            same = row == rows[:, s - 1]
            inside = np.where(same, inside % groups[row] + 1, 1)
            out[:, s - 1] = same & (inside == 1)
        return out

    def _search(self, rows: Ints, num_stages: Ints, own: Floats, scale: Floats) -> Ints:
        """Find the least bottleneck by bisection, and return the ends of its stages.

        If there are few pipelines, several steps of the bisection run at once: short arrays cost
        numpy as much as shorter ones.
        """
        whole = self.tables.sums.time_sums[:, -1]
        valid = rows >= 0
        speed = np.where(valid, scale / whole[rows], 0.0)
        low = 0.9 / speed.sum(axis=1)  # below: without boundaries and at a perfect balance
        alone_s = np.where(valid, whole[rows], 0.0)
        high = alone_s.max(axis=1) + own.max(axis=1)

        if len(rows) > limits.CUT_BY_LISTS:
            return self._search_all(rows, num_stages, own, scale, (low, high))
        stages = list(zip(rows[0].tolist(), own[0].tolist(), scale[0].tolist(), strict=True))
        return np.array([self._search_one(stages, float(low[0]), float(high[0]))])

    def _search_all(
        self,
        rows: Ints,
        num_stages: Ints,
        own: Floats,
        scale: Floats,
        between: tuple[Floats, Floats],
    ) -> Ints:
        """Bisect the bottlenecks of all pipelines together.

        between: (n,) each, bottlenecks that fail and that give every stage all layers.
        """
        low, high = between

        def take_all(which: Ints, limit: Floats) -> Ints:
            """Return the ends of these pipelines with these bottlenecks."""
            return self._greedy(rows[which], num_stages[which], limit, own[which], scale[which])

        best = self._greedy(rows, num_stages, high, own, scale)
        alive = np.flatnonzero(best[:, 0] >= 0)
        # most levels are above a bottleneck that succeeds: they need no look of their own
        enough = high.copy()
        likely = np.minimum(low * limits.LIKELY_BOTTLENECK, high)
        is_enough = take_all(alive, likely[alive])[:, 0] >= 0
        enough[alive[is_enough]] = likely[alive[is_enough]]
        too_little = low.copy()
        too_little[alive[~is_enough]] = likely[alive[~is_enough]]
        is_seen = np.ones(len(rows), dtype=np.bool_)
        while True:
            left = alive[high[alive] > low[alive] * (1 + limits.FINE)]
            if not len(left):
                unseen = np.flatnonzero(~is_seen)
                best[unseen] = take_all(unseen, high[unseen])
                return best

            levels = max(1, int(np.log2(1 + limits.CUTS_AT_ONCE / len(left))))
            parts = 2**levels
            exponents = np.arange(parts + 1) / parts
            ratios = high[left] / low[left]
            trials = low[left, None] * ratios[:, None] ** exponents

            # the ends of the range are known: the low one fails, the high one succeeds
            tried = trials[:, 1:-1]
            good = tried >= enough[left, None]
            is_open = ~good & (tried > too_little[left, None])
            index, level = np.nonzero(is_open)
            ends = take_all(left[index], tried[is_open])
            good[index, level] = ends[:, 0] >= 0

            none = good.shape[1]
            first = np.where(good.any(axis=1), good.argmax(axis=1), none)
            is_seen[left[first < none]] = False
            is_first = level == first[index]
            best[left[index[is_first]]] = ends[is_first]
            is_seen[left[index[is_first]]] = True

            number = np.arange(len(left))
            low[left] = trials[number, first]
            high[left] = trials[number, first + 1]

    @cached_property
    def _lists(self) -> tuple[list[float], list[float], list[int]]:
        """Sums, begins of stages and what fits: arrays' entries take ten times as long to read."""
        return self._flat.tolist(), self._begin.tolist(), self._fits.tolist()

    def _search_one(self, stages: Sequence[_UncutStage], low: float, high: float) -> list[int]:
        """Return what `_search` finds for one pipeline, in a fraction of its time.

        Half of the cuts of a walk are new, and each is asked for alone.
        """
        best = self._greedy_one(stages, high)
        parts = 2 ** int(np.log2(1 + limits.CUTS_AT_ONCE))
        exponents = np.arange(parts + 1) / parts
        while best and high > low * (1 + limits.FINE):
            trials = (low * np.array([high / low]) ** exponents).tolist()
            at = bisect_left(
                trials, True, 1, parts, key=lambda limit: bool(self._greedy_one(stages, limit))
            )
            if at < parts:
                best = self._greedy_one(stages, trials[at])
            low = trials[at - 1]
            high = trials[at]
        return best or [-1] * len(stages)

    def _greedy_one(self, stages: Sequence[_UncutStage], limit: float) -> list[int]:
        """Return the ends that `_greedy` finds for one pipeline; none if it fails."""
        flat, begin, fits = self._lists
        layers = self.tables.num_layers
        left = len(stages)
        ends = list[int]()
        at = 0
        for row, own, scale in stages:
            left -= 1
            base = row * self._width
            room = min(max(limit * scale - own, 0.0), self._gap / 2) * (1 + 1e-12)
            until_s = begin[base + at] + room
            by_time = bisect_right(flat, until_s, base + at, base + self._width) - (base + 1)
            by_memory = fits[(row * self.fits.shape[1] + left) * self._width + at]
            end = min(by_time, by_memory, layers - 1 - left if left else layers)
            if end <= at + (not ends):
                return []
            ends.append(end)
            at = end
        return ends if at == layers else []

    def _greedy(
        self, rows: Ints, num_stages: Ints, limit: Floats, own: Floats, scale: Floats
    ) -> Ints:
        """Return (n, P) ends if each stage takes all that it may.

        A pipeline succeeds if its last end is num_layers; else its ends are -1. Pipelines are
        sorted by depth, deepest first.
        """
        n, width = rows.shape
        layers = self.tables.num_layers
        stage = np.arange(width)
        # (P, n) from here on: a stage of all pipelines lies together
        left = num_stages - 1 - stage[:, None]
        base = rows.T * self._width
        fitting = (rows.T * self.fits.shape[1] + left) * self._width
        most = np.where(left > 0, layers - 1 - left, layers)

        # no more than half a gap, so that a stage ends in its own row
        work_s = np.maximum((limit[:, None] * scale - own).T, 0.0)
        room = np.minimum(work_s, self._gap / 2) * (1 + 1e-12)

        ends = np.zeros((width, n), dtype=np.int64)
        at = np.zeros(n, dtype=np.int64)
        good = np.ones(n, dtype=np.bool_)
        has_stage = np.searchsorted(-num_stages, -stage, side="left")
        for s, m in enumerate(has_stage.tolist()):
            if m == 0:
                break
            at = at[:m]
            row_begin = base[s, :m]
            until_s = self._begin[row_begin + at] + room[s, :m]
            by_time = self._flat.searchsorted(until_s, side="right") - (row_begin + 1)
            by_memory = self._fits[fitting[s, :m] + at]
            end = np.minimum(np.minimum(by_time, by_memory), most[s, :m])

            # a block of its own, and the last stage all that is left
            has_block = end > at + (s == 0)
            is_complete = (end == layers) | (left[s, :m] > 0)
            good[:m] &= has_block & is_complete
            ends[s, :m] = end
            at = end

        ends[:, ~good] = -1
        return np.ascontiguousarray(ends.T)

    def _measure(
        self, rows: Ints, ends: Ints, extra: Floats, own: Floats, slopes: Floats
    ) -> tuple[Ints, Floats, Floats]:
        """Return the ends as they are, with (n,) seconds of bottleneck and of fill."""
        valid = rows >= 0
        dead = (ends < 0).any(axis=1)

        # sums of a pipeline without a cut are read at layer 0, and dropped
        safe_ends = np.maximum(ends, 0)
        stage_s = _of_stages(self.tables.sums.time_sums, rows, safe_ends)
        work = np.where(valid, stage_s, 0.0)
        busy = np.where(valid, work + own, 0.0)
        bottleneck = (busy / slopes).max(axis=1)
        fill = (work + np.where(valid, extra, 0.0)).sum(axis=1)
        return ends, np.where(dead, np.inf, bottleneck), np.where(dead, np.inf, fill)


def _of_stages(sums: Floats, rows: Ints, ends: Ints) -> Floats:
    """Return (n, P) each stage's part of sums over layers, (rows, num_layers + 1)."""
    starts = np.zeros_like(ends)
    starts[:, 1:] = ends[:, :-1]
    return np.asarray(sums[rows, ends] - sums[rows, starts])


def padded_rows(pipelines: Sequence[tuple[int, ...]]) -> Ints:
    """Return (n, P) the table row of each stage, -1 beyond a pipeline's end."""
    deepest = max(map(len, pipelines))
    out = np.full((len(pipelines), deepest), -1, dtype=np.int64)
    for i, rows in enumerate(pipelines):
        out[i, : len(rows)] = rows
    return out


def slopes_of(tables: Tables, rows: Ints, microbatches: Floats) -> Floats:
    """Return (n, P) the factor by which each stage may exceed the bottleneck.

    Early stages work ahead while later ones fill (`planner.plans.in_flight`). Stage s may take (T -
    F) / (K - 1) times its factor, since T >= F + (K - 1) t - min(K - 1, n - 1) f, if n microbatches
    are in flight.
    """
    share = tables.sums.forward_share[rows]
    further = np.maximum(microbatches - 1, 1e-9)
    hidden = np.minimum(1.0, _ahead(tables, rows) / further[:, None])
    return np.asarray(1.0 / (1.0 - share * hidden))


def memory_holds(tables: Tables, rows: Ints, ends: Ints, microbatches: Floats) -> Bools:
    """Return (n,) True if each stage's memory holds the microbatches that it keeps in flight."""
    room = np.array([row.room_bytes for row in tables.rows])
    state = _of_stages(tables.sums.state_sums, rows, ends)
    a_microbatch = _of_stages(tables.sums.activation_sums, rows, ends)

    in_flight = np.minimum(_ahead(tables, rows) + 1, np.ceil(microbatches)[:, None])
    holds = state + in_flight * a_microbatch <= room[rows]
    is_absent = rows < 0
    return np.asarray((is_absent | holds).all(axis=1))


def _ahead(tables: Tables, rows: Ints) -> Ints:
    """Return microbatches that each stage may begin beside the microbatch that it waits for."""
    depth = (rows >= 0).sum(axis=1, keepdims=True)
    after = depth - 1 - np.arange(rows.shape[1])
    return np.asarray(tables.begun_ahead * np.maximum(after, 0))
