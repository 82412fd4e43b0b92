"""End of a process that no driver directs any more."""

import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol

from autohet.runtime.process.report_channel import ReportSender

logger = logging.getLogger("autohet")
STOP_S = 3.0
"""Seconds without a driver after which a process ends whose job was stopped."""
LOOK_S = 0.5


class Alone(Protocol):
    """What a process does while no driver is there."""

    def look(self, away_s: float) -> None:
        """Called now and then, after `away_s` seconds without a driver."""
        ...

    def save(self, has_to_end: Callable[[], bool]) -> None:
        """Make the state durable; return early once `has_to_end` returns False."""
        ...


class HeadlessWatch:
    """Ends this process once no driver has been there for `limit_s` seconds.

    alone: looks after checkpoints meanwhile, and makes the state durable before. Owns a thread
    until `close`.
    """

    def __init__(
        self,
        reports: ReportSender,
        limit_s: float,
        alone: Alone | None = None,
        end: Callable[[], None] = lambda: os._exit(0),
    ) -> None:
        self._reports = reports
        self._limit_s = limit_s
        self.is_stopped = False
        """True while the job is being stopped: a driver that goes now is not waited for."""
        self._alone = alone
        self._end = end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headless", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _has_to_end(self) -> bool:
        limit_s = min(self._limit_s, STOP_S) if self.is_stopped else self._limit_s
        return self._reports.away_s > limit_s and not self._closed.is_set()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            if not self._has_to_end():
                if self._alone is not None:
                    self._alone.look(self._reports.away_s)
                continue
            logger.warning("No driver for %.0f s: this process ends", self._reports.away_s)
            if self._alone is not None:
                self._alone.save(self._has_to_end)
            # A driver may have come meanwhile.
            if self._has_to_end():
                self._end()
                return
