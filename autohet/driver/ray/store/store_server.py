"""Server of the rendezvous store: torch's TCPStore protocol for authenticated workers.

It is bounded in bytes and connections. The handshake is that of `runtime.process.store_tunnel`.
Each generation has keys of its own: a worker that has the secret of one generation neither reads
nor changes another's. `store_messages` reads the messages, `store_queries` carries them out.

A `torch.distributed.TCPStore` of the driver behind the handshake would be less safe. It listens on
TCP alone (a Unix socket as `master_listen_fd` is refused with ENOTSUP, torch 2.13) and answers
everybody who reaches the port: on loopback each process of the head, of any user and container in
its network. It bounds neither what a generation stores nor the answers that a client leaves unread.
"""

import errno
import hmac
import logging
import secrets
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from autohet.driver.ray.listening import RareWarnings, listen_on
from autohet.driver.ray.store.store_messages import BadMessage, Incomplete, Reader
from autohet.driver.ray.store.store_queries import Keys, answer_query
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
MAX_UNSENT_BYTES = 32 << 20
"""Maximum bytes of answers that one connection has not read."""
KEPT_GENERATIONS = 4
"""Number of newest generations that are kept; connections of older ones are ended."""
READ_BYTES = 1 << 16
PAUSE_S = 0.5
"""Seconds until connections are accepted again after a shortage of descriptors or memory."""
SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass(eq=False)
class StoreConnection:
    """Client connection, unauthenticated until its handshake sets `keys`.

    Its socket does not block; `selector` reports when it can be read, or written while answers are
    unsent.
    """

    socket: socket.socket
    selector: selectors.BaseSelector
    nonce: bytes
    generation: int | None = None
    keys: Keys | None = None
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)

    @property
    def is_open(self) -> bool:
        return self.socket.fileno() >= 0

    def receive(self) -> bool:
        """Append the bytes that have come to `received`; return False if there are none.

        Raises ConnectionError if the client has hung up.
        """
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            raise ConnectionError("hung up")
        self.received += data
        return True

    def send(self, data: bytes) -> None:
        """Queue an answer; a connection that fails here ends at its next event."""
        if len(self.unsent) + len(data) > MAX_UNSENT_BYTES:
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
            return
        self.unsent += data
        with suppress(OSError):
            self.flush()

    def flush(self) -> None:
        """Send as many of the unsent bytes as the socket takes."""
        if self.unsent:
            with suppress(BlockingIOError):
                num_sent = self.socket.send(self.unsent)
                del self.unsent[:num_sent]

        # Without answers to send a socket can always be written: the selector would never block.
        events = selectors.EVENT_READ
        if self.unsent:
            events |= selectors.EVENT_WRITE
        if self.selector.get_key(self.socket).events != events:
            self.selector.modify(self.socket, events, self)

    def answer_messages(self, keys: Keys) -> None:
        """Carry out every whole message that has come."""
        while self.received:
            reader = Reader(self.received)
            try:
                answer = answer_query(self, keys, reader)
            except Incomplete:
                return
            if answer:
                self.send(answer)
            del self.received[: reader.at]

    def close(self) -> None:
        if self.is_open:
            self.selector.unregister(self.socket)
            self.socket.close()
        if self.keys is not None:
            self.keys.waiting.pop(self, None)


class StoreServer:
    """Owns a listening socket on `host` alone, a thread, and its connections."""

    def __init__(self, host: str, key: bytes) -> None:
        """Listen on `host`; raises OSError if it is no address of this machine."""
        self._key = key
        self._listener = listen_on(host)
        self._warnings = RareWarnings()
        self.port = int(self._listener.getsockname()[1])
        self._keys: dict[int, Keys] = {}
        self._members: set[StoreConnection] = set()
        self._strangers: dict[StoreConnection, None] = {}
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
        except OSError as error:
            # There is no further connection, or it has gone already, or there is a shortage.
            if error.errno in SHORTAGES:
                logger.warning("The rendezvous store takes no connections for a while: %s", error)
                self._selector.unregister(self._listener)
                self._paused_until = time.monotonic() + PAUSE_S

    def _greet(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        connection = StoreConnection(accepted, self._selector, secrets.token_bytes(NONCE_BYTES))
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        self._strangers[connection] = None
        if len(self._strangers) > MAX_STRANGERS:
            self._end(next(iter(self._strangers)))
        connection.send(connection.nonce)

    def _handle(self, connection: StoreConnection, events: int) -> None:
        if not connection.is_open:
            # An earlier event of the same round has ended it.
            return
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            if events & selectors.EVENT_READ:
                self._receive(connection)
        except BadMessage as error:
            self._warnings.warn("A connection to the rendezvous store is ended: %s", error)
            self._end(connection)
        except OSError:
            self._end(connection)

    def _receive(self, connection: StoreConnection) -> None:
        if not connection.receive():
            return
        if connection.keys is None:
            self._authenticate(connection)
        if connection.keys is not None:
            connection.answer_messages(connection.keys)

    def _authenticate(self, connection: StoreConnection) -> None:
        if len(connection.received) < HELLO.size:
            return
        generation, theirs, mac = HELLO.unpack_from(connection.received)
        del connection.received[: HELLO.size]
        secret = generation_secret(self._key, generation)
        expected = handshake_mac(secret, "client", connection.nonce, theirs)
        if not hmac.compare_digest(mac, expected):
            raise BadMessage("its handshake shows no secret of this run")
        if len(self._members) >= MAX_MEMBERS:
            raise BadMessage(f"there are {MAX_MEMBERS} connections of workers")

        connection.keys = self._keys_of(generation)
        connection.generation = generation
        self._strangers.pop(connection)
        self._members.add(connection)
        own = handshake_mac(secret, "server", connection.nonce, theirs)
        connection.send(WELCOME.pack(own))

    def _keys_of(self, generation: int) -> Keys:
        """Return the generation's keys, created if new; evict generations beyond the limit."""
        if generation in self._keys:
            return self._keys[generation]

        newest = sorted([*self._keys, generation])[-KEPT_GENERATIONS:]
        oldest_kept = newest[0]
        if generation < oldest_kept:
            raise BadMessage(f"generation {generation} is over")
        keys = Keys()
        self._keys[generation] = keys
        evicted = [number for number in self._keys if number < oldest_kept]
        for old in evicted:
            del self._keys[old]
            members = [member for member in self._members if member.generation == old]
            for member in members:
                self._end(member)
        return keys

    def _end(self, connection: StoreConnection) -> None:
        connection.close()
        self._strangers.pop(connection, None)
        self._members.discard(connection)
