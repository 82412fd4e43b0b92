"""Wake-up of the driver between two rounds."""

from __future__ import annotations

import os
import select
from threading import RLock

from autohet.driver.ray.report_server import ReportServer


class WakeUp:
    """Wake-up signal that any thread, or input of its servers, can give.

    Owns two descriptors until it is closed; later signals are no-ops.
    """

    def __init__(self) -> None:
        self._rung = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._hand, self._any = select.poll(), select.epoll()
        self._hand.register(self._rung, select.POLLIN)
        self._any.register(self._rung, select.EPOLLIN)
        self._closing, self._closed = (
            RLock(),
            False,
        )  # a signal's handler may ring while this thread rings

    def heed(self, server: ReportServer) -> None:
        self._any.register(server.fileno(), select.EPOLLIN)

    def ring(self) -> None:
        with self._closing:
            if not self._closed:
                os.eventfd_write(self._rung, 1)

    def wait(self, timeout_s: float, gather_s: float) -> None:
        """Block until the bell is rung, a server has input, or `timeout_s` is over.

        If a server has input, wait up to `gather_s` longer to gather what comes along with it.
        """
        came = dict(self._any.poll(max(0.0, timeout_s)))
        if came and self._rung not in came:
            self._hand.poll(1000 * gather_s)
        if self._hand.poll(0):
            os.eventfd_read(self._rung)

    def close(self) -> None:
        with self._closing:
            if not self._closed:
                self._closed = True
                self._any.close()
                os.close(self._rung)
