"""One pipeline, every layer on one node alone: what its copies on other nodes are worth when a node
is killed.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autohet.control.values.observation import Notice, Observation
from autohet.control.values.states import Waiting
from autohet.driver.emulated.fleet import EmulatedFleet
from autohet.driver.job.job_run import JobRun
from autohet.runtime.job import Job
from tests.harness.host_memory import memory_directory
from tests.harness.local_fleet import (
    Interference,
    adjust,
    in_generation,
    largest_relative_difference,
    local_fleet,
    make_job,
    run_job,
    stop,
    trains_a_while,
)

pytestmark = [pytest.mark.faults, pytest.mark.cluster]

Condition = Callable[[JobRun, Observation], bool]


@pytest.fixture(scope="module")
def fleet() -> Iterator[EmulatedFleet]:
    with local_fleet(big=1, small=2) as running:
        yield running


def one_pipeline(
    fleet: EmulatedFleet, directory: Path, min_workers: int = 1
) -> tuple[Job, list[str]]:
    """A job whose first plan is three stages on three nodes, with one durable checkpoint at its
    end; and its nodes.
    """
    nodes = sorted(fleet.nodes)[:3]
    stages = [
        {"first_layer": first, "num_layers": count, "workers": [f"{node}/0"]}
        for (first, count), node in zip([(0, 1), (1, 2), (3, 1)], nodes, strict=True)
    ]
    plan = {
        "version": 1,
        "model": "tiny",
        "global_batch_sequences": 8,
        "microbatch_sequences": 1,
        "sequence_length": 16,
        "pipelines": [{"num_microbatches": 8, "stages": stages}],
    }
    (directory / "plan.json").write_text(json.dumps(plan))
    wishes = {"plan": str(directory / "plan.json"), "min_pipelines": 1}
    job = make_job(
        directory,
        training={"steps": 5000},
        checkpoint={"every_steps": 4000},
        elastic={"min_workers": min_workers},
        parallelism=wishes,
    )
    return job, nodes


def replicated(step: int, generation: int = 1) -> Condition:
    """True once every worker of the generation has ended a round at this step or later."""

    def condition(run: JobRun, seen: Observation) -> bool:
        reports = [seen.reports.get(worker) for worker in run.controller.memory.members]
        return (
            run.controller.memory.generation == generation
            and bool(reports)
            and all(
                report is not None and (report.replicated_step or -1) >= step for report in reports
            )
        )

    return condition


@pytest.mark.slow  # in CI without Ray: tests/faults/test_sole_holder_exact.py
def test_the_middle_node_is_killed_and_nothing_comes_from_storage(
    fleet: EmulatedFleet, tmp_path: Path
) -> None:
    """No checkpoint is there at all: its layers come from the copy, at a step at most a round or
    two ago.
    """
    job, nodes = one_pipeline(fleet, tmp_path)
    copies: list[int] = []

    def kill(run: JobRun, seen: Observation) -> None:
        copies.append(
            min(
                seen.reports[worker].replicated_step or 0
                for worker in run.controller.memory.members
            )
        )
        fleet.kill(nodes[1])

    events = Interference()
    events.when(replicated(10), kill)
    events.when(in_generation(2), lambda run, seen: None)
    events.when(trains_a_while(workers=2), stop)
    outcome, log = run_job(job, fleet, tmp_path, events)
    (change,) = outcome.summary["reconfigurations"]
    assert change["cause"] == "death", log
    tiers = change["bytes_by_tier"]
    assert tiers["s3"] == 0, tiers
    assert tiers["memory"] > 0, tiers
    assert change["step"] >= copies[0], "never behind the last complete round"
    print(
        f"killed at step {change['step'] + change['steps_lost']}: {change['steps_lost']} steps"
        f" lost, {tiers}"
    )
    assert outcome.summary["steps_lost"] == change["steps_lost"] <= 20
    assert largest_relative_difference(outcome.summary["losses"], job) < 1e-3


@pytest.mark.slow  # in CI without Ray: tests/faults/test_sole_holder_exact.py
def test_a_node_that_holds_copies_leaves_and_then_the_only_holder_is_killed(
    fleet: EmulatedFleet, tmp_path: Path
) -> None:
    """An idle node takes a share of the copies.

    It has notice, goes only when they are elsewhere, and nothing is lost by it.
    """
    adjust(fleet, big=1, small=3)
    job, nodes = one_pipeline(fleet, tmp_path)
    (idle,) = set(fleet.nodes) - set(nodes)
    held: list[bool] = []

    def warn(run: JobRun, seen: Observation) -> None:
        held.append(
            any("pushed" in path.name for path in memory_directory(tmp_path).rglob(f"{idle}-*/*"))
        )
        run.workforce.observer.scripted.by_node[idle] = Notice(
            idle, "the test", seen.now, seen.now + 100
        )

    events = Interference()
    events.when(replicated(10), warn)
    events.when(lambda run, seen: idle not in seen.nodes, lambda run, seen: fleet.kill(idle))
    events.when(trains_a_while(workers=3), lambda run, seen: fleet.kill(nodes[1]))
    events.when(in_generation(2), lambda run, seen: None)
    events.when(trains_a_while(workers=2), stop)
    outcome, log = run_job(job, fleet, tmp_path, events)
    assert held == [True], "the idle node held copies"
    (change,) = outcome.summary["reconfigurations"]
    assert (change["cause"], change["nodes"]) == ("death", [nodes[1]]), log
    assert change["bytes_by_tier"]["s3"] == 0
    print(f"{change['steps_lost']} steps lost, {change['bytes_by_tier']}")
    assert change["steps_lost"] <= 20
    assert largest_relative_difference(outcome.summary["losses"], job) < 1e-3


@pytest.mark.slow
def test_host_memory_stays_bounded_over_many_changes(fleet: EmulatedFleet, tmp_path: Path) -> None:
    """Workers die and come back, again and again: what they leave behind goes."""
    adjust(fleet, big=1, small=2)
    job, nodes = one_pipeline(fleet, tmp_path)
    files: list[int] = []

    def kill(run: JobRun, seen: Observation) -> None:
        files.append(len(list(memory_directory(tmp_path).rglob("*.snapshot"))))
        os.kill(seen.reports[f"{nodes[1]}/0"].process_id, signal.SIGKILL)

    def back(run: JobRun, seen: Observation) -> bool:
        reports = [seen.reports.get(worker) for worker in run.controller.memory.members]
        steps = [report.replicated_step or -1 for report in reports if report is not None]
        return len(steps) == 3 and trains_a_while(workers=3)(run, seen) and min(steps) > 0

    events = Interference()
    for _ in range(4):
        events.when(back, kill)
        events.when(
            lambda run, seen: len(run.controller.memory.members) == 2, lambda run, seen: None
        )
    events.when(back, stop)
    outcome, log = run_job(job, fleet, tmp_path, events)
    print(f"{files} snapshot files before each death, {outcome.summary['steps_lost']} steps lost")
    assert (
        sum(change["bytes_by_tier"]["s3"] for change in outcome.summary["reconfigurations"]) == 0
    ), log
    assert max(files) <= 3 * (4 + 2 * 3), (
        "three workers' own files, and copies of three rounds on two nodes each"
    )


@pytest.mark.slow  # in CI without Ray: tests/faults/test_sole_holder_exact.py
def test_a_node_leaves_while_the_job_waits_and_hands_over_what_it_alone_keeps(
    fleet: EmulatedFleet, tmp_path: Path
) -> None:
    """The middle node is killed and the job waits for another; a second node, with half of the
    copies, has notice and goes.
    """
    adjust(fleet, big=1, small=2)
    job, nodes = one_pipeline(fleet, tmp_path, min_workers=3)
    stays, killed, leaves = nodes
    copies_at = memory_directory(tmp_path)

    def waits(run: JobRun, seen: Observation) -> bool:
        return isinstance(run.controller.state, Waiting) and killed not in seen.nodes

    def warn(run: JobRun, seen: Observation) -> None:
        run.workforce.observer.scripted.by_node[leaves] = Notice(
            leaves, "the test", seen.now, seen.now + 60
        )

    def replace_both(run: JobRun, seen: Observation) -> None:
        for _ in range(2):
            fleet.add("small")

    def handed_over(run: JobRun, seen: Observation) -> bool:
        owners = {
            path.name.split(".")[0] for path in copies_at.rglob(f"{stays}-*/*pushed*.snapshot")
        }
        return (
            owners == {f"{killed}%2F0", f"{leaves}%2F0"}
            and not run.workforce.observer.agent_commands.handing_over
        )

    events = Interference()
    events.when(replicated(10), lambda run, seen: fleet.kill(killed))
    events.when(waits, warn)
    events.when(
        lambda run, seen: run.workforce.observer.agent_commands.handing_over, lambda run, seen: None
    )
    events.when(handed_over, lambda run, seen: fleet.kill(leaves))
    events.when(lambda run, seen: leaves not in seen.nodes, replace_both)
    events.when(in_generation(2), lambda run, seen: None)
    events.when(trains_a_while(workers=3), stop)
    outcome, log = run_job(job, fleet, tmp_path, events)
    (change,) = outcome.summary["reconfigurations"]
    print(f"{change['steps_lost']} steps lost, {change['bytes_by_tier']}")
    assert change["bytes_by_tier"]["s3"] == 0, log
    assert change["step"] > 0
    assert change["steps_lost"] <= 20
    assert largest_relative_difference(outcome.summary["losses"], job) < 1e-3
    death = next(event["time"] for event in log if event["kind"] == "death")
    told = [
        (event["time"], part)
        for event in log
        if event["kind"] == "transfers"
        for part in event["transfers"]
    ]
    copied = [(at - part["ended_ago_s"], part) for at, part in told if part["tier"] == "peer"]
    assert {part["source"] for at, part in copied if at < death} == {*nodes}, (
        "rounds are told of, by node"
    )
    assert any(
        part["bytes"] > 0 for at, part in copied if at > death and part["source"] == leaves
    ), "and the handing over"
    assert all(part["seconds"] >= 0 <= part["ended_ago_s"] for _, part in told)
