"""Deaths, notices and failed starts on one real Ray cluster: each costs what it must, and the
losses stay those of an undisturbed run.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autohet.control.job_state import Waiting
from autohet.control.values.observation import Observation
from autohet.driver.emulated.fleet import EmulatedFleet
from autohet.driver.job.job_run import JobRun, Outcome
from autohet.driver.loop.planning import make_planning
from autohet.driver.ray.requests.drain import drain
from autohet.driver.ray.workers import RayWorkers
from autohet.runtime.job import Job
from planner.inputs.cluster import cluster_from_document
from planner.plans.plan import Plan
from tests.harness.imds_server import ImdsServer
from tests.harness.local_fleet import (
    Interference,
    adjust,
    cluster_document,
    in_generation,
    largest_relative_difference,
    local_fleet,
    make_job,
    node_ids,
    run_job,
    stop,
    trains_a_while,
    trains_at,
)

pytestmark = [pytest.mark.faults, pytest.mark.cluster]
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def fleet() -> Iterator[EmulatedFleet]:
    with local_fleet(big=1, small=2) as running:
        yield running


def plan_once(job: Job, **counts: int) -> None:
    """Plan the job ahead of its run, so that its driver captures no graph while it is timed."""
    fleet = cluster_from_document(cluster_document(**counts)).fleet()
    make_planning(job).propose(fleet, None)


def is_waiting(run: JobRun, seen: Observation) -> bool:
    return isinstance(run.controller.state, Waiting)


def node_of(worker: str) -> str:
    return worker.rsplit("/", 1)[0]


def kill_a_member(run: JobRun, seen: Observation) -> None:
    alive = [
        worker
        for worker in run.controller.memory.members
        if worker in seen.reports and worker not in seen.losses
    ]
    os.kill(seen.reports[max(alive)].process_id, signal.SIGKILL)


def check(outcome: Outcome, job: Job, *, steps_lost: int) -> None:
    """Stopped as asked, with its last step committed; so many steps lost; every loss as if nothing
    had happened.
    """
    assert outcome.reason == "stopped by the test", outcome.reason
    assert outcome.summary["checkpoint"].endswith(f"step-{outcome.summary['steps']:08d}")
    assert outcome.summary["steps_lost"] == steps_lost
    assert largest_relative_difference(outcome.summary["losses"], job) < TOLERANCE


def test_a_killed_and_a_frozen_process_are_replaced_on_their_node(
    fleet: EmulatedFleet, tmp_path: Path
) -> None:
    """SIGKILL, then SIGSTOP: planned without, hired again on the living node, back in the plan;
    nothing lost.
    """
    adjust(fleet, big=1, small=2)
    job = make_job(tmp_path, training={"steps": 2000})
    frozen: list[int] = []

    def freeze(run: JobRun, seen: Observation) -> None:
        frozen.append(seen.reports[max(run.controller.memory.members)].process_id)
        os.kill(frozen[0], signal.SIGSTOP)

    events = Interference()
    events.when(trains_at(5, workers=3), kill_a_member)
    events.when(in_generation(3), lambda run, seen: None)
    events.when(trains_a_while(workers=3), freeze)
    events.when(in_generation(5), lambda run, seen: None)
    events.when(trains_a_while(workers=3), stop)
    outcome, log = run_job(job, fleet, tmp_path, events)
    changes = outcome.summary["reconfigurations"]
    assert [change["cause"] for change in changes] == ["death", "arrival", "death", "arrival"], log
    check(outcome, job, steps_lost=0)
    assert all(change["bytes_by_tier"]["s3"] == 0 for change in changes)
    assert any("is stopped" in event["reason"] for event in log if event["kind"] == "death")
    assert not Path(f"/proc/{frozen[0]}").exists()


@pytest.mark.slow
def test_a_death_in_a_program_takes_no_step_and_changes_shares(
    fleet: EmulatedFleet, tmp_path: Path
) -> None:
    """One program of the strategy `hap` on unequal shares."""
    adjust(fleet, big=1, small=2)
    job = make_job(
        tmp_path,
        training={"steps": 2000},
        elastic={"heartbeat_timeout_s": 30},  # Ray tells the death; a busy machine is none
        parallelism={
            "strategy": "hap",
            "microbatch_sequences": None,
            "min_pipelines": 1,
            "redundancy": 2,
        },
    )
    plan_once(job, big=1, small=2)

    def kill_a_slow_one(run: JobRun, seen: Observation) -> None:
        worker = next(w for w in run.controller.memory.members if w.startswith("small"))
        os.kill(seen.reports[worker].process_id, signal.SIGKILL)

    events = Interference()
    events.when(trains_at(5, workers=3), kill_a_slow_one)
    events.when(in_generation(3), lambda run, seen: None)
    events.when(trains_a_while(workers=3), stop)
    outcome, log = run_job(job, fleet, tmp_path, events)
    changes = outcome.summary["reconfigurations"]
    assert [change["cause"] for change in changes] == ["death", "arrival"], log
    assert outcome.summary["steps_lost"] == 0
    assert all(change["bytes_by_tier"]["s3"] == 0 for change in changes)
    assert all(sum(change["bytes_by_tier"].values()) > 0 for change in changes[1:])
    assert largest_relative_difference(outcome.summary["losses"], job) < 1e-5
    plans = [Plan.from_document(entry["plan"]) for entry in outcome.summary["plans"]]
    shares = [
        sorted(max(dict(plan.spmd.units).values(), key=sum))
        for plan in plans
        if plan.spmd is not None
    ]
    assert len(shares) == len(plans) == 3
    assert shares[0] == shares[2] == [2, 2, 4]  # twice the speed, twice the samples
    assert len(shares[1]) == 2
    assert shares[1][0] < shares[1][1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_a_device_that_is_absent(
    fleet: EmulatedFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that can never start ends the job with its first error; none starts twice."""
    adjust(fleet, big=1, small=2)
    started: list[str] = []
    start = RayWorkers.start_worker
    monkeypatch.setattr(
        RayWorkers,
        "start_worker",
        lambda self, w, seat: (started.append(w), start(self, w, seat))[1],
    )
    outcome, events = run_job(make_job(tmp_path, training={"device": "cuda"}), fleet, tmp_path)
    assert not outcome.ok
    assert "training.device is cuda" in outcome.reason
    assert any(f"worker {name}/0 on node {name}" in outcome.reason for name in fleet.nodes)
    assert sorted(started) == sorted(set(started))
    assert [
        event["kind"] for event in events if event["kind"] in ("failed", "finished", "plan")
    ] == ["failed"]


@pytest.mark.slow
def test_a_drain_and_a_spot_notice_cost_nothing(fleet: EmulatedFleet, tmp_path: Path) -> None:
    """Both nodes are left in time: no step lost, nothing from storage, and Ray lets the drained
    nodes go.
    """
    job = make_job(
        tmp_path,
        training={"steps": 2000},
        elastic={"notice_sources": ["ray", "aws"], "metadata_poll_s": 0.2},
        parallelism={"min_pipelines": 1},
    )
    adjust(fleet, big=1)
    with ImdsServer() as metadata:
        fleet.add("big", "drained")
        fleet.add(
            "big",
            "interrupted",
            environment={"AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.endpoint},
        )
        events = Interference()
        events.when(
            trains_at(5, workers=3),
            lambda run, seen: drain(*node_ids("drained"), "test", 60.0) and None,
        )
        events.when(in_generation(2), lambda run, seen: None)
        events.when(
            trains_a_while(workers=2), lambda run, seen: metadata.interrupt(time.time() + 60)
        )
        events.when(in_generation(3), lambda run, seen: None)
        events.when(
            lambda run, seen: not any((node_ids("drained") | node_ids("interrupted")).values()),
            lambda run, seen: None,
        )
        events.when(trains_a_while(workers=1), stop)
        outcome, log = run_job(job, fleet, tmp_path, events)
    assert outcome.reason == "stopped by the test"
    changes = outcome.summary["reconfigurations"]
    assert [(change["cause"], change["nodes"]) for change in changes] == [
        ("notice", ["drained"]),
        ("notice", ["interrupted"]),
    ]
    assert outcome.summary["steps_lost"] == 0
    assert all(change["bytes_by_tier"]["s3"] == 0 for change in changes)
    zones = {event["node"]: event["zone"] for event in log if event["kind"] == "arrival"}
    assert zones["interrupted"] == "us-east-1a", "as the node says it"
    sources = [event["source"] for event in log if event["kind"] == "notice"]
    assert sources[0] == "Ray is draining it"
    assert "EC2 instance metadata" in sources[1]
    assert not [event for event in log if event["kind"] == "death"]
    assert largest_relative_difference(outcome.summary["losses"], job) < 1e-3


def test_a_stop_while_waiting_makes_the_newest_step_durable(
    fleet: EmulatedFleet, tmp_path: Path
) -> None:
    """Too few are left to train on, but they hold the whole state: what they have done since the
    last checkpoint is kept.
    """
    adjust(fleet, big=1, small=1)
    job = make_job(
        tmp_path,
        training={"steps": 2000},
        elastic={"min_workers": 2},
        checkpoint={"every_steps": 500},
    )
    events = Interference()
    events.when(
        trains_at(7, workers=2),
        lambda run, seen: fleet.kill(node_of(max(run.controller.memory.members))),
    )
    events.when(is_waiting, stop)
    outcome, _ = run_job(job, fleet, tmp_path, events)
    assert outcome.reason.startswith("stopped while waiting (the test)"), outcome.reason
    assert outcome.summary["steps"] >= 7
    assert outcome.summary["checkpoint"].endswith(f"step-{outcome.summary['steps']:08d}")
    assert outcome.summary["steps_lost"] == 0
