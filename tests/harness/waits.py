"""Waits that end only when something is broken: their limit is for hangs, not for slow machines."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

HANG_S = 600.0
"""Seconds of a wait after which a test counts as hung: ten times what a busy machine needs.

pytest's own limit (pyproject.toml) is longer, so that a wait's own message is seen.
"""
GROUP_TIMEOUT_S = 2 * HANG_S
GROUP_TIMEOUT = timedelta(seconds=GROUP_TIMEOUT_S)
"""Deadline of process groups and their stores.

It is longer than any wait of a test: a wait that only a group's own deadline ends is a failure.
"""
PATIENT_ELASTIC = {
    "step_timeout_s": GROUP_TIMEOUT_S,
    "quiesce_timeout_s": GROUP_TIMEOUT_S,
    "rendezvous_timeout_s": GROUP_TIMEOUT_S,
    "transfer_timeout_s": GROUP_TIMEOUT_S,
    "worker_start_timeout_s": GROUP_TIMEOUT_S,
    "checkpoint_timeout_s": GROUP_TIMEOUT_S,
}
"""Job keys of `elastic` of runs whose deadlines are not what is tested."""

Found = TypeVar("Found")


def wait_until(condition: Callable[[], Found], what: str = "", timeout_s: float = HANG_S) -> Found:
    """Poll until the condition holds, and return its value.

    Raises:
        AssertionError: it does not hold after `timeout_s`; names `what` was waited for.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what or condition}"
        time.sleep(0.01)
    return found
