"""A worker dies in mid-step while optimizer state is in host memory; no step is lost.

Every bit equals that of an undisturbed run whose state stayed on the device. The planner's plan
after the death needs no host memory, so the state moves back on the way.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import SHORT, SHORT_STEPS, Scene
from tests.harness.exact_job import PLAN, differing_shards, exact_job
from tests.harness.history import history_of
from tests.harness.leaks import nothing_left
from tests.harness.struck_run import Strike, StruckRun, losses_by_step

pytestmark = pytest.mark.faults


def offloaded_plan() -> dict[str, Any]:
    plan = copy.deepcopy(PLAN)
    for pipeline in plan["pipelines"]:
        for stage in pipeline["stages"]:
            stage["offload_optimizer"] = True
    return plan


def test_a_worker_goes_and_no_step_is_lost(
    short_scene: Scene, tmp_path: Path, memory: Path
) -> None:
    job = exact_job(tmp_path, short_scene.shared, memory, offloaded_plan(), training=SHORT)
    with nothing_left(memory):
        result = StruckRun(job, tmp_path, Strike("mid_update", "worker", "kill")).run()
        assert result.ok, result.reason
    assert result.struck_at_step is not None
    assert losses_by_step(result.events) == list(short_scene.reference.losses)
    checkpoints = str(tmp_path / "checkpoints")
    history = history_of(result.events)
    assert differing_shards(checkpoints, SHORT_STEPS, short_scene.reference, history) == []
    assert result.summary["reconfigurations"]
    assert result.summary["steps_lost"] == 0
