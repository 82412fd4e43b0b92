"""Deaths after which whole pipelines go on as they are, with the rows of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autohet.control.job_state import Training
from autohet.control.values.observation import Observation
from tests.faults.conftest import Scene
from tests.faults.test_sequences import harm, nothing_lost, run_through
from tests.harness.exact_job import PLAN
from tests.harness.local_fleet import Interference, trains_at
from tests.harness.struck_run import StruckRun

pytestmark = pytest.mark.faults

SIZES = (3, 3, 2)
THREES: dict[str, Any] = {
    **PLAN,
    "pipelines": [
        {**pipeline, "num_microbatches": 1, "microbatch_sequences": size}
        for pipeline, size in zip(PLAN["pipelines"], SIZES, strict=True)
    ],
}
"""Without the last pipeline, whole microbatches of 3 rows do not meet a batch of 8."""


def trains_in(generation: int) -> Any:
    def condition(run: StruckRun, seen: Observation) -> bool:
        state = run.controller.state
        return isinstance(state, Training) and run.controller.memory.generation == generation

    return condition


def test_two_deaths_cost_no_search_and_no_row(scene: Scene, tmp_path: Path, memory: Path) -> None:
    searching: list[str] = []

    def note_searches(run: StruckRun) -> None:
        propose = run.planning.propose

        def noted(*arguments: Any, **named: Any) -> Any:
            searching.append(type(run.controller.state).__name__)
            return propose(*arguments, **named)

        run.planning.propose = noted  # type: ignore[method-assign]

    events = Interference()
    events.when(trains_at(5), harm("kill", "d/0"))
    events.when(trains_in(2), harm("kill", "c/0"))
    checked = {"replica_check_steps": 1}
    result = run_through(
        scene, tmp_path, memory, events, note_searches, plan=THREES, training=checked
    )
    nothing_lost(result)
    plans = {
        event["generation"]: event["plan"] for event in result.events if event["kind"] == "plan"
    }
    first, second = THREES["pipelines"][:2]
    left = {"num_microbatches": 2, "microbatch_sequences": 3, "last_microbatch_sequences": 2}
    two = plans[2]["pipelines"]
    assert [each["stages"] for each in two] == [first["stages"], second["stages"]]
    assert sorted(each["num_microbatches"] for each in two) == [1, 2]
    assert [
        each.get("last_microbatch_sequences") for each in two if each["num_microbatches"] == 2
    ] == [2]
    assert plans[3]["pipelines"] == [{**left, "num_microbatches": 3, "stages": first["stages"]}]
    assert set(searching) <= {"Waiting", "Training"}, "a search held up the survivors"
    causes = [change["cause"] for change in result.summary["reconfigurations"]]
    assert causes[:2] == ["death", "death"]
    for change in result.summary["reconfigurations"][:2]:
        assert change["bytes_by_tier"]["peer"] == 0, "survivors have all that they need"
