"""The store where a generation's workers find each other; it lives with the driver, on the node
that is not spot.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore


class Rendezvous:
    """One TCPStore for the whole run; every generation uses keys of its own prefix."""

    def __init__(self, host: str, timeout_s: float = 60.0) -> None:
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("", 0))
        port = self._listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=self._listener.detach(),
        )
        self.address = (host, port)

    def close(self) -> None:
        self._store = None
