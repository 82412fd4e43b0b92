"""A death in the middle of an evaluation, on nodes whose clocks disagree: the next generation
evaluates that step again, training loses nothing, and no figure is a difference of two clocks.
"""

from pathlib import Path

import pytest

from tests.faults.conftest import Scene, run_through
from tests.harness.exact_job import EVERY, STEPS, TEXT
from tests.harness.fault_points import FaultPoint
from tests.harness.struck_run import StruckRun

STRUCK = 2 * EVERY


@pytest.mark.faults
def test_a_death_in_an_evaluation_costs_no_step_and_no_evaluation(
    scene: Scene, tmp_path: Path, memory: Path
) -> None:
    held_out = tmp_path / "held_out.txt"
    held_out.write_text(TEXT[::-1])

    def strike(run: StruckRun) -> None:
        run.fleet.clock_offsets.update({"b": 3600.0, "c": 3600.0, "d": -86400.0})
        run.fleet.points = (FaultPoint("evaluate", "b/0", STRUCK),)
        run.fleet.act = lambda point: run.harm("kill", "b/0")

    evaluation = {"source": str(held_out), "every_steps": EVERY, "max_sequences": 20}
    result = run_through(scene, tmp_path, memory, prepare=strike, evaluation=evaluation)
    assert result.summary["steps_lost"] == 0
    evaluations = [event for event in result.events if event["kind"] == "evaluation"]
    due = [*range(EVERY, STEPS, EVERY), STEPS]
    assert [event["step"] for event in evaluations] == due
    generations = {event["step"]: event["generation"] for event in evaluations}
    assert (generations[EVERY], generations[STRUCK]) == (1, 2)
    assert [each["step"] for each in result.summary["evaluations"]] == due
    assert result.summary["reconfigurations"]
    for change in result.summary["reconfigurations"]:
        assert 0 <= change["seconds"]["first_step"] < 3000
        assert 0 <= change["seconds"]["total"] < 3000
