"""A stage whose ranks have unequal shares, in a run that loses a worker: its state comes back in
other shares, and in its own again.
"""

from pathlib import Path
from typing import Any

import pytest

from planner.plans.plan import Plan
from tests.faults.conftest import Scene, replicated, run_through
from tests.harness.exact_job import CHAIN, LAYERS, LONG
from tests.harness.local_fleet import Interference, in_generation

pytestmark = pytest.mark.faults
STAGE = {
    "first_layer": 0,
    "num_layers": LAYERS,
    "workers": ["a/0", "a/1", "d/0"],
    "tp_shares": [2, 1, 1],
}
ALONE: dict[str, Any] = {**CHAIN, "pipelines": [{"num_microbatches": 8, "stages": [STAGE]}]}
"""What each of its workers holds of heads and vocabulary, no other has."""


def test_a_death_where_shares_are_uneven(long_scene: Scene, tmp_path: Path, memory: Path) -> None:
    """Copies of the dead node's snapshots serve, at the newest step of a complete round."""
    events = Interference()
    events.when(replicated(4), lambda run, seen: run.harm("kill", "d"))
    events.when(in_generation(2), lambda run, seen: None)
    given = {"plan": ALONE, "checkpoint": {"every_steps": 1000}, "training": LONG}
    how = {"nodes": {"a": 2, "d": 1}}
    result = run_through(long_scene, tmp_path, memory, events, how=how, **given)
    plans = [Plan.from_document(entry["plan"]) for entry in result.summary["plans"]]
    uneven = [
        [stage.tp_shares for p in each.pipelines for stage in p.stages if stage.tp_shares]
        for each in plans
    ]
    assert uneven[0] == [(2, 1, 1)]
    assert not any(uneven[1:]), "a stage that lost a worker for good is cut anew"
    assert result.summary["steps_lost"] <= 8
    assert sum(change["bytes_by_tier"]["s3"] for change in result.summary["reconfigurations"]) == 0
