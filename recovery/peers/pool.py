"""Connections to peers' servers that are used again: one greeting for many requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from recovery.peers.client import ShardClient
from recovery.peers.tls import PeerTls

MAX_IDLE = 16
"""Limit on idle connections, over all peers: four peers with a restore's four streams each.

Those of all workers of the fleet count against the 1,024 that a server takes (`peers.server`).
"""


class ClientPool:
    """Pool of connections to any number of peers, all of one TLS identity, until `close`.

    Any thread may use it. Only a connection whose last reply was read to its end is kept; beyond
    MAX_IDLE the one that has waited longest is closed.
    """

    def __init__(self, tls: PeerTls | None = None) -> None:
        """Make an empty pool; `tls` None: taken from the environment (`recovery.peers.tls`)."""
        self._tls = tls or PeerTls.from_environment()
        self._idle: list[tuple[tuple[str, int, str, float], ShardClient]] = []
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def client(self, host: str, port: int, token: str, timeout_s: float) -> Iterator[ShardClient]:
        """Lend a client of this server (see `ShardClient`) to the calling thread alone.

        What its `read` yields is valid until the next.
        """
        key = (host, port, token, timeout_s)
        client = self._take(key) or ShardClient(*key, reuse_buffer=True, tls=self._tls)
        try:
            yield client
        finally:
            self._give_back(key, client)

    def _take(self, key: tuple[str, int, str, float]) -> ShardClient | None:
        """Take the client that was used last.

        Its buffers may still be in the processor's cache, and the server still waits for it.
        """
        with self._lock:
            for number in range(len(self._idle) - 1, -1, -1):
                if self._idle[number][0] == key:
                    return self._idle.pop(number)[1]
        return None

    def _give_back(self, key: tuple[str, int, str, float], client: ShardClient) -> None:
        if not client.is_idle:
            return
        with self._lock:
            self._idle.append((key, client))
            surplus = self._idle if self._closed else self._idle[:-MAX_IDLE]
            self._idle = self._idle[len(surplus) :]
        for _, each in surplus:
            each.close()

    def close(self) -> None:
        """Close all idle connections; a client in use is closed when it is returned."""
        with self._lock:
            self._closed = True
            idle = self._idle
            self._idle = []
        for _, client in idle:
            client.close()

    def __enter__(self) -> ClientPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
