"""Channel on which a process sends its reports to the driver: a connection of its own.

A call through Ray would cost the driver a hundred times the processor time, with or without news.

The driver accepts connections and first sends a nonce on each. The process then sends frames:
length of the payload, number of its news, MAC, payload. The first frame names the sender (number
0). Every other frame is news: its age in seconds by this process's clock, and a pickled value. The
MAC is over nonce, place in the stream, number and payload; its key is a secret that the driver gave
to this process alone. So nothing is unpickled that did not come from this process. Between frames,
`BEAT` shows that the process is alive. The driver acknowledges news by its number, once it has
recorded it. News without an acknowledgement when a connection ends is sent again over the next one,
to the next driver too; duplicates count once.
"""

import hashlib
import logging
import pickle
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger("autohet")
FRAME = struct.Struct("!IQ16s")
"""Header of a frame: length, number, MAC."""
BEAT = bytes(4)
"""Sign of life: a frame of length 0."""
PLACE = struct.Struct("!QQ")
NUMBER = struct.Struct("!Q")
AGE = struct.Struct("!d")
NONCE_BYTES = 16
MOST_NEWS_BYTES = 1 << 28
"""Size limit of a report; the parts of a checkpoint with a million shards fit."""
LOST_MS = 2000
"""Milliseconds without acknowledgement after which the kernel drops a connection.

A new one is made at once when the network is back, while TCP would wait for its next
retransmission, seconds later.
"""
LOOK_S = 0.01
"""Seconds between two polls for news; each phase of a reconfiguration waits for one."""
PATIENCE_S = 5.0
"""Seconds for the driver to accept a connection, and for each write.

A driver that was frozen for longer gets a new connection afterwards.
"""
RETRY_S = 0.5
AWAY_LOOK_S = 0.25
"""Seconds between two polls for news while no driver is there."""
MOST_KEPT_BYTES = 64 << 20
"""Limit on the news that is kept for a driver; the oldest is dropped first."""


@dataclass(frozen=True)
class ReportAddress:
    """Address of the driver for reports, with its name for this process and the shared secret.

    `beat_s`: seconds between two signs of life. `epoch`: that of the driver, by which its commands
    are told from those of drivers before it.
    """

    host: str
    port: int
    name: str
    key: bytes = field(repr=False)
    beat_s: float
    epoch: int = 0


def frame_mac(key: bytes, nonce: bytes, place: int, number: int, payload: bytes) -> bytes:
    """Return the MAC of the frame at `place` of its connection."""
    return hashlib.blake2s(
        nonce + PLACE.pack(place, number) + payload, key=key, digest_size=16
    ).digest()


class ReportSender:
    """Sender with a thread that polls `report` every `look_s` seconds and sends news.

    A report is news if `is_new(last, report)` is True; `last` is the last one sent, None at first.
    An exception of `report` ends the thread; `wait` raises it.
    """

    def __init__(
        self,
        address: ReportAddress,
        report: Callable[[], Any],
        is_new: Callable[[Any, Any], bool],
        look_s: float = LOOK_S,
    ) -> None:
        self._address = address
        self._report = report
        self._is_new = is_new
        self._look_s = look_s
        self._last: Any = None
        self._number = self._place = 0
        self._unsent: deque[tuple[int, float, bytes]] = deque()
        self._unanswered: deque[tuple[int, float, bytes]] = deque()
        self._kept_bytes = 0
        """Bytes of the news in both queues."""
        self._next_address: ReportAddress | None = None
        """Address of a driver that has replaced the present one; None: none has."""
        self._connection: socket.socket | None = None
        self._nonce = self._answers = b""
        self._spoke_at = self._lost_at = float("-inf")
        self._began_at = self._there_at = time.monotonic()
        self._is_missed = False
        self._closing = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until this sender is closed; raise the error that ended it before."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def redirect(self, address: ReportAddress) -> None:
        """Report to another driver from now on: first all news that no driver has recorded.

        That driver is there, though no connection to it may stand for a while. Any thread may call
        it.
        """
        self._there_at = time.monotonic()
        self._next_address = address

    @property
    def away_s(self) -> float:
        """Seconds since a driver was connected, or redirected this sender; 0 while one is."""
        return 0.0 if self._connection is not None else time.monotonic() - self._there_at

    def close(self) -> None:
        self._closing.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._pause_s):
                self._follow()
                self._look()
                self._speak()
        except Exception as error:
            logger.exception("Nothing is reported any more")
            self._error = error
        finally:
            self._drop()

    @property
    def _pause_s(self) -> float:
        is_away = self.away_s > PATIENCE_S and self._next_address is None
        return max(self._look_s, AWAY_LOOK_S) if is_away else self._look_s

    def _follow(self) -> None:
        """Turn to the driver that has replaced the present one, which knows nothing so far."""
        address = self._next_address
        if address is None:
            return
        self._next_address = None
        self._drop()
        self._address = address
        self._lost_at = float("-inf")
        self._last = None

    def _look(self) -> None:
        report = self._report()
        if self._is_new(self._last, report):
            value = pickle.dumps(report)
            if AGE.size + len(value) > MOST_NEWS_BYTES:
                raise ValueError(
                    f"a report of {len(value)} bytes is longer than the driver takes"
                    f" ({MOST_NEWS_BYTES})"
                )
            self._number += 1
            self._unsent.append((self._number, time.monotonic(), value))
            self._last = report
            self._kept_bytes += len(value)
            while self._kept_bytes > MOST_KEPT_BYTES and len(self._unsent) > 1:
                self._forget(self._unanswered or self._unsent)

    def _forget(self, queue: deque[tuple[int, float, bytes]]) -> None:
        """Drop the oldest news of a queue."""
        _, _, value = queue.popleft()
        self._kept_bytes -= len(value)

    def _speak(self) -> None:
        """Send the news, or a sign of life; reconnect, after a pause, if the connection fails."""
        now = time.monotonic()
        try:
            if self._connection is None and now - self._lost_at >= RETRY_S:
                self._connect()
            if self._connection is None:
                return
            self._take_answers(self._connection)
            while self._unsent:
                number, made_at, value = self._unsent[0]
                self._send(number, AGE.pack(time.monotonic() - made_at) + value)
                self._unanswered.append(self._unsent.popleft())
            if now - self._spoke_at >= self._address.beat_s:
                self._write(self._connection, BEAT)
        except OSError as error:
            self._drop()
            self._lost_at = time.monotonic()
            if (
                not self._is_missed
                and self._lost_at - max(self._began_at, self._spoke_at) > PATIENCE_S
            ):
                self._is_missed = True
                where = f"{self._address.host}:{self._address.port}"
                logger.warning(
                    "The driver takes no reports at %s (%s); is that port open between the nodes?",
                    where,
                    error,
                )

    def _connect(self) -> None:
        connection = socket.create_connection((self._address.host, self._address.port), PATIENCE_S)
        self._connection = connection
        self._place = 0
        self._answers = b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_MS)
        self._nonce = b""
        while len(self._nonce) < NONCE_BYTES:
            more = connection.recv(NONCE_BYTES - len(self._nonce))
            if not more:
                raise ConnectionError("it was not taken")
            self._nonce += more
        self._send(0, self._address.name.encode())
        self._unsent.extendleft(reversed(self._unanswered))
        self._unanswered.clear()
        self._is_missed = False

    def _send(self, number: int, payload: bytes) -> None:
        assert self._connection is not None
        mac = frame_mac(self._address.key, self._nonce, self._place, number, payload)
        self._write(self._connection, FRAME.pack(len(payload), number, mac) + payload)
        self._place += 1

    def _write(self, connection: socket.socket, data: bytes) -> None:
        left = memoryview(data)
        # Not `sendall`, which has one time-out for all of it.
        while left:
            num_sent = connection.send(left)
            left = left[num_sent:]
        self._spoke_at = time.monotonic()

    def _take_answers(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with suppress(BlockingIOError):
            answers = connection.recv(4096)
            if not answers:
                raise ConnectionError("it was closed")
            self._answers += answers
        connection.settimeout(PATIENCE_S)
        whole = len(self._answers) // NUMBER.size * NUMBER.size
        for (number,) in NUMBER.iter_unpack(self._answers[:whole]):
            while self._unanswered and self._unanswered[0][0] <= number:
                self._forget(self._unanswered)
        self._answers = self._answers[whole:]

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._there_at = time.monotonic()
