"""Worker processes of the tests' raylets come from a fork server and look like Ray's own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.living import is_alive
from tests.harness.ray_worker_launcher import ADDRESS, SETUP_WORKER
from tests.harness.waits import wait_until
from tests.harness.warm_ray import LAUNCHER, running_server

SHOW = """
import json, os, sys, time
surroundings = [os.getcwd(), os.environ["OF_ITS_OWN"], sys.argv[1:]]
print(json.dumps([os.getpid(), os.getpgrp(), *surroundings]), flush=True)
"""
LANGUAGE = "--language=PYTHON"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    address = str(tmp_path / "socket")
    with running_server(address, ()):
        yield address


@contextmanager
def launched(
    address: str, directory: Path, ending: str, *options: str
) -> Iterator[subprocess.Popen[str]]:
    program = directory / "program.py"
    program.write_text(SHOW + ending)
    ours = {ADDRESS: address, SETUP_WORKER: str(program), "OF_ITS_OWN": "yes"}
    with subprocess.Popen(
        [sys.executable, str(LAUNCHER), str(program), LANGUAGE, *options],
        cwd=directory,
        env={**os.environ, **ours},
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        yield launcher
        launcher.kill()


def shown(launcher: subprocess.Popen[str]) -> list[object]:
    assert launcher.stdout is not None
    return list(json.loads(launcher.stdout.readline()))


def test_a_worker_has_its_launchers_surroundings_and_code(address: str, tmp_path: Path) -> None:
    with launched(address, tmp_path, "sys.exit(7)", "--node-id=3") as launcher:
        process_id, group, *surroundings = shown(launcher)
        assert process_id == group != launcher.pid
        assert surroundings == [str(tmp_path), "yes", ["--node-id=3"]]
        assert launcher.wait(20) == 7


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_a_launcher_dies_as_its_worker(
    address: str, tmp_path: Path, number: signal.Signals
) -> None:
    with launched(address, tmp_path, "time.sleep(60)") as launcher:
        os.kill(int(str(shown(launcher)[0])), number)
        assert launcher.wait(20) == -number


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_dies_with_its_launcher_alone(
    address: str, tmp_path: Path, number: signal.Signals
) -> None:
    with (
        launched(address, tmp_path, "time.sleep(60)") as other,
        launched(address, tmp_path, "time.sleep(60)") as launcher,
    ):
        worker = int(str(shown(launcher)[0]))
        launcher.send_signal(number)
        wait_until(lambda: not is_alive(worker), "the worker's end")
        assert launcher.wait(20) == -number
        assert is_alive(int(str(shown(other)[0])))


def test_an_environment_of_its_own_is_rays_matter(address: str, tmp_path: Path) -> None:
    context = json.dumps({"command_prefix": ["nice"], "py_executable": sys.executable})
    option = f"--serialized-runtime-env-context={context}"
    with launched(address, tmp_path, "", option) as launcher:
        process_id, *_, arguments = shown(launcher)
        assert process_id == launcher.pid
        assert arguments[-1] == option
