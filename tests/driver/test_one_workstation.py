"""Runs on one workstation: whose GPUs are whose."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from autohet.cli.main import main
from autohet.driver.job import stop
from autohet.driver.ray.this_machine import gpu_ids, launcher_document, reserved
from planner.errors import ConfigError

HOLD = """
import sys
from autohet.driver.ray.this_machine import reserved
with reserved(sys.argv[1:], "first"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_gpu_that_another_run_has_is_refused_by_that_jobs_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another process; one that was killed holds nothing."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command = [sys.executable, "-c", HOLD, "GPU-a", "GPU-b"]
    pipe = subprocess.PIPE
    environment = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        refused = rf"GPU-b of this machine is used by job 'first' \(process {first.pid}\)"
        with pytest.raises(ConfigError, match=refused), reserved(["GPU-c", "GPU-b"], "second"):
            pass
        with reserved(["GPU-c", "GPU-d"], "the other half"):
            pass
        first.kill()
    with reserved(["GPU-a", "GPU-b"], "third"):
        assert "third" in (tmp_path / "autohet-gpu-GPU-a.lock").read_text()


def test_the_cpu_is_nobodys() -> None:
    assert gpu_ids(launcher_document("CPU", 4, 1 << 30, 16)) == []


def test_after_a_run_on_its_own_ray_there_is_no_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong: "give an emulated --cluster", which the command does not have."""
    monkeypatch.setattr(stop.ray_cluster, "_find_here", Mock(side_effect=ConnectionError("none")))
    assert main(["status"]) == 2
    assert "started ends with it; --address names others" in capsys.readouterr().err


def test_a_run_on_its_own_ray_is_stopped_where_it_was_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wrong: "none", while `autohet status` shows that it trains."""
    monkeypatch.setattr(stop.ray_cluster, "connect", lambda address, private: None)
    monkeypatch.setattr(stop, "living_actors", list)
    with pytest.raises(ConfigError, match=r"live here are: none \(Ctrl-C or SIGTERM stops an"):
        stop.stop_run(None, "tiny", 0)
