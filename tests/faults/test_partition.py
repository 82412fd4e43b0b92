"""A node whose network is cut works on, alone, and comes back: shortly after, or once the others
have gone on without it.
"""

from __future__ import annotations

import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from autohet.control.values.observation import Observation
from autohet.emulate.namespaces import NamespaceNetwork
from autohet.runtime.messages import Phase, WorkerReport
from tests.faults.conftest import Scene
from tests.harness.exact_job import STEPS, differing_shards, exact_job
from tests.harness.leaks import nothing_left
from tests.harness.local_fleet import Interference, in_generation, trains_at
from tests.harness.namespace_fleet import NamespaceFleet
from tests.harness.remote_process import RemoteProcess
from tests.harness.struck_run import Result, StruckRun, losses_by_step
from tests.harness.waits import HANG_S

pytestmark = [pytest.mark.faults, pytest.mark.cluster, pytest.mark.slow]
HEARTBEAT_S = 10.0


class Partition:
    """Node a is cut off, and comes back with the processes that it had then."""

    def __init__(self) -> None:
        self.processes: list[RemoteProcess] = []
        self.cut_at = 0.0
        self.endpoint: Any = None

    def cut(self, run: StruckRun, seen: Observation) -> None:
        assert isinstance(run.fleet, NamespaceFleet)
        self.endpoint = seen.nodes["a"].endpoint
        assert self.reachable()
        self.processes, self.cut_at = run.fleet.processes_of("a"), time.monotonic()
        run.fleet.cut_node("a")
        assert not self.reachable()

    def join(self, run: StruckRun, seen: Observation) -> None:
        assert isinstance(run.fleet, NamespaceFleet)
        run.fleet.join_node("a", self.processes)

    def reachable(self) -> bool:
        """Whether the node's agent takes a connection from here."""
        try:
            socket.create_connection((self.endpoint.host, self.endpoint.port), timeout=0.3).close()
        except OSError:
            return False
        return True

    def old_reports(self, timeout_s: float = 20.0) -> list[WorkerReport]:
        """What the workers of before say of themselves, once they stand."""
        workers, found = self.processes[1:], {}
        deadline = time.monotonic() + timeout_s
        while len(found) < len(workers):
            assert time.monotonic() < deadline, found
            for process in workers:
                process.ask("report")
                reports = [
                    answer.value
                    for answer in process.take()
                    if isinstance(answer.value, WorkerReport)
                ]
                found |= {
                    report.worker: report
                    for report in reports
                    if report.phase is not Phase.TRAINING
                }
            time.sleep(0.05)
        return list(found.values())


def run_through(
    scene: Scene,
    directory: Path,
    memory: Path,
    network: NamespaceNetwork,
    events: Interference,
    **sections: Any,
) -> Result:
    """To the end, the same losses and the same state as undisturbed, nothing lost, nothing from
    storage.
    """
    job = exact_job(directory, scene.shared, memory, **sections)
    with nothing_left(memory):
        run = StruckRun(
            job, directory, fleet=partial(NamespaceFleet, network=network, silent_node_s=HANG_S)
        )
        result = run.run(events)
        assert result.ok, result.reason
    assert not events.events, f"{len(events.events)} events did not happen: {result.reason}"
    assert losses_by_step(result.events) == list(scene.reference.losses)
    assert differing_shards(str(directory / "checkpoints"), STEPS, scene.reference) == []
    assert result.summary["steps_lost"] == 0
    assert sum(change["bytes_by_tier"]["s3"] for change in result.summary["reconfigurations"]) == 0
    return result


def test_a_node_that_is_back_before_it_is_missed_goes_on(
    scene: Scene, tmp_path: Path, memory: Path, network: NamespaceNetwork
) -> None:
    """Half a heartbeat without network: what was on its way comes again, and nothing changes."""
    partition, events = Partition(), Interference()
    events.when(trains_at(6), partition.cut)
    events.when(
        lambda run, seen: time.monotonic() - partition.cut_at > HEARTBEAT_S / 2, partition.join
    )
    result = run_through(scene, tmp_path, memory, network, events)
    assert result.summary["generations"] == 1
    assert set(result.starts.values()) == {1}


def test_a_node_that_was_given_up_comes_back_and_its_old_generation_is_refused(
    scene: Scene, tmp_path: Path, memory: Path, network: NamespaceNetwork
) -> None:
    """The others train on without it. Its old workers are awake all the time, and change nothing
    any more; new ones beside them take part again, next to the agent that was there.
    """
    partition, events, old = Partition(), Interference(), []
    events.when(trains_at(6), partition.cut)
    events.when(in_generation(2), lambda run, seen: None)
    events.when(trains_at(9), partition.join)
    events.when(
        lambda run, seen: (
            "a/0" in run.controller.memory.members and run.controller.memory.generation > 2
        ),
        lambda run, seen: old.extend(partition.old_reports()),
    )
    result = run_through(scene, tmp_path, memory, network, events)
    assert [change["cause"] for change in result.summary["reconfigurations"]][:2] == [
        "death",
        "arrival",
    ]
    restored_at = result.summary["reconfigurations"][0]["step"]
    assert {report.worker for report in old} == {"a/0", "a/1"}
    for report in old:
        assert (report.generation, report.phase) == (1, Phase.HALTED), report
        assert report.step <= restored_at
    generations = [event["generation"] for event in result.events if event["kind"] == "step"]
    assert generations == sorted(generations), "no step of a generation that was left"
    assert result.starts["agent-a"] == 1
    assert result.starts["worker-a/0"] == 2
