"""An agent that does not answer: what all others keep is found nevertheless, in bounded time."""

from pathlib import Path

import pytest

from autohet.control.values.observation import Observation
from tests.faults.conftest import Scene
from tests.harness.exact_job import CHAIN, exact_job
from tests.harness.local_fleet import Interference, trains_at
from tests.harness.struck_run import StruckRun


@pytest.mark.faults
def test_a_frozen_agent_hides_no_other_nodes_copies(
    scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """Node e, which trains nothing, is frozen; then a worker dies whose state its own node's agent
    still keeps.
    """

    def strike(run: StruckRun, seen: Observation) -> None:
        run.fleet.freeze_node("e")
        run.harm("kill", "b/0")

    events = Interference()
    events.when(trains_at(7), strike)
    job = exact_job(tmp_path, scene.shared, memory, CHAIN)
    result = StruckRun(job, tmp_path, nodes={"b": 1, "c": 1, "e": 1}, hold=9).run(events)
    assert result.summary["steps_lost"] <= 1, result.summary["reconfigurations"]
    assert sum(change["bytes_by_tier"]["s3"] for change in result.summary["reconfigurations"]) == 0
