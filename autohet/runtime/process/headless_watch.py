"""End of a process that no driver directs any more."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from autohet.runtime.process.report_channel import ReportSender

logger = logging.getLogger("autohet")
STOP_S = 3.0
"""Seconds without a driver after which a process ends whose job was stopped."""
LOOK_S = 0.5


class HeadlessWatch:
    """Ends this process once no driver has been there for `limit_s` seconds.

    save: makes the state durable before; it returns early once its argument, which tells whether
    the process still is to end, returns False. Owns a thread until `close`.
    """

    def __init__(
        self,
        reports: ReportSender,
        limit_s: float,
        save: Callable[[Callable[[], bool]], None] | None = None,
        end: Callable[[], None] = lambda: os._exit(0),
    ) -> None:
        self._reports = reports
        self._limit_s = limit_s
        self.is_stopped = False
        """True while the job is being stopped: a driver that goes now is not waited for."""
        self._save = save
        self._end = end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headless", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _is_over(self) -> bool:
        limit_s = min(self._limit_s, STOP_S) if self.is_stopped else self._limit_s
        return self._reports.away_s > limit_s and not self._closed.is_set()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            if not self._is_over():
                continue
            logger.warning("No driver for %.0f s: this process ends", self._reports.away_s)
            if self._save is not None:
                self._save(self._is_over)
            # A driver may have come meanwhile.
            if self._is_over():
                self._end()
                return
