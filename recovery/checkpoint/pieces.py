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
        """Digest the blocks that came whole in [start, end), offsets here."""
        if not self.digests:
            return
        number = -(-start // BLOCK_BYTES)
        if end < len(self.bytes):
            end -= end % BLOCK_BYTES
        came = digests_of_blocks(self.bytes[number * BLOCK_BYTES : end])
        self.digests[number : number + len(came)] = came

    def checksum(self) -> int:
        """Return the checksum of all bytes; blocks that came in two parts are read again."""
        if not self.digests:
            return checksum(self.bytes)
        for number, digest in enumerate(self.digests):
            if digest is None:
                first = number * BLOCK_BYTES
                (self.digests[number],) = digests_of_blocks(self.bytes[first : first + BLOCK_BYTES])
        return combined([digest for digest in self.digests if digest is not None])


@dataclass(frozen=True)
class Pieces:
    """Memory of [start, end) of a file in small pieces, each checked while it is in the cache."""

    memory: Sequence[SpanMemory]
    start: int
    end: int

    def __iter__(self) -> Iterator[memoryview]:
        for piece in self.memory:
            first = max(0, self.start - piece.start)
            last = min(self.end, piece.end) - piece.start
            while first < last:
                end = min(last, (first // _PIECE_BYTES + 1) * _PIECE_BYTES)
                yield piece.bytes[first:end]
                piece.filled(first, end)
                first = end
