"""`ray job submit -- autohet train`: submitted to a real job server, followed, stopped, submitted again, continued."""

from __future__ import annotations

import json
import subprocess
import sys
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

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]
STEPS = 40


def losses_of(events: Path) -> dict[int, float]:
    """Loss by step of the steps that an events file tells of."""
    lines = events.read_text().splitlines() if events.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return {event["step"]: event["loss"] for event in found if event["kind"] == "step"}


def test_submitted_stopped_and_submitted_again(tmp_path: Path) -> None:
    port = free_port()
    # Slow enough that the stop comes in the middle.
    sections = {"training": {"steps": STEPS}, "emulation": {"block_forward_s": 0.01}}
    job_path, _ = write_documents(tmp_path, {}, **sections)
    head = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}
    with local_fleet(head, big=1, small=1) as fleet:
        client = JobSubmissionClient(f"http://127.0.0.1:{port}")

        def submit(events: Path) -> str:
            command = f"{Path(sys.executable).parent / 'autohet'} train --job {job_path} --events {events} --json"
            return client.submit_job(entrypoint=command)

        first = submit(tmp_path / "first.jsonl")
        until(lambda: len(losses_of(tmp_path / "first.jsonl")) >= 5, "five steps", 90)
        assert main_json(["status", "--address", str(fleet._cluster.address)])["jobs"]["tiny"]["state"] == "training"
        assert client.stop_job(first)
        until(lambda: client.get_job_status(first).is_terminal(), "the stop", 30)
        assert client.get_job_status(first) is JobStatus.STOPPED
        done = losses_of(tmp_path / "first.jsonl")
        assert 5 <= len(done) < STEPS
        assert any(path.name == f"step-{len(done):08d}" for path in (tmp_path / "checkpoints").iterdir())
        second = submit(tmp_path / "second.jsonl")
        until(lambda: client.get_job_status(second).is_terminal(), "the end", 90)
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
