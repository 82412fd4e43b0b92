"""The linear program over columns against HiGHS's, which sees all columns at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from planner.search.tables import Floats, Ints
from planner.strategies.packing import Packer


def _best(usage: Ints, supply: Ints, value: Floats, at_most: int | None) -> float:
    fits = (usage <= supply).all(axis=1)
    if not fits.any():
        return 0.0
    rows = np.vstack([usage[fits].T, np.ones(int(fits.sum()))])
    limits = np.append(supply, supply.sum() if at_most is None else at_most)
    return float(-linprog(-value[fits], A_ub=rows, b_ub=limits, method="highs").fun)


def _random(seed: int) -> tuple[np.random.Generator, Ints, Ints]:
    random = np.random.default_rng(seed)
    resources, columns = int(random.integers(1, 6)), int(random.integers(0, 400))
    usage = random.integers(0, 6, (columns, resources))
    usage[:, -1] = np.maximum(usage[:, -1], usage.sum(axis=1) == 0)  # a pipeline has a GPU
    return random, usage, random.integers(1, 65, resources)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_packings_are_worth_what_an_independent_solver_says_whatever_was_asked_before(seed: int) -> None:
    random, usage, supply = _random(seed)
    packer, value = (
        Packer(usage, supply),
        usage.sum(axis=1) * random.random(len(usage)) + random.integers(0, 3, len(usage)),
    )
    for at_most in (None, 3, 3, 1, None):
        value = np.floor(value * random.uniform(0.9, 1.2, len(value))) * (random.random(len(value)) > 0.2)
        found, best = packer.relax(value, None, at_most), _best(usage, supply, value, at_most)
        assert found.value == pytest.approx(best, rel=1e-6, abs=1e-9)
        index, amounts = list(found.amounts), np.array(list(found.amounts.values()))
        assert amounts @ value[index] == pytest.approx(best, rel=1e-6, abs=1e-9)
        assert (amounts @ usage[index] <= supply + 1e-6).all() if index else best == 0
        assert amounts.sum() <= (supply.sum() if at_most is None else at_most) + 1e-6
        assert (found.prices >= 0).all()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0.5, 1.5))
def test_a_target_is_reached_or_not_as_an_independent_solver_says(seed: int, share: float) -> None:
    random, usage, supply = _random(seed)
    value = usage.sum(axis=1) * random.random(len(usage))
    best = _best(usage, supply, value, 4)
    target = share * best
    found = Packer(usage, supply).relax(value, target, 4).value
    if abs(target - best) > 1e-5 * max(best, 1.0):
        assert (found >= target * (1 - 1e-6)) == (best >= target)
