"""Pipelines of two kinds, which share the GPUs of each type unevenly.

`families.py` shares GPUs as evenly as whole groups can be, and `combined_families.py` gives each
kind node types of its own. But the best plan of eight A100 and eight L40S may be a deep pipeline of
all A100 and three L40S beside one of the other L40S.

The best orders of stages (`orders.py`) say how many sequences a pipeline of any GPUs completes
while a step lasts. So all divisions of the fleet are compared by one lookup each: `number` equal
pipelines of some GPUs, and others of what they leave.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.arrays import Bools, Floats, Ints
from planner.search.drafts.orders import Orders, StageRows, Uses
from planner.search.drafts.uncut import UncutPipelines
from planner.search.problem import limits
from planner.search.problem.tables import Tables

_State = tuple[int, ...]
"""GPUs of each resource that a pipeline uses."""


@dataclass(frozen=True)
class _Division:
    """Two kinds of pipelines: GPUs of one of each, their numbers, and what all complete."""

    sequences: float
    numbers: tuple[int, int]
    uses: tuple[_State, _State]


def uncut_in_divisions(tables: Tables, holders: int) -> list[UncutPipelines]:
    """Return the best divisions of the fleet into pipelines of two kinds.

    holders: nodes on which each layer is to lie. From two on, a node that is the only one of its
    type serves a single pipeline. None are returned if the fleet is so large that tables of its
    parts take too long.
    """
    supply = tuple(resource.num_gpus for resource in tables.resources)
    if math.prod(gpus + 1 for gpus in supply) * limits.WIDE_LEVELS > limits.DIVIDED:
        return []
    best = _Best(tables, supply)
    alone = list[int]()
    if holders > 1:
        alone = [at for at, each in enumerate(tables.resources) if each.num_nodes == 1]

    found = list[_Division]()
    for numbers in itertools.product(range(1, limits.UNLIKE), range(1, limits.UNLIKE)):
        if sum(numbers) <= limits.UNLIKE:
            for given in _subsets(alone):
                found += best.divisions(numbers, alone, given)
    found.sort(key=lambda each: -each.sequences)

    uncut = dict[UncutPipelines, None]()
    for each in found:
        first, second = (best.order(use) for use in each.uses)
        pipelines = [(first, each.numbers[0]), (second, each.numbers[1])]
        if first != second:
            both = tuple(sorted(pipelines))
            uncut[UncutPipelines(sum(each.numbers), both, tables.batch)] = None
        if len(uncut) == limits.DIVISIONS:
            break
    return list(uncut)


def _subsets(several: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for number in range(len(several) + 1):
        yield from itertools.combinations(several, number)


class _Best:
    """Best pipeline for each number of GPUs of each resource, of any microbatch.

    sequences: what it completes while a step lasts, 0 if there is none. Arrays have the shape
    (supply[0] + 1, ...).
    """

    def __init__(self, tables: Tables, supply: Sequence[int]):
        self._supply = np.array(supply)
        shape = [gpus + 1 for gpus in supply]
        self.sequences = np.zeros(shape)
        self._source = np.full(shape, -1)  # index of the uses that have it
        self._uses = list[Uses]()
        self._states = np.indices(shape).reshape(len(supply), -1).T

        spent = 0
        for size in tables.sizes:
            orders = Orders(tables, supply, size, limits.WIDE_LEVEL, limits.WIDE_LEVELS)
            spent += orders.work
            if spent > limits.DIVIDED:
                break
            if not orders.rows:
                continue
            # a step of even pipelines takes longer than that of a perfect balance
            step_s = limits.UNBALANCED * tables.batch / size * orders.least_s
            for uses in orders.by_use():
                self._add(uses, size, step_s)

    def _add(self, uses: Uses, size: int, step_s: float) -> None:
        """Take the pipelines of one microbatch and depth that complete more than those so far."""
        completed = size * (step_s / uses.seconds - uses.depth + 1)
        is_better = completed > self.sequences
        self.sequences = np.where(is_better, completed, self.sequences)
        self._source = np.where(is_better, len(self._uses), self._source)
        self._uses.append(uses)

    def order(self, use: _State) -> StageRows:
        """Return the stages of the best pipeline that uses exactly these GPUs."""
        return self._uses[int(self._source[use])].order(use)

    def divisions(
        self, numbers: tuple[int, int], alone: Sequence[int], given: Sequence[int]
    ) -> Iterator[_Division]:
        """Yield the divisions that complete most, some GPUs idle where that is better.

        alone: resources of which one pipeline only may have GPUs. given: those of them that the
        first kind may use.
        """
        kept = [each for each in alone if each not in given]
        if (given and numbers[0] > 1) or (kept and numbers[1] > 1):
            return

        first = self._without(kept).ravel()
        second = self._without(given)
        within = second
        for axis in range(second.ndim):
            within = np.maximum.accumulate(within, axis=axis)

        left = (self._supply - numbers[0] * self._states) // numbers[1]
        is_possible = (left >= 0).all(axis=1) & (first > 0)
        of_left = within[tuple(np.maximum(left, 0).T)]
        is_possible &= of_left > 0
        total = np.where(is_possible, numbers[0] * first + numbers[1] * of_left, 0.0)
        for at in np.argsort(-total, kind="stable")[: limits.DIVISIONS].tolist():
            if total[at] > 0:
                use = tuple(self._states[at].tolist())
                other = _use_within(second, left[at])
                yield _Division(float(total[at]), numbers, (use, other))

    def _without(self, resources: Sequence[int]) -> Floats:
        """Return the sequences of pipelines that use none of these resources, 0 for others."""
        uses_none: Bools = (self._states[:, list(resources)] == 0).all(axis=1)
        return np.where(uses_none.reshape(self.sequences.shape), self.sequences, 0.0)


def _use_within(sequences: Floats, most: Ints) -> _State:
    """Return the GPUs, at most `most` of each resource, that complete the most sequences."""
    part = sequences[tuple(slice(0, gpus + 1) for gpus in most.tolist())]
    use = np.unravel_index(part.argmax(), part.shape)
    return tuple(int(gpus) for gpus in use)
