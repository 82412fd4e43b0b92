"""Memory that a checkpoint's bytes are read into, piece by piece, and checked as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from recovery.state.checksum import BLOCK_BYTES, checksum, combined, digests_of_blocks

_PIECE_BYTES = 1 << 20
"""Bytes that are read before they are checked: a multiple of a checksum's blocks."""


@dataclass
class SpanMemory:
    """Memory of a piece of a span, [start, end) in the file, and of which shard it is.

    `digests` are those of its blocks, None while unknown; a gap has none.
    """

    start: int
    bytes: memoryview
    digests: list[int | None] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.bytes)

    def filled(self, start: int, end: int) -> None:
        """Digest what came in [start, end), offsets here, as far as it is whole blocks."""
        if not self.digests or start % BLOCK_BYTES:
            return
        if end < len(self.bytes):
            end -= (end - start) % BLOCK_BYTES
        number = start // BLOCK_BYTES
        came = digests_of_blocks(self.bytes[start:end])
        self.digests[number : number + len(came)] = came

    def checksum(self) -> int:
        """Return the checksum of all bytes; those that are not digested yet are read again."""
        known = [digest for digest in self.digests if digest is not None]
        if self.digests and len(known) == len(self.digests):
            return combined(known)
        return checksum(self.bytes)


@dataclass(frozen=True)
class Pieces:
    """Memory of [start, end) of a file in small pieces, each checked while it is in the cache."""

    memory: Sequence[SpanMemory]
    start: int
    end: int

    def __iter__(self) -> Iterator[memoryview]:
        for piece in self.memory:
            last = min(self.end, piece.end) - piece.start
            for first in range(max(0, self.start - piece.start), last, _PIECE_BYTES):
                end = min(last, first + _PIECE_BYTES)
                yield piece.bytes[first:end]
                piece.filled(first, end)
