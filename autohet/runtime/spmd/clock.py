"""Compute time of a rank between its collectives.

EMULATION of a GPU type's speed sleeps before each collective.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from autohet.runtime.groups import Group
from autohet.runtime.step.pacing import sleep_until


class ComputeClock:
    """Clock of a rank's compute time.

    seconds: host time outside collectives since `begin`. `owe` adds the seconds that operators take
    on the emulated device; `pause` sleeps until that time is over. stopped: returns True to end the
    sleep.
    """

    def __init__(self, stopped: Callable[[], bool] = lambda: False) -> None:
        self._stopped = stopped
        self.begin()

    def begin(self) -> None:
        self.seconds = 0.0
        self._owed = 0.0
        self._since = time.perf_counter()

    def owe(self, seconds: float) -> None:
        self._owed += seconds

    def pause(self) -> None:
        """Stop the clock, since the rank is about to wait for others or has ended."""
        sleep_until(self._since + self._owed, self._stopped)
        self.seconds += time.perf_counter() - self._since
        self._owed = 0.0

    def resume(self) -> None:
        self._since = time.perf_counter()


@dataclass(frozen=True)
class ClockedGroup:
    """Group that stops the clock during its calls."""

    group: Group
    clock: ComputeClock

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.group, name)
        if not callable(found):
            return found
        return partial(self._stop_during, found)

    def _stop_during(self, call: Callable[..., Any], *arguments: Any) -> Any:
        self.clock.pause()
        try:
            return call(*arguments)
        finally:
            self.clock.resume()
