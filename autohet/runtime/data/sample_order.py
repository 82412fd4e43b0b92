"""Order of samples: the dataset row of a run's sample number `position`.

It is a function of (seed, position) alone.

Each epoch is a keyed permutation of the rows, computed per position without a table: a Feistel
network over the next even number of bits (Luby and Rackoff, "How to Construct Pseudorandom
Permutations", 1988), walked along its cycle until the value falls inside the rows (Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Billions of rows need no memory, a resumed
run needs no state, and a fleet of any shape reads the same samples in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 6
# Networks over fewer bits reach too few of the permutations of a handful of rows.
MIN_HALF_BITS = 3
MIX_PERIOD = 1 << 14
MIX_SEED = 0x6D69787475726521
SHARE_SEED = 0x68656C646F757421

_Words = NDArray[np.uint64]


def sample_order(seed: int, num_rows: int, position: int) -> int:
    """Return the row, in [0, num_rows), of the sample at `position` >= 0.

    The positions of one epoch visit each row once.
    """
    return int(sample_rows(seed, num_rows, position, 1)[0])


def sample_rows(seed: int, num_rows: int, first_position: int, count: int) -> NDArray[np.int64]:
    """Return the rows of the samples at first_position, first_position + 1, ..., int64 [count].

    The positions may span several epochs.
    """
    if num_rows < 1 or first_position < 0 or count < 0:
        raise ValueError(
            f"no sample at position {first_position}, count {count}, of {num_rows} rows"
        )
    positions = np.arange(first_position, first_position + count, dtype=np.uint64)
    return _rows_at(seed, num_rows, positions)


def mixed_rows(
    seed: int,
    rows_by_source: Sequence[int],
    weights: Sequence[float],
    first_position: int,
    count: int,
) -> NDArray[np.int64]:
    """Return the rows of samples from mixed sources, whose rows are stored source by source.

    Each source gets its share by weight of every `MIX_PERIOD` positions. A permutation keyed by
    (seed, period) chooses these positions. Each source has its own epochs.
    """
    # Slots of a period, in ranges by source.
    quotas = mix_quotas(weights)
    ends = np.cumsum(quotas)
    begins = ends - quotas
    positions = np.arange(first_position, first_position + count, dtype=np.uint64)
    periods = positions // np.uint64(MIX_PERIOD)
    slots = _rows_at(seed ^ MIX_SEED, MIX_PERIOD, positions)
    sources = np.searchsorted(ends, slots, side="right")

    # A sample's position among those of its source decides its row of that source.
    first_rows = np.cumsum([0, *rows_by_source[:-1]])
    rows = np.empty(count, np.int64)
    for source in np.unique(sources).tolist():
        mine = sources == source
        before = periods[mine] * np.uint64(quotas[source])
        in_period = (slots[mine] - begins[source]).astype(np.uint64)
        own_rows = _rows_at(seed + source, rows_by_source[source], before + in_period)
        rows[mine] = first_rows[source] + own_rows
    return rows


@dataclass(frozen=True)
class RowShare:
    """Rows of a dataset that are held out, or the others; a source's come in a fixed random order.

    rows_by_source: rows stored of each source, one source after the other.
    """

    rows_by_source: tuple[int, ...]
    share: float
    held_out: bool

    def _range(self, source: int) -> tuple[int, int]:
        """Return the wanted range of a source's order."""
        num_rows = self.rows_by_source[source]
        num_held_out = max(1, round(self.share * num_rows))
        return (0, num_held_out) if self.held_out else (num_held_out, num_rows)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of wanted rows of each source."""
        ranges = [self._range(source) for source in range(len(self.rows_by_source))]
        return tuple(end - begin for begin, end in ranges)

    def stored(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the stored rows of wanted rows, which are numbered source by source."""
        ends = np.cumsum(self.counts)
        sources = np.searchsorted(ends, rows, side="right")
        first_rows = np.cumsum([0, *self.rows_by_source[:-1]])
        found = np.empty(len(rows), np.int64)
        for source in np.unique(sources).tolist():
            mine = sources == source
            first = self._range(source)[0] + self.counts[source] - ends[source]
            places = (rows[mine] + first).astype(np.uint64)
            num_rows = self.rows_by_source[source]
            found[mine] = first_rows[source] + _rows_at(SHARE_SEED, num_rows, places)
        return found


def mix_quotas(weights: Sequence[float]) -> NDArray[np.int64]:
    """Return each source's positions in a period, by largest remainders and at least one."""
    shares = np.asarray(weights, np.float64)
    wanted = shares / shares.sum() * MIX_PERIOD
    at_least_one = np.maximum(1, np.floor(wanted))
    quotas: NDArray[np.int64] = at_least_one.astype(np.int64)
    by_remainder = np.argsort(quotas - wanted, kind="stable")
    for place in range(MIX_PERIOD - int(quotas.sum())):
        source = by_remainder[place % len(quotas)]
        quotas[source] += 1
    # Many tiny sources with a position each may be too many: the largest gives theirs up.
    quotas[np.argmax(quotas)] += MIX_PERIOD - int(quotas.sum())
    return quotas


def _rows_at(seed: int, num_rows: int, positions: _Words) -> NDArray[np.int64]:
    epochs, values = np.divmod(positions, np.uint64(num_rows))
    num_bits = (num_rows - 1).bit_length()
    half_bits = max(MIN_HALF_BITS, (num_bits + 1) // 2)
    seeds = np.full(len(positions), seed % (1 << 64), np.uint64)
    keys = _mix(_mix(seeds) + epochs)
    values = _permute(values, keys, half_bits)
    # This ends: a cycle of a permutation comes back to where it began, inside the rows.
    outside = np.flatnonzero(values >= num_rows)
    while outside.size:
        values[outside] = _permute(values[outside], keys[outside], half_bits)
        outside = outside[values[outside] >= num_rows]
    return values.astype(np.int64)


def _permute(values: _Words, keys: _Words, half_bits: int) -> _Words:
    """Run the Feistel network once over 2 * half_bits bits."""
    mask = np.uint64((1 << half_bits) - 1)
    left = values >> np.uint64(half_bits)
    right = values & mask
    for round_index in range(NUM_ROUNDS):
        round_keys = keys + np.uint64((round_index + 1) * 0x9E3779B97F4A7C15 % (1 << 64))
        mixed = _mix(right + round_keys) & mask
        left, right = right, left ^ mixed
    return (left << np.uint64(half_bits)) | right


def _mix(words: _Words) -> _Words:
    """The finaliser of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
    Generators", 2014).
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
