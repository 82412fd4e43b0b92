"""Silence under the default heartbeat: what was stopped is known by a witness, what is only slow is
left alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autohet.control.values.observation import Observation
from tests.faults.conftest import Scene
from tests.faults.test_sequences import nothing_lost, run_through
from tests.harness.local_fleet import Interference, in_generation, trains_at
from tests.harness.struck_run import Result, StruckRun

pytestmark = pytest.mark.faults
RAY_NOTICES_S = 64.0  # after which Ray tells that a node is silent, by default
SLOW_S = 4.5  # beyond the silence that makes a worker suspect


def ray_is_patient(run: StruckRun) -> None:
    run.fleet.silent_node_s = RAY_NOTICES_S


def run_with_defaults(scene: Scene, directory: Path, memory: Path, events: Interference) -> Result:
    """Bit-equal to the end and nothing lost, under the heartbeat that a job has by default."""
    result = run_through(scene, directory, memory, events, ray_is_patient)
    nothing_lost(result)
    return result


@pytest.mark.parametrize(
    ("victim", "why"),
    [
        ("b/0", "is stopped, as its node's agent sees"),
        ("a", "nothing on a answers, its agent included"),
    ],
    ids=["worker", "node"],
)
def test_the_frozen_are_known_before_the_heartbeat_is_over(
    victim: str, why: str, scene: Scene, tmp_path: Path, memory: Path
) -> None:
    events = Interference()
    events.when(trains_at(6), lambda run, seen: run.harm("freeze", victim))
    events.when(in_generation(2), lambda run, seen: None)
    result = run_with_defaults(scene, tmp_path, memory, events)
    deaths = [event for event in result.events if event["kind"] == "death"]
    assert len(deaths) == 1
    assert why in deaths[0]["reason"]
    assert "said nothing for" not in deaths[0]["reason"], "that is the heartbeat's time-out"


@pytest.mark.parametrize("whole_node", [False, True], ids=["worker", "node"])
def test_the_slow_are_waited_for(
    whole_node: bool, scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """An interpreter that is held up by native code, or a node that is away for a moment: suspect,
    and nothing more.
    """

    def slow_down(run: StruckRun, seen: Observation) -> None:
        if whole_node:
            held = run.fleet.processes_of("a")
            run.fleet.freeze_node("a")
            until = run.fleet.clock() + SLOW_S
            events.when(
                lambda run, seen: run.fleet.clock() > until,
                lambda run, seen: run.fleet.thaw_node("a", held),
            )
        else:
            run.fleet.tell(["b/0"], "hold_interpreter", SLOW_S)

    events = Interference()
    events.when(trains_at(6), slow_down)
    result = run_with_defaults(scene, tmp_path, memory, events)
    assert result.summary["generations"] == 1
    assert [event for event in result.events if event["kind"] == "death"] == []
