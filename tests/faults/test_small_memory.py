"""A node whose host memory holds the snapshots of one of its two workers only, and a death: of the
one that is kept, of the other.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from autohet.control.values.observation import Observation
from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.models.config import load_config
from planner.plans.plan import Plan
from recovery.local.memory_budget import FILES, USABLE, Budget, share_out
from recovery.local.snapshot_format import FileMap
from tests.faults.conftest import Scene, run_through
from tests.harness.exact_job import CHAIN, LONG, exact_job
from tests.harness.fault_points import FaultPoint
from tests.harness.local_fleet import Interference, in_generation, trains_at
from tests.harness.mounts import mounted
from tests.harness.struck_run import StruckRun

pytestmark = pytest.mark.faults
EVERY = 16
"""The checkpoint before the death is the only one before the end."""
HOLD_AT = 24
"""Where who is going to die waits until the checkpoint is committed."""
ONE_NODE = {
    **CHAIN,
    "pipelines": [
        {
            "num_microbatches": 8,
            "stages": [
                {"first_layer": 0, "num_layers": 1, "workers": ["b/0"]},
                {"first_layer": 1, "num_layers": 1, "workers": ["b/1"]},
            ],
        }
    ],
}
"""What one of its workers holds, no other has."""


@pytest.fixture
def small_memory(tmp_path: Path, scene: Scene) -> Iterator[tuple[Path, Budget]]:
    """A memory file system with room for one worker's snapshots and half of as much again; and what
    is kept in it.
    """
    path = tmp_path / "memory"
    layout = layout_of_plan(
        Plan.from_document(ONE_NODE),
        load_config(exact_job(tmp_path, scene.shared, path, ONE_NODE).model),
    )
    sizes = [
        FILES
        * FileMap.of(worker, layout.tensors, sorted(layout.shards_by_worker[worker])).file_bytes
        for worker in layout.workers
    ]
    capacity = min(sizes) * 3 // 2
    assert capacity < sum(sizes)
    with mounted(path, "-t", "tmpfs", "-o", f"size={int(capacity / USABLE)}", "tmpfs"):
        yield (
            path,
            share_out("b", layout, dict.fromkeys(layout.workers, "b"), capacity, replicates=False),
        )


def has_gone_on(run: StruckRun, seen: Observation) -> bool:
    """The checkpoint is committed, and steps came after it."""
    return run.durable.state().step == EVERY and trains_at(EVERY + 2)(run, seen)


@pytest.mark.parametrize("which", ["left out", pytest.param("kept", marks=pytest.mark.slow)])
def test_a_death_where_host_memory_holds_half_of_the_snapshots(
    which: str, small_memory: tuple[Path, Budget], long_scene: Scene, tmp_path: Path
) -> None:
    """Whoever is in memory dies: no step is lost.

    The other: the run goes back to the newest checkpoint, and no further.
    """
    memory, budget = small_memory
    assert not budget.suffices
    (kept,), (left_out,) = (
        [w for w, shards in budget.shards_by_worker.items() if bool(shards) is has]
        for has in (True, False)
    )
    victim = kept if which == "kept" else left_out
    events = Interference()
    killed = []

    def kill(run: StruckRun, seen: Observation) -> None:
        killed.append(victim)
        run.harm("kill", victim)

    events.when(has_gone_on, kill)
    events.when(in_generation(2), lambda run, seen: None)

    def hold(run: StruckRun) -> None:
        run.fleet.points = (FaultPoint("forward", victim, HOLD_AT),)
        run.fleet.act = lambda point: run.fleet.open_gate(point) if killed else None

    given = {"plan": ONE_NODE, "checkpoint": {"every_steps": EVERY}, "training": LONG}
    how = {"nodes": {"b": 2}}
    result = run_through(long_scene, tmp_path, memory, events, hold, how=how, **given)
    (change,) = result.summary["reconfigurations"]
    if which == "kept":
        assert result.summary["steps_lost"] == 0
        assert change["bytes_by_tier"]["memory"] > 0
    else:
        assert 0 < result.summary["steps_lost"] < LONG["steps"] - EVERY
        assert change["step"] == EVERY, (
            "neither further back than to the newest checkpoint, nor less far"
        )
