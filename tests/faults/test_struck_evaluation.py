"""A death in the middle of an evaluation: the next generation evaluates that step again, training
loses nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.conftest import Scene
from tests.harness.exact_job import EVERY, STEPS, TEXT, exact_job
from tests.harness.fault_points import FaultPoint
from tests.harness.leaks import nothing_left
from tests.harness.local_fleet import Interference
from tests.harness.struck_run import StruckRun, losses_by_step

STRUCK = 2 * EVERY


@pytest.mark.faults
def test_a_death_in_an_evaluation_costs_no_step_and_no_evaluation(
    scene: Scene, tmp_path: Path, memory: Path
) -> None:
    held_out = tmp_path / "held_out.txt"
    held_out.write_text(TEXT[::-1])
    job = exact_job(
        tmp_path,
        scene.shared,
        memory,
        evaluation={"source": str(held_out), "every_steps": EVERY, "max_sequences": 20},
    )
    with nothing_left(memory):
        run = StruckRun(job, tmp_path)
        run.fleet.points = (FaultPoint("evaluate", "b/0", STRUCK),)
        run.fleet.act = lambda point: run.harm("kill", "b/0")
        result = run.run(Interference())
        assert result.ok, result.reason
    assert losses_by_step(result.events) == list(scene.reference.losses)
    assert result.summary["steps_lost"] == 0
    evaluations = [event for event in result.events if event["kind"] == "evaluation"]
    due = [*range(EVERY, STEPS, EVERY), STEPS]
    assert [event["step"] for event in evaluations] == due
    generations = {event["step"]: event["generation"] for event in evaluations}
    assert (generations[EVERY], generations[STRUCK]) == (1, 2)
    assert [each["step"] for each in result.summary["evaluations"]] == due
