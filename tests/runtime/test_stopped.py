"""How a process looks from outside, against what was really done to it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from autohet.runtime.process.stopped import ProcessState, process_states

SCRIPTS = {
    "busy": "while True: pass",
    "idle": "import time; time.sleep(600)",
    "holding the interpreter": "import ctypes; ctypes.PyDLL(None).sleep(600)",
}


@pytest.fixture(params=SCRIPTS)
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", f"print(flush=True)\n{SCRIPTS[request.param]}"], stdout=-1
    ) as started:
        assert started.stdout is not None
        started.stdout.readline()
        yield started
        started.send_signal(signal.SIGCONT)
        started.kill()


def look(process: subprocess.Popen[bytes], until: Callable[[ProcessState], bool]) -> ProcessState:
    deadline = time.monotonic() + 20
    while not until(found := process_states([process.pid])[process.pid]):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def test_only_a_process_that_was_stopped_is_stopped(process: subprocess.Popen[bytes]) -> None:
    assert not look(process, lambda state: True).stopped
    process.send_signal(signal.SIGSTOP)
    first = look(process, lambda state: state.stopped)
    time.sleep(0.05)
    assert process_states([process.pid])[process.pid] == first, "it has not run in between"
    process.send_signal(signal.SIGCONT)
    assert look(process, lambda state: not state.stopped).started_ticks == first.started_ticks


def test_what_is_gone_has_ended_before_and_after_it_is_reaped() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        assert look(process, lambda state: state.ended).state == "Z"
        process.wait(20)
    assert process_states([process.pid])[process.pid].ended
    assert process_states([os.getpid()])[os.getpid()].state == "R"
