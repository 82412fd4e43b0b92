"""A driver that was given up for dead and replaced comes back: two of them, on two fleets, write to
one storage.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.faults.conftest import Scene
from tests.harness.driver_life import DriverLife
from tests.harness.exact_job import STEPS, differing_shards, exact_job
from tests.harness.leaks import nothing_left
from tests.harness.struck_run import Strike

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def test_the_replaced_driver_comes_back(scene: Scene, tmp_path: Path, memory: Path) -> None:
    """It stood still at step 6, longer than its lease, while another trained to the end and was
    committed: nothing of its counts.
    """
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
            lives.append(
                DriverLife(jobs[0], tmp_path / "first", Strike("forward", "driver", "freeze"))
            )
            lives[0].wait_frozen()
            lives.append(DriverLife(jobs[1], tmp_path / "second", None))
            assert lives[1].wait() == 0
            assert differing_shards(storage, STEPS, scene.reference) == []
            lives[0].thaw()
            assert lives[0].wait() == 0, "it ends by itself"
            shutil.rmtree(memory / "one")  # what its nodes keep is not its to remove any more
        finally:
            for life in lives:
                life.close()
    assert [life.result["ok"] for life in lives] == [False, True], [
        life.result["reason"] for life in lives
    ]
    assert "has taken the job over" in lives[0].result["reason"]
    told = {
        event["step"]: event["loss"]
        for life in lives
        for event in life.events
        if event["kind"] == "step"
    }
    assert [told[step] for step in sorted(told)] == list(scene.reference.losses)
    assert differing_shards(storage, STEPS, scene.reference) == []
