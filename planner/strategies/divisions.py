"""Dividing GPUs into sets that make a pipeline each.

A set loses what its GPUs are worth, at given prices, beyond what it does. Divisions that lose least are grown set by set, and each is
completed by the best set of what is left.
"""

from dataclasses import dataclass

import numpy as np

from planner.strategies.lattice import Sets
from planner.strategies.tables import Floats, Ints

_BEAM = 600
_MOST_SETS = 8
_DIVISIONS = 12


@dataclass(frozen=True)
class _Grown:
    """Some sets together, one entry each. usage: (n, resources) GPUs; lost: (n,) what they do less than their GPUs are worth."""

    members: Ints
    usage: Ints
    lost: Floats


def divisions(sets: Sets, supply: Ints, prices: Floats) -> list[tuple[int, ...]]:
    """Divisions of the supply into sets that do most, as indices of sets, best first. prices: sequences that a GPU of each resource is
    worth."""
    lost = sets.usage @ prices - sets.sequences
    order = np.argsort(lost, kind="stable")[:_BEAM]
    singles = _Grown(order[:, None], sets.usage[order], lost[order])
    best_of = _BestOf(sets)
    found: dict[tuple[int, ...], float] = {}
    grown = _Grown(np.zeros((1, 0), dtype=np.int64), np.zeros((1, len(supply)), dtype=np.int64), np.zeros(1))
    for _ in range(_MOST_SETS):
        last = best_of.within(supply - grown.usage)
        done = np.flatnonzero(last >= 0)
        total = sets.sequences[grown.members[done]].sum(axis=1) + sets.sequences[last[done]]
        for i in np.argsort(-total, kind="stable")[:_DIVISIONS].tolist():
            members = (*grown.members[done[i]].tolist(), int(last[done[i]]))
            found[tuple(sorted(members))] = float(total[i])
        grown = _grow(grown, singles, supply)
        if not len(grown.lost):
            break
    return sorted(found, key=lambda members: (-found[members], members))[:_DIVISIONS]


def _grow(grown: _Grown, singles: _Grown, supply: Ints) -> _Grown:
    """One set more: the few that lose least, of those that use equal GPUs the best."""
    usage = grown.usage[:, None, :] + singles.usage[None, :, :]
    one, other = np.nonzero((usage <= supply).all(axis=2))
    usage, lost = usage[one, other], grown.lost[one] + singles.lost[other]
    order = np.lexsort((np.arange(len(lost)), lost))
    _, first = np.unique(usage[order], axis=0, return_index=True)
    keep = order[np.sort(first)][:_BEAM]
    members = np.concatenate([grown.members[one[keep]], singles.members[other[keep]]], axis=1)
    return _Grown(members, usage[keep], lost[keep])


class _BestOf:
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
