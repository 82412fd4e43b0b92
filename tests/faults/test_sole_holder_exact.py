"""One pipeline over two nodes, each alone with its layers: the exact model's losses through copies,
farewells, handing over.
"""

from pathlib import Path
from typing import Any

import pytest

from autohet.control.job_state import Waiting
from autohet.control.values.observation import Observation
from tests.faults.conftest import Scene, replicated, run_through
from tests.harness.exact_job import CHAIN, LONG, node_type
from tests.harness.local_fleet import Interference, in_generation
from tests.harness.struck_run import Result, StruckRun
from tests.harness.waits import HANG_S

pytestmark = pytest.mark.faults
CHECKPOINT = {"every_steps": 1000}
"""None before the last step: what is lost is in no storage."""


def run_chain(
    scene: Scene, directory: Path, memory: Path, events: Interference, **sections: Any
) -> Result:
    how = {"nodes": {"b": 1, "c": 1, "e": 1}}
    given = {"plan": CHAIN, "checkpoint": CHECKPOINT, "training": LONG, **sections}
    result = run_through(scene, directory, memory, events, how=how, **given)
    assert sum(change["bytes_by_tier"]["s3"] for change in result.summary["reconfigurations"]) == 0
    return result


def copies_on(memory: Path, node: str) -> set[str]:
    """Whose state other nodes' agents have pushed to this one."""
    return {path.name.split("%")[0] for path in (memory / "run" / node).glob("*pushed*.snapshot")}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["kill", "freeze"])
def test_an_only_holder_is_killed_or_frozen(
    mode: str, long_scene: Scene, tmp_path: Path, memory: Path
) -> None:
    events = Interference()
    events.when(replicated(6), lambda run, seen: run.harm(mode, "b"))
    events.when(in_generation(2), lambda run, seen: None)
    result = run_chain(long_scene, tmp_path, memory, events)
    (change,) = result.summary["reconfigurations"]
    assert change["step"] >= 6
    assert result.summary["steps_lost"] <= 8


@pytest.mark.slow
def test_a_frozen_only_holder_is_asked_for_nothing(
    long_scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """What b keeps is not waited for once a witness has found
    the whole of b silent.
    """

    events = Interference()
    events.when(replicated(6), lambda run, seen: run.harm("freeze", "b"))
    events.when(in_generation(2), lambda run, seen: None)
    result = run_chain(long_scene, tmp_path, memory, events)
    death = next(event for event in result.events if event["kind"] == "death")
    orders = next(
        event for event in result.events if event["kind"] == "plan" and event["generation"] == 2
    )
    assert "its agent included" in death["reason"]
    assert orders["time"] - death["time"] < HANG_S / 2, "waited for the deadline of survivors"


def test_a_node_with_copies_leaves_only_when_they_are_elsewhere(
    long_scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """An idle node has notice, long before its deadline: it goes once the copies are renewed on
    others. Then a holder dies.
    """
    had: list[set[str]] = []
    events = Interference()

    def warn(run: StruckRun, seen: Observation) -> None:
        had.append(copies_on(memory, "e"))
        run.fleet.warn("e", 50.0)

    def kill(run: StruckRun, seen: Observation) -> None:
        had.append(copies_on(memory, "c"))
        run.fleet.kill_node("b")

    events.when(replicated(6), warn)
    events.when(lambda run, seen: "e" not in seen.nodes, kill)
    events.when(lambda run, seen: run.controller.memory.generation >= 2, lambda run, seen: None)
    result = run_chain(long_scene, tmp_path, memory, events)
    assert had[0], "it held copies"
    assert "b" in had[1]
    assert result.summary["steps_lost"] <= 8


def test_a_node_leaves_while_the_job_waits_and_hands_over(
    long_scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """b dies and too few are left; the node with b's copies has notice: its agent brings them to
    the one that stays.
    """
    events = Interference()
    keeper: list[str] = []

    def strike(run: StruckRun, seen: Observation) -> None:
        keeper.extend(node for node in ("c", "e") if "b" in copies_on(memory, node))
        run.fleet.kill_node("b")

    def waits(run: StruckRun, seen: Observation) -> bool:
        return isinstance(run.controller.state, Waiting) and "b" not in seen.nodes

    def handed_over(run: StruckRun, seen: Observation) -> bool:
        (stays,) = {"c", "e"} - {keeper[0]}
        return "b" in copies_on(memory, stays) and not run.fleet.handing_over

    def replace(run: StruckRun, seen: Observation) -> None:
        run.fleet.kill_node(keeper[0])
        for name in ("f", "g"):
            run.fleet.add(name, node_type(1))

    events.when(replicated(6), strike)
    events.when(waits, lambda run, seen: run.fleet.warn(keeper[0], 50.0))
    events.when(lambda run, seen: run.fleet.handing_over, lambda run, seen: None)
    events.when(handed_over, replace)
    events.when(in_generation(2), lambda run, seen: None)
    result = run_chain(long_scene, tmp_path, memory, events, elastic={"min_workers": 3})
    assert keeper
    assert result.summary["steps_lost"] <= 8
