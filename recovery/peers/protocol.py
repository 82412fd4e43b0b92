"""Frames between a shard server and its clients, sent and received with bounds in size and time.

    on connection  server -> client   nonce (32 bytes)
                   client -> server   version u8, nonce (32 bytes), mac (32 bytes)
                   server -> client   status u8: OK and a mac (32 bytes), or REFUSED and the end
    request        client -> server   u32 length, msgpack {op, ...}, then the payload of a push
    reply          server -> client   for each shard in the order asked: status u8, length u64,
                                      bytes
    reply to push  server -> client   status u8, number of shards u64, for each shard u8 1 if its
                                      bytes are held there already: it is not sent; after the
                                      payload status u8, 0 u64

No checksum is sent with a read: the reader has it from the schedule, and so from the time of the
snapshot.

Each side's `mac` is HMAC-SHA256 of its role and both nonces under the token, which itself is never
sent: neither side speaks to one without it. That keeps peers without the token out; the bytes are
neither encrypted nor authenticated unless TLS carries them (`peers.tls`).
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import ssl
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from recovery.cancellation import await_bytes
from recovery.state.checksum import BLOCK_BYTES, RunningChecksum
from recovery.state.holdings import Source
from recovery.state.layout import ShardId, TensorSpec

VERSION = 7
NONCE_BYTES = 32
HELLO = struct.Struct("<B32s32s")
WELCOME = struct.Struct("<B32s")
MAX_REQUEST_BYTES = 64 << 20
MAX_SHARD_BYTES = 64 << 30
# A peer that trickles is as good as stalled: bytes count against the deadline at this speed.
MIN_BYTES_PER_S = 2 << 20
REPLY = struct.Struct("<BQ")
OK, UNAVAILABLE, CORRUPT, REFUSED, FULL = range(5)
PIECE_BYTES = 4 << 20


def mac_of(token: str, role: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Return the MAC with which `role` ("client" or "server") proves that it has the token."""
    return hmac.digest(token.encode(), role.encode() + server_nonce + client_nonce, "sha256")


@dataclass(frozen=True)
class FileBytes:
    """Bytes of an open file, sent without passing through this process.

    `owner` keeps its descriptor open.
    """

    owner: Any
    offset: int
    num_bytes: int

    def __len__(self) -> int:
        return self.num_bytes


@dataclass(frozen=True)
class Deadline:
    """Deadline for sending or receiving `num_bytes` over a connection.

    It is the connection's timeout plus the time that the bytes take at MIN_BYTES_PER_S.
    """

    until: float | None

    @staticmethod
    def of(connection: socket.socket, num_bytes: int) -> Deadline:
        patience = connection.gettimeout()
        if patience is None:
            return Deadline(None)
        return Deadline(time.monotonic() + patience + num_bytes / MIN_BYTES_PER_S)

    def check(self, done: int, num_bytes: int) -> None:
        if self.until is not None and time.monotonic() > self.until and done < num_bytes:
            raise TimeoutError(f"{done} of {num_bytes} bytes went through in time")


def send_within(connection: socket.socket, data: memoryview | FileBytes) -> None:
    """Send all of `data`.

    Raises TimeoutError where its Deadline passes, or nothing moves for the socket's timeout.
    """
    if isinstance(data, memoryview):
        _send_memory(connection, data)
    elif isinstance(connection, ssl.SSLSocket):
        # The kernel cannot encrypt: the bytes pass through this process.
        read = os.pread(data.owner.fileno(), data.num_bytes, data.offset)
        _send_memory(connection, memoryview(read))
    else:
        _send_file(connection, data)


def _send_memory(connection: socket.socket, data: memoryview) -> None:
    deadline = Deadline.of(connection, len(data))
    for start in range(0, len(data), PIECE_BYTES):
        end = start + PIECE_BYTES
        connection.sendall(data[start:end])
        deadline.check(end, len(data))


def _send_file(connection: socket.socket, data: FileBytes) -> None:
    """Send from the page cache to the socket inside the kernel (`sendfile`)."""
    deadline = Deadline.of(connection, data.num_bytes)
    sent = 0
    patience = connection.gettimeout()
    patience_ms = None if patience is None else 1000 * patience
    writable = select.poll()
    writable.register(connection, select.POLLOUT)
    while sent < data.num_bytes:
        offset = data.offset + sent
        length = min(PIECE_BYTES, data.num_bytes - sent)
        try:
            count = os.sendfile(connection.fileno(), data.owner.fileno(), offset, length)
        except BlockingIOError:
            # A socket with a timeout does not block in the kernel.
            if not writable.poll(patience_ms):
                raise TimeoutError(f"nothing was taken within {patience:.3g} s") from None
            continue
        if count == 0:
            raise ConnectionError("the file ends before the range that is to be sent")
        sent += count
        deadline.check(sent, data.num_bytes)


class ReadShards(msgspec.Struct, tag_field="op", tag="read"):
    """Request for shards of `source`."""

    source: Source
    shards: list[ShardId]


class PushShards(msgspec.Struct, tag_field="op", tag="push", kw_only=True):
    """Request to keep copies of a worker's shards, whose bytes follow.

    checksums: those of `shards`, in their order. superseded: copies of the worker that are older
    than this (generation, step) are removed afterwards. to: node that the copies are for.
    """

    worker: str
    step: int
    generation: int
    tensors: list[TensorSpec]
    shards: list[ShardId]
    checksums: list[int]
    superseded: tuple[int, int] | None = None
    to: str | None = None


ShardRequest = ReadShards | PushShards
_REQUESTS: msgspec.msgpack.Decoder[ShardRequest] = msgspec.msgpack.Decoder(ShardRequest)


def send_request(connection: socket.socket, request: ShardRequest) -> None:
    raw = msgspec.msgpack.encode(request)
    connection.sendall(len(raw).to_bytes(4, "little") + raw)


def receive_request(connection: socket.socket) -> ShardRequest | None:
    """Receive the next request; None if the peer has closed the connection between requests.

    Raises:
        ConnectionError, TimeoutError, ValueError (too long), msgspec.DecodeError.
    """
    first = connection.recv(1)
    if not first:
        return None
    length = int.from_bytes(first + receive(connection, 3), "little")
    if length > MAX_REQUEST_BYTES:
        raise ValueError(f"a request of {length} bytes is longer than {MAX_REQUEST_BYTES}")
    return _REQUESTS.decode(receive(connection, length))


def receive(
    connection: socket.socket, length: int, cancelled: threading.Event | None = None
) -> bytearray:
    """Receive exactly `length` bytes (a short message)."""
    data = bytearray(length)
    receive_into(connection, memoryview(data), cancelled)
    return data


def receive_into(
    connection: socket.socket, view: memoryview, cancelled: threading.Event | None = None
) -> int:
    """Fill `view`; return its checksum, computed while each piece is in the processor's cache.

    Raises:
        ConnectionError: the peer closed the connection before. TimeoutError: nothing came within
        the socket's timeout, or not all before its Deadline. Cancelled: `cancelled` was set before.
    """
    length = len(view)
    got = 0
    checked = 0
    running = RunningChecksum()
    deadline = Deadline.of(connection, length)
    while got < length:
        await_bytes(connection, cancelled, "bytes of a peer")
        count = connection.recv_into(view[got:], min(length - got, PIECE_BYTES))
        if count == 0:
            raise ConnectionError(f"the peer hung up after {got} of {length} bytes")
        got += count

        # A running checksum takes whole blocks, and then the rest.
        whole = got
        if got < length:
            whole -= (got - checked) % BLOCK_BYTES
        running.update(view[checked:whole])
        checked = whole
        deadline.check(got, length)
    return running.value()
