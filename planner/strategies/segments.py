"""Pipelines that are all cut at the same walls, chosen by one integer program over the pieces between the walls.

Between two walls a piece of the model lies on one or more groups of one kind. With a bottleneck m a kind needs so many
groups for a piece, and a pipeline takes for each of its pieces any kind: at a step time T y pipelines of microbatch b and
bottleneck m whose pieces take the fills F do

    sum over pipelines of b (1 + (T - F) / m)  =  b (1 + T / m) y - (b / m) sum over pieces of their fills

sequences. Equal pieces (all but the first and the last, where blocks are equal) are counted, not told apart, so the program
has a few hundred integers whatever the size of the fleet, and mixes of kinds come as they are needed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.strategies.drafts import Shape
from planner.strategies.stages import StageTable
from planner.strategies.tables import Floats, Ints, Tables

_STEPS = 10
_TRIES = 3
_NEAR = 0.02


@dataclass(frozen=True)
class Piece:
    """Equal pieces of the model: first block of each, and their number of blocks."""

    starts: tuple[int, ...]
    blocks: int


@dataclass(frozen=True)
class Option:
    """One way to hold a piece within a bottleneck: groups of one row, blocks of each. cost: GPUs."""

    piece: int
    row: int
    sizes: tuple[int, ...]
    gpus: int
    fill_s: float


@dataclass(frozen=True)
class Lane:
    """Pipelines of one microbatch size and bottleneck, with the options of each piece."""

    microbatch: int
    bottleneck_s: float
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Relaxed:
    """The linear program at one step time. margins: (lanes,) share of its sequences that a pipeline of each lane lacks to pay."""

    sequences: float
    prices: Floats
    margins: Floats


def pieces_of(tables: Tables, spacing: int) -> tuple[Piece, ...]:
    """The pieces between walls at every `spacing`-th block, equal ones together."""
    n = tables.num_blocks
    found: dict[tuple[object, ...], list[int]] = {}
    sizes: dict[tuple[object, ...], int] = {}
    blocks = np.stack([np.stack([r.forward_s, r.backward_s, r.state_bytes, r.sync_bytes]) for r in tables.rows])
    for start in range(0, n, spacing):
        stop = min(start + spacing, n)
        key = (start == 0, stop == n, stop - start, blocks[:, :, start + 1 : stop + 1].tobytes())
        found.setdefault(key, []).append(start)
        sizes[key] = stop - start
    return tuple(Piece(tuple(starts), sizes[key]) for key, starts in found.items())


class Segments:
    """The programs of one family: walls at every `spacing`-th block, groups of at least `degree` GPUs."""

    def __init__(
        self,
        tables: Tables,
        batch: int,
        supply: Ints,
        max_stages: int,
        spacing: int,
        degrees: Sequence[int],
        sizes: Sequence[int],
    ):
        self.batch = batch
        self.tables, self.supply, self.max_stages = tables, supply, max_stages
        self.pieces = pieces_of(tables, spacing)
        self.resource = np.array([tables.kinds[row.kind].resource for row in tables.rows])
        walls = tuple(range(spacing, tables.num_blocks, spacing))
        self.lanes = [
            lane for size in sizes for lane in self._lanes(StageTable(tables, size, max_stages, walls, degrees=degrees))
        ]
        self._assemble()

    def _lanes(self, stages: StageTable) -> Iterator[Lane]:
        """Lanes for every bottleneck at which some kind holds a piece with fewer groups than just below."""
        ladders = [
            [self._ladder(stages, p, piece, i) for i in range(len(stages.rows))] for p, piece in enumerate(self.pieces)
        ]
        for bottleneck in _apart({seconds for part in ladders for ladder in part for seconds, _ in ladder}):
            chosen = [self._unbeaten(_fewest(ladder, bottleneck) for ladder in part) for part in ladders]
            if all(chosen):
                yield Lane(stages.microbatch, bottleneck, tuple(o for part in chosen for o in part))

    def _ladder(self, stages: StageTable, index: int, piece: Piece, i: int) -> list[tuple[float, Option]]:
        """(bottleneck, option) for each number of groups of row i that may hold the piece, fewest first."""
        out: list[tuple[float, Option]] = []
        room = stages.room[stages.band(self._depth(stages, i))][i]
        for count in range(1, piece.blocks + 1):
            sizes = _even(piece.blocks, count, piece.starts[0] == 0)
            if sizes[0] > room.shape[1] or sizes[-1] > room.shape[1]:
                continue
            at = piece.starts[0] + np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
            places = (at, np.array(sizes) - 1)
            seconds = float(stages.busy[i][places].max())
            if not room[places].all() or not np.isfinite(seconds) or (out and seconds >= out[-1][0]):
                continue
            fill = float(stages.fill[i][places].sum())
            out.append((seconds, Option(index, int(stages.rows[i]), sizes, int(stages.degree[i]) * count, fill)))
        return out

    def _depth(self, stages: StageTable, i: int) -> int:
        """Stages of a pipeline of row i alone, each as full as memory allows at its last place."""
        most = max(1, int(stages.room[0][i].sum(axis=1).max()))
        return min(self.max_stages, -(-self.tables.num_blocks // most))

    def _unbeaten(self, options: "Iterator[Option | None]") -> list[Option]:
        """Those that no other of the same resource beats in both GPUs and fill."""
        kept: list[Option] = []
        for option in sorted((o for o in options if o is not None), key=lambda o: (o.gpus, o.fill_s, o.row)):
            mine = [o.fill_s for o in kept if self.resource[o.row] == self.resource[option.row]]
            if not mine or option.fill_s < min(mine) * 0.98:
                kept.append(option)
        return kept

    def _assemble(self) -> None:
        """Variables: y of each lane, then each lane's options. Rows: one a (lane, piece), then the resources."""
        lanes, pieces = len(self.lanes), len(self.pieces)
        options = [(j, option) for j, lane in enumerate(self.lanes) for option in lane.options]
        self.options = options
        self.fill = np.array([o.fill_s for _, o in options])
        self.owner = np.array([j for j, _ in options], dtype=np.int64)
        self.size = np.array([lane.microbatch for lane in self.lanes], dtype=np.float64)
        self.period = np.array([lane.bottleneck_s for lane in self.lanes])
        count = np.array([len(piece.starts) for piece in self.pieces], dtype=np.float64)
        balance = np.zeros((lanes * pieces, lanes + len(options)))
        for j in range(lanes):
            balance[j * pieces : (j + 1) * pieces, j] = -count
        usage = np.zeros((len(self.supply), lanes + len(options)))
        for i, (j, option) in enumerate(options):
            balance[j * pieces + option.piece, lanes + i] = 1.0
            usage[self.resource[option.row], lanes + i] = option.gpus
        self.balance, self.usage = balance, usage

    def relax(self, seconds: float) -> Relaxed:
        """Maximum of the sequences over fractional packings."""
        from scipy.optimize import linprog

        gain = self._gain(seconds)
        result = linprog(
            -gain, A_ub=self.usage, b_ub=self.supply, A_eq=self.balance, b_eq=np.zeros(len(self.balance)),
            bounds=[(0, 0 if late else None) for late in self._late(seconds)] + [(0, None)] * len(self.fill), method="highs",
        )  # fmt: skip
        if result.x is None:
            return Relaxed(0.0, np.zeros(len(self.supply)), np.full(len(self.lanes), np.inf))
        prices = -np.asarray(result.ineqlin.marginals)
        return Relaxed(float(-result.fun), prices, self._margins(seconds, prices))

    def _gain(self, seconds: float) -> Floats:
        lanes = self.size * (1 + seconds / self.period)
        return np.concatenate([lanes, -(self.size / self.period)[self.owner] * self.fill])

    def _late(self, seconds: float) -> "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]":
        """(lanes,) whether not even the fastest pipeline completes a microbatch."""
        return np.array([self._least(j, lambda o: o.fill_s) > seconds for j in range(len(self.lanes))])

    def _least(self, lane: int, cost: "Callable[[Option], float]") -> float:
        """The cheapest pipeline of a lane."""
        best = [np.inf] * len(self.pieces)
        for option in self.lanes[lane].options:
            best[option.piece] = min(best[option.piece], cost(option))
        return float(sum(value * len(piece.starts) for value, piece in zip(best, self.pieces, strict=True)))

    def _margins(self, seconds: float, prices: Floats) -> Floats:
        out = np.empty(len(self.lanes))
        for j, lane in enumerate(self.lanes):
            weight = lane.microbatch / lane.bottleneck_s
            whole = lane.microbatch + weight * seconds
            cost = self._least(j, lambda o, w=weight: w * o.fill_s + float(prices[self.resource[o.row]]) * o.gpus)  # type: ignore[misc]
            out[j] = cost / whole - 1
        return out

    def used_sizes(self, relaxed: Relaxed) -> list[int]:
        """Microbatch sizes of lanes that nearly pay."""
        return sorted(
            {lane.microbatch for lane, margin in zip(self.lanes, relaxed.margins, strict=True) if margin < _NEAR}
        )

    def least_time(self, start: float, ceiling: float = np.inf) -> tuple[float, Relaxed] | None:
        """The relaxation's step time within 0.1%, from a guess; None where it is above `ceiling` or there is none."""
        low, high, seconds, found = 0.0, np.inf, start, None
        for _ in range(_STEPS):
            relaxed = self.relax(seconds)
            if relaxed.sequences >= self.batch:
                high, found = seconds, relaxed
            else:
                low = seconds
                if low >= ceiling:
                    return None
            if high <= low * 1.001:
                break
            guess = seconds * (self.batch / relaxed.sequences if relaxed.sequences > 0 else 2.0)
            seconds = min(max(guess, low * 1.0004), high * 0.9996)
        return None if found is None else (float(high), found)

    def whole(self, start: float, relaxed: Relaxed, nodes: int, lanes: int, least: int = 1) -> list[Shape] | None:
        """Pipelines that complete the batch in little more than the relaxation's time; None where none are found."""
        keep = np.sort(np.argsort(relaxed.margins, kind="stable")[:lanes])
        seconds, best = start * 1.008, None
        for _ in range(_TRIES):
            sequences, chosen = self._most(seconds, keep, nodes, least)
            if sequences >= self.batch:
                best = chosen
                break
            seconds *= self.batch / sequences * 1.001 if sequences > 0 else 1.1
        return None if best is None else self._shapes(best)

    def _most(self, seconds: float, keep: Ints, nodes: int, least: int) -> tuple[float, Ints | None]:
        """The integer program over some lanes."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        lanes = len(self.lanes)
        columns = np.concatenate([keep, lanes + np.flatnonzero(np.isin(self.owner, keep))])
        late = self._late(seconds)[keep]
        rows = np.flatnonzero(np.isin(np.arange(len(self.balance)) // len(self.pieces), keep))
        top = np.concatenate([np.where(late, 0.0, np.inf), np.full(len(columns) - len(keep), np.inf)])
        count = (columns < lanes).astype(float)
        result = milp(
            -self._gain(seconds)[columns],
            constraints=[
                LinearConstraint(self.balance[np.ix_(rows, columns)], 0, 0),
                LinearConstraint(self.usage[:, columns], -np.inf, self.supply),
                LinearConstraint(count[None], least, np.inf),
            ],
            integrality=np.ones(len(columns)),
            bounds=Bounds(0, top),
            options={"node_limit": nodes, "mip_rel_gap": 2e-3},
        )
        if result.x is None:
            return 0.0, None
        out = np.zeros(lanes + len(self.options), dtype=np.int64)
        out[columns] = np.round(result.x).astype(np.int64)
        return float(-result.fun), out

    def _shapes(self, chosen: Ints) -> list[Shape]:
        """Whole pipelines: equal rows lie together, so that few boundaries leave a node."""
        out: list[Shape] = []
        for j in np.flatnonzero(chosen[: len(self.lanes)]):
            number = int(chosen[j])
            stock: list[list[Option]] = [[] for _ in self.pieces]
            for i in np.flatnonzero(self.owner == j):
                stock[self.options[i][1].piece] += [self.options[i][1]] * int(chosen[len(self.lanes) + i])
            for part in stock:
                part.sort(key=lambda o: (o.row, o.sizes))
            shares = [
                [part[k * len(part) // number : (k + 1) * len(part) // number] for part in stock] for k in range(number)
            ]
            out += [self._shape(share) for share in shares]
        return out

    def _shape(self, share: list[list[Option]]) -> Shape:
        pairs = [
            pair
            for piece, part in zip(self.pieces, share, strict=True)
            for pair in zip(piece.starts, part, strict=True)
        ]
        placed = sorted(pairs, key=lambda pair: pair[0])
        rows, ends, block, n = [], [], 0, self.tables.num_blocks
        for _, option in placed:
            for size in option.sizes:
                block += size
                rows.append(option.row)
                ends.append(block + 2 if block == n else block + 1)
        return Shape(tuple(rows), tuple(ends))


def _even(blocks: int, count: int, rising: bool) -> tuple[int, ...]:
    """Sizes that differ by one at most, the larger ones first, or last where `rising`."""
    low, more = divmod(blocks, count)
    sizes = (low + 1,) * more + (low,) * (count - more)
    return sizes[::-1] if rising else sizes


def _apart(values: set[float]) -> list[float]:
    """Rising, nearly equal ones once: the largest of them."""
    out: list[float] = []
    for value in sorted(values, reverse=True):
        if not out or value < out[-1] * 0.996:
            out.append(value)
    return out[::-1]


def _fewest(ladder: list[tuple[float, Option]], bottleneck: float) -> Option | None:
    return next((option for seconds, option in ladder if seconds <= bottleneck * (1 + 1e-9)), None)
