"""Server of the rendezvous store: torch's TCPStore protocol for authenticated workers.

It is bounded in bytes and connections. The handshake is that of `runtime.process.store_tunnel`.
Each generation has keys of its own: a worker that has the secret of one generation neither reads
nor changes another's. Message layout: torch/csrc/distributed/c10d/TCPStore.cpp and
TCPStoreBackend.hpp of torch 2.13 (native byte order).
"""

from __future__ import annotations

import errno
import hmac
import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from autohet.driver.ray.listening import RareWarnings, listen_on
from autohet.runtime.process.store_tunnel import (
    HELLO,
    WELCOME,
    generation_secret,
    handshake_mac,
)

logger = logging.getLogger("autohet")
NONCE_BYTES = 16
MAX_STRANGERS = 256
"""Maximum connections without a finished handshake; a further one ends the oldest."""
MAX_MEMBERS = 8192
"""Maximum authenticated connections."""
MAX_MESSAGE_BYTES = 4 << 20
MAX_KEYS = 1 << 16
"""Maximum keys of one message."""
MAX_STORED_BYTES = 128 << 20
"""Maximum bytes of keys and values of one generation."""
MAX_UNSENT_BYTES = 32 << 20
"""Maximum bytes of answers that one connection has not read."""
KEPT_GENERATIONS = 4
"""Number of newest generations that are kept; connections of older ones are ended."""
READ_BYTES = 1 << 16
PAUSE_S = 0.5
"""Seconds until connections are accepted again after a shortage of descriptors or memory."""
SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
MAGIC = 0x3C85F7CE
(
    VALIDATE, SET, COMPARE_SET, GET, ADD, CHECK, WAIT, NUM_KEYS, DELETE_KEY,
    APPEND, MULTI_GET, MULTI_SET, CANCEL_WAIT, PING,
) = range(14)  # fmt: skip
READY, NOT_READY = bytes([0]), bytes([1])
STOP_WAITING, WAIT_CANCELED = bytes([0]), bytes([1])
LENGTH = struct.Struct("=Q")
INTEGER = struct.Struct("=q")
WORD = struct.Struct("=I")


class Incomplete(Exception):
    """Raised if more bytes have to come before the message can be read."""


class BadMessage(Exception):
    """Raised if the peer breaks the protocol or a bound; its connection ends."""


class Reader:
    """Reads one message from the beginning of `data`; raises Incomplete or BadMessage."""

    def __init__(self, data: bytearray) -> None:
        self._data = data
        self.at = 0

    def _take(self, num_bytes: int) -> bytes:
        end = self.at + num_bytes
        if end > MAX_MESSAGE_BYTES:
            raise BadMessage(f"a message of {end} bytes; at most {MAX_MESSAGE_BYTES} are taken")
        if end > len(self._data):
            raise Incomplete
        taken = bytes(self._data[self.at : end])
        self.at = end
        return taken

    def byte(self) -> int:
        return self._take(1)[0]

    def word(self) -> int:
        return int(WORD.unpack(self._take(WORD.size))[0])

    def integer(self) -> int:
        return int(INTEGER.unpack(self._take(INTEGER.size))[0])

    def count(self) -> int:
        number = int(LENGTH.unpack(self._take(LENGTH.size))[0])
        if number > MAX_KEYS:
            raise BadMessage(f"{number} keys in a message; at most {MAX_KEYS} are taken")
        return number

    def data(self) -> bytes:
        return self._take(int(LENGTH.unpack(self._take(LENGTH.size))[0]))

    def key_list(self) -> list[bytes]:
        return [self.data() for _ in range(self.count())]


@dataclass
class Keys:
    """Keys of one generation, their size, and the connections that wait for keys."""

    values: dict[bytes, bytes] = field(default_factory=dict)
    num_bytes: int = 0
    waiting: dict[Connection, set[bytes]] = field(default_factory=dict)

    def set(self, key: bytes, value: bytes) -> None:
        old = self.values.get(key)
        change = len(value) - len(old) if old is not None else len(key) + len(value)
        if self.num_bytes + change > MAX_STORED_BYTES:
            raise BadMessage(f"a generation's keys would pass {MAX_STORED_BYTES} bytes")
        self.values[key] = value
        self.num_bytes += change

    def get(self, key: bytes) -> bytes:
        if key not in self.values:
            raise BadMessage(f"no key {key[:80]!r}")
        return self.values[key]

    def delete(self, key: bytes) -> bool:
        value = self.values.pop(key, None)
        if value is not None:
            self.num_bytes -= len(key) + len(value)
        return value is not None


@dataclass(eq=False)
class Connection:
    """Client connection, unauthenticated until its handshake sets `keys`."""

    socket: socket.socket
    nonce: bytes
    generation: int | None = None
    keys: Keys | None = None
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class StoreServer:
    """Owns a listening socket on `host` alone, a thread, and its connections."""

    def __init__(self, host: str, key: bytes) -> None:
        """Listen on `host`; raises OSError if it is no address of this machine."""
        self._key = key
        self._listener = listen_on(host)
        self._warnings = RareWarnings()
        self.port = int(self._listener.getsockname()[1])
        self._keys: dict[int, Keys] = {}
        self._members: set[Connection] = set()
        self._strangers: dict[Connection, None] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._paused_until: float | None = None
        self._wake, woken = socket.socketpair()
        self._selector.register(woken, selectors.EVENT_READ)
        self._woken = woken
        self._thread = threading.Thread(target=self._run, name="rendezvous store", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        self._wake.close()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        finally:
            for connection in [*self._members, *self._strangers]:
                connection.socket.close()
            self._listener.close()
            self._woken.close()
            self._selector.close()

    def _serve(self) -> bool:
        """Handle one round of events; return false once this server is closed."""
        paused = self._paused_until is not None
        for key, events in self._selector.select(PAUSE_S if paused else None):
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._handle(key.data, events)
        if self._paused_until is not None and time.monotonic() >= self._paused_until:
            self._paused_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        return True

    def _accept(self) -> None:
        try:
            while True:
                self._greet(self._listener.accept()[0])
        except OSError as error:  # no more, or it is gone already
            if error.errno in SHORTAGES:
                logger.warning("The rendezvous store takes no connections for a while: %s", error)
                self._selector.unregister(self._listener)
                self._paused_until = time.monotonic() + PAUSE_S

    def _greet(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        connection = Connection(accepted, secrets.token_bytes(NONCE_BYTES))
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        self._strangers[connection] = None
        if len(self._strangers) > MAX_STRANGERS:
            self._end(next(iter(self._strangers)))
        self._send(connection, connection.nonce)

    def _handle(self, connection: Connection, events: int) -> None:
        if connection.socket.fileno() < 0:  # ended by an earlier event of the same round
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ:
                self._receive(connection)
        except BadMessage as error:
            self._warnings.warn("A connection to the rendezvous store is ended: %s", error)
            self._end(connection)
        except OSError:
            self._end(connection)

    def _receive(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError("hung up")
        connection.received += data
        if connection.keys is None:
            self._authenticate(connection)
        if connection.keys is not None:
            self._take_messages(connection, connection.keys)

    def _authenticate(self, connection: Connection) -> None:
        if len(connection.received) < HELLO.size:
            return
        generation, theirs, mac = HELLO.unpack_from(connection.received)
        del connection.received[: HELLO.size]
        secret = generation_secret(self._key, generation)
        if not hmac.compare_digest(mac, handshake_mac(secret, "client", connection.nonce, theirs)):
            raise BadMessage("its handshake shows no secret of this run")
        if len(self._members) >= MAX_MEMBERS:
            raise BadMessage(f"there are {MAX_MEMBERS} connections of workers")
        connection.generation, connection.keys = generation, self._keys_of(generation)
        self._strangers.pop(connection)
        self._members.add(connection)
        own = handshake_mac(secret, "server", connection.nonce, theirs)
        self._send(connection, WELCOME.pack(own))

    def _keys_of(self, generation: int) -> Keys:
        """Return the generation's keys, created if new; evict generations beyond the limit."""
        found = self._keys.get(generation)
        if found is None:
            oldest_kept = sorted([*self._keys, generation])[-KEPT_GENERATIONS:][0]
            if generation < oldest_kept:
                raise BadMessage(f"generation {generation} is over")
            found = self._keys[generation] = Keys()
            for old in [number for number in self._keys if number < oldest_kept]:
                del self._keys[old]
                for member in [each for each in self._members if each.generation == old]:
                    self._end(member)
        return found

    def _take_messages(self, connection: Connection, keys: Keys) -> None:
        while connection.received:
            reader = Reader(connection.received)
            try:
                self._answer(connection, keys, reader)
            except Incomplete:
                return
            del connection.received[: reader.at]

    def _answer(self, connection: Connection, keys: Keys, reader: Reader) -> None:
        """Read one whole message, then carry it out."""
        query = reader.byte()
        method = QUERIES.get(query)
        if method is None:
            raise BadMessage(f"query {query} is not served")
        answer = method(self, connection, keys, reader)
        if answer:
            self._send(connection, answer)

    # one method for each query: reads its fields, returns the answer

    def _validate(self, _: Connection, __: Keys, reader: Reader) -> bytes:
        if reader.word() != MAGIC:
            raise BadMessage("not a client of torch's TCPStore")
        return b""

    def _ping(self, _: Connection, __: Keys, reader: Reader) -> bytes:
        return WORD.pack(reader.word())

    def _set(self, _: Connection, keys: Keys, reader: Reader) -> bytes:
        self._store(keys, reader.data(), reader.data())
        return b""

    def _append(self, _: Connection, keys: Keys, reader: Reader) -> bytes:
        key, value = reader.data(), reader.data()
        self._store(keys, key, keys.values.get(key, b"") + value)
        return b""

    def _compare_set(self, _: Connection, keys: Keys, reader: Reader) -> bytes:
        key, expected, desired = reader.data(), reader.data(), reader.data()
        present = keys.values.get(key)
        if present == expected or (present is None and not expected):
            self._store(keys, key, desired)
            present = desired
        return _packed(expected if present is None else present)

    def _get(self, _: Connection, keys: Keys, reader: Reader) -> bytes:
        return _packed(keys.get(reader.data()))

    def _multi_get(self, _: Connection, keys: Keys, reader: Reader) -> bytes:
        return b"".join(_packed(keys.get(key)) for key in reader.key_list())

    def _multi_set(self, _: Connection, keys: Keys, reader: Reader) -> bytes:
        pairs = [(reader.data(), reader.data()) for _ in range(reader.count())]
        for key, value in pairs:
            self._store(keys, key, value)
        return b""

    def _add(self, _: Connection, keys: Keys, reader: Reader) -> bytes:
        key, amount = reader.data(), reader.integer()
        try:
            total = int(keys.values.get(key, b"0")) + amount
            answer = INTEGER.pack(total)
        except (ValueError, struct.error):
            raise BadMessage("a sum of what is no number of 64 bits") from None
        self._store(keys, key, str(total).encode())
        return answer

    def _check(self, _: Connection, keys: Keys, reader: Reader) -> bytes:
        return READY if all(key in keys.values for key in reader.key_list()) else NOT_READY

    def _wait(self, connection: Connection, keys: Keys, reader: Reader) -> bytes:
        missing = {key for key in reader.key_list() if key not in keys.values}
        if not missing:
            return STOP_WAITING
        keys.waiting[connection] = missing
        return b""

    def _cancel_wait(self, connection: Connection, keys: Keys, _: Reader) -> bytes:
        keys.waiting.pop(connection, None)
        return WAIT_CANCELED

    def _num_keys(self, _: Connection, keys: Keys, __: Reader) -> bytes:
        return INTEGER.pack(len(keys.values))

    def _delete(self, _: Connection, keys: Keys, reader: Reader) -> bytes:
        return INTEGER.pack(int(keys.delete(reader.data())))

    def _store(self, keys: Keys, key: bytes, value: bytes) -> None:
        """Set a key and answer the connections for which it was the last one missing."""
        keys.set(key, value)
        for connection, missing in list(keys.waiting.items()):
            missing.discard(key)
            if not missing:
                del keys.waiting[connection]
                self._send(connection, STOP_WAITING)

    # sending and ending

    def _send(self, connection: Connection, data: bytes) -> None:
        """Queue an answer; a connection that fails here ends at its next event."""
        if len(connection.unsent) + len(data) > MAX_UNSENT_BYTES:
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
            return
        connection.unsent += data
        with suppress(OSError):
            self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        if connection.unsent:
            with suppress(BlockingIOError):
                del connection.unsent[: connection.socket.send(connection.unsent)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events, connection)

    def _end(self, connection: Connection) -> None:
        if connection.socket.fileno() >= 0:
            self._selector.unregister(connection.socket)
            connection.socket.close()
        self._strangers.pop(connection, None)
        self._members.discard(connection)
        if connection.keys is not None:
            connection.keys.waiting.pop(connection, None)


def _packed(value: bytes) -> bytes:
    return LENGTH.pack(len(value)) + value


QUERIES: dict[int, Callable[[StoreServer, Connection, Keys, Reader], bytes]] = {
    VALIDATE: StoreServer._validate,
    SET: StoreServer._set,
    COMPARE_SET: StoreServer._compare_set,
    GET: StoreServer._get,
    ADD: StoreServer._add,
    CHECK: StoreServer._check,
    WAIT: StoreServer._wait,
    NUM_KEYS: StoreServer._num_keys,
    DELETE_KEY: StoreServer._delete,
    APPEND: StoreServer._append,
    MULTI_GET: StoreServer._multi_get,
    MULTI_SET: StoreServer._multi_set,
    CANCEL_WAIT: StoreServer._cancel_wait,
    PING: StoreServer._ping,
}
