"""Faults of the product that the matrix has found and that are not mended yet: each fails, and says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from autohet.driver.change import Change
from autohet.driver.events import EventLog
from autohet.driver.ledger import Ledger
from autohet.driver.observation import Observation
from autohet.runtime.messages import Phase, StepRecord, WorkerReport
from tests.faults.conftest import Scene
from tests.harness.exact_job import CHAIN, exact_job
from tests.harness.local_fleet import Interference, trains_at
from tests.harness.struck_run import StruckRun


@pytest.mark.xfail(
    strict=True,
    reason="Ledger.begin_generation forgets the first steps of the very generation that begins, where a worker reports them in"
    " the tick that finds all ready: they are missing in the summary's losses",
)
def test_steps_that_come_with_the_news_of_readiness_are_kept() -> None:
    ledger = Ledger(None, EventLog(None))  # type: ignore[arg-type]
    controller = SimpleNamespace(generation=2, failures_in_a_row=0, members=("a/0",))
    record = StepRecord(16, 1.0, 1.0, 64, 0.01, 2, 10.0)
    report = WorkerReport("a/0", 1, 2, Phase.TRAINING, 17, 2, steps=(record,))
    ledger.take(Observation(10.0, {}, reports={"a/0": report}), controller)  # type: ignore[arg-type]
    change = Change("notice", ("b",), 9.0, 9.0, 16, None, restore_step=16)
    ledger.begin_generation(2, change)
    assert ledger.committed_steps == 17


@pytest.mark.faults
@pytest.mark.timeout(100)
@pytest.mark.xfail(
    strict=True,
    reason="one agent that does not answer hides what all others hold: RayWorkforce._ready_inventories gives all or nothing, and"
    " at the controller's deadline nothing is taken for an empty fleet",
)
def test_a_frozen_agent_hides_no_other_nodes_copies(scene: Scene, tmp_path: Path, memory: Path) -> None:
    """Node e, which trains nothing, is frozen; then a worker dies whose state its own node's agent still keeps."""

    def strike(run: StruckRun, seen: Observation) -> None:
        run.fleet.silent_node_s = 30.0
        run.fleet.freeze_node("e")
        run.fleet.kill_worker("b/0")

    events = Interference()
    events.when(trains_at(7), strike)
    job = exact_job(tmp_path, scene.shared, memory, CHAIN)
    result = StruckRun(job, tmp_path, nodes={"b": 1, "c": 1, "e": 1}).run(40.0, events)
    assert result.summary["steps_lost"] <= 1, result.summary["reconfigurations"]
    assert sum(change["bytes_by_tier"]["s3"] for change in result.summary["reconfigurations"]) == 0
