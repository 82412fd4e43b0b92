"""A worker dies while no driver is there: the others make the newest step durable by themselves."""

import time
from pathlib import Path

import pytest

from recovery.checkpoint.commit import list_checkpoints
from recovery.checkpoint.unattended import read_held
from recovery.storage.open import open_storage
from tests.faults.conftest import Scene
from tests.harness.exact_job import differing_shards, exact_job
from tests.harness.fault_points import FaultPoint
from tests.harness.leaks import nothing_left
from tests.harness.remote_process import await_answers
from tests.harness.struck_run import Strike, StruckRun, losses_by_step, read_events
from tests.harness.waits import HANG_S

pytestmark = pytest.mark.faults
DURABLE = 11


def test_survivors_store_the_newest_step_that_they_hold_together(
    scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """b/0 dies in step 10, whose vote c/0 has not seen: c/0 is one step behind the others."""
    job = exact_job(tmp_path, scene.shared, memory)
    run = StruckRun(job, tmp_path, Strike("unseen_vote", "worker", "kill", step=10))
    struck: list[FaultPoint] = []

    def strike(at: FaultPoint) -> None:
        run.fleet.kill_worker("b/0")
        run.fleet.open_gate(at)
        struck.append(at)

    run.fleet.act = strike
    with nothing_left(memory):
        deadline = time.monotonic() + HANG_S
        try:
            run.start()
            while not struck:
                run.tick()
                assert time.monotonic() < deadline, run.state()
            # From here on nobody drives.
            survivors = [p for name in "acd" for p in run.fleet.processes_of(name)[1:]]
            await_answers({process: process.ask("save_alone") for process in survivors})
        finally:
            run.close(forget=True)
        storage = open_storage(job.checkpoint_storage)
        assert list_checkpoints(storage)[-1].step == DURABLE
        assert read_held(storage, 1) == {}
        run.forget()
        result = StruckRun(job, tmp_path).run()
    assert result.ok, result.reason
    (restored, *_) = [event for event in result.events if event["kind"] == "restore"]
    assert restored["step"] == DURABLE
    assert run.events.path is not None
    before = [event for event in read_events(run.events.path) if event["kind"] == "step"]
    losses = losses_by_step([*before, *result.events])
    expected = list(scene.reference.losses[DURABLE:])
    assert losses[-len(expected) :] == expected
    assert differing_shards(str(tmp_path / "checkpoints"), scene.reference) == []
