"""What all runs that are struck share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autohet.emulate.namespaces import NamespaceNetwork, namespace_network, why_no_namespaces
from tests.harness.exact_job import Reference, exact_job, train_alone
from tests.harness.fork_server import server_address
from tests.harness.host_memory import memory_directory
from tests.harness.leaks import nothing_left
from tests.harness.struck_run import Result, Strike, StruckRun, losses_by_step

FEW_STEPS = 12
"""Length of runs whose strike comes at step 6, and which need no checkpoint after it."""

SHORT_STEPS = 16
"""Length of runs that are struck at a point of step 6 or 8: a change, and two checkpoints after it.

Where a test's own condition decides when to strike, a slow driver would meet it after the end.
"""
SHORT = {"steps": SHORT_STEPS, "decay_steps": SHORT_STEPS}


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
def short_scene(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """What an undisturbed run of `SHORT_STEPS` gives."""
    alone = tmp_path_factory.mktemp("alone")
    return Scene(scene.shared, train_alone(alone, scene.shared, training=SHORT))


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
