"""Two drivers on one real cluster: requests add up, a killed one's end, and GPUs have users."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.autoscaler.v2.sdk import get_cluster_status

from autohet.driver.ray.gpu_users import gpu_users
from autohet.driver.ray.requests.broker import put_request
from tests.harness.autoscaling_cluster import autoscaling_cluster
from tests.harness.local_fleet import local_fleet
from tests.harness.waits import wait_until

pytestmark = pytest.mark.cluster
OTHER_JOB = """
import sys, time, ray
from autohet.driver.ray.requests.broker import put_request
ray.init(address=sys.argv[1], log_to_driver=False)
put_request([{"CPU": 0.5}] * 2, [{}, {}], "run", True)
print("asked", flush=True)
input()
put_request([{"CPU": 0.5}] * 7, [{}] * 7, "run")
put_request((), (), "run")
print("asked again", flush=True)
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
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
            try:
                assert other.stdout is not None
                assert other.stdout.readline() == "asked\n"
                assert num_requested() == 5
                put_request([{"CPU": 0.5}], [{}])
                assert num_requested() == 3
                # This driver takes the other's run over, which only stood still and wakes.
                put_request([{"CPU": 0.5}] * 4, [{}] * 4, "run", True)
                assert num_requested() == 4
                assert other.stdin is not None
                other.stdin.write("\n")
                other.stdin.flush()
                assert other.stdout.readline() == "asked again\n"
                assert num_requested() == 4
            finally:
                other.kill()
        wait_until(lambda: num_requested() == 4)
        put_request((), (), "run")
        assert num_requested() == 0


@ray.remote(num_cpus=0, num_gpus=1)
class WorkerActor:
    """A worker that starts once `path` exists."""

    def __init__(self, path: str) -> None:
        wait_until(Path(path).exists)

    def answer(self) -> bool:
        return True


@ray.remote(num_cpus=0, num_gpus=1)
class ForeignActor:
    def answer(self) -> bool:
        return True


def test_a_worker_that_starts_slowly_has_its_gpu_itself(tmp_path: Path) -> None:
    """Wrong: another program is taken to have it, so that the worker is ended and started again."""
    actors: Any = WorkerActor
    with local_fleet(big=1):
        (node,) = [each["NodeID"] for each in ray.nodes() if each["Resources"].get("GPU")]
        worker = actors.remote(str(tmp_path / "go"))
        wait_until(lambda: ray.available_resources().get("GPU", 0) < 1)
        wait_until(lambda: gpu_users({node}, {node}, "run") == {})
        (tmp_path / "go").touch()
        assert ray.get(worker.answer.remote())
        assert gpu_users({node}, {node}, "run") == {}
        ray.kill(worker)
        others: Any = ForeignActor
        foreign = others.remote()
        assert ray.get(foreign.answer.remote())
        waits = actors.remote(str(tmp_path / "go"))
        wait_until(lambda: gpu_users({node}, {node}, "run") != {})
        ray.kill(waits)
