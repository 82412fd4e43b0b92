"""Requests of two drivers to one real autoscaler: they add up, and a killed one's ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray.autoscaler.v2.sdk import get_cluster_status

from autohet.driver.ray.requests.broker import put_request
from tests.harness.autoscaling_cluster import autoscaling_cluster
from tests.harness.waits import wait_until

pytestmark = pytest.mark.cluster
OTHER_JOB = """
import sys, time, ray
from autohet.driver.ray.requests.broker import put_request
ray.init(address=sys.argv[1], log_to_driver=False)
put_request([{"CPU": 0.5}] * 2, [{}, {}])
print("asked", flush=True)
time.sleep(600)
"""


def num_requested() -> int:
    """Return how many bundles the autoscaler is asked for."""
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    constraints = status.resource_demands.cluster_constraint_demand
    return sum(each.count for one in constraints for each in one.bundles_by_count)


def test_requests_of_two_jobs_add_up_and_a_killed_jobs_is_withdrawn(tmp_path: Path) -> None:
    with autoscaling_cluster(tmp_path, {}):
        put_request([{"CPU": 0.5}] * 3, [{}] * 3)
        wait_until(lambda: num_requested() == 3)
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-c", OTHER_JOB, address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
            try:
                assert other.stdout is not None
                assert other.stdout.readline() == "asked\n"
                assert num_requested() == 5
                put_request([{"CPU": 0.5}], [{}])
                assert num_requested() == 3
            finally:
                other.kill()
        wait_until(lambda: num_requested() == 1)
        put_request((), ())
        assert num_requested() == 0
