"""A shard server that greets as it should and answers each request as a test says: wrongly, half,
late or not at all.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from recovery.peers.protocol import (
    HELLO,
    NONCE_BYTES,
    OK,
    WELCOME,
    mac_of,
    receive,
    receive_request,
)

Answer = Callable[[socket.socket, int], object]
"""Called with the connection and the request's number, from 1 on over all connections; after a
false result the server hangs up.
"""


class ScriptedPeer:
    """Owns a listening socket and its threads; `greeted` and `ended` count connections."""

    def __init__(self, answer: Answer, token: str) -> None:
        self._answer = answer
        self._token = token
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.greeted = self.ended = self.requests = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._threads.append(
                    threading.Thread(target=self._serve, args=(connection,), daemon=True)
                )
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.sendall(bytes(NONCE_BYTES))
            _, nonce, _ = HELLO.unpack(receive(connection, HELLO.size))
            connection.sendall(
                WELCOME.pack(OK, mac_of(self._token, "server", bytes(NONCE_BYTES), nonce))
            )
            self.greeted += 1
            while receive_request(connection) is not None:
                self.requests += 1
                if not self._answer(connection, self.requests):
                    break
        self.ended += 1

    def __enter__(self) -> ScriptedPeer:
        return self

    def __exit__(self, *_: object) -> None:
        """Its clients have hung up by now."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()
        self._listener.close()
