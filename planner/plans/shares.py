"""Division of a stage among unequal ranks into whole parts."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from planner.inputs.fleet import NodeType
from planner.plans.plan import TensorShare

# of a stage's seconds: for less its shares are neither cut finer nor changed, which moves state
ALIKE = 1e-3


@dataclass(frozen=True, slots=True)
class UnevenGroup:
    """Node types of a group's GPUs, equal ones next to each other, and the parts of each GPU.

    shares: parts by speed (`Stage.tp_shares`). GPUs of one type are on one node.
    """

    kinds: tuple[NodeType, ...]
    shares: tuple[int, ...]

    @property
    def nodes(self) -> tuple[NodeType, ...]:
        """Node types of the group's nodes, one entry for each node."""
        return tuple(dict.fromkeys(self.kinds))


PartsByRank = tuple[int, ...]
"""Parts of each rank."""


Seconds = Callable[[int, TensorShare], float]
"""Seconds of a rank of a stage with a share; infinite if it may not have that share."""


def whole_shares(seconds: Seconds, ranks: int, finest: int, units: int = 0) -> PartsByRank:
    """Return the number of parts of each rank with which the slowest rank ends earliest.

    Each rank gets one part at least; the division has as few parts as are as fast. finest: parts at
    most. units: number into which keys and values are cut. A rank holds each unit that its share
    overlaps. Among equally fast divisions, the rank with most units has the fewest. Empty if no
    division is allowed.
    """

    def load(shares: PartsByRank) -> list[tuple[float, int]]:
        """Return seconds and units of each rank, the slowest first."""
        loads = []
        for rank, share in enumerate(place_shares(shares)):
            num_units = len(share.units(units))
            loads.append((seconds(rank, share), num_units))
        return sorted(loads, reverse=True)

    found = []
    best_s = math.inf
    for exponent in range(finest.bit_length()):
        parts = 2**exponent
        if parts < ranks:
            continue
        lightest = min(_divisions(parts, ranks), key=load)
        lightest_s = slowest_s(seconds, lightest)
        best_s = min(best_s, lightest_s)
        found.append((lightest, lightest_s))

    if not math.isfinite(best_s):
        return ()
    # fewest parts come first
    return next(shares for shares, shares_s in found if shares_s <= (1 + ALIKE) * best_s)


@cache
def _divisions(parts: int, ranks: int) -> list[PartsByRank]:
    """Return all divisions of `parts` among ranks that each have one part at least.

    Those with most parts for the first ranks come first.
    """
    divisions = []
    for inner in itertools.combinations(range(1, parts), ranks - 1):
        ends = itertools.pairwise((0, *inner, parts))
        divisions.append(tuple(end - begin for begin, end in ends))
    return sorted(divisions, reverse=True)


def place_shares(shares: Sequence[int]) -> list[TensorShare]:
    """Return the share of each rank: consecutive ranges of parts, in rank order."""
    ends = list(itertools.accumulate(shares))
    parts = ends[-1]
    return [TensorShare(end - own, end, parts) for own, end in zip(shares, ends, strict=True)]


def slowest_s(seconds: Seconds, shares: Sequence[int]) -> float:
    """Return seconds of the slowest rank with these shares."""
    return max(seconds(rank, share) for rank, share in enumerate(place_shares(shares)))
