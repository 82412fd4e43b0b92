"""The order of samples: each row once an epoch, another order each epoch, a function of (seed,
position) alone.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autohet.runtime.data import sample_order, sample_rows


@settings(max_examples=40)
@given(seed=st.integers(0, 2**64), num_rows=st.integers(1, 3000), epoch=st.integers(0, 2**20))
def test_each_epoch_visits_each_row_once(seed: int, num_rows: int, epoch: int) -> None:
    rows = sample_rows(seed, num_rows, epoch * num_rows, num_rows)
    assert rows.dtype == np.int64
    np.testing.assert_array_equal(np.sort(rows), np.arange(num_rows))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 100),
    num_rows=st.integers(1, 200),
    first=st.integers(0, 10**12),
    sizes=st.lists(st.integers(0, 40)),
)
def test_any_way_to_cut_the_positions_gives_the_same_rows(
    seed: int, num_rows: int, first: int, sizes: list[int]
) -> None:
    whole = sample_rows(seed, num_rows, first, sum(sizes))
    starts = np.cumsum([0, *sizes])
    parts = [
        sample_rows(seed, num_rows, first + int(start), size)
        for start, size in zip(starts, sizes, strict=False)
    ]
    np.testing.assert_array_equal(whole, np.concatenate([*parts, np.empty(0, np.int64)]))
    if len(whole):
        assert sample_order(seed, num_rows, first) == whole[0]


def test_epochs_and_seeds_differ() -> None:
    first, second = sample_rows(7, 1000, 0, 1000), sample_rows(7, 1000, 1000, 1000)
    other = sample_rows(8, 1000, 0, 1000)
    # two random permutations of 1000 agree in 1 place on average, in more than 10 hardly ever
    assert (first == second).sum() < 10
    assert (first == other).sum() < 10
    assert (first == np.arange(1000)).sum() < 10


@pytest.mark.parametrize("num_rows", [3, 4])
def test_all_orders_of_few_rows_occur_equally_often(num_rows: int) -> None:
    epochs = 2400
    rows = sample_rows(1, num_rows, 0, epochs * num_rows).reshape(epochs, num_rows)
    counts = Counter(map(tuple, rows.tolist()))
    orders = {3: 6, 4: 24}[num_rows]
    assert len(counts) == orders
    expected = epochs / orders
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_square < 2.5 * orders  # mean orders - 1; 1 in 10^4 beyond this for 24


def test_each_row_is_equally_likely_in_each_place() -> None:
    rows = np.concatenate([sample_rows(seed, 100, 0, 10) for seed in range(2000)])
    counts = np.bincount(rows, minlength=100)
    assert (
        (counts - 200) ** 2 / 200
    ).sum() < 160  # chi-square of 99 degrees: mean 99, 1 in 10^4 beyond 155


def test_billions_of_rows_need_no_table() -> None:
    num_rows = 5_000_000_000
    rows = sample_rows(3, num_rows, 4 * num_rows - 500, 1000)
    assert len(set(rows[:500].tolist())) == 500
    assert len(set(rows[500:].tolist())) == 500
    assert rows.min() >= 0
    assert rows.max() < num_rows
    assert rows.max() > num_rows // 2


def test_order_is_pinned() -> None:
    """A change of the order would make resumed runs read other samples; it needs a new format
    version.
    """
    assert sample_rows(0, 10, 0, 10).tolist() == [3, 0, 7, 2, 5, 6, 9, 1, 8, 4]


@pytest.mark.parametrize(("num_rows", "first", "count"), [(0, 0, 1), (5, -1, 1), (5, 0, -1)])
def test_nonsense_is_refused(num_rows: int, first: int, count: int) -> None:
    with pytest.raises(ValueError, match="no sample at position"):
        sample_rows(0, num_rows, first, count)
