"""A checkpoint that takes long to store holds up no step, nor a snapshot; the next one is of one
step at all workers, and of the newest.
"""

from pathlib import Path

import pytest

from autohet.control.values.observation import Observation
from recovery.checkpoint.commit import open_checkpoint
from recovery.checkpoint.read import verify
from recovery.storage.open import open_storage
from tests.faults.conftest import Scene, run_through
from tests.harness.exact_job import EVERY, LONG
from tests.harness.fault_points import FaultPoint
from tests.harness.local_fleet import Interference, trains_at
from tests.harness.struck_run import StruckRun

HELD = 8
GOES_ON_UNTIL = 18


@pytest.mark.faults
def test_slow_storage_delays_the_next_checkpoint_and_no_step(
    long_scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """Worker b/0 stores its part of step 8 only when ten more steps, two checkpoints' worth, are
    trained.
    """
    point = FaultPoint("upload", "b/0", HELD)

    def let_go(run: StruckRun, seen: Observation) -> None:
        assert newest_committed(run) < HELD
        run.fleet.open_gate(point)

    def hold(run: StruckRun) -> None:
        run.fleet.points = (point,)
        run.fleet.act = lambda arrived: None

    events = Interference()
    events.when(trains_at(GOES_ON_UNTIL), let_go)
    given = {"checkpoint": {"keep": 100}, "training": LONG}
    result = run_through(long_scene, tmp_path, memory, events, hold, **given)
    steps = [event["step"] for event in result.events if event["kind"] == "checkpoint"]
    owed = min(step for step in steps if step > HELD)
    assert {EVERY, HELD, LONG["steps"]} <= set(steps)
    assert GOES_ON_UNTIL <= owed <= GOES_ON_UNTIL + 2 * EVERY, steps
    kept = [event["step"] for event in result.events if event["kind"] == "snapshot"]
    assert kept == sorted(set(kept))
    assert kept[0] < HELD < GOES_ON_UNTIL < kept[-1]
    storage = open_storage(str(tmp_path / "checkpoints"))
    try:
        assert all(verify(storage, step).ok for step in steps)
        assert open_checkpoint(storage, owed).step == owed
    finally:
        storage.close()


def newest_committed(run: StruckRun) -> int:
    return run.controller.memory.ledger.checkpoints.step or 0
