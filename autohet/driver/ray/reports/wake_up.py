"""Wake-up of the driver between two rounds."""

import os
import select
from threading import RLock

from autohet.driver.ray.reports.report_server import ReportServer


class WakeUp:
    """Wake-up signal that any thread, or input of its servers, can give.

    Owns two descriptors until it is closed; later signals are no-ops.
    """

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._event_poll = select.poll()
        self._event_poll.register(self._event, select.POLLIN)
        self._any_poll = select.epoll()
        self._any_poll.register(self._event, select.EPOLLIN)
        # Not a plain lock: a signal's handler may wake while this thread wakes.
        self._closing = RLock()
        self._servers: list[ReportServer] = []
        self._closed = False

    def watch(self, server: ReportServer) -> None:
        """Wake up when the server has input, too."""
        self._any_poll.register(server.fileno(), select.EPOLLIN)
        self._servers.append(server)

    def wake(self) -> None:
        with self._closing:
            if not self._closed:
                os.eventfd_write(self._event, 1)

    def wait(self, timeout_s: float, gather_s: float) -> None:
        """Block until `wake` is called, a server has input, or `timeout_s` is over.

        If a server has input, wait up to `gather_s` longer to gather what comes along with it,
        unless a connection has ended: that may be a death.
        """
        came = dict(self._any_poll.poll(max(0.0, timeout_s)))
        is_urgent = self._event in came or any(each.has_ends for each in self._servers)
        if came and not is_urgent:
            self._event_poll.poll(1000 * gather_s)
        # Take the signal back, or the next wait would end at once. A read of no signal raises.
        if self._event_poll.poll(0):
            os.eventfd_read(self._event)

    def is_due(self, timeout_s: float = 0.0) -> bool:
        """Return True if `wait` would end within `timeout_s`; it still would afterwards."""
        return bool(self._any_poll.poll(timeout_s))

    def close(self) -> None:
        with self._closing:
            if not self._closed:
                self._closed = True
                self._any_poll.close()
                os.close(self._event)
