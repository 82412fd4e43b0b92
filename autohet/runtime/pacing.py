"""EMULATION of a GPU type's speed: after its real work, an action sleeps until it has taken the time that the type would take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Seconds that one microbatch's forward and backward through one worker's stage take on the emulated GPU."""

    forward_s: float
    backward_s: float


class Pacer:
    """Sleeps out the rest of an action's emulated time. An interrupt ends the sleep by way of `stopped`."""

    def __init__(self, pace: Pace, stopped: Callable[[], bool], slice_s: float = 0.05) -> None:
        self._pace = pace
        self._stopped = stopped
        self._slice_s = slice_s

    def after_forward(self, started: float) -> None:
        self._sleep_until(started + self._pace.forward_s)

    def after_backward(self, started: float) -> None:
        self._sleep_until(started + self._pace.backward_s)

    def _sleep_until(self, deadline: float) -> None:
        while (left := deadline - time.perf_counter()) > 0 and not self._stopped():
            time.sleep(min(left, self._slice_s))
