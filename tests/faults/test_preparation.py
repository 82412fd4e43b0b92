"""Strikes while the next generation is prepared: it is dropped, and the run is not."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest.mock import patch

import pytest

from autohet.control.job_state import Training
from autohet.control.states import cutting_over
from autohet.control.values.observation import Observation
from autohet.runtime.messages import GenerationOrder
from tests.faults.conftest import Scene
from tests.faults.test_sequences import harm, nothing_lost, run_through
from tests.harness.driver_life import DriverLife
from tests.harness.exact_job import STEPS, differing_shards, exact_job, train_alone
from tests.harness.history import history_of
from tests.harness.leaks import nothing_left
from tests.harness.local_fleet import Interference, in_generation, trains_at
from tests.harness.struck_run import Strike, StruckRun, losses_by_step
from tests.harness.waits import HANG_S

pytestmark = pytest.mark.faults
WARNED = f"notice a {HANG_S}"


def preparing(run: StruckRun, seen: Observation) -> bool:
    state = run.controller.state
    return isinstance(state, Training) and state.preparing is not None


class Numbers:
    """Numbers of the prepared generation and of the one that trains in the end."""

    def __init__(self) -> None:
        self.prepared = 0
        self.used = 0

    def note_prepared(self, run: StruckRun, seen: Observation) -> None:
        self.prepared = run.controller.memory.reserved

    def note_used(self, run: StruckRun, seen: Observation) -> None:
        self.used = run.controller.memory.generation


@pytest.mark.parametrize("strike", [None, "kill", "freeze"])
def test_a_notice_and_a_strike_on_a_survivor_while_it_is_prepared_for(
    scene: Scene, tmp_path: Path, memory: Path, strike: str | None
) -> None:
    numbers = Numbers()
    events = Interference()
    events.when(trains_at(5), harm("notice", "a"))
    events.when(preparing, numbers.note_prepared)
    if strike is not None:
        events.when(lambda run, seen: True, harm(strike, "b"))
    events.when(in_generation(2), numbers.note_used)
    result = run_through(scene, tmp_path, memory, events)
    nothing_lost(result)
    if strike is None:
        assert numbers.used == numbers.prepared, "what was prepared is what trains"
    else:
        assert numbers.used > numbers.prepared, "with a dead member it is never used"


@pytest.fixture
def soon() -> Iterator[None]:
    """Cut-overs two steps ahead, whatever a step takes: the harness holds a worker until then."""
    with patch.object(cutting_over, "LEAD_S", 0.0):
        yield


@pytest.mark.parametrize("point", ["restore", "cut_over"])
def test_a_death_at_the_cut_over(
    scene: Scene, tmp_path: Path, memory: Path, soon: None, point: str
) -> None:
    """b/0 dies where the others have begun the next generation, some or all of them; step 8 is one
    that changes no weights.
    """
    skips = {"skip_steps": [[8, 8]]}
    alone = tmp_path / "alone"
    alone.mkdir()
    reference = train_alone(alone, scene.shared, training=skips)
    job = exact_job(tmp_path, scene.shared, memory, training={**skips, "replica_check_steps": 1})
    with nothing_left(memory):
        run = StruckRun(job, tmp_path, Strike(point, "worker", "kill", before=WARNED))
        result = run.run()
        assert result.ok, result.reason
    assert result.struck_at_step is not None, "the point was never reached"
    assert losses_by_step(result.events) == list(reference.losses)
    assert differing_shards(str(tmp_path / "checkpoints"), STEPS, reference) == []
    nothing_lost(result)
    (begun, *_) = [e for e in result.events if "without a stop" in e.get("reason", "")]
    assert "at step 9" in begun["reason"]


def test_orders_that_are_lost_on_the_way_drop_the_preparation_alone(
    scene: Scene, tmp_path: Path, memory: Path, soon: None
) -> None:
    """d/0 never gets its order of the first cut-over: all train on, and begin a later one."""
    job = exact_job(tmp_path, scene.shared, memory)
    sent: list[GenerationOrder] = []
    with nothing_left(memory):
        # Nothing is struck: step 7 waits for the orders.
        run = StruckRun(job, tmp_path, Strike("forward", "worker", "kill", 999, before=WARNED))
        begin = run.fleet.begin

        def lose_first(orders: Mapping[str, GenerationOrder]) -> None:
            if orders["d/0"].follows is not None:
                sent.append(orders["d/0"])
                if len(sent) == 1:
                    orders = {name: each for name, each in orders.items() if name != "d/0"}
            begin(orders)

        run.fleet.begin = lose_first  # type: ignore[method-assign]
        result = run.run()
        assert result.ok, result.reason
    assert losses_by_step(result.events) == list(scene.reference.losses)
    assert differing_shards(str(tmp_path / "checkpoints"), STEPS, scene.reference) == []
    nothing_lost(result)
    plans = {event["generation"] for event in result.events if event["kind"] == "plan"}
    assert sent[0].generation not in plans, "a number that was dropped is never used"
    trained = {e["step"]: e["generation"] for e in result.events if e["kind"] == "step"}
    assert trained[sent[0].start_step] == 1, "all train on"


def test_a_driver_that_dies_once_a_generation_is_claimed_that_nobody_begins(
    scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """The workers train on beyond the step at which it was to begin: that is not lost."""
    job = exact_job(tmp_path, scene.shared, memory)
    lives = [DriverLife(job, tmp_path / "0", Strike("claimed", "driver", "kill", before=WARNED))]
    with nothing_left(memory):
        try:
            assert lives[0].wait() == -signal.SIGKILL
            lives.append(DriverLife(job, tmp_path / "1", None))
            assert lives[1].wait() == 0
        finally:
            for life in lives:
                life.close()
        assert lives[1].result["ok"], lives[1].result["reason"]
    (claimed,) = [e for e in lives[0].events if "without a stop" in e.get("reason", "")]
    step = int(claimed["reason"].split("at step ")[1].split()[0])
    (restored, *_) = [e["step"] for e in lives[1].events if e["kind"] == "restore"]
    assert restored > step
    events = [each for each in lives[0].events if each["kind"] == "step"]
    # The driver that died may not have told of its last steps, which its workers trained.
    for untold in range(events[-1]["step"] + 1, restored):
        events.append({**events[-1], "step": untold})
    history = history_of([*events, *lives[1].events])
    assert differing_shards(str(tmp_path / "checkpoints"), STEPS, scene.reference, history) == []
