"""Dividing GPUs into sets that make a pipeline each.

A set loses what its GPUs are worth, at given prices, beyond what it does. Divisions that lose least are grown set by set, and each is
completed by the best set of what is left.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.strategies.tables import Floats, Ints

_DIVISIONS = 12


@dataclass(frozen=True)
class _Grown:
    """Some sets together, one entry each. usage: (n, resources) GPUs; lost: (n,) what they do less than their GPUs are worth."""

    members: Ints
    usage: Ints
    lost: Floats


def divisions(
    usage: Ints,
    value: Floats,
    supply: Ints,
    prices: Floats,
    best_within: Callable[[Ints], Ints],
    beam: int,
    most_sets: int,
) -> list[tuple[int, ...]]:
    """Divisions of the supply into at most so many sets that do most, as indices of sets, best first.

    usage: (n, resources) GPUs of each set; value: (n,) sequences that it does; prices: sequences that a GPU of each resource is worth.
    best_within: the set that does most within each row of GPUs, -1 where none fits. beam: how many are grown side by side.
    """
    lost = usage @ prices - value
    order = np.argsort(lost, kind="stable")[:beam]
    singles = _Grown(order[:, None], usage[order], lost[order])
    found: dict[tuple[int, ...], float] = {}
    grown = _Grown(np.zeros((1, 0), dtype=np.int64), np.zeros((1, len(supply)), dtype=np.int64), np.zeros(1))
    for _ in range(most_sets):
        last = best_within(supply - grown.usage)
        done = np.flatnonzero(last >= 0)
        total = value[grown.members[done]].sum(axis=1) + value[last[done]]
        for i in np.argsort(-total, kind="stable")[:_DIVISIONS].tolist():
            members = (*grown.members[done[i]].tolist(), int(last[done[i]]))
            found[tuple(sorted(members))] = float(total[i])
        grown = _grow(grown, singles, supply, beam)
        if not len(grown.lost):
            break
    return sorted(found, key=lambda members: (-found[members], members))[:_DIVISIONS]


def _grow(grown: _Grown, singles: _Grown, supply: Ints, beam: int) -> _Grown:
    """One set more: the few that lose least, of those that use equal GPUs the best."""
    left = supply - grown.usage
    one, other = np.nonzero(np.all([singles.usage[:, r] <= left[:, [r]] for r in range(len(supply))], axis=0))
    usage, lost = grown.usage[one] + singles.usage[other], grown.lost[one] + singles.lost[other]
    order = np.lexsort((np.arange(len(lost)), lost))
    _, first = np.unique((usage @ _strides(supply))[order], return_index=True)
    keep = order[np.sort(first)][:beam]
    members = np.concatenate([grown.members[one[keep]], singles.members[other[keep]]], axis=1)
    return _Grown(members, usage[keep], lost[keep])


def _strides(supply: Ints) -> Ints:
    """(resources,) which tell any two sets of GPUs within the supply apart."""
    return np.append(1, np.cumprod(supply[:-1] + 1)).astype(np.int64)
