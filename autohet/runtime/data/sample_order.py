"""Which row of the dataset is sample number `position` of a run: a function of (seed, position)
alone.

Each epoch is a keyed permutation of the rows, computed per position without a table: a Feistel
network over the next even number of bits (Luby and Rackoff, "How to Construct Pseudorandom
Permutations", 1988), walked along its cycle until the value falls inside the rows (Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Billions of rows need no memory, a resumed
run needs no state, and a fleet of any shape reads the same samples in the same order.
"""

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 6
# Networks over fewer bits reach too few of the permutations of a handful of rows.
MIN_HALF_BITS = 3

_Words = NDArray[np.uint64]


def sample_order(seed: int, num_rows: int, position: int) -> int:
    """The row, in [0, num_rows), of the sample at `position` >= 0; positions of one epoch visit
    each row once.
    """
    return int(sample_rows(seed, num_rows, position, 1)[0])


def sample_rows(seed: int, num_rows: int, first_position: int, count: int) -> NDArray[np.int64]:
    """Rows (int64, shape [count]) of the samples at first_position, first_position + 1, ...; may
    cross epochs.
    """
    if num_rows < 1 or first_position < 0 or count < 0:
        raise ValueError(
            f"no sample at position {first_position}, count {count}, of {num_rows} rows"
        )
    positions = np.arange(first_position, first_position + count, dtype=np.uint64)
    epochs, values = np.divmod(positions, np.uint64(num_rows))
    half_bits = max(MIN_HALF_BITS, ((num_rows - 1).bit_length() + 1) // 2)
    keys = _mix(_mix(np.full(count, seed % (1 << 64), np.uint64)) + epochs)
    values = _permute(values, keys, half_bits)
    outside = np.flatnonzero(values >= num_rows)
    while (
        outside.size
    ):  # ends: a cycle of a permutation comes back to where it began, inside the rows
        values[outside] = _permute(values[outside], keys[outside], half_bits)
        outside = outside[values[outside] >= num_rows]
    return values.astype(np.int64)


def _permute(values: _Words, keys: _Words, half_bits: int) -> _Words:
    """One pass of the network over 2 * half_bits bits."""
    mask = np.uint64((1 << half_bits) - 1)
    left, right = values >> np.uint64(half_bits), values & mask
    for round_index in range(NUM_ROUNDS):
        round_keys = keys + np.uint64((round_index + 1) * 0x9E3779B97F4A7C15 % (1 << 64))
        left, right = right, left ^ (_mix(right + round_keys) & mask)
    return (left << np.uint64(half_bits)) | right


def _mix(words: _Words) -> _Words:
    """The finaliser of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
    Generators", 2014).
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
