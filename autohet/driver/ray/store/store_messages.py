"""Messages of torch's TCPStore: fields, bounds and answers.

Layout: torch/csrc/distributed/c10d/TCPStore.cpp and TCPStoreBackend.hpp of torch 2.13 (native byte
order).
"""

import struct

MAX_MESSAGE_BYTES = 4 << 20
MAX_KEYS = 1 << 16
"""Maximum keys of one message."""
MAGIC = 0x3C85F7CE
(
    VALIDATE, SET, COMPARE_SET, GET, ADD, CHECK, WAIT, NUM_KEYS, DELETE_KEY,
    APPEND, MULTI_GET, MULTI_SET, CANCEL_WAIT, PING,
) = range(14)  # fmt: skip
READY = bytes([0])
NOT_READY = bytes([1])
STOP_WAITING = bytes([0])
WAIT_CANCELED = bytes([1])
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

    def _number(self, layout: struct.Struct) -> int:
        (number,) = layout.unpack(self._take(layout.size))
        return int(number)

    def byte(self) -> int:
        return self._take(1)[0]

    def word(self) -> int:
        return self._number(WORD)

    def integer(self) -> int:
        return self._number(INTEGER)

    def count(self) -> int:
        number = self._number(LENGTH)
        if number > MAX_KEYS:
            raise BadMessage(f"{number} keys in a message; at most {MAX_KEYS} are taken")
        return number

    def data(self) -> bytes:
        num_bytes = self._number(LENGTH)
        return self._take(num_bytes)

    def key_list(self) -> list[bytes]:
        return [self.data() for _ in range(self.count())]


def pack_data(value: bytes) -> bytes:
    return LENGTH.pack(len(value)) + value
