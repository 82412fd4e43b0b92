"""Asks another node's shard server for shards, and pushes copies to it. What comes back is checked before it is
used.
"""

from __future__ import annotations

import hmac
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from recovery.cancellation import call_until
from recovery.errors import PeerRefused, PeerTimeout, PeerUnreachable, ShardCorrupt, ShardUnavailable, SnapshotError
from recovery.peers.protocol import (
    CORRUPT,
    FULL,
    HELLO,
    MAX_SHARD_BYTES,
    NONCE_BYTES,
    OK,
    REPLY,
    UNAVAILABLE,
    VERSION,
    WELCOME,
    FileRange,
    mac_of,
    receive,
    receive_into,
    send_request,
    send_within,
)
from recovery.peers.tls import PeerTls
from recovery.state.checksum import checksum
from recovery.state.holdings import Source
from recovery.state.layout import ShardId, TensorSpec
from recovery.storage.protocol import BandwidthLimit

SEND_BYTES = 1 << 20

ShardReply = memoryview | ShardUnavailable | ShardCorrupt


class ShardClient:
    """One connection to one node's server, kept until `close`. One thread uses it; take several for several
    streams.
    """

    def __init__(
        self, host: str, port: int, token: str, timeout_s: float, *, reuse_buffer: bool = False,
        cancelled: threading.Event | None = None, tls: PeerTls | None = None,
    ) -> None:  # fmt: skip
        """`host` is the peer's address on the interface to use. `timeout_s` bounds the connection, each wait for
        bytes and (beside a minimal speed) each shard. With `reuse_buffer` what `read` yields is valid until the
        next. Once `cancelled` is set, a read ends with Cancelled. `tls` None: what the environment
        says (`recovery.peers.tls`).
        """
        self._tls = tls or PeerTls.from_environment()
        self._cancelled = cancelled
        self._reuse_buffer = reuse_buffer
        self._scratch = np.empty(0, dtype=np.uint8)
        self.peer = f"{host}:{port}"
        self._address, self._token, self._timeout_s = (host, port), token, timeout_s
        self._connection: socket.socket | None = None

    def __enter__(self) -> ShardClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(
        self, source: Source, shards: Sequence[ShardId], checksums: Mapping[ShardId, int],
        into: Mapping[ShardId, memoryview] | None = None,
    ) -> Iterator[tuple[ShardId, ShardReply]]:  # fmt: skip
        """Each shard's bytes, in the order asked, or why this one is not to be had from here.

        They are checked against `checksums`, which the reader has from the holding or the schedule, never from the peer that
        sends. With `into`, shards named there are received straight into that memory (which holds anything after a failure).

        Raises:
            PeerTimeout, PeerUnreachable, PeerRefused: nothing more comes from this peer. Cancelled.
        """
        finished = False
        try:
            connection = self._ask({"op": "read", "source": _place(source), "shards": list(shards)})
            for shard in shards:
                yield shard, self._reply(connection, source, shard, checksums.get(shard), (into or {}).get(shard))
            finished = True
        except PeerRefused:
            raise
        except OSError as error:
            raise self._failure(error, f"sending shards of {source}") from error
        finally:
            if not finished:  # left half-way, the connection's next bytes belong to this request
                self.close()

    def push(
        self, source: Source, tensors: Mapping[str, TensorSpec], pieces: Mapping[ShardId, memoryview | FileRange], *,
        checksums: Sequence[int] | None = None, limit: BandwidthLimit | None = None, superseded: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Put copies of `source`'s shards on the peer's node, committed there as a whole; blocks until they are.

        `checksums` are the recorded ones, in the order of `pieces` (computed here if None, of memory only); `limit` bounds the bytes per
        second; `superseded`: copies of this worker that are older than this (generation, step) are removed afterwards.

        Raises:
            SnapshotError: the peer has no room. ShardCorrupt: they were damaged on the way; nothing is kept.
            PeerTimeout, PeerUnreachable, PeerRefused: as `read`.
        """
        used = {shard.tensor: tensors[shard.tensor] for shard in pieces}
        request = {
            "op": "push",
            "worker": source.name,
            "step": source.step,
            "generation": source.generation,
            "tensors": [spec.to_document() for spec in used.values()],
            "shards": list(pieces),
            "checksums": list(checksums) if checksums is not None else _checksums(pieces),
            "superseded": superseded,
        }
        try:
            connection = self._ask(request)
            self._check_push(connection, source)
            for piece in pieces.values():
                _send_bounded(connection, piece, limit)
            self._check_push(connection, source)
        except PeerRefused:
            raise
        except OSError as error:
            raise self._failure(error, f"taking shards of {source}") from error

    def _check_push(self, connection: socket.socket, source: Source) -> None:
        status = REPLY.unpack(receive(connection, REPLY.size))[0]
        if status == OK:
            return
        self.close()
        if status == FULL:
            raise SnapshotError(self.peer, f"has no room for shards of {source}")
        raise ShardCorrupt("all", self.peer, "damaged on the way")

    def _ask(self, request: dict[str, object]) -> socket.socket:
        if self._connection is None:
            connect = partial(socket.create_connection, self._address, self._timeout_s)
            self._connection = call_until(self._cancelled, connect, self.peer)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                self._connection = self._tls.context(server=False).wrap_socket(self._connection)
            self._greet(self._connection)
        send_request(self._connection, request)
        return self._connection

    def _greet(self, connection: socket.socket) -> None:
        """Show that we have the token, and see that the peer has it."""
        theirs, ours = bytes(receive(connection, NONCE_BYTES, self._cancelled)), os.urandom(NONCE_BYTES)
        connection.sendall(HELLO.pack(VERSION, ours, mac_of(self._token, "client", theirs, ours)))
        if receive(connection, 1, self._cancelled)[0] != OK:
            self.close()
            raise PeerRefused(self.peer, "it rejected the token or the protocol version")
        mac = receive(connection, WELCOME.size - 1, self._cancelled)
        if not hmac.compare_digest(bytes(mac), mac_of(self._token, "server", theirs, ours)):
            self.close()
            raise PeerRefused(self.peer, "it does not have the token itself: it is no agent of this job")

    def _reply(
        self, connection: socket.socket, source: Source, shard: ShardId, expected: int | None, memory: memoryview | None
    ) -> ShardReply:
        status, length = REPLY.unpack(receive(connection, REPLY.size, self._cancelled))
        where = f"{self.peer}, {source}"
        if status == UNAVAILABLE:
            return ShardUnavailable(shard, where, "the peer has it no more")
        if status == CORRUPT:
            return ShardCorrupt(shard, where, "the peer's own copy is damaged")
        if length > MAX_SHARD_BYTES or (memory is not None and length != len(memory)):
            raise ConnectionError(f"{self.peer} announces {length} bytes for {shard}")
        data = self._memory(length) if memory is None else memory
        found = receive_into(connection, data, self._cancelled)
        if expected is None:
            return ShardUnavailable(shard, where, "no checksum of it is known")
        return data if found == expected else ShardCorrupt(shard, where, "the bytes are not those committed")

    def _memory(self, length: int) -> memoryview:
        # New memory costs a page fault for every 4 KiB, which is slower than the network.
        if not self._reuse_buffer:
            return np.empty(length, dtype=np.uint8).data
        if self._scratch.size < length:
            self._scratch = np.empty(length, dtype=np.uint8)
        return self._scratch[:length].data

    def _failure(self, error: OSError, doing: str) -> PeerTimeout | PeerUnreachable:
        self.close()
        if isinstance(error, TimeoutError):
            return PeerTimeout(self.peer, doing, self._timeout_s)
        return PeerUnreachable(self.peer, str(error))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _send_bounded(connection: socket.socket, piece: memoryview | FileRange, limit: BandwidthLimit | None) -> None:
    for start in range(0, len(piece), SEND_BYTES):
        length = min(SEND_BYTES, len(piece) - start)
        if limit is not None:
            limit.take(length)
        if isinstance(piece, FileRange):
            send_within(connection, FileRange(piece.owner, piece.offset + start, length))
        else:
            send_within(connection, piece[start : start + length])


def _checksums(pieces: Mapping[ShardId, memoryview | FileRange]) -> list[int]:
    memory = [piece for piece in pieces.values() if isinstance(piece, memoryview)]
    assert len(memory) == len(pieces), "a file's ranges come with the checksums that it records"
    return [checksum(piece) for piece in memory]


def _place(source: Source) -> tuple[str, str, str, int, int]:
    return source.kind, source.node, source.name, source.step, source.generation
