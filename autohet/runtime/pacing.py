"""EMULATION of a GPU type's speed: after its real work, an action sleeps until it has taken the
time that the type would take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

SLICE_S = 0.05
"""Seconds between two looks at whether to go on sleeping."""


@dataclass(frozen=True)
class Pace:
    """Seconds that one microbatch's forward and backward through one worker's stage take on the
    emulated GPU.
    """

    forward_s: float
    backward_s: float


class Pacer:
    """Sleeps out the rest of an action's emulated time.

    An interrupt ends the sleep by way of `stopped`.
    """

    def __init__(self, pace: Pace, stopped: Callable[[], bool]) -> None:
        self._pace, self._stopped = pace, stopped

    def after_forward(self, started: float) -> None:
        sleep_until(started + self._pace.forward_s, self._stopped)

    def after_backward(self, started: float) -> None:
        sleep_until(started + self._pace.backward_s, self._stopped)


def sleep_until(deadline: float, stopped: Callable[[], bool]) -> None:
    """deadline: on `time.perf_counter`. Once `stopped` is true, at most SLICE_S longer."""
    while (left := deadline - time.perf_counter()) > 0 and not stopped():
        time.sleep(min(left, SLICE_S))
