"""A stage whose ranks have unequal shares, in a run that loses a worker: its state comes back in
other shares, and in its own again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autohet.control.values.observation import Observation
from planner.plans.plan import Plan
from tests.faults.conftest import Scene
from tests.harness.exact_job import CHAIN, STEPS, differing_shards, exact_job
from tests.harness.history import history_of
from tests.harness.leaks import nothing_left
from tests.harness.local_fleet import Interference, in_generation
from tests.harness.struck_run import StruckRun, losses_by_step

pytestmark = pytest.mark.faults
STAGE = {
    "first_layer": 0,
    "num_layers": 4,
    "workers": ["a/0", "a/1", "d/0"],
    "tp_shares": [2, 1, 1],
}
ALONE: dict[str, Any] = {**CHAIN, "pipelines": [{"num_microbatches": 8, "stages": [STAGE]}]}
"""What each of its workers holds of heads and vocabulary, no other has."""


def replicated(run: StruckRun, seen: Observation, step: int = 4) -> bool:
    reports = [seen.reports.get(worker) for worker in run.controller.memory.members]
    return bool(reports) and all(
        report is not None and (report.replicated_step or -1) >= step for report in reports
    )


def test_a_death_where_shares_are_uneven(scene: Scene, tmp_path: Path, memory: Path) -> None:
    """Copies of the dead node's snapshots serve, at the newest step of a complete round."""
    events = Interference()
    events.when(replicated, lambda run, seen: run.harm("kill", "d"))
    events.when(in_generation(2), lambda run, seen: None)
    job = exact_job(tmp_path, scene.shared, memory, ALONE, checkpoint={"every_steps": 1000})
    with nothing_left(memory):
        result = StruckRun(job, tmp_path, nodes={"a": 2, "d": 1}).run(events)
        assert result.ok, result.reason
    assert not events.events, result.reason
    assert losses_by_step(result.events) == list(scene.reference.losses)
    assert (
        differing_shards(
            str(tmp_path / "checkpoints"), STEPS, scene.reference, history_of(result.events)
        )
        == []
    )
    plans = [Plan.from_document(entry["plan"]) for entry in result.summary["plans"]]
    uneven = [
        [stage.tp_shares for p in each.pipelines for stage in p.stages if stage.tp_shares]
        for each in plans
    ]
    assert uneven[0] == [(2, 1, 1)]
    assert not any(uneven[1:]), "a stage that lost a worker for good is cut anew"
    assert result.summary["steps_lost"] <= 8
    assert sum(change["bytes_by_tier"]["s3"] for change in result.summary["reconfigurations"]) == 0
