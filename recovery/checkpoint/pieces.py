"""Memory that a checkpoint's bytes are read into, piece by piece, and checked as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recovery.state.checksum import BLOCK_BYTES, combined, digests_of_blocks

PIECE_BYTES = 512 << 10
"""Bytes that are read before they are checked: whole blocks, and half of a usual L2 cache."""


@dataclass
class SpanMemory:
    """Memory of [start, end) in a file; without `bytes`, what comes is checked and not kept.

    `digests` are those of a shard's blocks, as they came; what lies between shards has none.
    """

    start: int
    end: int
    bytes: memoryview | None
    digests: list[int] | None = None

    @classmethod
    def of_shard(cls, start: int, num_bytes: int, memory: memoryview | None) -> SpanMemory:
        """Return the memory of a shard's elements, which begin at `start` in the file."""
        num_blocks = -(-num_bytes // BLOCK_BYTES)
        return cls(start, start + num_bytes, memory, [0] * num_blocks)

    def filled(self, first: int, piece: memoryview) -> None:
        """Digest the blocks that came, from the offset `first` here."""
        if self.digests is not None:
            number = first // BLOCK_BYTES
            came = digests_of_blocks(piece)
            self.digests[number : number + len(came)] = came

    def checksum(self) -> int:
        """Return the checksum of a shard's bytes as they came."""
        assert self.digests is not None
        return combined(self.digests)


@dataclass(frozen=True)
class Pieces:
    """Memory of [start, end) of a file in small pieces, each checked while it is in the cache.

    `start` and `end` cut no block of a checksum. `scratch`, of PIECE_BYTES, takes what is not kept.
    """

    memory: Sequence[SpanMemory]
    start: int
    end: int
    scratch: memoryview | None = None

    def __iter__(self) -> Iterator[memoryview]:
        for part in self.memory:
            first = max(0, self.start - part.start)
            last = min(self.end, part.end) - part.start
            while first < last:
                end = min(last, (first // PIECE_BYTES + 1) * PIECE_BYTES)
                if part.bytes is not None:
                    piece = part.bytes[first:end]
                else:
                    assert self.scratch is not None
                    piece = self.scratch[: end - first]
                yield piece
                part.filled(first, piece)
                first = end
