"""Strikes while the next generation is prepared: it is dropped, and the run is not."""

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest.mock import patch

import pytest

from autohet.control.job_state import Training
from autohet.control.states import cutting_over
from autohet.control.values.observation import Observation
from autohet.runtime.messages import GenerationOrder
from tests.faults.conftest import Scene, nothing_lost, run_through
from tests.faults.test_sequences import building, harm
from tests.harness.driver_life import DriverLife
from tests.harness.exact_job import LONG, differing_shards, exact_job, node_type, train_alone
from tests.harness.fault_points import FaultPoint
from tests.harness.history import history_of
from tests.harness.leaks import nothing_left
from tests.harness.local_fleet import Condition, Interference, in_generation, trains_at
from tests.harness.struck_run import Strike, StruckRun
from tests.harness.waits import HANG_S

pytestmark = pytest.mark.faults
WARNED = f"notice a {HANG_S}"
NOTHING_STRUCK = Strike("forward", "worker", "kill", 999, before=WARNED)
"""Step 7 waits for the orders of the cut-over."""


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


@pytest.mark.parametrize("strike", ["kill", pytest.param("freeze", marks=pytest.mark.slow)])
def test_a_strike_on_a_survivor_while_a_notice_is_prepared_for(
    long_scene: Scene, tmp_path: Path, memory: Path, strike: str
) -> None:
    numbers = Numbers()
    events = Interference()
    events.when(trains_at(5), harm("notice", "a"))
    events.when(preparing, numbers.note_prepared)
    events.when(lambda run, seen: True, harm(strike, "b"))
    events.when(in_generation(2), numbers.note_used)
    result = run_through(long_scene, tmp_path, memory, events, training=LONG)
    nothing_lost(result)
    assert numbers.used > numbers.prepared, "with a dead member it is never used"


@pytest.fixture
def soon() -> Iterator[None]:
    """Cut-overs two steps ahead, whatever a step takes: the harness holds a worker until then."""
    with patch.object(cutting_over, "LEAD_S", 0.0):
        yield


@pytest.mark.parametrize(
    "point", [pytest.param("restore", marks=pytest.mark.slow), "cut_over", "unseen_vote"]
)
def test_a_death_at_the_cut_over(
    scene: Scene, tmp_path: Path, memory: Path, soon: None, point: str
) -> None:
    """b/0 dies where the others have begun the next generation, some or all of them, or where c/0
    alone has not seen the vote for it; step 8 is one that changes no weights.
    """
    skips = {"skip_steps": [[8, 8]]}
    alone = tmp_path / "alone"
    alone.mkdir()
    reference = train_alone(alone, scene.shared, training=skips)
    skipping = Scene(scene.shared, reference)
    how = {"strike": Strike(point, "worker", "kill", step=8, before=WARNED)}
    training = {**skips, "replica_check_steps": 1}
    result = run_through(skipping, tmp_path, memory, how=how, training=training)
    assert result.struck_at_step is not None, "the point was never reached"
    nothing_lost(result)
    (begun, *_) = [e for e in result.events if "without a stop" in e.get("reason", "")]
    assert "at step 9" in begun["reason"]


def test_orders_that_are_lost_on_the_way_drop_the_preparation_alone(
    scene: Scene, tmp_path: Path, memory: Path, soon: None
) -> None:
    """d/0 never gets its order of the first cut-over: all train on, and begin a later one."""
    sent: list[GenerationOrder] = []

    def lose(run: StruckRun) -> None:
        begin = run.fleet.begin

        def lose_first(orders: Mapping[str, GenerationOrder]) -> None:
            if orders["d/0"].follows is not None:
                sent.append(orders["d/0"])
                if len(sent) == 1:
                    orders = {name: each for name, each in orders.items() if name != "d/0"}
            begin(orders)

        run.fleet.begin = lose_first  # type: ignore[method-assign]

    result = run_through(scene, tmp_path, memory, prepare=lose, how={"strike": NOTHING_STRUCK})
    nothing_lost(result)
    plans = {event["generation"] for event in result.events if event["kind"] == "plan"}
    assert sent[0].generation not in plans, "a number that was dropped is never used"
    trained = {e["step"]: e["generation"] for e in result.events if e["kind"] == "step"}
    assert trained[sent[0].start_step] == 1, "all train on"


def test_a_driver_that_dies_once_a_generation_is_claimed_that_nobody_begins(
    long_scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """The workers train on beyond the step at which it was to begin: that is not lost."""
    job = exact_job(tmp_path, long_scene.shared, memory, training=LONG)
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
    assert differing_shards(str(tmp_path / "checkpoints"), long_scene.reference, history) == []


@pytest.mark.parametrize("scope", [pytest.param("worker", marks=pytest.mark.slow), "node"])
def test_an_upload_that_outlasts_the_cut_over_is_committed(
    long_scene: Scene, tmp_path: Path, memory: Path, soon: None, scope: str
) -> None:
    """b/0, which stays, or a/0, which leaves, ends its part of step 4 under generation 2."""
    strike = Strike("upload", scope, "kill", step=4, before=WARNED)
    upload = strike.fault_point
    arrived: list[FaultPoint] = []

    def hold_upload(run: StruckRun) -> None:
        def act(point: FaultPoint) -> None:
            if point == upload:
                arrived.append(point)
            else:
                run.at_point(point)

        run.fleet.act = act

    numbers = Numbers()
    events = Interference()
    events.when(preparing, numbers.note_prepared)
    events.when(in_generation(2), numbers.note_used)
    events.when(trains_at(11), lambda run, seen: run.fleet.open_gate(upload))
    given = {"how": {"strike": strike}, "training": LONG}
    result = run_through(long_scene, tmp_path, memory, events, hold_upload, **given)
    assert arrived == [upload]
    assert numbers.used == numbers.prepared, "what was prepared is what trains"
    nothing_lost(result)
    assert "a/0" not in result.resources, "the node that leaves is released"
    stored = {e["step"]: e["generation"] for e in result.events if e["kind"] == "checkpoint"}
    assert stored[4] == 2, "generation 1 wrote it; it was committed under the next"


def orders_out(run: StruckRun, seen: Observation) -> bool:
    """The orders of a cut-over are out, and no worker has begun it."""
    state = run.controller.state
    if not isinstance(state, Training) or state.preparing is None:
        return False
    cut_over = state.preparing.cut_over
    return cut_over is not None and cut_over.is_sent


@pytest.mark.parametrize(("mode", "victim"), [("notice", "d"), ("kill", "b/0")])
def test_a_strike_between_the_orders_and_the_cut_over(
    long_scene: Scene, tmp_path: Path, memory: Path, soon: None, mode: str, victim: str
) -> None:
    """A second notice makes the workers vote against what is prepared: both nodes leave in one
    change. A death ends it as well.
    """
    numbers = Numbers()
    events = Interference()
    events.when(orders_out, numbers.note_prepared)
    events.when(lambda run, seen: True, harm(mode, victim))
    events.when(in_generation(2), lambda run, seen: None)
    given = {"how": {"strike": NOTHING_STRUCK}, "training": LONG}
    result = run_through(long_scene, tmp_path, memory, events, **given)
    nothing_lost(result)
    plans = {event["generation"] for event in result.events if event["kind"] == "plan"}
    assert numbers.prepared not in plans, "it is never begun"
    changes = [{*change["nodes"]} for change in result.summary["reconfigurations"]]
    if mode == "notice":
        assert changes == [{"a", "d"}], "one change answers both notices"
    else:
        assert {"b"} in changes


@pytest.mark.parametrize("moment", [pytest.param(orders_out, marks=pytest.mark.slow), building])
def test_a_death_of_a_worker_that_is_new_in_the_next_generation(
    long_scene: Scene, tmp_path: Path, memory: Path, moment: Condition
) -> None:
    """e/0 dies with its orders, or while it is given its state."""

    def is_new(run: StruckRun, seen: Observation) -> bool:
        memory = run.controller.memory
        return moment(run, seen) and "e/0" in seen.reports and "e/0" not in memory.members

    events = Interference()
    events.when(trains_at(3), lambda run, seen: run.fleet.add("e", node_type(1)))
    events.when(lambda run, seen: "e/0" in seen.reports, harm("notice", "a"))
    events.when(is_new, harm("kill", "e/0"))
    result = run_through(long_scene, tmp_path, memory, events, training=LONG)
    nothing_lost(result)
