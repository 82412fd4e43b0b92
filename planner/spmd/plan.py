"""Search for program and ratios together.

It searches from the ratios that can be optimal, then alternates with the linear program, within
memory. A pair of program and ratios is judged after rounding to whole units, and the best pair is
kept as a pair. Without memory limits and launches, and with one segment, one search for each
distinct speed contains the joint optimum (`ratios.closed_form`). Otherwise the pairs are found by
alternation, and nothing is proved.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.errors import InfeasibleError
from planner.inputs.cluster import GIB
from planner.spmd.costs import CostTable, Shares, round_to_units
from planner.spmd.graph import Axis, Graph
from planner.spmd.program import Program
from planner.spmd.ratios import (
    closed_form,
    linear_program,
    normalise_rows,
)
from planner.spmd.search import ProgramSearch

Ratios = tuple[tuple[float, ...], ...]

# Speeds from the slowest to the fastest at which a program's ratios begin. The joint optimum lies
# near one of them.
STARTS = 4
# Rounds of search and linear program in turn; most end after two.
ROUNDS = 6
# Charges for bytes, each four times the one before, from a hundredth of a step for all memory. The
# last outweighs any time.
CHARGES = 8
# Rounds under each charge.
CHARGED_ROUNDS = 2
# Index of the first charge above a step for all memory. If it and those before bring no program
# nearer to fitting, higher ones do not either.
TELLING_CHARGE = 4
# Devices up to which single samples are moved between pairs of them: the number of pairs grows with
# the square.
MOST_MOVED = 16


@dataclass(frozen=True)
class PlacedProgram:
    """A program with the shares of its devices: what an executor needs."""

    graph: Graph
    program: Program
    shares: Shares

    def lengths(self, name: str, dim: int) -> tuple[int, ...]:
        """Return each rank's length along a sharded dimension."""
        axis = self.graph.axes[name, dim]
        cuts = self.graph.cuts(name, dim)
        lengths = []
        first = 0
        for num_units in self.shares.lengths(axis.name):
            end = first + num_units
            lengths.append(cuts[end] - cuts[first])
            first = end
        return tuple(lengths)

    @cached_property
    def units(self) -> dict[Axis, tuple[int, ...]]:
        """Units of each rank, for each axis along which the program shards a tensor."""
        used = set[Axis]()
        for instruction in self.program.instructions:
            layout = instruction.output
            if layout.kind == "sharded":
                used.add(self.graph.axes[instruction.tensor, layout.dim])
        # a set has no order, but documents list the axes
        ordered = sorted(used, key=lambda axis: axis.name)
        return {axis: self.shares.lengths(axis.name) for axis in ordered}

    @property
    def units_by_name(self) -> dict[str, tuple[int, ...]]:
        """Units of each rank, by the name of the axis."""
        return {axis.name: row for axis, row in self.units.items()}

    def idle(self, rank: int) -> bool:
        """Return True if a rank's share is 0 along every sharded axis of the program."""
        if not self.units:
            return False
        return all(row[rank] == 0 for row in self.units.values())


@dataclass(frozen=True)
class SpmdPlan(PlacedProgram):
    """Program and shares chosen for a cluster.

    seconds: time of a step, after rounding. is_short: True if some pair of program and ratios
    exceeded memory.
    """

    seconds: float
    is_short: bool = False


class _Pairs:
    """Pairs of program and ratios under one charge for memory, and the best of those that fit."""

    def __init__(self, table: CostTable, pinned: Mapping[str, int], whole: bool) -> None:
        self.table = table
        self.pinned = dict(pinned)
        self.whole = whole
        self.best: tuple[float, Program, Shares] | None = None
        self.has_refused = False
        # of the pair that comes nearest to fitting, its fullest device: filled share of its
        # memory, index, bytes
        self.tightest: tuple[float, int, float] = (float("inf"), 0, 0.0)

    def shares(self, ratios: Ratios) -> Shares:
        return Shares(self.table.graph, ratios, self.whole)

    def search(self, ratios: Ratios, charge: Sequence[float]) -> Program:
        shares = self.shares(ratios)
        search = ProgramSearch(self.table, shares, self.pinned, tuple(charge))
        _, program = search.dynamic_program()
        return program

    def judge(self, program: Program, ratios: Ratios) -> float:
        """Return the seconds of a pair, infinite if it does not fit; keep the best pair."""
        shares = self.shares(ratios)
        used = self.table.program_bytes(program, shares)
        filled = used / self.table.limits
        worst = int(filled.argmax())
        most_filled = float(filled[worst])
        if most_filled < self.tightest[0]:
            self.tightest = (most_filled, worst, float(used[worst]))
        if most_filled > 1 + 1e-9:
            self.has_refused = True
            return float("inf")

        seconds = self.table.program_s(program, shares)
        # of pairs that are equal but for rounding, the first is kept
        if self.best is None or seconds < self.best[0] * (1 - 1e-12):
            self.best = (seconds, program, shares)
        return seconds

    def alternate(self, start: Ratios, charge: Sequence[float], rounds: int = ROUNDS) -> None:
        """Search and linear program in turn, while the pair gets better."""
        ratios = start
        before = float("inf")
        for _ in range(rounds):
            program = self.search(ratios, charge)
            seconds = self.judge(program, ratios)
            try:
                ratios = linear_program(self.table, program, self.shares(ratios))
            except InfeasibleError:
                return
            seconds = min(seconds, self.judge(program, ratios))
            if not seconds < before * (1 - 1e-6):
                return
            before = seconds


def synthesize(
    table: CostTable,
    segments: int = 1,
    pinned: Mapping[str, int] | None = None,
    whole: bool = True,
    is_late: Callable[[], bool] = lambda: False,
) -> SpmdPlan:
    """Return the best pair of program and ratios found.

    pinned: for each parameter, the only dimension that its state may be cut along (below 0: none).
    whole: round to units (False: for results about real numbers).
    is_late: once it returns True, the best that fits is taken.

    Raises:
        InfeasibleError: no pair fits the devices' memory.
    """
    if whole and table.least_bytes > table.limits.sum():
        raise _fits_no_mix(
            table,
            f"every program of it needs {table.least_bytes / GIB:.2f} GiB in all, they have",
            table.limits.sum(),
        )
    starts = _starts(table, segments)
    pairs = _Pairs(table, pinned or {}, whole)
    for start in starts:
        program = pairs.search(start, ())
        pairs.judge(program, start)
    if pairs.best is not None:
        pairs.alternate(pairs.best[2].ratios, ())
    if pairs.has_refused:
        _search_with_charges(pairs, starts, is_late)
    if pairs.best is None:
        _, worst, need = pairs.tightest
        name = table.cluster.devices[worst].name
        reason = (
            f"in the program that comes nearest, device '{name}' needs {need / GIB:.2f} GiB, it has"
        )
        raise _fits_no_mix(table, reason, table.limits[worst])

    if whole and table.num_devices <= MOST_MOVED:
        _move_units(pairs)
    seconds, program, shares = pairs.best
    shares = _clear_idle(PlacedProgram(table.graph, program, shares))
    return SpmdPlan(table.graph, program, shares, seconds, pairs.has_refused)


def _search_with_charges(
    pairs: _Pairs, starts: Sequence[Ratios], is_late: Callable[[], bool]
) -> None:
    """Search with charges for bytes until a higher charge finds nothing better.

    This is a Lagrangian relaxation, so nothing is proved. Charges rise by a factor of four, from a
    hundredth of a step for all of a device's memory.
    """
    num_idle = 0
    table = pairs.table
    program = pairs.search(starts[-1], ())
    step_s = table.program_s(program, pairs.shares(starts[-1]))
    for number in range(CHARGES):
        whole_memory_s = step_s * 0.01 * 4**number
        charge = (whole_memory_s / table.limits).tolist()
        before = pairs.best
        nearest = pairs.tightest[0]
        first_and_last = dict.fromkeys((starts[0], starts[-1]))
        for start in first_and_last:
            pairs.alternate(start, charge, CHARGED_ROUNDS)

        if pairs.best is not None:
            if pairs.best is before or is_late():
                return
            continue
        num_idle += 1
        comes_nearer = pairs.tightest[0] <= 0.99 * nearest
        if comes_nearer:
            num_idle = 0
        if num_idle >= 2 and number >= TELLING_CHARGE:
            return


def _starts(table: CostTable, segments: int) -> list[Ratios]:
    """Return the ratios to begin at: those that can be optimal, and memory's proportions.

    If many can be optimal, they are evenly chosen from them.
    """
    optimal = closed_form(table.speeds.tolist())
    found = optimal
    if len(optimal) > STARTS:
        found = []
        for number in range(STARTS):
            # from the first to the last
            index = round(number * (len(optimal) - 1) / (STARTS - 1))
            found.append(optimal[index])
    if np.isfinite(table.limits).all():
        by_memory = table.limits / table.limits.sum()
        found.append(tuple(by_memory.tolist()))
    return [(row,) * segments for row in dict.fromkeys(found)]


def _move_units(pairs: _Pairs) -> None:
    """Move one unit of the data at a time between devices while the step gets shorter.

    Rounding alone may miss the best.
    """
    assert pairs.best is not None
    _, program, shares = pairs.best
    placed = PlacedProgram(pairs.table.graph, program, shares)
    units = 0
    for axis in placed.units:
        if axis.is_batch:
            units = max(units, axis.units)
    if not units:
        return

    for _ in range(2 * pairs.table.num_devices):
        before, program, shares = pairs.best
        counts = round_to_units(shares.ratios[0], units)
        for source, target in itertools.permutations(range(len(counts)), 2):
            if not counts[source]:
                continue
            moved = list(counts)
            moved[source] -= 1
            moved[target] += 1
            row = tuple(count / units for count in moved)
            pairs.judge(program, (row, *shares.ratios[1:]))
        if pairs.best[0] >= before * (1 - 1e-9):
            return


def _clear_idle(placed: PlacedProgram) -> Shares:
    """Return the shares with 0 for devices that round to nothing.

    They stay as they were if the others' units would change.
    """
    num_ranks = len(placed.shares.ratios[0])
    idle = [placed.idle(rank) for rank in range(num_ranks)]
    if not any(idle):
        return placed.shares
    rows = np.where(idle, 0.0, np.array(placed.shares.ratios))
    shares = Shares(placed.graph, normalise_rows(rows), placed.shares.whole)
    other = PlacedProgram(placed.graph, placed.program, shares)
    if other.units != placed.units:
        return placed.shares
    return shares


def _fits_no_mix(table: CostTable, reason: str, has: float) -> InfeasibleError:
    return InfeasibleError(
        f"the model fits no mix of these {table.num_devices} devices: {reason} {has / GIB:.2f} GiB;"
        " add devices, or lower the batch or the sequence length"
    )
