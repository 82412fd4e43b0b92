"""Deaths after which whole pipelines go on as they are, with the rows of the others."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from autohet.control import replanning
from autohet.control.job_state import Training
from autohet.control.values.observation import Observation
from tests.faults.conftest import Scene, nothing_lost, run_through
from tests.faults.test_sequences import harm
from tests.harness.exact_job import LONG, PLAN
from tests.harness.local_fleet import Interference, in_generation, trains_at
from tests.harness.struck_run import Strike, StruckRun

pytestmark = pytest.mark.faults

SIZES = (3, 3, 2)
THREES: dict[str, Any] = {
    **PLAN,
    "pipelines": [
        {"num_microbatches": 1, "microbatch_sequences": size, "stages": pipeline["stages"]}
        for pipeline, size in zip(PLAN["pipelines"], SIZES, strict=True)
    ],
}
"""Without the last pipeline, whole microbatches of 3 rows do not meet a batch of 8."""


def trains_in(generation: int) -> Any:
    def condition(run: StruckRun, seen: Observation) -> bool:
        state = run.controller.state
        return isinstance(state, Training) and run.controller.memory.generation == generation

    return condition


def test_two_deaths_cost_no_search_and_no_row(
    long_scene: Scene, tmp_path: Path, memory: Path
) -> None:
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
    checked = {**LONG, "replica_check_steps": 1}
    result = run_through(
        long_scene, tmp_path, memory, events, note_searches, plan=THREES, training=checked
    )
    nothing_lost(result)
    # Not by number: one that was prepared when the second death came is used up.
    plans = [event["plan"] for event in result.events if event["kind"] == "plan"]
    first, second = THREES["pipelines"][:2]
    left = {"num_microbatches": 2, "microbatch_sequences": 3, "last_microbatch_sequences": 2}
    two = plans[1]["pipelines"]
    assert [each["stages"] for each in two] == [first["stages"], second["stages"]]
    assert sorted(each["num_microbatches"] for each in two) == [1, 2]
    assert [
        each.get("last_microbatch_sequences") for each in two if each["num_microbatches"] == 2
    ] == [2]
    assert plans[2]["pipelines"] == [{**left, "num_microbatches": 3, "stages": first["stages"]}]
    assert set(searching) <= {"Waiting", "Training"}, "a search held up the survivors"
    causes = [change["cause"] for change in result.summary["reconfigurations"]]
    assert causes[:2] == ["death", "death"]
    for change in result.summary["reconfigurations"][:2]:
        assert change["bytes_by_tier"]["peer"] == 0, "survivors have all that they need"


@pytest.mark.parametrize(
    ("point", "mode", "then", "num_kept"),
    [
        ("backward", "kill", None, 5),
        ("backward", "kill", "d/0", None),
        ("gate", "kill", None, None),
        pytest.param("forward", "freeze", None, 5, marks=pytest.mark.slow),
        pytest.param("gradient_sync", "kill", None, 0, marks=pytest.mark.slow),
        pytest.param("apply", "kill", None, None, marks=pytest.mark.slow),
    ],
)
def test_a_death_in_passes_costs_the_rows_of_its_pipeline(
    scene: Scene,
    tmp_path: Path,
    memory: Path,
    point: str,
    mode: str,
    then: str | None,
    num_kept: int | None,
) -> None:
    """b/0 and c/0 have three of eight rows; the two other pipelines keep their passes.

    then: worker that dies in the generation after. num_kept: None where it depends on how
    far the others are.
    """
    given = {
        "how": {"strike": Strike(point, "worker", mode)},
        "training": {"replica_check_steps": 1},
    }
    events = Interference()
    if then is not None:
        events.when(in_generation(2), harm("kill", then))
    with patch.object(replanning, "GATED_STEP_S", 0.0):
        result = run_through(scene, tmp_path, memory, events, **given)
    nothing_lost(result)
    kept = [event["kept_rows"] for event in result.events if "kept_rows" in event]
    if num_kept is not None:
        # A later death may leave passes of a later step.
        assert kept[:1] == ([num_kept] if num_kept else []), result.events
