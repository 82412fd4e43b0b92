"""Serves a node's snapshots to other nodes over TCP, and asks for theirs. What comes back is checked before it is
used.

    request     u32 length, msgpack: version, token, source (kind, node, name, step, generation), shards reply
    for each shard in the order asked: status u8 (0 ok, 1 unavailable, 2 corrupt, 3 refused), CRC-32 u32, length
    u64, bytes

A connection serves many requests, one after the other. The token only keeps strangers on the network apart; run
inside a trusted network.
"""

from __future__ import annotations

import hmac
import logging
import socket
import socketserver
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from recovery.agent_store import AgentStore
from recovery.errors import PeerRefused, PeerTimeout, PeerUnreachable, ShardCorrupt, ShardUnavailable
from recovery.holdings import Source
from recovery.layout import ShardId

logger = logging.getLogger(__name__)

VERSION = 1
MAX_REQUEST_BYTES = 64 << 20
MAX_SHARD_BYTES = 64 << 30
IDLE_S = 60.0
_REPLY = struct.Struct("<BIQ")
_OK, _UNAVAILABLE, _CORRUPT, _REFUSED = range(4)


class ShardServer:
    """Owns a listening socket and its threads; serves until `close`."""

    def __init__(self, store: AgentStore, token: str, *, host: str = "0.0.0.0", port: int = 0) -> None:
        """Listen on `host` (the interface that peers are to use); port 0 takes a free one, see `port`."""
        handler = type("Handler", (_Handler,), {"store": store, "token": token})
        self._server = _ThreadingServer((host, port), handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="shard-server", daemon=True
        )
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop listening, hang up on every peer, join the threads."""
        self._server.shutdown()
        self._server.hang_up()
        self._server.server_close()
        self._thread.join(timeout_s)

    def __enter__(self) -> ShardServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ThreadingServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        super().__init__(address, handler)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    def track(self, connection: socket.socket, *, opened: bool) -> None:
        with self._lock:
            (self._open.add if opened else self._open.discard)(connection)

    def hang_up(self) -> None:
        with self._lock:
            for connection in self._open:
                _shut(connection)


class _Handler(socketserver.BaseRequestHandler):
    """One peer's connection."""

    store: AgentStore
    token: str
    server: _ThreadingServer

    def handle(self) -> None:
        self.request.settimeout(IDLE_S)
        self.server.track(self.request, opened=True)
        try:
            while (request := _receive_request(self.request)) is not None:
                if not self._answer(request):
                    return
        except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            logger.info("a peer's connection ended: %s", error)
        finally:
            self.server.track(self.request, opened=False)

    def _answer(self, request: dict[str, Any]) -> bool:
        """Send every shard asked for; False after a request that is refused."""
        if request["version"] != VERSION or not hmac.compare_digest(str(request["token"]), self.token):
            self.request.sendall(_REPLY.pack(_REFUSED, 0, 0))
            return False
        source = Source(*request["source"])
        for tensor, unit in request["shards"]:
            self._send(source, ShardId(str(tensor), int(unit)))
        return True

    def _send(self, source: Source, shard: ShardId) -> None:
        try:
            data = self.store.read(source, shard)
        except ShardUnavailable:
            self.request.sendall(_REPLY.pack(_UNAVAILABLE, 0, 0))
        except ShardCorrupt:
            self.request.sendall(_REPLY.pack(_CORRUPT, 0, 0))
        else:
            self.request.sendall(_REPLY.pack(_OK, zlib.crc32(data), len(data)))
            self.request.sendall(data)


def _receive_request(connection: socket.socket) -> dict[str, Any] | None:
    """The next request; None when the peer has hung up."""
    raw = connection.recv(4, socket.MSG_WAITALL)
    if len(raw) < 4:
        return None
    length = int.from_bytes(raw, "little")
    if length > MAX_REQUEST_BYTES:
        raise ValueError(f"a request of {length} bytes is longer than {MAX_REQUEST_BYTES}")
    document: dict[str, Any] = msgspec.msgpack.decode(_receive(connection, length))
    return document


def _receive(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view, got = memoryview(data), 0
    while got < length:
        count = connection.recv_into(view[got:], min(length - got, 1 << 22))
        if count == 0:
            raise ConnectionError(f"the peer hung up after {got} of {length} bytes")
        got += count
    return data


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        logger.debug("a connection was closed already")


class ShardClient:
    """Asks one node's shard server. One thread uses it; the connection is kept until `close`."""

    def __init__(self, host: str, port: int, token: str, timeout_s: float) -> None:
        """`timeout_s` bounds the connection and each wait for bytes."""
        self.peer = f"{host}:{port}"
        self._address, self._token, self._timeout_s = (host, port), token, timeout_s
        self._connection: socket.socket | None = None

    def read(
        self, source: Source, shards: Sequence[ShardId]
    ) -> Iterator[tuple[ShardId, bytearray | ShardUnavailable | ShardCorrupt]]:
        """Each shard's verified bytes, in the order asked, or why this one is not to be had from here.

        Raises:
            PeerTimeout, PeerUnreachable, PeerRefused: nothing more comes from this peer.
        """
        try:
            connection = self._request(source, shards)
            for shard in shards:
                yield shard, self._reply(connection, source, shard)
        except TimeoutError as error:
            self.close()
            raise PeerTimeout(self.peer, f"sending shards of {source}", self._timeout_s) from error
        except PeerRefused:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise PeerUnreachable(self.peer, str(error)) from error

    def _request(self, source: Source, shards: Sequence[ShardId]) -> socket.socket:
        if self._connection is None:
            self._connection = socket.create_connection(self._address, self._timeout_s)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        place = (source.kind, source.node, source.name, source.step, source.generation)
        document = msgspec.msgpack.encode(
            {"version": VERSION, "token": self._token, "source": place, "shards": list(shards)}
        )
        self._connection.sendall(len(document).to_bytes(4, "little") + document)
        return self._connection

    def _reply(
        self, connection: socket.socket, source: Source, shard: ShardId
    ) -> bytearray | ShardUnavailable | ShardCorrupt:
        status, crc, length = _REPLY.unpack(_receive(connection, _REPLY.size))
        if status == _REFUSED:
            raise PeerRefused(self.peer, "it rejected the token or the protocol version")
        if status == _UNAVAILABLE:
            return ShardUnavailable(shard, f"{self.peer}, {source}", "the peer has it no more")
        if status == _CORRUPT:
            return ShardCorrupt(shard, f"{self.peer}, {source}", "the peer's own copy is damaged")
        if length > MAX_SHARD_BYTES:
            raise ConnectionError(f"{self.peer} announces {length} bytes for one shard")
        data = _receive(connection, length)
        return data if zlib.crc32(data) == crc else ShardCorrupt(shard, f"{self.peer}, {source}", "damaged on the way")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
