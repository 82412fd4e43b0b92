"""The frames between a shard server and its clients, and the reading of them: bounded in size and in time.

    on connection  server -> client   nonce (32 bytes)
                   client -> server   version u8, mac (32 bytes)
                   server -> client   status u8: OK, or REFUSED and the end
    request        client -> server   u32 length, msgpack {op, ...}, then the payload of a push
    reply          server -> client   for each shard in the order asked: status u8, length u64, bytes

No checksum travels with a read: the reader has it from the schedule, and so from the snapshot's birth.

`mac` is HMAC-SHA256 of the connection's nonce under the token, which itself never travels. It keeps strangers out;
the bytes are neither encrypted nor authenticated, so run it inside a trusted network.
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
import time
from typing import Any

import msgspec

from recovery.cancellation import await_bytes

VERSION = 4
NONCE_BYTES = 32
HELLO = struct.Struct("<B32s")
MAX_REQUEST_BYTES = 64 << 20
MAX_SHARD_BYTES = 64 << 30
# A peer that trickles is as good as stalled: bytes count against the deadline at this speed.
MIN_BYTES_PER_S = 2 << 20
REPLY = struct.Struct("<BQ")
OK, UNAVAILABLE, CORRUPT, REFUSED, FULL = range(5)
_PIECE_BYTES = 4 << 20


def mac_of(token: str, nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), nonce, "sha256")


def send_within(connection: socket.socket, data: memoryview) -> None:
    """Send all of `data`. Raises TimeoutError if that takes longer than the socket's timeout and the time that
    MIN_BYTES_PER_S allows, or if a few MiB take longer than the timeout.
    """
    patience = connection.gettimeout()
    until = None if patience is None else time.monotonic() + patience + len(data) / MIN_BYTES_PER_S
    for start in range(0, len(data), _PIECE_BYTES):
        connection.sendall(data[start : start + _PIECE_BYTES])
        if until is not None and time.monotonic() > until and start + _PIECE_BYTES < len(data):
            raise TimeoutError(f"{start + _PIECE_BYTES} of {len(data)} bytes were taken in time")


def send_request(connection: socket.socket, document: dict[str, Any]) -> None:
    raw = msgspec.msgpack.encode(document)
    connection.sendall(len(raw).to_bytes(4, "little") + raw)


def receive_request(connection: socket.socket) -> dict[str, Any] | None:
    """The next request; None when the peer has hung up between requests.

    Raises:
        ConnectionError, TimeoutError, ValueError (too long), msgspec.DecodeError.
    """
    first = connection.recv(1)
    if not first:
        return None
    length = int.from_bytes(first + receive(connection, 3), "little")
    if length > MAX_REQUEST_BYTES:
        raise ValueError(f"a request of {length} bytes is longer than {MAX_REQUEST_BYTES}")
    document: dict[str, Any] = msgspec.msgpack.decode(receive(connection, length))
    return document


def receive(connection: socket.socket, length: int, cancelled: threading.Event | None = None) -> bytearray:
    """Exactly `length` bytes (a short message)."""
    data = bytearray(length)
    receive_into(connection, memoryview(data), cancelled)
    return data


def receive_into(connection: socket.socket, view: memoryview, cancelled: threading.Event | None = None) -> None:
    """Fill `view`.

    Raises:
        ConnectionError: the peer hung up before. TimeoutError: nothing came within the socket's timeout, or all of it
            took longer than that and the time that MIN_BYTES_PER_S allows. Cancelled: `cancelled` was set before.
    """
    length, got = len(view), 0
    patience = connection.gettimeout()
    until = None if patience is None else time.monotonic() + patience + length / MIN_BYTES_PER_S
    while got < length:
        await_bytes(connection, cancelled, "bytes of a peer")
        count = connection.recv_into(view[got:], min(length - got, _PIECE_BYTES))
        if count == 0:
            raise ConnectionError(f"the peer hung up after {got} of {length} bytes")
        got += count
        if until is not None and time.monotonic() > until and got < length:
            raise TimeoutError(f"{got} of {length} bytes came in time")
