"""Processes of this machine, by id and by session (Linux: /proc)."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from tests.harness.waits import wait_until


def state_of(pid: int) -> str:
    """R, S, T (stopped), Z ... of a process; "" when there is none."""
    return _state_and_session(pid)[0]


def is_alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


def kill(pid: int) -> None:
    """A process that is gone already is left alone."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def members_of(session: int) -> list[int]:
    """Living processes of a session, zombies left out."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [
        pid for pid in pids if (seen := _state_and_session(pid))[1] == session and seen[0] != "Z"
    ]


def end_session(session: int) -> None:
    """End every process of a session: some end by themselves when others do, some start while the
    rest are ended.
    """

    def is_empty() -> bool:
        left = members_of(session)
        for pid in left:
            kill(pid)
        return not left

    wait_until(is_empty, f"the end of session {session}")


def _state_and_session(pid: int) -> tuple[str, int]:
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
    except (FileNotFoundError, ProcessLookupError):
        return "", -1
    return state, int(session)
