"""EMULATION of a GPU type's speed.

After its real work, an action sleeps until it has taken the time that the GPU type would take.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

SLICE_S = 0.01
"""Seconds between two checks for an interrupt of the sleep."""


@dataclass(frozen=True)
class Pace:
    """Seconds of a microbatch's forward and backward through a worker's stage, emulated."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Pacer:
    """Sleep through the rest of an action's emulated time.

    An interrupt ends the sleep: `stopped` returns True.
    """

    pace: Pace
    stopped: Callable[[], bool]

    def after_forward(self, started: float, share: float = 1.0) -> None:
        """End a forward pass that started then; share: its part of a whole microbatch."""
        sleep_until(started + share * self.pace.forward_s, self.stopped)

    def after_backward(self, started: float, share: float = 1.0) -> None:
        sleep_until(started + share * self.pace.backward_s, self.stopped)


def sleep_until(deadline: float, stopped: Callable[[], bool]) -> None:
    """Sleep until `deadline` (on `time.perf_counter`), or until `stopped` returns True.

    `stopped` is polled every SLICE_S seconds.
    """
    while True:
        left_s = deadline - time.perf_counter()
        if left_s <= 0 or stopped():
            return
        time.sleep(min(left_s, SLICE_S))
