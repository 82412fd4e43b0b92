"""Dividing GPUs into sets that make a pipeline each.

A set loses what its GPUs are worth, at given prices, beyond what it does. Divisions that lose least are grown set by set, and each is
completed by the best set, or the best two, of what is left.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.strategies.tables import Floats, Ints

_DIVISIONS = 12
_PAIRS, _TRIED = 3000, 8


@dataclass(frozen=True)
class _Grown:
    """Some sets together, one entry each. usage: (n, resources) GPUs; lost: (n,) what they do less than their GPUs are worth."""

    members: Ints
    usage: Ints
    lost: Floats


def divisions(
    usage: Ints, value: Floats, supply: Ints, prices: Floats, beam: int, most_sets: int
) -> list[tuple[int, ...]]:
    """Divisions of the supply into sets that do most, as indices of sets, best first.

    usage: (n, resources) GPUs of each set; value: (n,) sequences that it does; prices: sequences that a GPU of each resource is worth.
    beam: how many are grown side by side. most_sets: what is grown has at most so many, besides those that complete it.
    """
    if not len(usage):
        return []
    lost = usage @ prices - value
    members = [(i,) for i in range(len(usage))] + _pairs(usage, lost, supply)
    used = np.array([usage[list(each)].sum(axis=0) for each in members])
    done = np.array([value[list(each)].sum() for each in members])
    largest = _Largest(used, done)
    order = np.argsort(lost, kind="stable")[:beam]
    singles = _Grown(order[:, None], usage[order], lost[order])
    found: dict[tuple[int, ...], float] = {}
    grown = _Grown(np.zeros((1, 0), dtype=np.int64), np.zeros((1, len(supply)), dtype=np.int64), np.zeros(1))
    for _ in range(most_sets):
        last = largest.within(supply - grown.usage)
        complete = np.flatnonzero(last >= 0)
        total = value[grown.members[complete]].sum(axis=1) + done[last[complete]]
        for i in np.argsort(-total, kind="stable")[:_DIVISIONS].tolist():
            sets = (*grown.members[complete[i]].tolist(), *members[int(last[complete[i]])])
            found[tuple(sorted(sets))] = float(total[i])
        grown = _grow(grown, singles, supply, beam)
        if not len(grown.lost):
            break
    return sorted(found, key=lambda sets: (-found[sets], sets))[:_DIVISIONS]


def _pairs(usage: Ints, lost: Floats, supply: Ints) -> list[tuple[int, ...]]:
    """Two sets that fit together into the supply: those that lose least, of those that use equal GPUs the best."""
    one, other = np.triu_indices(len(usage))
    order = np.argsort(lost[one] + lost[other], kind="stable")[: _TRIED * _PAIRS]
    one, other = one[order], other[order]
    both = usage[one] + usage[other]
    fit = np.flatnonzero((both <= supply).all(axis=1))
    _, first = np.unique(both[fit] @ _strides(supply), return_index=True)
    best = fit[np.sort(first)][:_PAIRS]
    return list(zip(one[best].tolist(), other[best].tolist(), strict=True))


class _Largest:
    """Of sets on so many GPUs, (n, resources), that do so much, (n,), the one that does most."""

    def __init__(self, usage: Ints, value: Floats):
        self._order = np.argsort(-value, kind="stable")
        self._usage = np.asfortranarray(usage[self._order])

    def within(self, gpus: Ints) -> Ints:
        """Of those within each row of GPUs; -1 where none is."""
        fits = _within(self._usage, gpus)
        return np.where(fits.any(axis=1), self._order[fits.argmax(axis=1)], -1)


def _grow(grown: _Grown, singles: _Grown, supply: Ints, beam: int) -> _Grown:
    """One set more: the few that lose least, of those that use equal GPUs the best."""
    one, other = np.nonzero(_within(singles.usage, supply - grown.usage))
    usage, lost = grown.usage[one] + singles.usage[other], grown.lost[one] + singles.lost[other]
    order = np.lexsort((np.arange(len(lost)), lost))
    _, first = np.unique((usage @ _strides(supply))[order], return_index=True)
    keep = order[np.sort(first)][:beam]
    members = np.concatenate([grown.members[one[keep]], singles.members[other[keep]]], axis=1)
    return _Grown(members, usage[keep], lost[keep])


def _within(usage: Ints, gpus: Ints) -> NDArray[np.bool_]:
    """(m, n) which of the sets, (n, resources), are within which GPUs, (m, resources)."""
    return np.asarray(np.all([usage[:, r] <= gpus[:, [r]] for r in range(usage.shape[1])], axis=0))


def _strides(supply: Ints) -> Ints:
    """(resources,) which tell any two sets of GPUs within the supply apart."""
    return np.append(1, np.cumprod(supply[:-1] + 1)).astype(np.int64)
