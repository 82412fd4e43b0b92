"""Host memory that a killed test session, or a killed benchmark, leaves behind: none."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SESSION = """
import pathlib, sys, time
sys.path.insert(0, ".")
from tests.harness.host_memory import memory_directory, owned_memory
with owned_memory():
    for name in ("one", "two"):
        directory = memory_directory(pathlib.Path(name))
        directory.mkdir()
        (directory / "snapshot").write_bytes(b"x" * 4096)
        print(directory, flush=True)
    time.sleep({sleep_s})
"""
BENCHMARK = """
import sys
sys.path.insert(0, ".")
from scripts.benchmarks.recovery.storage_throughput import data_in_memory
with data_in_memory(1 << 20) as path:
    print(path, flush=True)
    assert open(path, "rb").seek(0, 2) == 1 << 20
    sys.stdin.read()
"""


def gone(path: Path) -> bool:
    deadline = time.monotonic() + 20
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not path.exists()


@pytest.mark.parametrize("killed", [True, False])
def test_a_sessions_directories_go_with_it(killed: bool) -> None:
    program = SESSION.format(sleep_s=600 if killed else 0)
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdout=-1, text=True
    ) as session:
        assert session.stdout is not None
        directories = [Path(session.stdout.readline().strip()) for _ in range(2)]
        if killed:
            assert all((directory / "snapshot").exists() for directory in directories)
            session.send_signal(signal.SIGKILL)
        session.wait(20)
    assert all(directory.is_relative_to("/dev/shm") for directory in directories)
    assert all(gone(directory) for directory in directories)


def test_a_benchmarks_data_has_no_name_that_could_stay() -> None:
    before = set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-c", BENCHMARK]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=-1, stdout=-1, text=True) as benchmark:
        assert benchmark.stdout is not None
        path = Path(benchmark.stdout.readline().strip())
        assert path.stat().st_size == 1 << 20
        new = {p.name for p in set(Path("/dev/shm").iterdir()) - before if p.name.startswith("tmp")}
        benchmark.send_signal(signal.SIGKILL)
        benchmark.wait(20)
    assert new == set()
    assert not path.exists()
