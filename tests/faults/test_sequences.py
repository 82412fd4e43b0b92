"""Faults that come one upon another, nodes that come back, many changes in a row."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from autohet.control.job_state import Building
from autohet.control.values.observation import Observation
from tests.faults.conftest import Scene, nothing_lost, run_through
from tests.harness.exact_job import LAYERS, LONG, PLAN, exact_job
from tests.harness.leaks import nothing_left
from tests.harness.local_fleet import Interference, in_generation, trains_a_while, trains_at
from tests.harness.remote_process import RemoteProcess
from tests.harness.struck_run import StruckRun, losses_by_step

pytestmark = pytest.mark.faults


def harm(mode: str, victim: str) -> Callable[[StruckRun, Observation], None]:
    return lambda run, seen: run.harm(mode, victim)


def building(run: StruckRun, seen: Observation) -> bool:
    return isinstance(run.controller.state, Building) and run.controller.memory.generation > 1


@pytest.mark.slow
def test_six_deaths_each_inside_the_rebuild_after_the_one_before(
    long_scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """Eight live nodes, each with a whole copy: a new death is no repetition of the one before."""
    nodes = {f"n{number}": 1 for number in range(8)}
    stage = {"first_layer": 0, "num_layers": LAYERS}
    pipelines = [
        {"num_microbatches": 1, "stages": [{**stage, "workers": [f"{name}/0"]}]} for name in nodes
    ]
    job = exact_job(
        tmp_path, long_scene.shared, memory, {**PLAN, "pipelines": pipelines}, training=LONG
    )
    struck: dict[int, str] = {}

    def kill_a_participant(run: StruckRun, seen: Observation) -> None:
        there = seen.reports.keys() - seen.losses.keys() - {*struck.values()}
        struck[run.controller.memory.generation] = victim = min(there)
        run.fleet.kill_worker(victim)

    def builds_anew(run: StruckRun, seen: Observation) -> bool:
        return building(run, seen) and run.controller.memory.generation not in struck

    events = Interference().when(trains_at(4, workers=8), kill_a_participant)
    for _ in range(5):
        events.when(builds_anew, kill_a_participant)
    with nothing_left(memory):
        result = StruckRun(job, tmp_path, nodes=nodes).run(events)
    assert result.ok, result.reason
    assert len(struck) == 6, f"the rest did not come: {result.reason}"
    assert losses_by_step(result.events) == list(long_scene.reference.losses)
    nothing_lost(result)


class Partition:
    """Node a is cut off, declared dead, and comes back with the processes that it had: their orders
    to end never arrived.
    """

    def __init__(self) -> None:
        self.processes: list[RemoteProcess] = []
        self.back_at = 0.0

    def cut(self, run: StruckRun, seen: Observation) -> None:
        self.processes = run.fleet.processes_of("a")
        run.fleet.freeze_node("a")

    def heal(self, run: StruckRun, seen: Observation) -> None:
        run.fleet.thaw_node("a", self.processes)


def test_a_partitioned_node_comes_back(long_scene: Scene, tmp_path: Path, memory: Path) -> None:
    """Its old processes still train generation 1 when new ones are hired beside them: they change
    nothing any more.
    """
    partition = Partition()
    events = Interference()
    events.when(trains_at(6), partition.cut)
    events.when(in_generation(2), partition.heal)
    events.when(
        lambda run, seen: (
            "a/0" in run.controller.memory.members and run.controller.memory.generation > 2
        ),
        lambda run, seen: None,
    )
    result = run_through(long_scene, tmp_path, memory, events, training=LONG)
    nothing_lost(result)
    assert result.starts["worker-a/0"] == 2


def test_many_changes_leave_nothing_in_the_survivors(
    scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """Node b's worker dies three times; open files, threads and snapshots stay those of any one
    generation.
    """
    held: list[tuple[int, int, int]] = []

    def look(run: StruckRun, seen: Observation) -> None:
        process_id = seen.reports["d/0"].process_id
        num_files = len(os.listdir(f"/proc/{process_id}/fd"))
        num_threads = len(os.listdir(f"/proc/{process_id}/task"))
        held.append((num_files, num_threads, len(list(memory.rglob("*.snapshot")))))

    events = Interference()
    for _ in range(3):
        events.when(trains_a_while(workers=5), look)
        events.when(trains_a_while(workers=5), harm("kill", "b/0"))
        events.when(
            lambda run, seen: "b/0" not in run.controller.memory.members, lambda run, seen: None
        )
    events.when(trains_a_while(workers=5), look)
    events.when(lambda run, seen: True, lambda run, seen: run.stop())
    job = exact_job(tmp_path, scene.shared, memory, training={"steps": 5000})
    with nothing_left(memory):
        run = StruckRun(job, tmp_path)
        result = run.run(events)
        assert result.reason == "stopped by the test", result.reason
        run.forget()
    nothing_lost(result)
    # The first generation alone has had no other one before it, whose groups end beside it.
    before = held[1]
    after = held[-1]
    assert all(b <= a + 2 for a, b in zip(before, after, strict=True)), held
