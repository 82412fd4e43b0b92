"""A driver that is killed is started again; one that ends by itself, or is asked to, is not."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autohet.driver.job.supervise import is_supervised

PROGRAM = """
import os, signal, sys, time
from autohet.driver.job.supervise import MAY_PASS, note_begun, supervise_child, will_restart

def work():
    with open(sys.argv[1], "a") as file:
        file.write("started ")
    number = len(open(sys.argv[1]).read().split())
    {body}

sys.exit(supervise_child(2, work))
"""


def supervise(tmp_path: Path, body: str, term: bool = False) -> tuple[int, int]:
    """Exit code, and how often the work was started."""
    path = tmp_path / "starts"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body), str(path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        if term:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.terminate()
        return process.wait(60), len(path.read_text().split())
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("body", "code", "starts"),
    [
        ("return 0", 0, 1),
        ("return 1", 1, 1),
        ("os.kill(os.getpid(), signal.SIGKILL) if number < 3 else None; return 0", 0, 3),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 1, 3),
        ("return MAY_PASS if number < 3 else 0", 0, 3),
        ("return MAY_PASS", 1, 3),
        ("raise RuntimeError('before the run has begun')", 1, 1),
        ("note_begun(); raise RuntimeError('the GCS is gone')", 1, 3),
        ("assert will_restart() == (number < 3); return MAY_PASS", 1, 3),
    ],
)
def test_what_a_signal_killed_or_a_passing_cause_ended_is_started_again(
    tmp_path: Path, body: str, code: int, starts: int
) -> None:
    assert supervise(tmp_path, body) == (code, starts)


def test_a_driver_knows_who_watches_it_and_that_it_goes_on_with_another_s_run(
    tmp_path: Path,
) -> None:
    """Which its event `started` tells."""
    body = (
        "from autohet.driver.job.supervise import is_restart, is_supervised;"
        " assert is_supervised(); assert is_restart() == (number > 1);"
        " os.kill(os.getpid(), signal.SIGKILL) if number < 2 else None; return 0"
    )
    assert not is_supervised()
    assert supervise(tmp_path, body) == (0, 2)


def test_who_is_asked_to_end_is_not_started_again(tmp_path: Path) -> None:
    assert supervise(tmp_path, "print('ready', flush=True); time.sleep(60)", term=True) == (143, 1)


def test_sigterm_right_after_the_start_leaves_no_driver_behind(tmp_path: Path) -> None:
    """It comes before the parent could wait for its child."""
    at_once = "os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))"
    program = PROGRAM.replace("sys.exit(", f"{at_once}\nsys.exit(").format(body="time.sleep(120)")
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "starts")], stdout=subprocess.PIPE
    )
    try:
        process.communicate(timeout=60)  # the child holds the pipe as long as it lives
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM


def test_sigterm_reaches_the_driver_which_ends_in_order(tmp_path: Path) -> None:
    body = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('ready', flush=True);"
        " time.sleep(60)"
    )
    assert supervise(tmp_path, body, term=True) == (7, 1)
