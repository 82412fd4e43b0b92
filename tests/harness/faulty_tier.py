"""A tier that fails where a test says: raises, stalls, truncates or corrupts the n-th shard that it
gives.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from recovery.errors import PeerTimeout, PeerUnreachable, ShardCorrupt
from recovery.state.holdings import Source
from recovery.state.layout import ShardId
from recovery.transfer.tiers import Into, ShardAnswer, Tier

FAULTS = ("fail", "stall", "truncate", "corrupt")


@dataclass
class FaultyTier:
    """Passes on what `inner` gives but for shard number `at` (from 1, over all calls).

    "fail": the source breaks off. "stall": it is silent until its own deadline, then breaks off.
    "truncate": a piece that is too short. "corrupt": damage that the tier itself has found.
    """

    inner: Tier
    fault: str
    at: int = 1
    given: int = 0
    read_sources: list[Source] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(
        self,
        source: Source,
        shards: Sequence[ShardId],
        checksums: Mapping[ShardId, int],
        into: Into,
    ) -> Iterator[tuple[ShardId, ShardAnswer]]:
        self.read_sources.append(source)
        for shard, piece in self.inner.read(source, shards, checksums, into):
            with self._lock:
                self.given += 1
                due = self.given == self.at
            yield shard, self._damaged(source, shard, piece) if due else piece

    def _damaged(self, source: Source, shard: ShardId, piece: ShardAnswer) -> ShardAnswer:
        if self.fault == "fail":
            raise PeerUnreachable(str(source), "the peer hung up")
        if self.fault == "stall":
            raise PeerTimeout(str(source), "sending shards", 0.1)
        if self.fault == "truncate":
            assert isinstance(piece, torch.Tensor)
            return piece.view(-1).view(torch.uint8)[:-1]
        return ShardCorrupt(shard, str(source), "flipped")
