"""Payloads: bytes of known size to put into storage.

A payload can be read from any offset, so that its parts are sent in parallel.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview


class Payload(Protocol):
    """A sequence of `size` bytes; `read` may be called from several threads at once."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> Buffer:
        """Return exactly the bytes [offset, offset + length)."""
        ...


class BytesPayload:
    """A buffer that is already in memory."""

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data).cast("B")

    @property
    def size(self) -> int:
        return len(self._data)

    def read(self, offset: int, length: int) -> memoryview:
        return self._data[offset : offset + length]


class ConcatPayload:
    """Concatenation of several payloads."""

    def __init__(self, parts: Sequence[Payload]) -> None:
        self.parts = [part for part in parts if part.size]
        self._ends = list(accumulate(part.size for part in self.parts))

    @property
    def size(self) -> int:
        if not self._ends:
            return 0
        return self._ends[-1]

    def read(self, offset: int, length: int) -> Buffer:
        """Return the bytes; without a copy if they are within one part."""
        end = min(offset + length, self.size)
        index = bisect_right(self._ends, offset)
        pieces: list[Buffer] = []
        while offset < end:
            part = self.parts[index]
            part_end = self._ends[index]
            part_start = part_end - part.size
            take = min(end, part_end) - offset
            pieces.append(part.read(offset - part_start, take))
            offset += take
            index += 1

        if len(pieces) == 1:
            return pieces[0]
        return b"".join(pieces)


def pieces_of(payload: Payload, max_bytes: int) -> Iterator[Buffer]:
    """Yield the payload's bytes in order, none copied to be joined: at most `max_bytes` each."""
    parts = payload.parts if isinstance(payload, ConcatPayload) else [payload]
    for part in parts:
        for offset in range(0, part.size, max_bytes):
            yield part.read(offset, min(max_bytes, part.size - offset))


def as_payload(data: Buffer | Payload) -> Payload:
    if isinstance(data, bytes | bytearray | memoryview):
        return BytesPayload(data)
    return data
