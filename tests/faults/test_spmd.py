"""A job of the strategy `hap` on a real Ray cluster: one program on unequal shares, a death in it,
other shares after it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from autohet.driver.control.observation import Observation
from autohet.driver.run import JobRun
from planner.plan import Plan
from tests.harness.local_fleet import (
    Interference,
    in_generation,
    largest_relative_difference,
    local_fleet,
    make_job,
    run_job,
    stop,
    trains_a_while,
    trains_at,
)

pytestmark = [pytest.mark.faults, pytest.mark.cluster, pytest.mark.timeout(420)]


def test_a_death_in_a_program_takes_no_step_and_the_rest_goes_on_with_other_shares(
    tmp_path: Path,
) -> None:
    job = make_job(
        tmp_path,
        training={"steps": 2000},
        parallelism={
            "strategy": "hap",
            "microbatch_sequences": None,
            "min_pipelines": 1,
            "redundancy": 2,
        },
    )

    def kill_a_slow_one(run: JobRun, seen: Observation) -> None:
        worker = next(w for w in run.controller.memory.members if w.startswith("small"))
        os.kill(seen.reports[worker].process_id, signal.SIGKILL)

    events = Interference()
    events.when(trains_at(5, workers=3), kill_a_slow_one)
    events.when(in_generation(3), lambda run, seen: None)
    events.when(trains_a_while(workers=3), stop)
    with local_fleet(big=1, small=2) as fleet:
        outcome, log = run_job(job, fleet, tmp_path, events, timeout_s=300)
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
