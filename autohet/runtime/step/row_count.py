"""Rows of a global batch that were computed: their number, and a sum of hashes of their positions.

Both are summed over all workers in the vote. A microbatch that is left out, computed twice or taken
from elsewhere in the batch changes one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

WORD = 0xFFFFFFFF


class RowsDiffer(RuntimeError):
    """The workers have not computed each row of a global batch once: no step may follow from it."""


class RowCount:
    """Rows whose losses one worker has computed since `clear`."""

    def __init__(self) -> None:
        self.number = 0
        self.hashes = 0

    def clear(self) -> None:
        self.number = 0
        self.hashes = 0

    def add_all(self, other: RowCount) -> None:
        """Count the rows of another count, too."""
        self.number += other.number
        self.hashes += other.hashes

    def add(self, positions: Iterable[int]) -> None:
        """Count the rows at these positions of the global batch."""
        for position in positions:
            self.number += 1
            self.hashes += row_hash(position)


def row_hash(position: int) -> int:
    """Return 32 bits of a position, so that float64 sums 2**21 of them exactly.

    The mixing is MurmurHash3's finalizer (Appleby).
    """
    x = (position + 0x9E3779B9) & WORD
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & WORD
    return x ^ (x >> 16)


@functools.lru_cache(maxsize=8)
def hashes_of(num_rows: int) -> int:
    """Return the sum of hashes of the first positions of a global batch."""
    return sum(map(row_hash, range(num_rows)))
