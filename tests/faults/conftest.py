"""What all runs that are struck share."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from autohet.control.values.observation import Observation
from autohet.emulate.namespaces import NamespaceNetwork, namespace_network, why_no_namespaces
from tests.harness.exact_job import LONG, Reference, differing_shards, exact_job, train_alone
from tests.harness.fork_server import server_address
from tests.harness.history import history_of
from tests.harness.host_memory import memory_directory
from tests.harness.leaks import nothing_left
from tests.harness.local_fleet import Condition, Interference
from tests.harness.struck_run import Result, Strike, StruckRun, losses_by_step

FEW_STEPS = 12
"""Length of runs whose strike comes at step 6, and which need no checkpoint after it."""


@dataclass(frozen=True)
class Scene:
    """Where runs take place: what they share, and what an undisturbed one gives."""

    shared: Path
    reference: Reference


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    shared = tmp_path_factory.mktemp("shared")
    alone = tmp_path_factory.mktemp("alone")
    server_address()
    return Scene(shared, train_alone(alone, shared))


@pytest.fixture(scope="session")
def long_scene(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """What an undisturbed run of `LONG` training gives."""
    alone = tmp_path_factory.mktemp("alone")
    return Scene(scene.shared, train_alone(alone, scene.shared, training=LONG))


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """Host memory for this test's snapshots."""
    path = memory_directory(tmp_path)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def network() -> Iterator[NamespaceNetwork]:
    """A namespace a node, where they can be made."""
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with namespace_network() as made:
        yield made


def run_through(
    scene: Scene,
    directory: Path,
    memory: Path,
    events: Interference | None = None,
    prepare: Callable[[StruckRun], None] = lambda run: None,
    *,
    how: Mapping[str, Any] = MappingProxyType({}),
    **sections: Any,
) -> Result:
    """Run the exact job to its end with these events, and make every check that holds for all runs:
    all events happened, nothing is left, and each loss and each bit of the state that is stored in
    the end is the undisturbed run's, made by the generations that the events tell of.

    how: `StruckRun`'s own keywords; sections: the job's, and its `plan`.
    """
    job = exact_job(directory, scene.shared, memory, **sections)
    with nothing_left(memory):
        run = StruckRun(job, directory, **how)
        prepare(run)
        result = run.run(events)
        assert result.ok, result.reason
    left = [] if events is None else events.events
    assert not left, f"{len(left)} events did not happen: {result.reason}"
    check_outcome(job.checkpoint_storage, scene.reference, result.events)
    return result


def check_outcome(storage: str, reference: Reference, events: list[dict[str, Any]]) -> None:
    """Every loss, and every bit of the committed state, as in the undisturbed run."""
    assert losses_by_step(events) == list(reference.losses)
    assert differing_shards(storage, reference, history_of(events)) == []


def nothing_lost(result: Result) -> None:
    changes = result.summary["reconfigurations"]
    assert result.summary["steps_lost"] == 0, changes
    assert sum(change["bytes_by_tier"]["s3"] for change in changes) == 0, changes


def replicated(step: int) -> Condition:
    """True once every worker's state of this step, or of a newer one, is on other nodes."""

    def condition(run: StruckRun, seen: Observation) -> bool:
        reports = [seen.reports.get(worker) for worker in run.controller.memory.members]
        return bool(reports) and all(
            report is not None and (report.replicated_step or -1) >= step for report in reports
        )

    return condition


def lose_a_worker(
    shared: Path,
    directory: Path,
    memory: Path,
    plan: dict[str, Any],
    sections: dict[str, dict[str, Any]],
    parallelism: dict[str, Any],
    tolerance: float,
) -> tuple[StruckRun, Result]:
    """Run the exact job on a plan of its own and kill a worker in mid-step.

    No step is lost, and the losses are those of one process within a relative `tolerance`.
    """
    alone = directory / "alone"
    alone.mkdir()
    training = {**sections.get("training", {}), "steps": FEW_STEPS, "decay_steps": FEW_STEPS}
    sections = {**sections, "training": training}
    reference = train_alone(alone, shared, **sections)
    job = exact_job(directory, shared, memory, plan, parallelism=parallelism, **sections)
    with nothing_left(memory):
        run = StruckRun(job, directory, Strike("backward", "worker", "kill", step=6))
        result = run.run()
        assert result.ok, result.reason
    assert result.struck_at_step is not None
    assert losses_by_step(result.events) == pytest.approx(list(reference.losses), rel=tolerance)
    assert result.summary["reconfigurations"]
    assert result.summary["steps_lost"] == 0
    steps = {event["step"] for event in result.events if event["kind"] == "step"}
    assert steps == set(range(FEW_STEPS))
    return run, result
