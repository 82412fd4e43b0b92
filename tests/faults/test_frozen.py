"""Silence under the default heartbeat: a worker or a node that is only slow is left alone.

Frozen ones are cells of the fault matrix.
"""

from pathlib import Path

import pytest

from autohet.control.values.observation import Observation
from tests.faults.conftest import Scene, nothing_lost, run_through
from tests.harness.exact_job import LONG
from tests.harness.local_fleet import Interference, trains_at
from tests.harness.struck_run import StruckRun

pytestmark = pytest.mark.faults
SLOW_S = 4.5  # beyond the silence that makes a worker suspect


@pytest.mark.parametrize(
    "whole_node", [pytest.param(False, marks=pytest.mark.slow), True], ids=["worker", "node"]
)
def test_the_slow_are_waited_for(
    whole_node: bool, long_scene: Scene, tmp_path: Path, memory: Path
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
    result = run_through(long_scene, tmp_path, memory, events, training=LONG)
    nothing_lost(result)
    assert result.summary["generations"] == 1
    assert [event for event in result.events if event["kind"] == "death"] == []
