"""Random strikes on real processes, in short; scripts/benchmarks/chaos.py strikes 200 times."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.faults.conftest import Scene
from tests.harness.chaos.judge import judge
from tests.harness.chaos.lives import strike_job
from tests.harness.chaos.places import make_places
from tests.harness.chaos.strikes import WEIGHTS, draw_strikes
from tests.harness.exact_job import STEPS

pytestmark = [pytest.mark.faults, pytest.mark.timeout(150)]
SEED, NUM_STRIKES = 10, 6
"""A notice, deaths of an agent and of the driver, and of workers, two of them inside rebuilds."""


def test_random_strikes_cost_nothing(scene: Scene, tmp_path: Path) -> None:
    with make_places(tmp_path / "job") as places:
        struck = strike_job(places, scene.shared, STEPS, draw_strikes(SEED, NUM_STRIKES))
        found = judge(struck, scene.reference)
    assert found["wrong"] == [], found
    assert found["strikes"] >= NUM_STRIKES - 1, found


def test_a_seed_gives_one_sequence_of_strikes() -> None:
    """A longer sequence begins with the shorter one, and 200 strikes have every kind."""
    assert draw_strikes(1, 40)[:12] == draw_strikes(1, 12)
    assert draw_strikes(1, 12) != draw_strikes(2, 12)
    kinds = Counter(strike.kind for seed in range(1, 5) for strike in draw_strikes(seed, 50))
    assert kinds.keys() == WEIGHTS.keys() - {"deaths_in_rebuilds"}
