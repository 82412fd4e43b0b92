"""`ray job submit -- autohet train`: submitted to a real job server, followed, stopped while S3 is
slow, submitted again, continued.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from recovery.checkpoint.read import verify
from recovery.storage.open import open_storage
from tests.harness.local_fleet import (
    free_port,
    largest_relative_difference,
    local_fleet,
    make_job,
    write_documents,
)
from tests.harness.misbehaving_proxy import MisbehavingProxy, proxy_before
from tests.harness.s3_server import s3_server
from tests.harness.waits import HANG_S, wait_until

pytestmark = pytest.mark.cluster
MANY_STEPS = 5000
REST = 10
RAYS_STOP_WAIT_S = 3
"""After so many seconds `ray job stop` kills, unless the job's environment says otherwise."""
STOP_WAIT = {"RAY_JOB_STOP_WAIT_TIME_S": "600"}
"""What the cluster files give the head's Ray; elsewhere a job brings it by --runtime-env-json
(cluster_configs/README.md).
"""


def losses_of(events: Path) -> dict[int, float]:
    """Loss by step of the steps that an events file tells of."""
    lines = events.read_text().splitlines() if events.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return {event["step"]: event["loss"] for event in found if event["kind"] == "step"}


class Submissions:
    """The job server of a fleet's head, and one job's documents."""

    def __init__(self, port: int, job: Path, **job_environment: str) -> None:
        self.client, self._job = JobSubmissionClient(f"http://127.0.0.1:{port}"), job
        self._environment = job_environment

    def submit(self, events: Path) -> str:
        command = (
            f"{Path(sys.executable).parent / 'autohet'} train --job {self._job} --events {events}"
            " --json"
        )
        return self.client.submit_job(
            entrypoint=command, runtime_env={"env_vars": self._environment}
        )

    def over(self, submitted: str) -> bool:
        return self.client.get_job_status(submitted).is_terminal()

    def stop(self, submitted: str) -> None:
        assert self.client.stop_job(submitted)
        wait_until(lambda: self.over(submitted), "the stop")
        assert self.client.get_job_status(submitted) is JobStatus.STOPPED


def head_with_job_server(port: int) -> dict[str, Any]:
    return {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}


def stored_whole(uri: str, step: int) -> bool:
    """Whether the checkpoint of a step is committed and every byte of it is right."""
    storage = open_storage(uri)
    try:
        return verify(storage, step).ok
    finally:
        storage.close()


def took_longer_than_ray_waits(proxy: MisbehavingProxy) -> bool:
    assert proxy.bytes_per_s is not None
    return proxy.throttled_bytes / proxy.bytes_per_s > RAYS_STOP_WAIT_S


def test_submitted_stopped_while_s3_is_slow_and_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in STOP_WAIT.items():
        monkeypatch.setenv(name, value)  # the head's, from which a job's supervisor has it
    port = free_port()
    first_events = tmp_path / "first.jsonl"
    second_events = tmp_path / "second.jsonl"
    with s3_server() as server, proxy_before(server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        uri = server.create_bucket("stop") + "/tiny"
        sections = {
            "training": {"steps": MANY_STEPS, "decay_steps": 24},
            "checkpoint": {"storage": uri, "every_steps": MANY_STEPS},  # the stop's own alone
            "emulation": {"block_forward_s": 0.01},
        }
        job_path, _ = write_documents(tmp_path, {}, **sections)
        with local_fleet(head_with_job_server(port), big=1, small=1) as fleet:
            jobs = Submissions(port, job_path)
            first = jobs.submit(first_events)
            wait_until(lambda: len(losses_of(first_events)) >= 5, "five steps")
            status = main_json(["status", "--address", str(fleet.cluster.address)])
            assert status["jobs"]["tiny"]["state"] == "training"
            proxy.bytes_per_s = 80e3
            jobs.stop(first)
            assert took_longer_than_ray_waits(proxy)
            proxy.bytes_per_s = None
            done = losses_of(first_events)
            assert 5 <= len(done) < MANY_STEPS
            assert stored_whole(uri, len(done))
            sections["training"]["steps"] = len(done) + REST
            write_documents(tmp_path, {}, **sections)
            second = jobs.submit(second_events)
            wait_until(lambda: jobs.over(second), "the end")
            logs = jobs.client.get_job_logs(second)
            assert jobs.client.get_job_status(second) is JobStatus.SUCCEEDED, logs
    assert f"Going on from step {len(done)} of" in logs
    summary = json.loads(next(line for line in logs.splitlines() if line.startswith('{"steps"')))
    assert summary["first_step"] == len(done)
    losses = [*done.values(), *summary["losses"]]
    assert len(losses) == len(done) + REST
    assert largest_relative_difference(losses, make_job(tmp_path, **sections)) < 1e-3


@pytest.mark.slow
def test_a_stop_commits_two_gigabytes_while_s3_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded in scripts/benchmarks/results/job_stop.json (`pytest -s` shows the figures)."""
    port = free_port()
    events = tmp_path / "events.jsonl"
    model = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    config = {"model_type": "llama", "vocab_size": 256, "max_position_embeddings": 32, **model}
    with s3_server() as server, proxy_before(server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        uri = server.create_bucket("stop") + "/large"
        sections = {
            "model": {"config": config},
            "training": {"steps": 10_000, "global_batch_sequences": 2},
            "checkpoint": {
                "storage": uri,
                "every_steps": 10_000,
                "memory_directory": str(tmp_path / "memory"),
                "replicate_every_steps": 0,
            },
            "elastic": {"step_timeout_s": 60, "heartbeat_timeout_s": 20},
            "parallelism": {"min_pipelines": 1, "plan": str(tmp_path / "plan.json")},
        }
        write_plan(tmp_path / "plan.json")
        job_path, _ = write_documents(tmp_path, {}, **sections)
        with local_fleet(head_with_job_server(port), big=1, small=1):
            jobs = Submissions(port, job_path, **STOP_WAIT)
            submitted = jobs.submit(events)
            wait_until(lambda: len(losses_of(events)) >= 5 or jobs.over(submitted), "five steps")
            assert not jobs.over(submitted), jobs.client.get_job_logs(submitted)[-3000:]
            proxy.bytes_per_s = 40e6
            began = time.monotonic()
            jobs.stop(submitted)
            seconds = time.monotonic() - began
        assert proxy.throttled_bytes > 2e9
        assert took_longer_than_ray_waits(proxy)
        steps = len(losses_of(events))
        proxy.bytes_per_s = None
        assert stored_whole(uri, steps)
    print(
        json.dumps(
            {
                "steps": steps,
                "bytes_stored": proxy.throttled_bytes,
                "s3_bytes_per_s": 40e6,
                "stop_s": round(seconds, 1),
            }
        )
    )


def write_plan(path: Path) -> None:
    """Two stages: the state is there once."""
    stages = [
        {"first_layer": 0, "num_layers": 5, "workers": ["big-0/0"]},
        {"first_layer": 5, "num_layers": 5, "workers": ["small-0/0"]},
    ]
    plan = {
        "version": 1,
        "model": "tiny",
        "global_batch_sequences": 2,
        "microbatch_sequences": 1,
        "sequence_length": 16,
        "pipelines": [{"num_microbatches": 2, "stages": stages}],
    }
    path.write_text(json.dumps(plan))


def main_json(arguments: list[str]) -> dict:
    """One JSON document and nothing else on standard output, from a process of its own."""
    command = [str(Path(sys.executable).parent / "autohet"), *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    return json.loads(done.stdout)
