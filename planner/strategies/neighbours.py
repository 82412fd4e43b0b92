"""Pipelines a change of their groups away from known ones, cut anew.

Shortest paths at some prices are few, and whole pipelines seldom divide a fleet well: those near the ones that nearly do are many.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from planner.search.cut import Balancer
from planner.search.draft import Shape
from planner.search.tables import Floats, Ints, Tables
from planner.strategies.refine import well_formed
from planner.strategies.regroup import other_groups

Rows = tuple[int, ...]


class Neighbours:
    """rows: of the tables, those that a group may have. group_gpus: (rows,) GPUs of a group."""

    def __init__(self, tables: Tables, rows: Sequence[int], group_gpus: Ints, max_stages: int):
        self._tables, self._rows, self._max_stages = tables, rows, max_stages
        self._balancer = Balancer(tables, max_stages)
        self._usage = np.zeros((len(tables.rows), len(tables.resources)), dtype=np.int64)
        for row, gpus in enumerate(group_gpus.tolist()):
            self._usage[row, tables.kinds[tables.rows[row].kind].resource] = gpus
        self._seen = set[Rows]()

    def best(self, pipelines: Mapping[Rows, float], supply: Ints, prices: Floats, step_s: float) -> Iterator[Shape]:
        """Of pipelines, given with about how many microbatches they do in a step, all neighbours within the supply, those that lose least
        of what their GPUs are worth first. Each once: none that an earlier call had."""
        found = dict[Rows, float]()
        for rows, microbatches in pipelines.items():
            found |= dict.fromkeys(self._changed(rows), microbatches)
        fresh = [rows for rows in found if rows not in self._seen]
        self._seen.update(fresh)
        usage = np.array([self._usage[list(rows)].sum(axis=0) for rows in fresh]).reshape(-1, len(supply))
        held = np.flatnonzero((usage <= supply).all(axis=1))
        fresh, usage = [fresh[i] for i in held], usage[held]
        if not fresh:
            return
        worth = usage @ prices / np.array([self._tables.rows[rows[0]].microbatch for rows in fresh])
        cuts = self._balancer.cut_each(fresh, np.array([found[rows] for rows in fresh]))
        with np.errstate(invalid="ignore"):
            lost = worth - (1.0 + (step_s - cuts.fill_s) / cuts.bottleneck_s)
        for i in np.argsort(lost, kind="stable").tolist():
            if np.isfinite(cuts.bottleneck_s[i]):
                shape = Shape(fresh[i], tuple(cuts.ends[i, : len(fresh[i])].tolist()))
                if well_formed(shape):
                    yield shape

    def _changed(self, rows: Rows) -> Iterator[Rows]:
        """Groups of other sizes; of each run of equal groups one less, one more, the first or the last of another kind, or all of it at the
        place of another run."""
        yield from other_groups(self._tables, rows, self._max_stages)
        runs = _runs(rows)
        for row, start, end in runs:
            if len(rows) > 1:
                yield rows[:start] + rows[start + 1 :]
            if len(rows) < self._max_stages:
                yield (*rows[:start], row, *rows[start:])
            for other in self._rows:
                if other != row:
                    yield (*rows[:start], other, *rows[start + 1 :])
                    yield (*rows[: end - 1], other, *rows[end:])
        for (_, start, end), (_, place, until) in itertools.permutations(runs, 2):
            rest = rows[:start] + rows[end:]
            at = place if place < start else until - (end - start)
            yield rest[:at] + rows[start:end] + rest[at:]


def _runs(rows: Rows) -> list[tuple[int, int, int]]:
    """(row, start, end) of equal groups that follow each other."""
    out, start = [], 0
    for row, run in itertools.groupby(rows):
        end = start + len(list(run))
        out.append((row, start, end))
        start = end
    return out
