"""A driver that was given up for dead and replaced comes back: two of them, on two fleets, write to one storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.conftest import Scene
from tests.harness.driver_life import DriverLife
from tests.harness.exact_job import STEPS, differing_shards, exact_job
from tests.harness.leaks import nothing_left
from tests.harness.struck_run import Strike, losses_by_step

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(150)]
DEADLINE_S = 40.0


def test_the_replaced_driver_comes_back(scene: Scene, tmp_path: Path, memory: Path) -> None:
    """It stood still at step 6 while another trained to the end and was committed; then it goes on to its own end."""
    storage = str(tmp_path / "checkpoints")
    jobs = [
        exact_job(
            tmp_path,
            scene.shared,
            memory / name,
            checkpoint={"storage": storage, "local_directory": str(tmp_path / name)},
        )
        for name in ("one", "other")
    ]
    lives: list[DriverLife] = []
    with nothing_left(memory):
        try:
            lives.append(DriverLife(jobs[0], tmp_path / "first", Strike("forward", "driver", "freeze"), DEADLINE_S))
            lives[0].wait_frozen(DEADLINE_S)
            lives.append(DriverLife(jobs[1], tmp_path / "second", None, DEADLINE_S))
            assert lives[1].wait(DEADLINE_S) == 0
            assert differing_shards(storage, STEPS, scene.reference) == []
            lives[0].thaw()
            assert lives[0].wait(DEADLINE_S) == 0
        finally:
            for life in lives:
                life.close()
    assert [life.result["ok"] for life in lives] == [True, True], [life.result["reason"] for life in lives]
    assert losses_by_step(lives[0].events) == list(scene.reference.losses)
    assert differing_shards(storage, STEPS, scene.reference) == []
