"""Shard server: serves a node's snapshots to other nodes over TCP and takes in pushed copies.

See `peers.protocol`. A connection serves many requests, one after the other, in a thread of its
own. Bytes go from the snapshot's file to the socket inside the kernel; the reader checks them
against the checksum taken with the snapshot, whatever happened in between.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import socketserver
import ssl
import threading
import time
from dataclasses import dataclass
from typing import Any

from recovery.errors import ShardUnavailable, SnapshotError
from recovery.local.agent_store import AgentStore
from recovery.local.snapshot_file import SnapshotFileWriter
from recovery.local.snapshot_format import FileMap
from recovery.peers.client import ShardClient
from recovery.peers.protocol import (
    CORRUPT,
    FULL,
    HELLO,
    NONCE_BYTES,
    OK,
    REFUSED,
    REPLY,
    UNAVAILABLE,
    VERSION,
    WELCOME,
    FileBytes,
    PushShards,
    ShardRequest,
    mac_of,
    receive,
    receive_into,
    receive_request,
    send_within,
)
from recovery.peers.tls import PeerTls
from recovery.state.holdings import Source
from recovery.state.layout import ShardId

__all__ = ["ShardClient", "ShardServer"]

logger = logging.getLogger(__name__)

IDLE_S = 60.0


MAX_CONNECTIONS = 1024
"""Limit on connections of peers: 64 workers restore at once, each with a few kept ones."""
MAX_STRANGERS = 256
"""Limit on connections that have not shown the token; one more closes the oldest of them."""
MAX_PUSHES = 8
GREETING_S = 10.0


@dataclass(frozen=True)
class ServerLimits:
    """Limits on connections of peers at a time, and on those of them that push."""

    connections: int = MAX_CONNECTIONS
    pushes: int = MAX_PUSHES


class ShardServer:
    """Shard server; owns a listening socket and one thread per connection; serves until `close`.

    Bounds: `limits.connections` of peers at a time, `limits.pushes` of them pushing. One more
    connection closes the one that has waited longest for its next request, or is closed itself if
    none waits.
    One more push is answered that there is no room. A peer has GREETING_S seconds to show its
    token, IDLE_S between two requests and for each wait within one. Connections that have not shown
    the token are at most MAX_STRANGERS and take no place from peers.
    """

    def __init__(
        self,
        store: AgentStore,
        token: str,
        *,
        host: str,
        port: int = 0,
        limits: ServerLimits | None = None,
        tls: PeerTls | None = None,
    ) -> None:
        """Listen on `host` only, the address of the interface that peers are to use.

        Port 0 takes a free one, see `port`. `tls` None: taken from the environment
        (`recovery.peers.tls`).
        """
        limits = limits or ServerLimits()
        pushes = threading.BoundedSemaphore(limits.pushes)
        tls = tls or PeerTls.from_environment()
        context = None if tls is None else tls.context(server=True)
        handler = type(
            "Handler",
            (_Handler,),
            {"store": store, "token": token, "pushes": pushes, "context": context},
        )
        self.listener = _ThreadingServer((host, port), handler, limits.connections)
        self.port = int(self.listener.server_address[1])
        self._thread = threading.Thread(
            target=self.listener.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="shard-server",
            daemon=True,
        )
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop listening, close every connection, join all threads.

        Threads that still run after `timeout_s` are logged.
        """
        until = time.monotonic() + timeout_s
        self.listener.shutdown()
        self.listener.server_close()
        self._thread.join(timeout_s)
        self.listener.hang_up(until)

    def __enter__(self) -> ShardServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ThreadingServer(socketserver.TCPServer):
    """TCP server with one thread per connection; threads are counted and joined."""

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: Any, max_connections: int) -> None:
        super().__init__(address, handler)
        self._max_connections = max_connections
        self.strangers: dict[threading.Thread, socket.socket] = {}
        """Connections without a token yet, the oldest first."""
        self.open: dict[threading.Thread, socket.socket] = {}
        """Connections of peers."""
        self.idle: dict[threading.Thread, None] = {}
        """Connections between two requests, the one that has waited longest first."""
        self._threads: list[threading.Thread] = []
        """Threads of connections that are open, or were open a moment ago."""
        self._closing = False
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a new connection in a thread of its own.

        If there are too many connections without a token, the oldest of them is closed.
        """
        thread = threading.Thread(
            target=self._serve,
            args=(request, client_address),
            name=f"shard-server {client_address}",
            daemon=True,
        )
        with self._lock:
            if len(self.strangers) >= MAX_STRANGERS:
                oldest = next(iter(self.strangers))
                _shut(self.strangers.pop(oldest))
            # Its first call of `note` comes after this block.
            thread.start()
            self.strangers[thread] = request
            self._threads = [each for each in (*self._threads, thread) if each.is_alive()]

    def admit(self) -> bool:
        """Count the calling thread's connection among those of peers.

        Returns False if too many connections have something to do, or if it was closed for lack of
        a token.
        """
        with self._lock:
            thread = threading.current_thread()
            connection = self.strangers.pop(thread, None)
            if connection is None:
                return False
            if len(self.open) >= self._max_connections and not self._end_an_idle_one():
                logger.warning("A peer is hung up on: %d are served", self._max_connections)
                return False
            self.open[thread] = connection
            return True

    def _end_an_idle_one(self) -> bool:
        """Close the connection that has been idle longest; return False if there is none.

        The peer makes a new one for its next request and does not count this as an error.
        """
        thread = next(iter(self.idle), None)
        if thread is None:
            return False
        del self.idle[thread]
        _shut(self.open[thread])
        return True

    def note(self, connection: socket.socket, *, idle: bool) -> None:
        """Record the calling thread's connection, and whether it waits for its next request.

        TLS puts another object in the connection's place.
        """
        with self._lock:
            thread = threading.current_thread()
            known = self.open if thread in self.open else self.strangers
            if thread in known:
                known[thread] = connection
            self.idle.pop(thread, None)
            if idle and thread in self.open:
                self.idle[thread] = None
            if self._closing:
                _shut(connection)

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        finally:
            self.shutdown_request(request)
            thread = threading.current_thread()
            with self._lock:
                self.strangers.pop(thread, None)
                self.open.pop(thread, None)
                self.idle.pop(thread, None)

    def hang_up(self, until: float) -> None:
        with self._lock:
            self._closing = True
            for connection in (*self.strangers.values(), *self.open.values()):
                _shut(connection)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("connections of the shard server are still at work after its close")


_MALFORMED = (OSError, KeyError, TypeError, ValueError, OverflowError)
"""Errors of a connection that ends, or of a request whose fields no client of ours would send."""


class _Handler(socketserver.BaseRequestHandler):
    """Handler of one peer's connection."""

    store: AgentStore
    token: str
    pushes: threading.BoundedSemaphore
    context: ssl.SSLContext | None
    request: socket.socket
    server: _ThreadingServer

    def handle(self) -> None:
        self.request.settimeout(GREETING_S)
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if self.context is not None:
                self.request = self.context.wrap_socket(
                    self.request, server_side=True, do_handshake_on_connect=False
                )
            self.server.note(self.request, idle=False)
            # After the note: a close of the server then ends a handshake, too.
            if isinstance(self.request, ssl.SSLSocket):
                self.request.do_handshake()
            if not self._greet():
                return

            self.request.settimeout(IDLE_S)
            while True:
                request = receive_request(self.request)
                if request is None:
                    return
                self.server.note(self.request, idle=False)
                if not self._answer(request):
                    return
                self.server.note(self.request, idle=True)
        except _MALFORMED as error:
            logger.info("a peer's connection ended: %s", error)

    def finish(self) -> None:
        """Close the TLS socket, which has taken the accepted socket over.

        The server closes the accepted one.
        """
        if self.context is not None:
            self.request.close()

    def _greet(self) -> bool:
        """Return True if the peer has the token; nothing else that it sends is read before."""
        nonce = os.urandom(NONCE_BYTES)
        self.request.sendall(nonce)
        version, theirs, mac = HELLO.unpack(receive(self.request, HELLO.size))
        known = version == VERSION and hmac.compare_digest(
            mac, mac_of(self.token, "client", nonce, theirs)
        )
        if known and not self.server.admit():
            return False

        if known:
            own = mac_of(self.token, "server", nonce, theirs)
            self.request.sendall(WELCOME.pack(OK, own))
        else:
            self.request.sendall(bytes([REFUSED]))
        return known

    def _answer(self, request: ShardRequest) -> bool:
        """Serve one request; return False if the connection is unusable afterwards."""
        if isinstance(request, PushShards):
            status = self._push(request)
            self.request.sendall(REPLY.pack(status, 0))
            return status == OK
        for shard in request.shards:
            self._send(request.source, shard)
        return True

    def _send(self, source: Source, shard: ShardId) -> None:
        try:
            file = self.store.file_of(source, shard)
            extent = file.extent(shard)
        except ShardUnavailable:
            self.request.sendall(REPLY.pack(UNAVAILABLE, 0))
        else:
            self.request.sendall(REPLY.pack(OK, extent.num_bytes))
            send_within(self.request, FileBytes(file, extent.offset, extent.num_bytes))

    def _push(self, request: PushShards) -> int:
        """Take a push and return its status.

        The peer that reads the status may push again at once: its slot is free by then.
        """
        if request.to not in (None, self.store.node):
            # Another node had this address before: a copy here may be beside its original.
            return REFUSED
        if not self.pushes.acquire(blocking=False):
            return FULL
        try:
            return self._take(request)
        finally:
            self.pushes.release()

    def _take(self, request: PushShards) -> int:
        """Store pushed shards as a snapshot of their worker, once all are here and whole."""
        tensors = {spec.name: spec for spec in request.tensors}
        file_map = FileMap.of(request.worker, tensors, request.shards)
        checksums = request.checksums
        try:
            writer = self.store.accept(request.step, request.generation, file_map)
        except SnapshotError as error:
            logger.warning("a peer's copy is not taken: %s", error)
            return FULL

        status = CORRUPT
        try:
            whole = memoryview(writer.buffer)
            held = self.store.fill_unchanged(writer.map, checksums, whole)
            self.request.sendall(REPLY.pack(OK, len(held)) + bytes(held))
            if self._fill(writer, checksums, held):
                writer.commit_with(request.step, request.generation, checksums)
                status = OK
                if request.superseded is not None:
                    self.store.drop_copies(request.worker, request.superseded)
        finally:
            writer.close()
            if status != OK:
                writer.path.unlink(missing_ok=True)
        return status

    def _fill(self, writer: SnapshotFileWriter, checksums: list[int], held: list[bool]) -> bool:
        """Receive the shards that are not `held`; return False if one of them is damaged."""
        whole = memoryview(writer.buffer)
        extents = writer.map.extents.values()
        for extent, expected, is_held in zip(extents, checksums, held, strict=True):
            if is_held:
                continue
            view = whole[extent.offset : extent.end]
            if receive_into(self.request, view) != expected:
                return False
        return True


def _shut(connection: socket.socket) -> None:
    """Wake the thread that waits for the connection's bytes.

    Not TLS's own `shutdown`, which that thread would have to take part in.
    """
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        logger.debug("a connection was closed already")
