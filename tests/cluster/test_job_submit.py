"""`ray job submit -- autohet train`: submitted to a real job server, followed, stopped, submitted again, continued."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from tests.harness.local_fleet import (
    free_port,
    largest_relative_difference,
    local_fleet,
    make_job,
    until,
    write_documents,
)
from tests.harness.misbehaving_proxy import MisbehavingProxy
from tests.harness.s3_server import s3_server

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
STEPS = 40


def events_of(events: Path, kind: str) -> list[dict]:
    lines = events.read_text().splitlines() if events.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if event["kind"] == kind]


def losses_of(events: Path) -> dict[int, float]:
    """Loss by step of the steps that an events file tells of."""
    return {event["step"]: event["loss"] for event in events_of(events, "step")}


def test_submitted_stopped_and_submitted_again(tmp_path: Path) -> None:
    port = free_port()
    # Slow enough that the stop comes in the middle.
    sections = {"training": {"steps": STEPS}, "emulation": {"block_forward_s": 0.01}}
    head = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}
    with (
        s3_server() as server,
        closing(MisbehavingProxy(server.endpoint)) as slow,
        local_fleet(head, big=1, small=1) as fleet,
    ):
        job_path, _ = write_documents(tmp_path, {}, **sections, checkpoint={"storage": server.create_bucket("runs")})
        client = JobSubmissionClient(f"http://127.0.0.1:{port}")

        def submit(events: Path) -> str:
            command = f"{Path(sys.executable).parent / 'autohet'} train --job {job_path} --events {events} --json"
            environment = {"RAY_JOB_STOP_WAIT_TIME_S": "100", "AWS_ENDPOINT_URL": slow.endpoint}
            ids: list[str] = []

            def accepted() -> bool:
                try:
                    ids.append(client.submit_job(entrypoint=command, runtime_env={"env_vars": environment}))
                except RuntimeError as error:  # the dashboard is up before the agent that starts jobs
                    assert "No available agent" in str(error)
                return bool(ids)

            until(accepted, "an agent that takes jobs", 60)
            return ids[0]

        first = submit(tmp_path / "first.jsonl")
        going = lambda: len(losses_of(tmp_path / "first.jsonl")) >= 5  # noqa: E731
        until(lambda: going() or client.get_job_status(first).is_terminal(), "five steps", 150)
        assert going(), client.get_job_logs(first)
        assert main_json(["status", "--address", str(fleet._cluster.address)])["jobs"]["tiny"]["state"] == "training"
        slow.mode = "slow"  # Ray kills 3 s after its SIGTERM unless the job's environment says otherwise
        stopped_at = time.monotonic()
        assert client.stop_job(first)
        until(lambda: client.get_job_status(first).is_terminal(), "the stop", 100)
        assert time.monotonic() - stopped_at > 3, "the checkpoint takes longer than Ray would wait"
        slow.mode = "good"
        assert client.get_job_status(first) is JobStatus.STOPPED
        done = losses_of(tmp_path / "first.jsonl")
        assert 5 <= len(done) < STEPS
        assert [event["step"] for event in events_of(tmp_path / "first.jsonl", "checkpoint")][-1] == len(done)
        second = submit(tmp_path / "second.jsonl")
        until(lambda: client.get_job_status(second).is_terminal(), "the end", 150)
        logs = client.get_job_logs(second)
        assert client.get_job_status(second) is JobStatus.SUCCEEDED, logs
    assert f"Going on from step {len(done)} of" in logs
    summary = json.loads(next(line for line in logs.splitlines() if line.startswith('{"steps"')))
    assert summary["first_step"] == len(done)
    losses = [*done.values(), *summary["losses"]]
    assert len(losses) == STEPS
    assert largest_relative_difference(losses, make_job(tmp_path, **sections)) < 1e-3


def main_json(arguments: list[str]) -> dict:
    """One JSON document and nothing else on standard output, from a process of its own."""
    command = [str(Path(sys.executable).parent / "autohet"), *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)
