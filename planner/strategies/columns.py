"""Every mix of kinds that one pipeline may be made of, with a bound on how many microbatches it can do in a given time.

A *column* says how many stages of which kinds a pipeline has and at which microbatch size, not their order nor the
cut of the
layers. Its bottleneck and fill here are bounds (never more than any order and cut would need), so the integer program's
relaxation over all columns bounds the step time of every plan built of them; `balance.py` makes the promising ones
exact. Columns thinned for a search are estimates instead (`ColumnMaker`).
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.search.tables import Floats, Ints, Tables

_CLOSELY, _ROUGHLY = 16, 10  # bisections of a bottleneck
_SHALLOW = 6


@dataclass(frozen=True)
class Columns:
    """One entry a column. rows: (n, S) table row of each slot, -1 where unused; counts: (n, S) stages of it.

    usage: (n, resources) GPUs. bottleneck_s, fill_s: (n,) bounds; sync_bytes: (n,) least gradient bytes of a stage's
    worker. ahead: (n,) microbatches that the first stage may begin before the first backward reaches it, beside that one.
    """

    rows: Ints
    counts: Ints
    usage: Ints
    microbatch: Ints
    num_stages: Ints
    bottleneck_s: Floats
    fill_s: Floats
    sync_bytes: Floats
    forward_share: Floats
    least_tp: Ints
    ahead: Ints

    def __len__(self) -> int:
        return len(self.microbatch)

    def take(self, index: Ints) -> "Columns":
        return Columns(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def least(self, by_row: Floats) -> Floats:
        """(n,) the least that any of a column's table rows has."""
        return np.asarray(np.where(self.rows >= 0, by_row[self.rows], np.inf).min(axis=1))

    def microbatches_in(self, seconds: Floats) -> Ints:
        """(n,) upper bound of the microbatches that a column completes in so many seconds.

        A stage s of P keeps at most n = P - s microbatches in flight (1F1B; more where stages work ahead, `Tables.begun_ahead`),
        so it cannot have done more than that many forwards when the first backward reaches it:
        seconds >= fill + (K - 1) t_s - min(K - 1, n - 1) f_s for every stage s.
        """
        room = np.maximum(seconds - self.fill_s, -1.0)
        ahead = self.ahead * self.forward_share
        by_stage = np.where(room >= 0, room / self.bottleneck_s + 1 + ahead, 0.0)
        # with K - 1 < n - 1 all of a stage's forwards may come first
        few = np.where(room >= 0, room / (self.bottleneck_s * (1 - self.forward_share)) + 1, 0.0)
        return np.floor(np.minimum(by_stage, few) + 1e-9).astype(np.int64)


class ColumnMaker:
    """Enumerates columns of one set of tables within a budget of columns; deeper pipelines are left out first.

    degrees: TP degrees allowed; none: all. several_degrees: whether a pipeline may have several on one node type. node_parts: for a
    search, where bottleneck and fill count typical transfers instead of the least, so that they are no bounds: of each node type whole
    nodes only (1), or halves (2), and in mixed pipelines TP degrees that differ by a factor of two at most, beside all pipelines of few
    stages; 0: everything, for a bound.
    """

    def __init__(
        self,
        tables: Tables,
        max_stages: int,
        budget: int,
        supply: Ints,
        node_parts: int = 0,
        degrees: Sequence[int] = (),
        several_degrees: bool = False,
    ):
        self.tables = tables
        self.several_degrees = several_degrees
        self.node_parts, self.degrees = node_parts, degrees
        self.max_stages = max_stages
        self.budget = budget
        self.supply = supply
        self.fits = tables.fitting(max_stages)
        self._prepare()

    def _prepare(self) -> None:
        tables, sums = self.tables, self.tables.time_sums
        layers = tables.num_layers
        blocks = sums[:, 1:layers]
        n = layers - 2
        self.least_s = np.full((len(sums), n + 1), np.inf)
        self.least_s[:, 0] = 0.0
        for count in range(1, n + 1):
            self.least_s[:, count] = (blocks[:, count:] - blocks[:, :-count]).min(axis=1)
        self.ends_s = np.stack([sums[:, 1] - sums[:, 0], sums[:, layers] - sums[:, layers - 1]], axis=1)
        room = self.fits[:, :, 1:layers] - np.arange(1, layers)
        self.room = np.clip(room.max(axis=2), 0, n)
        depth = np.arange(self.max_stages)
        held = np.minimum(np.arange(n + 1)[None, :, None], self.room[:, None, depth])
        self.held = np.concatenate([np.zeros((len(sums), n + 1, 1), dtype=np.int64), np.cumsum(held, axis=2)], axis=2)
        forward = np.stack([row.forward_s for row in tables.rows])
        total = np.maximum(forward + np.stack([row.backward_s for row in tables.rows]), 1e-30)
        # a stage's forward share is at most its layers' largest
        self.forward_share = (forward / total).max(axis=1) if tables.overlaps_warmup else np.zeros(len(sums))
        np_boundary = tables.boundaries
        self.most_boundary = np.where(np.isfinite(np_boundary), np_boundary, 0.0).max(axis=1)
        self.least_boundary = np.where(np.isfinite(np_boundary), np_boundary, np.inf).min(axis=1)
        occupied = 2 * tables.busiest_hop if self.node_parts else self.least_boundary
        self.toll = occupied * tables.boundary_share

    def make(self) -> Columns:
        """All columns within the budget, in a fixed order."""
        groups = [slots for slots in self._slots()]
        parts = [self._compositions(slots, depth) for slots, depth in self._depths(groups)]
        width = max(map(len, groups), default=1)
        parts = parts or [((0,), np.zeros((0, 1), dtype=np.int64))]
        rows = np.concatenate([_pad(np.broadcast_to(np.array(s), (len(c), len(s))), width, -1) for s, c in parts])
        counts = np.concatenate([_pad(c, width, 0) for _, c in parts])
        return self._bound(rows, counts)

    def _slots(self) -> Iterator[tuple[int, ...]]:
        """Sets of table rows of one microbatch size and of different resources, unless these may have several degrees."""
        rows = self.tables.rows
        by_size: dict[int, dict[int, list[int]]] = {}
        for index, row in enumerate(rows):
            kind = self.tables.kinds[row.kind]
            if self.supply[kind.resource] < kind.tp_degree or (self.degrees and kind.tp_degree not in self.degrees):
                continue
            one_of = index if self.several_degrees else kind.resource
            by_size.setdefault(row.microbatch, {}).setdefault(one_of, []).append(index)
        for size in sorted(by_size):
            for width in range(1, len(by_size[size]) + 1):
                for chosen in itertools.combinations(sorted(by_size[size]), width):
                    product = itertools.product(*(by_size[size][one_of] for one_of in chosen))
                    yield from (slots for slots in product if not self.node_parts or self._degrees_near(slots))

    def _degrees_near(self, slots: tuple[int, ...]) -> bool:
        degrees = [self.tables.kinds[self.tables.rows[r].kind].tp_degree for r in slots]
        return max(degrees) <= 2 * min(degrees)

    def _steps(self, slots: tuple[int, ...]) -> list[int]:
        """By how many groups of each kind pipelines differ."""
        groups = self.tables.groups_a_node
        return [max(1, int(groups[r]) // self.node_parts) if self.node_parts else 1 for r in slots]

    def _depths(self, groups: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], int]]:
        """How deep pipelines may be for each group so that the budget holds."""
        by_width: dict[int, list[tuple[int, ...]]] = {}
        for slots in groups:
            by_width.setdefault(len(slots), []).append(slots)
        out = []
        for width, members in sorted(by_width.items()):
            share = self.budget / len(by_width)
            depth, thinning = self.max_stages, [math.prod(self._steps(slots)) for slots in members]
            while depth > width and sum(_count(depth, width) / each for each in thinning) > share:
                depth -= 1
            out += [(slots, depth) for slots in members]
        return out

    def _compositions(self, slots: tuple[int, ...], depth: int) -> tuple[tuple[int, ...], Ints]:
        tables = self.tables
        kinds = [tables.kinds[tables.rows[r].kind] for r in slots]
        limits = [min(depth, k.count, int(self.supply[k.resource]) // k.tp_degree) for k in kinds]
        counts = _grid(limits, self._steps(slots), depth)
        if self.node_parts:  # and all that are shallow
            shallow = _grid([min(limit, _SHALLOW) for limit in limits], [1] * len(slots), min(depth, _SHALLOW))
            counts = np.unique(np.concatenate([counts, shallow]), axis=0)
        most = np.array([self.room[r, 0] for r in slots])
        possible = (counts * most).sum(axis=1) >= tables.num_blocks
        for resource in {kind.resource for kind in kinds} if self.several_degrees else ():
            degrees = np.array([kind.tp_degree if kind.resource == resource else 0 for kind in kinds])
            possible &= counts @ degrees <= self.supply[resource]
        return slots, counts[possible]

    def _bound(self, rows: Ints, counts: Ints) -> Columns:
        tables = self.tables
        n, width = rows.shape
        usage = np.zeros((n, len(tables.resources)), dtype=np.int64)
        resource = np.array([tables.kinds[row.kind].resource for row in tables.rows])
        degree = np.array([tables.kinds[row.kind].tp_degree for row in tables.rows])
        for slot in range(width):
            used = rows[:, slot] >= 0
            usage[np.flatnonzero(used), resource[rows[used, slot]]] += counts[used, slot] * degree[rows[used, slot]]
        stages = counts.sum(axis=1)
        used = rows >= 0
        bottleneck = self._bottleneck(rows, counts, stages)
        share = np.where(used, self.forward_share[rows], 0.0).max(axis=1)
        # transfers occupy a stage before and after its forward as much as around its backward
        toll = np.where(used, self.most_boundary[rows], 0.0).max(axis=1) * 2 * tables.boundary_share
        share += np.maximum(0.5 - share, 0.0) * np.minimum(1.0, toll / bottleneck) * tables.overlaps_warmup
        size = np.array([row.microbatch for row in tables.rows])[rows[:, 0]]
        workers = (counts * np.where(used, degree[rows], 0)).sum(axis=1)
        each = np.arange(len(tables.rows))
        once = tables.held_sync_bytes(each, 0, tables.num_layers) * degree  # of a tied embedding too
        whole = np.where(stages[:, None] > 1, (tables.sync_sums[:, -1] * degree)[rows], once[rows])
        sync = np.where(used, whole, np.inf).min(axis=1) / np.maximum(workers, 1)
        least = np.where(used, degree[rows], 10**6).min(axis=1)
        columns = Columns(
            rows,
            counts,
            usage,
            size,
            stages,
            bottleneck,
            self._fill(rows, counts, stages, bottleneck),
            sync,
            share,
            least,
            tables.begun_ahead * (stages - 1),
        )
        return columns.take(np.flatnonzero(np.isfinite(bottleneck)))

    def _capacity(self, rows: Ints, counts: Ints, stages: Ints, limit: Floats) -> Ints:
        """(n,) most blocks under a bottleneck, each kind as if it sat nearest the pipeline's end, where memory is
        freest.
        """
        total = np.zeros(len(rows), dtype=np.int64)
        lost_first = np.full(len(rows), 10**6)
        lost_last = np.full(len(rows), 10**6)
        for slot in range(rows.shape[1]):
            r, c = rows[:, slot], counts[:, slot]
            used = r >= 0
            toll = np.where(stages > 1, self.toll[r], 0.0)
            blocks = self._blocks(r, limit - toll)
            total += np.where(used, self.held[r, blocks, c], 0)
            total -= np.where(used & (blocks < 1), 10**6, 0)
            first = blocks - self._blocks(r, limit - toll - self.ends_s[r, 0])
            last = blocks - self._blocks(r, limit - toll - self.ends_s[r, 1])
            # a stage whose blocks memory limits may have the time for embedding or head without giving up a block
            deepest = self.room[r, np.maximum(c - 1, 0)]
            first = np.maximum(first - np.maximum(blocks - deepest, 0), 0)
            last = np.maximum(last - np.maximum(blocks - self.room[r, 0], 0), 0)
            both = blocks - self._blocks(r, limit - toll - self.ends_s[r].sum(axis=1))
            both = np.maximum(both - np.maximum(blocks - self.room[r, 0], 0), 0)
            first, last = np.where(stages > 1, first, both), np.where(stages > 1, last, 0)
            lost_first = np.where(used, np.minimum(lost_first, first), lost_first)
            lost_last = np.where(used, np.minimum(lost_last, last), lost_last)
        return np.asarray(total - lost_first - lost_last, dtype=np.int64)

    def _blocks(self, rows: Ints, limit: Floats) -> Ints:
        """(n,) most blocks that each row does in `limit` seconds."""
        table = self.least_s
        gap = float(table.max()) * 2 + 1.0
        flat = (table + gap * np.arange(len(table))[:, None]).ravel()
        safe = np.maximum(rows, 0)
        target = np.clip(limit, 0.0, gap / 2) * (1 + 1e-9) + gap * safe
        found = np.searchsorted(flat, target * (1 + 1e-12), side="right") - 1 - safe * table.shape[1]
        return np.asarray(found, dtype=np.int64)

    def _bottleneck(self, rows: Ints, counts: Ints, stages: Ints) -> Floats:
        blocks = self.tables.num_blocks
        whole = self.tables.time_sums[:, -1]
        used = rows >= 0
        low = np.where(used, self.least_s[rows, 1], np.inf).min(axis=1) * 0.5
        high = np.where(used, whole[rows], 0.0).max(axis=1) + np.where(used, self.least_boundary[rows], 0.0).max(axis=1)
        high = np.where(np.isfinite(high), high, whole.max())
        alive = self._capacity(rows, counts, stages, high) >= blocks
        for _ in range(_ROUGHLY if self.node_parts else _CLOSELY):
            middle = np.sqrt(low * high)
            good = self._capacity(rows, counts, stages, middle) >= blocks
            high, low = np.where(good, middle, high), np.where(good, low, middle)
        return np.where(alive, low, np.inf)

    def _fill(self, rows: Ints, counts: Ints, stages: Ints, bottleneck: Floats) -> Floats:
        """(n,) least seconds of one microbatch: every other kind has one block a stage, the fastest all that memory
        allows.
        """
        used = rows >= 0
        blocks = self.tables.num_blocks
        floor = np.where(used, self.least_s[rows, 1], 0.0)
        most = np.where(used, self.held[rows, -1, counts], 0)
        left = blocks - stages
        total = (floor * counts).sum(axis=1)
        # n blocks in one stage cost at least least_s[1] + (n - 1) times the least increase
        cheapest = np.where(used, _least_slope(self.least_s)[rows], np.inf)
        order = np.argsort(cheapest, axis=1, kind="stable")
        for slot in range(rows.shape[1]):
            pick = order[:, slot]
            at = np.arange(len(rows))
            take = np.clip(np.minimum(left, most[at, pick] - counts[at, pick]), 0, None)
            total += np.where(
                np.isfinite(cheapest[at, pick]), take * np.where(used[at, pick], cheapest[at, pick], 0.0), 0.0
            )
            left = left - take
        ends = np.where(used[:, :, None], self.ends_s[rows], np.inf).min(axis=1).sum(axis=1)
        if self.node_parts:
            tolls = (np.where(used, self.tables.typical_hop[rows], 0.0) * counts).sum(axis=1)
        else:
            toll = np.where(used, self.least_boundary[rows], np.inf).min(axis=1)
            tolls = np.where(stages > 1, (stages - 1) * np.where(np.isfinite(toll), toll, 0.0), 0.0)
        return np.asarray(total + ends + tolls, dtype=np.float64)


def _grid(limits: Sequence[int], steps: Sequence[int], depth: int) -> Ints:
    """(n, kinds) counts up to the limits, in such steps, of `depth` stages at most."""
    axes = (np.arange(step, limit + 1, step) for step, limit in zip(steps, limits, strict=True))
    counts = np.stack([grid.ravel() for grid in np.meshgrid(*axes, indexing="ij")], axis=1)
    return np.asarray(counts[counts.sum(axis=1) <= depth])


def _least_slope(least_s: Floats) -> Floats:
    """(rows,) the smallest increase of `least_s` per block."""
    return np.asarray(np.diff(least_s, axis=1).min(axis=1), dtype=np.float64)


def _count(depth: int, width: int) -> int:
    """Compositions of at most `depth` stages into `width` positive counts."""
    total = 1
    for i in range(width):
        total = total * (depth - i) // (i + 1)
    return total


def _pad(values: Ints, width: int, filler: int) -> Ints:
    out = np.full((len(values), width), filler, dtype=np.int64)
    out[:, : values.shape[1]] = values
    return out
