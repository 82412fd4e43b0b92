"""Client of another node's shard server: requests shards from it and pushes copies to it.

What comes back is checked before it is used.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from recovery.cancellation import call_until, check, has_bytes
from recovery.errors import (
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    ShardCorrupt,
    ShardUnavailable,
    SnapshotError,
)
from recovery.peers.protocol import (
    CORRUPT,
    FULL,
    HELLO,
    MAX_SHARD_BYTES,
    NONCE_BYTES,
    OK,
    REFUSED,
    REPLY,
    UNAVAILABLE,
    VERSION,
    WELCOME,
    FileBytes,
    PushShards,
    ReadShards,
    ShardRequest,
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

logger = logging.getLogger(__name__)

SEND_BYTES = 1 << 20
GREETINGS = 8
"""Connections made for one request, if the peer hangs up before it has answered the greeting."""

_NO_BYTES = np.empty(0, dtype=np.uint8)

ShardReply = memoryview | ShardUnavailable | ShardCorrupt


@dataclass(frozen=True)
class PushOptions:
    """Options of a push.

    limit: bound on the bytes per second. superseded: copies of the worker that are older than this
    (generation, step) are removed afterwards. to: name of the node that the copies are for, if it
    matters; if another node has the address now, it refuses.
    """

    limit: BandwidthLimit | None = None
    superseded: tuple[int, int] | None = None
    to: str | None = None


@dataclass(frozen=True)
class _WantedShard:
    """Shard that is read: its recorded checksum, and the memory for it; None: own memory."""

    source: Source
    shard: ShardId
    checksum: int | None
    memory: memoryview | None


class ShardClient:
    """Connection to one node's shard server, made when it is needed and kept until `close`.

    One thread uses it, for one request at a time; take several clients for several streams.

    A request has the connection to itself until its reply is read to the end. A connection whose
    request was abandoned or failed is closed. If the server has closed a kept connection meanwhile
    (it was restarted, or waited too long for a request), the request is sent again over a new one,
    once.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        timeout_s: float,
        *,
        reuse_buffer: bool = False,
        tls: PeerTls | None = None,
    ) -> None:
        """Prepare a client; the connection is made with the first request.

        `host` is the peer's address on the interface to use. `timeout_s` bounds the connection,
        each wait for bytes and (with a minimal speed) each shard. With `reuse_buffer` what `read`
        yields is valid until the next. `tls` None: taken from the environment
        (`recovery.peers.tls`).
        """
        self._tls = tls or PeerTls.from_environment()
        self._reuse_buffer = reuse_buffer
        self._scratch = _NO_BYTES
        self.peer = f"{host}:{port}"
        self._address = (host, port)
        self._token = token
        self._timeout_s = timeout_s
        self._connection: socket.socket | None = None

    def __enter__(self) -> ShardClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_idle(self) -> bool:
        """True if there is a connection with no request in flight."""
        return self._connection is not None

    def read(
        self,
        source: Source,
        shards: Sequence[ShardId],
        checksums: Mapping[ShardId, int],
        into: Mapping[ShardId, memoryview] | None = None,
        cancelled: threading.Event | None = None,
    ) -> Iterator[tuple[ShardId, ShardReply]]:
        """Yield each shard's bytes, in the order asked, or the error why this peer cannot give it.

        The bytes are checked against `checksums`, which the reader has from the holding or the
        schedule, never from the peer that sends. Shards named in `into` are received straight into
        that memory (which holds anything after a failure).

        Raises:
            PeerTimeout, PeerUnreachable, PeerRefused: nothing more comes from this peer. Cancelled:
            `cancelled` was set.
        """
        if not shards:
            return
        request = ReadShards(source, list(shards))
        places = into or {}
        damaged = False
        with self._ask(request, f"sending shards of {source}", cancelled) as (connection, first):
            header = first
            for number, shard in enumerate(shards):
                if number > 0:
                    header = receive(connection, REPLY.size, cancelled)
                wanted = _WantedShard(source, shard, checksums.get(shard), places.get(shard))
                reply = self._reply(connection, header, wanted, cancelled)
                damaged = damaged or isinstance(reply, ShardCorrupt)
                yield shard, reply

        # Maybe the frames are damaged, and not the bytes alone.
        if damaged:
            self.close()
        # As large as the largest shard: not kept by each connection that waits.
        self._scratch = _NO_BYTES

    def push(
        self,
        source: Source,
        tensors: Mapping[str, TensorSpec],
        pieces: Mapping[ShardId, memoryview | FileBytes],
        *,
        checksums: Sequence[int] | None = None,
        options: PushOptions | None = None,
        cancelled: threading.Event | None = None,
    ) -> int:
        """Push copies of `source`'s shards to the peer's node, committed there as a whole.

        Blocks until they are committed; returns the bytes sent. A shard whose checksum is that of
        the peer's earlier copy is not sent again. `checksums` are the recorded ones, in the order
        of `pieces` (computed here if None, of memory only).

        Raises:
            SnapshotError: the peer has no room. ShardCorrupt: they were damaged on the way; nothing
            is kept. PeerTimeout, PeerUnreachable, PeerRefused, Cancelled: as `read`. PeerRefused
            also if the peer is another node than `options.to`.
        """
        options = options or PushOptions()
        if checksums is None:
            checksums = _checksums(pieces)
        used = {shard.tensor: tensors[shard.tensor] for shard in pieces}
        request = PushShards(
            worker=source.name,
            step=source.step,
            generation=source.generation,
            tensors=list(used.values()),
            shards=list(pieces),
            checksums=list(checksums),
            superseded=options.superseded,
            to=options.to,
        )
        with self._ask(request, f"taking shards of {source}", cancelled) as (connection, first):
            if self._check_push(first, source) != len(pieces):
                raise ConnectionError("the peer answers for another number of shards")
            held = receive(connection, len(pieces), cancelled)
            sent = 0
            for piece, is_held in zip(pieces.values(), held, strict=True):
                if not is_held:
                    _send_bounded(connection, piece, options.limit, cancelled)
                    sent += len(piece)
            self._check_push(receive(connection, REPLY.size, cancelled), source)
        return sent

    def _check_push(self, header: bytes | bytearray, source: Source) -> int:
        """Return the number in a reply to a push; raise the error that its status means."""
        status, number = REPLY.unpack(header)
        if status == OK:
            return int(number)
        if status == FULL:
            raise SnapshotError(self.peer, f"has no room for shards of {source}")
        if status == REFUSED:
            raise PeerRefused(self.peer, "it is another node than these copies are for")
        raise ShardCorrupt("all", self.peer, "damaged on the way")

    @contextmanager
    def _ask(
        self, request: ShardRequest, doing: str, cancelled: threading.Event | None = None
    ) -> Iterator[tuple[socket.socket, bytearray]]:
        """Send a request; yield its connection and the first header of its reply.

        The block reads the reply to its end.
        """
        check(cancelled, self.peer)
        # Put back at the end: a connection whose request failed half-way is not used again.
        kept = self._connection
        self._connection = None
        try:
            exchange = None
            if kept is not None:
                exchange = self._ask_again(kept, request, cancelled)
            if exchange is None:
                exchange = self._ask_anew(request, cancelled)

            connection, header = exchange
            with _closed_if_left(connection):
                yield connection, header
            self._connection = connection
        except PeerRefused:
            raise
        except TimeoutError as error:
            raise PeerTimeout(self.peer, doing, self._timeout_s) from error
        except OSError as error:
            raise PeerUnreachable(self.peer, str(error)) from error

    def _ask_again(
        self, kept: socket.socket, request: ShardRequest, cancelled: threading.Event | None
    ) -> tuple[socket.socket, bytearray] | None:
        """Send the request over a kept connection; return None if it is no longer usable.

        The server may have closed it, which says nothing against the peer; the caller then makes a
        new connection with `_ask_anew`.
        """
        try:
            with _closed_if_left(kept):
                if has_bytes(kept, 0.0):
                    raise ConnectionError("its end, or bytes that belong to no request")
                return kept, _exchange(kept, request, cancelled)
        except (ConnectionError, ssl.SSLError) as error:
            logger.debug("a kept connection to %s is of no use any more: %s", self.peer, error)
            return None

    def _ask_anew(
        self, request: ShardRequest, cancelled: threading.Event | None
    ) -> tuple[socket.socket, bytearray]:
        connection = self._greeted(cancelled)
        with _closed_if_left(connection):
            return connection, _exchange(connection, request, cancelled)

    def _greeted(self, cancelled: threading.Event | None) -> socket.socket:
        """Connect and greet, several times where the peer hangs up first.

        A peer that strangers besiege closes the oldest connection that has not shown the token: on
        a busy machine that is ours now and then.
        """
        for tries_left in reversed(range(GREETINGS)):
            connection = call_until(cancelled, self._connect, self.peer)
            try:
                with _closed_if_left(connection):
                    self._greet(connection, cancelled)
                return connection
            except ConnectionError:
                if tries_left == 0:
                    raise
        raise AssertionError("the last try returns or raises")

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, self._timeout_s)
        with _closed_if_left(connection):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                return connection
            return self._tls.context(server=False).wrap_socket(connection)

    def _greet(self, connection: socket.socket, cancelled: threading.Event | None) -> None:
        """Show that we have the token, and see that the peer has it."""
        theirs = bytes(receive(connection, NONCE_BYTES, cancelled))
        ours = os.urandom(NONCE_BYTES)
        proof = mac_of(self._token, "client", theirs, ours)
        connection.sendall(HELLO.pack(VERSION, ours, proof))

        status = receive(connection, 1, cancelled)[0]
        if status != OK:
            raise PeerRefused(self.peer, "it rejected the token or the protocol version")
        mac = receive(connection, WELCOME.size - 1, cancelled)
        if not hmac.compare_digest(bytes(mac), mac_of(self._token, "server", theirs, ours)):
            raise PeerRefused(
                self.peer, "it does not have the token itself: it is no agent of this job"
            )

    def _reply(
        self,
        connection: socket.socket,
        header: bytearray,
        wanted: _WantedShard,
        cancelled: threading.Event | None,
    ) -> ShardReply:
        status, length = REPLY.unpack(header)
        shard = wanted.shard
        memory = wanted.memory
        where = f"{self.peer}, {wanted.source}"
        if status == UNAVAILABLE:
            return ShardUnavailable(shard, where, "the peer has it no more")
        if status == CORRUPT:
            return ShardCorrupt(shard, where, "the peer's own copy is damaged")
        if length > MAX_SHARD_BYTES or (memory is not None and length != len(memory)):
            raise ConnectionError(f"{self.peer} announces {length} bytes for {shard}")

        data = self._memory(length) if memory is None else memory
        found = receive_into(connection, data, cancelled)
        if wanted.checksum is None:
            return ShardUnavailable(shard, where, "no checksum of it is known")
        if found != wanted.checksum:
            return ShardCorrupt(shard, where, "the bytes are not those committed")
        return data

    def _memory(self, length: int) -> memoryview:
        # New memory costs a page fault for every 4 KiB, which is slower than the network.
        if not self._reuse_buffer:
            return np.empty(length, dtype=np.uint8).data
        if self._scratch.size < length:
            self._scratch = np.empty(length, dtype=np.uint8)
        return self._scratch[:length].data

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _exchange(
    connection: socket.socket, request: ShardRequest, cancelled: threading.Event | None
) -> bytearray:
    """Send the request; returns the first header of its reply."""
    send_request(connection, request)
    return receive(connection, REPLY.size, cancelled)


@contextmanager
def _closed_if_left(connection: socket.socket) -> Iterator[None]:
    """Close the connection unless the block runs to its end.

    The next bytes of an abandoned request would be taken for those of the next one.
    """
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _send_bounded(
    connection: socket.socket,
    piece: memoryview | FileBytes,
    limit: BandwidthLimit | None,
    cancelled: threading.Event | None,
) -> None:
    for start in range(0, len(piece), SEND_BYTES):
        length = min(SEND_BYTES, len(piece) - start)
        check(cancelled, "sending to a peer")
        if limit is not None:
            limit.take(length, cancelled)
        if isinstance(piece, FileBytes):
            send_within(connection, FileBytes(piece.owner, piece.offset + start, length))
        else:
            send_within(connection, piece[start : start + length])


def _checksums(pieces: Mapping[ShardId, memoryview | FileBytes]) -> list[int]:
    memory = [piece for piece in pieces.values() if isinstance(piece, memoryview)]
    assert len(memory) == len(pieces), "a file's ranges come with the checksums that it records"
    return [checksum(piece) for piece in memory]
