"""Strikes while the next generation is prepared: it is dropped, and the run is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from autohet.control.job_state import Training
from autohet.control.values.observation import Observation
from tests.faults.conftest import Scene
from tests.faults.test_sequences import harm, nothing_lost, run_through
from tests.harness.local_fleet import Interference, in_generation, trains_at
from tests.harness.struck_run import StruckRun

pytestmark = pytest.mark.faults


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
