"""Parts shared by the driver's servers: a listening socket, and rate-limited warnings.

The socket listens on one address. The limit keeps strangers from filling the log.
"""

import errno
import logging
import socket
import time

logger = logging.getLogger("autohet")
WARNING_PERIOD_S = 60.0


def listen_on(host: str) -> socket.socket:
    """Return a non-blocking socket that listens on a free port of `host` alone.

    `host` is an address of this machine, IPv4 or IPv6. If it is not (a translated one, for
    instance), the socket listens on all addresses.

    Raises OSError.
    """
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    try:
        listener = socket.create_server((host, 0), family=family, backlog=1024)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        logger.warning("%s is no address of this machine: listening on all of its addresses", host)
        listener = socket.create_server(("", 0), family=family, backlog=1024)
    listener.setblocking(False)
    return listener


class RareWarnings:
    """Logs the first warning, then at most one in WARNING_PERIOD_S, with the number suppressed."""

    def __init__(self) -> None:
        self._next_at = float("-inf")
        self._left_out = 0

    def warn(self, message: str, *arguments: object) -> None:
        now = time.monotonic()
        if now < self._next_at:
            self._left_out += 1
            return
        if self._left_out:
            message += f" ({self._left_out} more like it since the last)"
        self._next_at = now + WARNING_PERIOD_S
        self._left_out = 0
        logger.warning(message, *arguments)
