"""Two drivers die in a row, and a node loses its memory between them: copies of one step lie about
that two histories made.
"""

import shutil
import signal
from pathlib import Path

import pytest

from tests.faults.conftest import Scene
from tests.faults.test_matrix import newest_durable
from tests.harness.driver_life import DriverLife
from tests.harness.exact_job import differing_shards, exact_job
from tests.harness.history import history_of
from tests.harness.leaks import nothing_left
from tests.harness.struck_run import Strike

pytestmark = pytest.mark.faults
STRUCK = 10
"""Both lives die in this step: of those since the first one's newest checkpoint each has made a
history of its own.
"""


def test_copies_of_an_abandoned_history_never_meet_the_present_ones(
    scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """The first driver dies; all its nodes but one lose what they keep, so that the second goes on
    from the checkpoint, which abandons what that node has of later steps. The second dies in the
    same step, and the third goes on from what the nodes have of the second.
    """
    job = exact_job(tmp_path, scene.shared, memory)
    lives: list[DriverLife] = []
    with nothing_left(memory):
        try:
            for number, strike in enumerate((killed(), killed(), None)):
                lives.append(DriverLife(job, tmp_path / str(number), strike))
                assert lives[-1].wait() == (0 if strike is None else -signal.SIGKILL)
                if number == 0:
                    durable = newest_durable(job.checkpoint_storage)
                    forget_all_but(memory, tmp_path / "disk", "c")  # which has half of the layers
        finally:
            for life in lives:
                life.close()
        assert lives[-1].result["ok"], lives[-1].result["reason"]
    first, second, third = (life.events for life in lives)
    begun = [
        [event["step"] for event in events if event["kind"] == "restore"]
        for events in (second, third)
    ]
    assert begun[0] == [durable], (
        "the second driver has to abandon what the first one's nodes had made since"
    )
    assert durable < STRUCK - 1
    assert begun[1][0] >= STRUCK - 1, "the third driver went on from host memory"
    told = {event["step"] for event in second if event["kind"] == "step"}
    generation = max(event["generation"] for event in second if event["kind"] == "plan")
    untold = [
        {"kind": "step", "step": s, "generation": generation}
        for s in range(durable, begun[1][0])
        if s not in told
    ]
    history = history_of([*first, *second, *untold, *third])
    assert differing_shards(str(tmp_path / "checkpoints"), scene.reference, history) == []


def killed() -> Strike:
    return Strike("forward", "driver", "kill", STRUCK)


def forget_all_but(memory: Path, disk: Path, kept: str) -> None:
    """Node directories carry the node's name."""
    for root in (memory, disk):
        for path in [*root.rglob("*")] if root.exists() else []:
            if path.is_dir() and path.name in {"a", "b", "c", "d"} - {kept}:
                shutil.rmtree(path)
