"""Notices as they come on a real fleet: Ray drains a node, or EC2's instance metadata tells the node of its end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import ray

from autohet.driver.ray import cluster as ray_cluster
from tests.harness.imds_server import ImdsServer
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

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(150)]


def node_ids(name: str) -> dict[str, bool]:
    """Ray's ids of the nodes with this name, and whether each is alive."""
    return {n["NodeID"]: n["Alive"] for n in ray.nodes() if n["Labels"].get(ray_cluster.NAME_LABEL) == name}


def test_a_drain_and_a_spot_notice_cost_nothing(tmp_path: Path) -> None:
    """Both nodes are left in time: no step lost, nothing from storage, and Ray lets the drained nodes go."""
    job = make_job(
        tmp_path,
        training={"steps": 2000},
        elastic={"notice_sources": ["ray", "aws"], "metadata_poll_s": 0.2},
        parallelism={"min_pipelines": 1},
    )
    with ImdsServer() as metadata, local_fleet(big=1) as fleet:
        fleet.add("big", "drained")
        fleet.add("big", "interrupted", environment={"AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.endpoint})
        events = Interference()
        events.when(
            trains_at(5, workers=3), lambda run, seen: ray_cluster.drain(*node_ids("drained"), "test", 60.0) and None
        )
        events.when(in_generation(2), lambda run, seen: None)
        events.when(trains_a_while(workers=2), lambda run, seen: metadata.interrupt(time.time() + 60))
        events.when(in_generation(3), lambda run, seen: None)
        events.when(
            lambda run, seen: not any((node_ids("drained") | node_ids("interrupted")).values()), lambda run, seen: None
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
    sources = [event["source"] for event in log if event["kind"] == "notice"]
    assert sources[0] == "Ray is draining it"
    assert "EC2 instance metadata" in sources[1]
    assert not [event for event in log if event["kind"] == "death"]
    assert largest_relative_difference(outcome.summary["losses"], job) < 1e-3
