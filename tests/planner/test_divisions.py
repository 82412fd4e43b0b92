"""Divisions of GPUs into sets against all that there are."""

import numpy as np
import pytest

from planner.search.tables import Ints
from planner.strategies.divisions import divisions
from planner.strategies.packing import Packer


@pytest.mark.parametrize("seed", range(8))
def test_divisions_find_the_best_of_all(seed: int) -> None:
    random, supply = np.random.default_rng(seed), np.array([6, 5])
    usage = np.unique(random.integers(0, 4, (30, 2)), axis=0)
    usage = usage[usage.sum(axis=1) > 0]
    value = random.uniform(1, 2, len(usage)) * usage.sum(axis=1) ** 1.2
    prices = Packer(usage, supply).relax(value).prices
    found = divisions(usage, value, supply, prices, 600, 8)
    assert found == sorted(found, key=lambda chosen: -value[list(chosen)].sum())
    assert all((usage[list(chosen)].sum(axis=0) <= supply).all() for chosen in found)

    def best(left: Ints, first: int) -> float:
        ways = (i for i in range(first, len(value)) if (usage[i] <= left).all())
        return max((float(value[i]) + best(left - usage[i], i) for i in ways), default=0.0)

    assert value[list(found[0])].sum() == pytest.approx(best(supply, 0))


def test_two_sets_complete_what_one_alone_cannot() -> None:
    """Nothing is grown before the only completion, so a division of two sets or more is completed by both at once."""
    usage = np.array([[3, 0], [2, 2], [1, 2], [0, 3], [2, 1], [1, 1]])
    value = np.array([3.0, 4.0, 2.9, 2.9, 2.9, 1.0])
    found = divisions(usage, value, np.array([6, 6]), np.ones(2), 1, 1)
    assert max(len(chosen) for chosen in found) >= 2
    assert all((usage[list(chosen)].sum(axis=0) <= 6).all() for chosen in found)


def test_sets_of_which_none_fits_divide_nothing() -> None:
    usage, value = np.array([[3, 0], [0, 4], [2, 2]]), np.array([3.0, 4.0, 4.0])
    assert not divisions(usage, value, np.array([1, 1]), np.ones(2), 4, 3)
    assert divisions(usage, value, np.array([3, 1]), np.ones(2), 4, 3) == [(0,)]
