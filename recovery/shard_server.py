"""Serves a node's snapshots to other nodes over TCP, and takes in copies that they push here (see `shard_protocol`).

A connection serves many requests, one after the other, in a thread of its own. Bytes go out straight from the mapped
snapshot with the checksum that was recorded at its commit: the reader checks them, whatever happened in between.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import socketserver
import threading
import zlib
from typing import Any

import msgspec

from recovery.agent_store import AgentStore
from recovery.errors import ShardUnavailable, SnapshotError
from recovery.holdings import Source
from recovery.layout import ShardId, TensorSpec
from recovery.shard_client import ShardClient
from recovery.shard_protocol import (
    CORRUPT,
    FULL,
    NONCE_BYTES,
    OK,
    REFUSED,
    REPLY,
    UNAVAILABLE,
    VERSION,
    mac_of,
    receive_into,
    receive_request,
)
from recovery.snapshot_file import FileMap, SnapshotFileWriter

__all__ = ["ShardClient", "ShardServer"]

logger = logging.getLogger(__name__)

IDLE_S = 60.0


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
    request_queue_size = 128

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
    request: socket.socket

    def handle(self) -> None:
        self.request.settimeout(IDLE_S)
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.track(self.request, opened=True)
        try:
            nonce = os.urandom(NONCE_BYTES)
            self.request.sendall(nonce)
            while (request := receive_request(self.request)) is not None:
                if not self._answer(request, mac_of(self.token, nonce)):
                    return
        except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            logger.info("a peer's connection ended: %s", error)
        finally:
            self.server.track(self.request, opened=False)

    def _answer(self, request: dict[str, Any], mac: bytes) -> bool:
        """Do what was asked; False after a request that is refused, or that leaves the connection unusable."""
        sent = request["mac"]
        if request["version"] != VERSION or not isinstance(sent, bytes) or not hmac.compare_digest(sent, mac):
            self.request.sendall(REPLY.pack(REFUSED, 0, 0))
            return False
        if request["op"] == "push":
            return self._take(request)
        source = Source(*request["source"])
        for tensor, unit in request["shards"]:
            self._send(source, ShardId(str(tensor), int(unit)))
        return True

    def _send(self, source: Source, shard: ShardId) -> None:
        try:
            file = self.store.file_of(source, shard)
            data, crc = file.view(shard), file.checksum(shard)
        except ShardUnavailable:
            self.request.sendall(REPLY.pack(UNAVAILABLE, 0, 0))
        else:
            self.request.sendall(REPLY.pack(OK, crc, len(data)))
            self.request.sendall(data)

    def _take(self, request: dict[str, Any]) -> bool:
        """Store pushed shards as a snapshot of their worker, once all are here and whole."""
        specs = [TensorSpec.from_document(document) for document in request["tensors"]]
        shards = [ShardId(str(tensor), int(unit)) for tensor, unit in request["shards"]]
        crcs = [int(crc) for crc in request["crcs"]]
        file_map = FileMap.of(str(request["worker"]), {spec.name: spec for spec in specs}, shards)
        try:
            writer = self.store.accept(int(request["step"]), int(request["generation"]), file_map)
        except SnapshotError as error:
            logger.warning("a peer's copy is not taken: %s", error)
            self.request.sendall(REPLY.pack(FULL, 0, 0))
            return False
        status = CORRUPT
        try:
            self.request.sendall(REPLY.pack(OK, 0, 0))
            if self._fill(writer, crcs):
                writer.commit_with(int(request["step"]), int(request["generation"]), crcs)
                status = OK
                self._drop_superseded(request)
        finally:
            writer.close()
            if status != OK:
                writer.path.unlink(missing_ok=True)
        self.request.sendall(REPLY.pack(status, 0, 0))
        return status == OK

    def _drop_superseded(self, request: dict[str, Any]) -> None:
        if request.get("superseded") is not None:
            generation, step = request["superseded"]
            self.store.drop_copies(str(request["worker"]), (int(generation), int(step)))

    def _fill(self, writer: SnapshotFileWriter, crcs: list[int]) -> bool:
        whole = memoryview(writer.buffer)
        for extent, crc in zip(writer.map.extents.values(), crcs, strict=True):
            view = whole[extent.offset : extent.offset + extent.num_bytes]
            receive_into(self.request, view)
            if zlib.crc32(view) != crc:
                return False
        return True


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        logger.debug("a connection was closed already")
