"""Optimizer state of which each shard has one holder: what dies with a worker comes from its node's
snapshot, or from copies elsewhere.

A survivor cannot finish a step for the dead: whoever has applied it goes back to a snapshot.
Nothing is lost where the step was committed nowhere. The plan after a death need not shard
anything: the state is laid out anew on the way.
"""

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Scene, replicated, run_through
from tests.harness.exact_job import LONG, PLAN
from tests.harness.local_fleet import Interference, in_generation
from tests.harness.struck_run import Result, Strike

pytestmark = pytest.mark.faults
NO_CHECKPOINT = {"every_steps": 1000}
"""None before the last step: what is lost is in no storage."""
CELLS = {"vote-worker-kill": 0, "apply-worker-kill": 1}
"""Strikes, and how many steps they cost at the most. Whoever votes has its snapshot of the step
before; in the update others may be a step further than the snapshot of whoever dies.
"""


def sharded_plan() -> dict[str, Any]:
    plan = copy.deepcopy(PLAN)
    for pipeline in plan["pipelines"]:
        for stage in pipeline["stages"]:
            stage["shard_optimizer"] = True
    return plan


def check(result: Result, most_lost: int) -> None:
    changes = result.summary["reconfigurations"]
    assert changes
    assert result.summary["steps_lost"] <= most_lost, changes
    assert sum(change["bytes_by_tier"]["s3"] for change in changes) == 0, changes


@pytest.mark.parametrize(
    "name", [pytest.param("vote-worker-kill", marks=pytest.mark.slow), "apply-worker-kill"]
)
def test_a_worker_goes_and_its_nodes_snapshot_serves(
    name: str, scene: Scene, tmp_path: Path, memory: Path
) -> None:
    how = {"strike": Strike(*name.split("-"), step=6)}
    given = {"plan": sharded_plan(), "checkpoint": NO_CHECKPOINT}
    result = run_through(scene, tmp_path, memory, how=how, **given)
    assert result.struck_at_step is not None, "the run never came to the point"
    check(result, CELLS[name])


def test_a_node_goes_with_its_snapshots_and_copies_serve(
    long_scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """Every layer has three holders, and yet a node takes moments along that nobody else has:
    agents have copied them.
    """
    events = Interference()
    events.when(replicated(4), lambda run, seen: run.harm("kill", "a"))
    events.when(in_generation(2), lambda run, seen: None)
    given = {"plan": sharded_plan(), "checkpoint": NO_CHECKPOINT, "training": LONG}
    check(run_through(long_scene, tmp_path, memory, events, **given), 8)
