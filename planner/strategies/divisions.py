"""Dividing GPUs into sets that make a pipeline each.

A set loses what its GPUs are worth, at given prices, beyond what it does. Divisions that lose least are grown set by set, from any two
sets on, and each is completed by the best set, or the best two, of what is left.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.search.tables import Floats, Ints

_DIVISIONS = 12
_PAIRS = 50_000
_CELLS = 2_000_000
_ALIKE = 6  # a division of four sets is found by each two of them


@dataclass(frozen=True)
class _Grown:
    """Some sets together, one entry each: (n, sets) members, (n, resources) GPUs, and (n,) what they do."""

    members: Ints
    usage: Ints
    done: Floats

    def take(self, index: Ints) -> "_Grown":
        return _Grown(self.members[index], self.usage[index], self.done[index])


def divisions(
    usage: Ints, value: Floats, supply: Ints, prices: Floats, beam: int, most_sets: int, number: int = _DIVISIONS
) -> list[tuple[int, ...]]:
    """So many divisions of the supply into sets that do most, as indices of sets, best first.

    usage: (n, resources) GPUs of each set; value: (n,) sequences that it does; prices: sequences that a GPU of each resource is worth.
    beam: how many are grown side by side. most_sets: what is grown has at most so many, besides those that complete it.
    """
    fit = np.flatnonzero((usage <= supply).all(axis=1))
    if not len(fit):
        return []
    grown = _Grown(np.zeros((1, 0), dtype=np.int64), np.zeros((1, len(supply)), dtype=np.int64), np.zeros(1))
    singles = _Grown(fit[:, None], usage[fit], value[fit])
    pairs = _pairs(singles, supply, prices)
    few = _least_lost(singles, prices, beam)
    rest = _Rest([singles, pairs], supply)
    found: dict[tuple[int, ...], float] = {}
    for sets in range(most_sets):
        found |= rest.completed(grown, number)
        if sets > 1:
            grown = _grow(_least_lost(grown, prices, beam), few, supply)
        else:
            grown = pairs if sets else singles
        if not len(grown.done):
            break
    return sorted(found, key=lambda sets: (-found[sets], sets))[:number]


def _pairs(singles: _Grown, supply: Ints, prices: Floats) -> _Grown:
    """Two sets that fit together into the supply, those that lose least."""
    one, other = np.triu_indices(len(singles.done))
    both = singles.usage[one] + singles.usage[other]
    fit = np.flatnonzero((both <= supply).all(axis=1))
    one, other = one[fit], other[fit]
    members = np.concatenate([singles.members[one], singles.members[other]], axis=1)
    pairs = _Grown(members, both[fit], singles.done[one] + singles.done[other])
    return _least_lost(pairs, prices, _PAIRS)


def _least_lost(grown: _Grown, prices: Floats, most: int) -> _Grown:
    """So many, those that lose least first."""
    return grown.take(np.argsort(grown.usage @ prices - grown.done, kind="stable")[:most])


class _Rest:
    """What sets do best on any GPUs that are left: a table over numbers of GPUs, in steps of a few where they are many, in which each cell
    has the best of all cells that it contains."""

    def __init__(self, levels: Sequence[_Grown], supply: Ints):
        self._supply, self._step = supply, np.ones(len(supply), dtype=np.int64)
        while math.prod((supply // self._step + 1).tolist()) > _CELLS:
            self._step[np.argmax(supply // self._step)] *= 2
        width = max(level.members.shape[1] for level in levels)
        self._members = np.concatenate([_padded(level.members, width) for level in levels])
        cells = -(-np.concatenate([level.usage for level in levels]) // self._step)
        order = np.argsort(np.concatenate([level.done for level in levels]), kind="stable")
        order = order[(cells[order] <= supply // self._step).all(axis=1)]
        self._order = np.append(order, -1)  # and nothing
        self._done = np.append(np.concatenate([level.done for level in levels])[order], 0.0)
        table = np.full(supply // self._step + 1, -1, dtype=np.int32)
        table[tuple(cells[order].T)] = np.arange(len(order), dtype=np.int32)
        for axis in range(len(supply)):
            np.maximum.accumulate(table, axis=axis, out=table)
        self._best = table

    def completed(self, grown: _Grown, number: int) -> dict[tuple[int, ...], float]:
        """The best so many, each completed by what does most on the GPUs that it leaves, with what they do in all."""
        best = self._best[tuple(((self._supply - grown.usage) // self._step).T)]
        total = grown.done + self._done[best]
        top = np.argsort(-total, kind="stable")[: _ALIKE * number]
        members = np.concatenate([grown.members[top], self._members[self._order[best[top]]]], axis=1)
        members[best[top] < 0, grown.members.shape[1] :] = -1
        sets = (tuple(sorted(i for i in mine if i >= 0)) for mine in members.tolist())
        return {mine: float(done) for mine, done in zip(sets, total[top], strict=True) if mine}


def _padded(members: Ints, width: int) -> Ints:
    return np.pad(members, ((0, 0), (0, width - members.shape[1])), constant_values=-1)


def _grow(grown: _Grown, singles: _Grown, supply: Ints) -> _Grown:
    """One set more; of those that use equal GPUs the best."""
    one, other = np.nonzero(_within(singles.usage, supply - grown.usage))
    usage, done = grown.usage[one] + singles.usage[other], grown.done[one] + singles.done[other]
    order = np.argsort(-done, kind="stable")
    _, first = np.unique((usage @ strides(supply))[order], return_index=True)
    keep = order[np.sort(first)]
    members = np.concatenate([grown.members[one[keep]], singles.members[other[keep]]], axis=1)
    return _Grown(members, usage[keep], done[keep])


def _within(usage: Ints, gpus: Ints) -> NDArray[np.bool_]:
    """(m, n) which of the sets, (n, resources), are within which GPUs, (m, resources)."""
    return np.asarray(np.all([usage[:, r] <= gpus[:, [r]] for r in range(usage.shape[1])], axis=0))


def strides(supply: Ints) -> Ints:
    """(resources,) which tell any two sets of GPUs within the supply apart."""
    return np.append(1, np.cumprod(supply[:-1] + 1)).astype(np.int64)
