"""Optimizer state of which each shard has one holder: what dies with a worker comes from its node's
snapshot, or from copies elsewhere.

A survivor cannot finish a step for the dead: whoever has applied it goes back to a snapshot.
Nothing is lost where the step was committed nowhere. The plan after a death need not shard
anything: the state is laid out anew on the way.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from autohet.control.values.observation import Observation
from tests.faults.conftest import SHORT, Scene
from tests.harness.exact_job import PLAN, differing_shards, exact_job
from tests.harness.history import history_of
from tests.harness.leaks import nothing_left
from tests.harness.local_fleet import Interference, in_generation
from tests.harness.struck_run import Result, Strike, StruckRun, losses_by_step

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


def check(result: Result, directory: Path, scene: Scene, most_lost: int) -> None:
    assert losses_by_step(result.events) == list(scene.reference.losses)
    storage = str(directory / "checkpoints")
    steps = len(scene.reference.losses)
    assert differing_shards(storage, steps, scene.reference, history_of(result.events)) == []
    changes = result.summary["reconfigurations"]
    assert changes
    assert result.summary["steps_lost"] <= most_lost, changes
    assert sum(change["bytes_by_tier"]["s3"] for change in changes) == 0, changes


@pytest.mark.parametrize(
    "name", [pytest.param("vote-worker-kill", marks=pytest.mark.slow), "apply-worker-kill"]
)
def test_a_worker_goes_and_its_nodes_snapshot_serves(
    name: str, short_scene: Scene, tmp_path: Path, memory: Path
) -> None:
    strike = Strike(*name.split("-"), step=6)
    given = {"checkpoint": NO_CHECKPOINT, "training": SHORT}
    job = exact_job(tmp_path, short_scene.shared, memory, sharded_plan(), **given)
    with nothing_left(memory):
        result = StruckRun(job, tmp_path, strike).run()
        assert result.ok, result.reason
    assert result.struck_at_step is not None, f"the run never came to {strike.point}"
    check(result, tmp_path, short_scene, CELLS[name])


def replicated(run: StruckRun, seen: Observation, step: int = 4) -> bool:
    reports = [seen.reports.get(worker) for worker in run.controller.memory.members]
    return bool(reports) and all(
        report is not None and (report.replicated_step or -1) >= step for report in reports
    )


def test_a_node_goes_with_its_snapshots_and_copies_serve(
    scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """Every layer has three holders, and yet a node takes moments along that nobody else has:
    agents have copied them.
    """
    events = Interference()
    events.when(replicated, lambda run, seen: run.harm("kill", "a"))
    events.when(in_generation(2), lambda run, seen: None)
    job = exact_job(tmp_path, scene.shared, memory, sharded_plan(), checkpoint=NO_CHECKPOINT)
    with nothing_left(memory):
        result = StruckRun(job, tmp_path).run(events)
        assert result.ok, result.reason
    assert not events.events, f"{len(events.events)} events did not happen: {result.reason}"
    check(result, tmp_path, scene, 8)
