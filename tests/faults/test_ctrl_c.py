"""Ctrl-C on `autohet train`: a committed checkpoint, one document, exit code 1, and nothing left
behind.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.host_memory import memory_directory
from tests.harness.living import end_session, members_of
from tests.harness.local_fleet import cluster_document, write_documents
from tests.harness.waits import HANG_S, wait_until
from tests.harness.warm_ray import launcher_environment

pytestmark = [pytest.mark.faults, pytest.mark.cluster]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run on one emulated node, in a session of its own, as a terminal's foreground group.

    Its workers' launchers are of that session, and live as long as the workers.
    """
    job, cluster = write_documents(
        tmp_path,
        cluster_document(big=1),
        training={"steps": 5000},
        parallelism={"min_pipelines": 1},
    )
    arguments = [
        sys.executable,
        "-m",
        "tests.harness.warm_autohet",
        "train",
        "--job",
        str(job),
        "--cluster",
        str(cluster),
    ]
    running = subprocess.Popen(
        [*arguments, "--events", str(tmp_path / "events.jsonl"), "--json"],
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "stderr").open("w"),
        text=True,
        cwd=ROOT,
        env={**os.environ, **launcher_environment()},
        start_new_session=True,
    )
    yield running
    end_session(running.pid)
    running.wait(10)


def num_steps(directory: Path) -> int:
    events = directory / "events.jsonl"
    return events.read_text().count('"kind": "step"') if events.exists() else 0


def stopped_by(
    number: signal.Signals, command: subprocess.Popen[str], directory: Path
) -> dict[str, Any]:
    """The summary of a command whose whole process group gets a signal after three steps: the
    newest is committed, nothing runs on.
    """
    wait_until(lambda: num_steps(directory) >= 3, "three steps")
    os.killpg(command.pid, number)
    out, _ = command.communicate(timeout=HANG_S)
    assert command.returncode == 1, (directory / "stderr").read_text()
    summary: dict[str, Any] = json.loads(out)
    assert summary["reason"] == f"stopped by {number.name}"
    assert summary["checkpoint"].endswith(f"step-{summary['steps']:08d}")
    wait_until(lambda: not members_of(command.pid), "the end of its processes")
    return summary


def test_once_commits_and_leaves_nothing(command: subprocess.Popen[str], tmp_path: Path) -> None:
    summary = stopped_by(signal.SIGINT, command, tmp_path)
    assert summary["steps"] >= 3
    assert Path(summary["checkpoint"].removeprefix("file://")).is_dir()
    assert "Traceback" not in (tmp_path / "stderr").read_text()
    assert not memory_directory(tmp_path).exists()


@pytest.mark.slow
def test_a_sigterm_to_the_whole_group_commits_too(
    command: subprocess.Popen[str], tmp_path: Path
) -> None:
    """As `timeout` and service managers send it: the emulated cluster must outlive it until the
    step is committed.
    """
    summary = stopped_by(signal.SIGTERM, command, tmp_path)
    assert summary["steps"] >= 3


@pytest.mark.slow
def test_twice_ends_at_once(command: subprocess.Popen[str], tmp_path: Path) -> None:
    wait_until(lambda: num_steps(tmp_path) >= 1, "a step")
    command.send_signal(signal.SIGINT)
    command.send_signal(signal.SIGINT)
    out, _ = command.communicate(timeout=HANG_S)
    assert (command.returncode, out) in ((130, ""), (1, out))
    wait_until(lambda: not members_of(command.pid), "the end of its processes")
    assert not memory_directory(tmp_path).exists()
