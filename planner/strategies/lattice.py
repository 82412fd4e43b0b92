"""The pipeline that each set of GPUs makes, its node types in any order and its tensor-parallel groups of any sizes.

For a limit on the bottleneck, the stages that reach furthest from the pipeline's end leave least to those before them. So a dynamic
program over numbers of GPUs of each node type, from the last stage to the first, finds groups, order and cut together, for many limits
side by side:

    start(gpus) = least over groups g of  start of a stage on g that ends at start(gpus - g)

where a stage reaches as far as time, memory and its gradient sync allow. Sync may last so long after the pipeline's end; before that a
stage has the backwards of the layers before it, each at least as long as on the fastest group. Transfers run beside the work.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.strategies.drafts import Shape
from planner.strategies.refine import well_formed
from planner.strategies.stage_orders import first_layers
from planner.strategies.tables import Floats, Ints, Tables

Shorts = NDArray[np.int16]

_LONGEST = 5.0  # times the shortest limit
_FULL = 0.88  # share of the step in which a pipeline begins microbatches, roughly


@dataclass(frozen=True)
class Sets:
    """One entry a set of GPUs that holds the model. usage: (n, resources) GPUs; sequences: (n,) that its pipeline does in the step;
    lanes: (n,) which limit gives it."""

    lattice: "Lattice"
    usage: Ints
    sequences: Floats
    lanes: Ints
    _states: Ints

    def shape(self, i: int) -> Shape | None:
        """The pipeline; None where some stage has no block of its own."""
        return self.lattice.shape(int(self._states[i]), int(self.lanes[i]))


class Lattice:
    """The dynamic program, over sets of at most `most` GPUs of each resource, with groups of these table rows, of one microbatch size.

    step_s: pipelines' part of the step. sync: (seconds, seconds a byte of each table row): how long sums may last after the pipeline's
    end, and how long they take. limits: bottlenecks to try, or how many, fewer where that would be more than `most_entries` with all sets.
    """

    def __init__(
        self, tables: Tables, rows: Sequence[int], most: Ints, max_stages: int, step_s: float, sync: tuple[float, Floats],
        limits: Floats | int, most_entries: int,
    ):  # fmt: skip
        self.tables, self.step_s = tables, step_s
        kinds = [tables.kinds[tables.rows[row].kind] for row in rows]
        order = sorted(range(len(rows)), key=lambda i: (-kinds[i].tp_degree, i))  # of equal reach the shorter way
        self.rows = [rows[i] for i in order]
        self.resources = sorted({kind.resource for kind in kinds})
        self.unit = np.array([min(k.tp_degree for k in kinds if k.resource == r) for r in self.resources])
        self.axis = [self.resources.index(kinds[i].resource) for i in order]
        self.step = [kinds[i].tp_degree // int(self.unit[axis]) for i, axis in zip(order, self.axis, strict=True)]
        self.dims = np.array([int(most[r]) for r in self.resources]) // self.unit + 1
        self.strides = np.append(np.cumprod(self.dims[:0:-1])[::-1], 1).astype(np.int64)
        self.deepest = min(max_stages, tables.num_blocks, int((self.dims - 1).sum()))
        self.limits = (
            self._limits(min(limits, most_entries // int(np.prod(self.dims)))) if isinstance(limits, int) else limits
        )
        self.microbatches = np.maximum(_FULL * step_s / self.limits, 2.0)
        self.reach = np.stack([self._reach(row, sync[0], float(sync[1][row])) for row in self.rows])
        self._solve()

    @property
    def size(self) -> int:
        return self.tables.rows[self.rows[0]].microbatch

    def _limits(self, number: int) -> Floats:
        """(number,) bottlenecks, from that of the whole lattice in one pipeline."""
        times = self.tables.time_sums[self.rows, -1]
        rate = [
            max(1 / (self.step[i] * times[i]) for i in range(len(self.rows)) if self.axis[i] == axis)
            for axis in range(len(self.dims))
        ]
        least = 1.0 / float(((self.dims - 1) * np.array(rate)).sum())
        return np.asarray(np.geomspace(least, least * _LONGEST, number))

    def _reach(self, row: int, sync_s: float, byte_s: float) -> Shorts:
        """(depths, lanes, num_layers + 2) `first_layers` of a stage with so many after it that ends there; beyond the model where it ends
        before its beginning or beyond it."""
        tables, ends = self.tables, np.arange(1, self.tables.num_layers + 1)
        fits, summed = tables.fitting(tables.begun_ahead * self.deepest + 1)[row], self._summed(row, sync_s, byte_s)
        shape = (self.deepest + 1, len(self.limits), tables.num_layers + 2)
        out = np.full(shape, tables.num_layers + 1, dtype=np.int16)
        for after in range(self.deepest):
            for further in {number * after for number in range(1, tables.begun_ahead + 1)}:
                hidden = np.minimum(1.0, further / (self.microbatches - 1))
                room = self.limits / (1 - tables.forward_share[row] * hidden) - tables.stage_overhead_s
                start = first_layers(tables, row, fits[further], ends, room[:, None], summed[1:])
                out[after, :, 1:-1] = np.minimum(out[after, :, 1:-1], start)
        return out

    def _summed(self, row: int, sync_s: float, byte_s: float) -> Ints:
        """(num_layers + 1,) the first layer of a stage that ends there and whose sums end in time."""
        tables = self.tables
        back = tables.time_sums[self.rows] - tables.forward_sums[self.rows]
        before = back.min(axis=0)  # (num_layers + 1,) backwards of the layers before each, at least
        held = tables.sync_sums[row]
        late = byte_s * (held[None, :] - held[:, None]) > sync_s + before[:, None]  # (starts, ends)
        return np.asarray(np.argmin(late, axis=0))

    def _solve(self) -> None:
        """Reach of each state, in which number of stages, through which first group, with what fill and bottleneck."""
        lanes, layers = len(self.limits), self.tables.num_layers
        coordinates = np.indices(self.dims).reshape(len(self.dims), -1)
        total = coordinates.sum(axis=0)
        order = np.argsort(total, kind="stable")
        waves = np.split(order, np.flatnonzero(np.diff(total[order])) + 1)
        shape = (len(order), lanes)
        self.coordinates, self.start = coordinates, np.full(shape, layers + 1, dtype=np.int16)
        self.count, self.choice = np.zeros(shape, dtype=np.int16), np.full(shape, -1, dtype=np.int8)
        self.fill, self.busy = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
        self.start[0] = layers
        width, which = layers + 2, np.arange(lanes)
        for wave in waves[1:]:
            best = np.full((len(wave), lanes), layers + 1, dtype=np.int16)
            group = np.full((len(wave), lanes), -1, dtype=np.int8)
            for i, reach in enumerate(self.reach):
                mine = np.flatnonzero(coordinates[self.axis[i]][wave] >= self.step[i])
                source = wave[mine] - self.step[i] * self.strides[self.axis[i]]
                at = (np.minimum(self.count[source], self.deepest).astype(np.int64) * lanes + which) * width
                found = reach.ravel().take(at + self.start[source])
                known = best[mine]
                better = found < known
                best[mine] = np.where(better, found, known)
                group[mine] = np.where(better, np.int8(i), group[mine])
            state, lane = np.nonzero(group >= 0)
            self._extend(wave[state], lane, group[state, lane], best[state, lane])

    def _extend(self, states: Ints, lanes: Ints, groups: NDArray[np.int8], starts: Shorts) -> None:
        """Notes the first group of these states in these lanes, and where its stage starts."""
        tables, row = self.tables, np.array(self.rows)[groups]
        source = states - (np.array(self.step) * self.strides[self.axis])[groups]
        ends, after = self.start[source, lanes], self.count[source, lanes]
        seconds = tables.time_sums[row, ends] - tables.time_sums[row, starts] + tables.stage_overhead_s
        hidden = np.minimum(1.0, tables.begun_ahead * after / (self.microbatches[lanes] - 1))
        busy = seconds * (1 - tables.forward_share[row] * hidden)
        self.start[states, lanes], self.choice[states, lanes] = starts, groups
        self.count[states, lanes] = after + 1
        self.fill[states, lanes] = self.fill[source, lanes] + seconds + tables.typical_hop[row]
        self.busy[states, lanes] = np.maximum(self.busy[source, lanes], busy)

    def states(self, gpus: Ints) -> Ints:
        """(n,) of each row of GPUs of each resource; what is less than a group counts for nothing."""
        return np.asarray(gpus[:, self.resources] // self.unit @ self.strides)

    def sets(self) -> Sets:
        """Each set of GPUs with the lane in which its pipeline does most."""
        held = self.start == 0
        further = (self.step_s - self.fill) / np.where(held, self.busy, 1.0)
        sequences = np.where(held & (further > 0), self.size * (1 + further), 0.0)
        lane = sequences.argmax(axis=1)
        most = sequences[np.arange(len(lane)), lane]
        states = np.flatnonzero(most > 0)
        usage = np.zeros((len(states), len(self.tables.resources)), dtype=np.int64)
        usage[:, self.resources] = self.coordinates[:, states].T * self.unit
        return Sets(self, usage, most[states], lane[states], states)

    def shape(self, state: int, lane: int) -> Shape | None:
        """The pipeline of a set of GPUs that holds the model."""
        rows, ends = list[int](), list[int]()
        while state:
            group = int(self.choice[state, lane])
            state -= self.step[group] * int(self.strides[self.axis[group]])
            rows.append(self.rows[group])
            ends.append(max(int(self.start[state, lane]), len(rows) + 1))
        found = Shape(tuple(rows), tuple(ends))
        return found if well_formed(found) else None


class BestOf:
    """The set that does most within any number of GPUs."""

    def __init__(self, sets: Sets):
        self._lattice = lattice = sets.lattice
        value, index = np.zeros(int(np.prod(lattice.dims))), np.full(int(np.prod(lattice.dims)), -1, dtype=np.int64)
        at = lattice.states(sets.usage)
        value[at], index[at] = sets.sequences, np.arange(len(at))
        value, index = value.reshape(lattice.dims), index.reshape(lattice.dims)
        for axis in range(len(lattice.dims)):
            values, indices = np.moveaxis(value, axis, 0), np.moveaxis(index, axis, 0)
            for i in range(1, len(values)):
                less = values[i] < values[i - 1]
                values[i][less], indices[i][less] = values[i - 1][less], indices[i - 1][less]
        self._index = index.ravel()

    def within(self, gpus: Ints) -> Ints:
        """(n,) of each row of GPUs; -1 where they hold no pipeline."""
        return np.asarray(self._index[self._lattice.states(gpus)])
