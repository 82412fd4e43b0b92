"""A plan of `hap` on processes that are paced as its emulated GPUs; measured beside others by
`scripts/benchmarks/step/spmd_paced.py`.
"""

from __future__ import annotations

import pytest

from tests.harness.paced_programs import (
    PacedFleet,
    chosen_plan,
    data_parallel_plan,
    predicted_and_measured,
)

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def test_a_paced_step_is_no_shorter_than_predicted_and_shares_follow_speed() -> None:
    """A step that left out what a worker owes, or paced another share than the plan's, would be
    shorter.
    """
    of = PacedFleet((("A100-40", 1, 1), ("A10G", 1, 2)), {"A100-40": 2.0, "A10G": 1.0}, 8, 0.03)
    plan = chosen_plan(of, "hap")
    assert plan.spmd is not None
    assert [units for _, units in plan.spmd.units] == [(4, 2, 2)]
    predicted_s, measured_s = predicted_and_measured(of, plan, 1)
    assert measured_s > 0.97 * predicted_s
    assert (
        of.cost().predict(data_parallel_plan(of, [1.0, 1.0, 1.0])).step_time_s > 1.2 * predicted_s
    )
