"""A worker dies in mid-step while optimizer state is in host memory; no step is lost.

Every bit equals that of an undisturbed run whose state stayed on the device. The planner's plan
after the death needs no host memory, so the state moves back on the way.
"""

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Scene, run_through
from tests.harness.exact_job import PLAN
from tests.harness.struck_run import Strike

pytestmark = pytest.mark.faults


def offloaded_plan() -> dict[str, Any]:
    plan = copy.deepcopy(PLAN)
    for pipeline in plan["pipelines"]:
        for stage in pipeline["stages"]:
            stage["offload_optimizer"] = True
    return plan


def test_a_worker_goes_and_no_step_is_lost(scene: Scene, tmp_path: Path, memory: Path) -> None:
    how = {"strike": Strike("mid_update", "worker", "kill")}
    result = run_through(scene, tmp_path, memory, how=how, plan=offloaded_plan())
    assert result.struck_at_step is not None
    assert result.summary["reconfigurations"]
    assert result.summary["steps_lost"] == 0
