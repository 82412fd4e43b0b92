"""Ray's real autoscaler: the driver asks it for the fleet, and takes what it brings in place of a node that leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.scaling import fleet_request
from autohet.driver.run import JobRun
from planner.cluster import cluster_from_document
from tests.harness.autoscaling_cluster import at_most, autoscaling_cluster
from tests.harness.local_fleet import (
    Interference,
    in_generation,
    largest_relative_difference,
    make_job,
    run_on,
    stop,
    trains_a_while,
    trains_at,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]


def drain_a_member(run: JobRun, seen: object) -> None:
    """Ray is told that the node of one single-GPU worker will be preempted."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU") == 1}
    assert ray_cluster.drain(min(alive), "test", 60.0)


def test_the_fleet_comes_by_request_and_a_drained_node_is_replaced(tmp_path: Path) -> None:
    elastic = {"notice_sources": ["ray"], "wait_for_fleet_s": 60, "request_nodes": {"big": 2, "pair": 1}}
    job = make_job(tmp_path, training={"steps": 2000}, elastic=elastic)
    with autoscaling_cluster(tmp_path, at_most(big=2, pair=1)) as document:
        assert not ray_cluster.living_nodes()
        cluster = cluster_from_document(document)
        request = fleet_request(job, cluster, document, None, None)
        request.ask()
        events = Interference()
        events.when(trains_at(5, workers=4), drain_a_member)
        events.when(in_generation(3), lambda run, seen: None)
        events.when(trains_a_while(workers=4), stop)
        outcome, log = run_on(job, cluster, None, tmp_path, events, timeout_s=360)
        request.withdraw()
    changes = outcome.summary["reconfigurations"]
    assert {change["cause"] for change in changes} == {"notice", "arrival"}, changes
    assert outcome.summary["steps_lost"] == 0
    assert all(change["bytes_by_tier"]["s3"] == 0 for change in changes)
    arrived = [event["node"] for event in log if event["kind"] == "arrival"]
    assert len(arrived) == 4, arrived
    assert largest_relative_difference(outcome.summary["losses"], job) < 1e-3
