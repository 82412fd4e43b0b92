"""Driver's end of `runtime.report_channel`: accepts and reads connections without blocking."""

from __future__ import annotations

import errno
import hmac
import logging
import pickle
import secrets
import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autohet.driver.ray.listening import RareWarnings, listen_on
from autohet.runtime.process.report_channel import (
    AGE,
    BEAT,
    FRAME,
    MOST_NEWS_BYTES,
    NONCE_BYTES,
    NUMBER,
    ReportAddress,
    frame_mac,
)

logger = logging.getLogger("autohet")
MOST_STRANGERS = 256
"""Maximum connections without an authenticated sender; a further one ends the oldest."""
MOST_GREETING_BYTES = 1024
READ_BYTES = 1 << 16
MOST_READS = 256
"""Bytes of one read, and reads of one connection before the others have their turn."""
SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
SHORT_S = 1.0
"""Seconds until connections are accepted again after a shortage of descriptors or memory.

The shortage is that of this process or its machine. A process that wants a connection waits, or
retries by itself.
"""
OVER = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


@dataclass
class ExpectedSender:
    """Expected sender: shared secret, number of its newest message, and connection if any."""

    key: bytes
    number: int = 0
    connection: ReportConnection | None = None
    is_unanswered: bool = False
    """True if some of its messages are received and not acknowledged over this connection."""


@dataclass(eq=False)
class ReportConnection:
    """Connection, and the part of a frame that it has received so far.

    `name` is set once its first frame has proved the sender's identity.
    """

    socket: socket.socket
    nonce: bytes
    name: str | None = None
    place: int = 0
    data: bytearray = field(default_factory=bytearray)


class News(NamedTuple):
    """Message of the sender `name`.

    `age_s`: time for which it had waited at the sender when it was sent.
    """

    name: str
    value: Any
    age_s: float


@dataclass(frozen=True)
class Unreadable:
    """Placeholder for an authentic message that cannot be decoded here.

    The sender's node has another version of some package.
    """

    why: str


class BadFrame(Exception):
    """Raised for a frame that is not from the process that it names."""


class ReportServer:
    """Owns a listening socket on `host` alone and its connections; called from one thread."""

    def __init__(self, host: str, beat_s: float) -> None:
        self._host = host
        self._beat_s = beat_s
        self.listener = listen_on(host)
        """Accepts connections; one that refuses to shows what a shortage of descriptors does."""
        self._warnings = RareWarnings()
        self._poll = select.epoll()
        self._poll.register(self.listener, select.EPOLLIN)
        self._connections: dict[int, ReportConnection] = {}
        self._speakers: dict[str, ExpectedSender] = {}
        self._strangers: dict[ReportConnection, ReportConnection] = {}
        self.ended: set[str] = set()
        """Senders whose connection has ended, and that have made no other one."""
        self._short_until: float | None = None
        self._is_short = False

    def expect(self, who: str) -> ReportAddress:
        """Expect a new sender; return the address and key with which it may report.

        `who`: description of the sender for people; it becomes part of the sender's name.
        """
        name = f"{who} {secrets.token_hex(8)}"
        key = secrets.token_bytes(32)
        self._speakers[name] = ExpectedSender(key)
        return ReportAddress(self._host, self.listener.getsockname()[1], name, key, self._beat_s)

    def forget(self, name: str) -> None:
        self.disconnect(name)
        self._speakers.pop(name, None)
        self.ended.discard(name)

    def disconnect(self, name: str) -> None:
        """End a sender's connection, as a network might; it makes another one."""
        connection = self.connection(name)
        if connection is not None:
            self._end(connection)

    def speaks(self, name: str) -> bool:
        """Return true if this sender has a connection, so that more of its messages may come."""
        return self.connection(name) is not None

    def connection(self, name: str) -> ReportConnection | None:
        """Return the present connection of this sender."""
        speaker = self._speakers.get(name)
        return None if speaker is None else speaker.connection

    def fileno(self) -> int:
        """Return a descriptor that is readable while there is more input than heartbeats."""
        return self._poll.fileno()

    @property
    def has_ends(self) -> bool:
        """True if the input has the end of a connection."""
        return any(ready & OVER for _, ready in self._poll.poll(0))

    def take(self) -> tuple[set[str], list[News]]:
        """Return the input so far: names of the senders heard, and their messages in order."""
        heard: set[str] = set()
        news: list[News] = []
        ready = dict(self._poll.poll(0))
        for number, connection in list(self._connections.items()):
            if number in ready:
                self._read(connection, bool(ready[number] & OVER), heard, news)
            elif connection.name is not None:
                # Not reported as ready: nothing has come, or a heartbeat.
                try:
                    data = connection.socket.recv(READ_BYTES)
                except OSError:
                    continue
                if data == BEAT and not connection.data:
                    heard.add(connection.name)
                elif data:
                    connection.data += data
                    self._read(connection, False, heard, news, has_input=True)
        if self._short_until is not None and time.monotonic() >= self._short_until:
            self._short_until = None
            self._poll.register(self.listener, select.EPOLLIN)
        elif self.listener.fileno() in ready:
            self._accept()
        return heard, news

    def acknowledge(self) -> None:
        """Acknowledge all messages that `take` has returned: they are recorded."""
        for speaker in self._speakers.values():
            if not speaker.is_unanswered or speaker.connection is None:
                continue
            speaker.is_unanswered = False
            # If it is not sent now, the next answer stands for this one, too.
            with suppress(OSError):
                speaker.connection.socket.send(NUMBER.pack(speaker.number))

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._end(connection)
        self.listener.close()
        self._poll.close()

    def _accept(self) -> None:
        try:
            while True:
                self._greet(self.listener.accept()[0])
        except OSError as error:
            # There is no further connection, or it has gone already, or there is a shortage.
            was_short = self._is_short
            self._is_short = error.errno in SHORTAGES
            if self._is_short:
                # The connection stays in the queue: it would wake the driver over and over.
                self._poll.unregister(self.listener)
                self._short_until = time.monotonic() + SHORT_S
            if self._is_short and not was_short:
                logger.warning(
                    "No more connections for reports can be taken (%s); those that stand are not"
                    " concerned",
                    error,
                )

    def _greet(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        connection = ReportConnection(accepted, secrets.token_bytes(NONCE_BYTES))
        self._poll.register(accepted, select.EPOLLIN | select.EPOLLRDHUP)
        self._connections[accepted.fileno()] = connection
        self._strangers[connection] = connection
        if len(self._strangers) > MOST_STRANGERS:
            self._end(next(iter(self._strangers)))
        accepted.send(connection.nonce)

    def _read(
        self,
        connection: ReportConnection,
        ends: bool,
        heard: set[str],
        news: list[News],
        *,
        has_input: bool = False,
    ) -> None:
        """Read a connection's input.

        `ends`: the connection has ended after this input. `has_input`: some is received already.
        """
        try:
            before = len(connection.data)
            over = self._receive(connection, ends)
            if len(connection.data) == before and not over and not has_input:
                return
            if connection.data == BEAT and connection.name is not None:
                # Nearly always: a process without news sends nothing else.
                connection.data.clear()
            else:
                self._take_frames(connection, news)

            if over:
                self._end(connection)
            elif connection.name is not None:
                # Whatever came is a sign of life, also a part of long news.
                heard.add(connection.name)
        except OSError:
            self._end(connection)
        except BadFrame as error:
            self._warnings.warn("A connection for reports is ended: %s", error)
            self._end(connection)

    def _receive(self, connection: ReportConnection, ends: bool) -> bool:
        """Receive the bytes that are there; return true if no more will come."""
        for _ in range(MOST_READS):
            try:
                data = connection.socket.recv(READ_BYTES)
            except BlockingIOError:
                return False
            except OSError:
                # A reset; what came before it has been received.
                return True
            if not data:
                return True
            connection.data += data
            # A short read has emptied the buffer; an ended connection has its end still to be read.
            if len(data) < READ_BYTES and not ends:
                return False
        return False

    def _take_frames(self, connection: ReportConnection, news: list[News]) -> None:
        frame = self._next_frame(connection)
        while frame is not None:
            number, payload, speaker = frame
            if connection.name is None:
                self._know(connection, payload.decode(), speaker)
            elif number > speaker.number:
                # A lower number is a message that came over an earlier connection already.
                speaker.number = number
                news.append(_read_news(connection.name, payload))
            if number:
                speaker.is_unanswered = True
            frame = self._next_frame(connection)

    def _next_frame(self, connection: ReportConnection) -> tuple[int, bytes, ExpectedSender] | None:
        """Return the number and payload of one whole frame, and its authenticated sender."""
        data = connection.data
        while data.startswith(BEAT) and connection.name is not None:
            del data[: len(BEAT)]
        if len(data) < FRAME.size:
            return None
        length, number, mac = FRAME.unpack_from(data)
        most_bytes = MOST_GREETING_BYTES if connection.name is None else MOST_NEWS_BYTES
        if length > most_bytes:
            raise BadFrame(f"{length} bytes are too many for {connection.name or 'a name'}")
        end = FRAME.size + length
        if len(data) < end:
            return None
        payload = bytes(data[FRAME.size : end])
        del data[:end]

        # The nonce and the place in the connection keep a recorded frame from being sent again.
        name = payload.decode(errors="replace") if connection.name is None else connection.name
        speaker = self._speakers.get(name)
        if speaker is None:
            # Of a node that was cut off and has come back, for instance: it tries for ever, and is
            # not worth a warning each time.
            raise ConnectionAbortedError(f"nobody of the name {name!r} is expected")
        expected = frame_mac(speaker.key, connection.nonce, connection.place, number, payload)
        if not hmac.compare_digest(mac, expected):
            raise BadFrame(
                f"a wrong MAC in place {connection.place} of {connection.name or payload!r}"
            )
        connection.place += 1
        return number, payload, speaker

    def _know(self, connection: ReportConnection, name: str, speaker: ExpectedSender) -> None:
        """Attach a connection to the sender whose identity it has proved, and end its older one.

        From then on `_poll` reports the connection only for input longer than a heartbeat.
        """
        if speaker.connection is not None:
            self._end(speaker.connection)
        connection.name = name
        speaker.connection = connection
        self.ended.discard(name)
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, FRAME.size)
        self._strangers.pop(connection, None)

    def _end(self, connection: ReportConnection) -> None:
        if self._connections.pop(connection.socket.fileno(), None) is not None:
            self._poll.unregister(connection.socket)
        connection.socket.close()
        self._strangers.pop(connection, None)
        speaker = self._speakers.get(connection.name or "")
        if speaker is not None and speaker.connection is connection:
            speaker.connection = None
            self.ended.add(connection.name or "")


def _read_news(name: str, payload: bytes) -> News:
    try:
        (age_s,) = AGE.unpack_from(payload)
        return News(name, pickle.loads(memoryview(payload)[AGE.size :]), age_s)
    except Exception as error:  # noqa: BLE001
        return News(name, Unreadable(f"{type(error).__name__}: {error}"), 0.0)
