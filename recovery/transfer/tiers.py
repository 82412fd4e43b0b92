"""Protocol of every tier that a worker reads by itself.

Tiers are its node's memory and disk, a peer's agent, and durable storage.
"""

import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from recovery.errors import RecoveryError, ShardCorrupt, ShardUnavailable
from recovery.local.agent_store import AgentStore
from recovery.peers.pool import ClientPool
from recovery.state.checksum import checksum
from recovery.state.holdings import Source
from recovery.state.layout import ShardId
from recovery.storage.tensor_payload import tensor_bytes

ShardAnswer = Tensor | RecoveryError
Into = Mapping[ShardId, memoryview]

# Snapshots are mapped read-only, and nothing here writes to them.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)


class Tier(Protocol):
    """Tier: reads the shards of one source.

    What it yields is checked against the schedule's `checksums`, never against what the sender
    says. (A node's own snapshots, and durable storage, are checked against their own records if the
    schedule has none.)

    Shards named in `into` may be written straight to that memory, which is right only once the
    shard was yielded.

    Yields each shard once, in any order: a CPU tensor (uint8 bytes, or the unit's own type), valid
    until the next one is asked for, or the error why this shard is not available here. Shards may
    be left out at the end.

    Raises:
        RecoveryError, OSError: nothing more comes from this source.
    """

    def read(
        self,
        source: Source,
        shards: Sequence[ShardId],
        checksums: Mapping[ShardId, int],
        into: Into,
    ) -> Iterator[tuple[ShardId, ShardAnswer]]: ...


class ReadDurable(Protocol):
    """Reader of verified tensors of the shards of one step's checkpoint at `uri`.

    Those named in `into` may be in that memory.
    """

    def __call__(
        self, uri: str, step: int, shards: Sequence[ShardId], into: Into, /
    ) -> Iterable[tuple[ShardId, Tensor]]: ...


@dataclass(frozen=True)
class NodeTier:
    """The reader's own node: snapshots mapped from its host memory, and read from its disk."""

    store: AgentStore

    def read(
        self,
        source: Source,
        shards: Sequence[ShardId],
        checksums: Mapping[ShardId, int],
        into: Into,
    ) -> Iterator[tuple[ShardId, ShardAnswer]]:
        for shard in shards:
            expected = checksums.get(shard)
            memory = into.get(shard)
            try:
                if memory is None and source.kind == "memory":
                    yield shard, _as_tensor(self.store.read(source, shard, expected))
                    continue

                file = self.store.file_of(source, shard)
                if memory is None:
                    # Not from a mapping, which reads a disk page by page and is slower.
                    own = torch.empty(file.extent(shard).num_bytes, dtype=torch.uint8)
                    memory = own.numpy().data
                file.read_into(shard, memory, expected)
                yield shard, _as_tensor(memory)
            except (ShardUnavailable, ShardCorrupt) as error:
                yield shard, error


@dataclass(frozen=True)
class PeerTier:
    """Memory and disks of other nodes, through their agents' shard servers.

    `agents` maps a node to (host, port, token). Connections come from `pool`, which its owner
    closes.
    """

    agents: Mapping[str, tuple[str, int, str]]
    pool: ClientPool
    timeout_s: float
    cancelled: threading.Event | None = None

    def read(
        self,
        source: Source,
        shards: Sequence[ShardId],
        checksums: Mapping[ShardId, int],
        into: Into,
    ) -> Iterator[tuple[ShardId, ShardAnswer]]:
        endpoint = self.agents.get(source.node)
        if endpoint is None:
            raise ShardUnavailable(shards[0], str(source), "its node has no agent")

        with self.pool.client(*endpoint, self.timeout_s) as client:
            for shard, data in client.read(source, shards, checksums, into, self.cancelled):
                if isinstance(data, RecoveryError):
                    yield shard, data
                else:
                    yield shard, _as_tensor(data)


@dataclass(frozen=True)
class DurableTier:
    """Committed checkpoints, as `read_durable` gives them."""

    read_durable: ReadDurable

    def read(
        self,
        source: Source,
        shards: Sequence[ShardId],
        checksums: Mapping[ShardId, int],
        into: Into,
    ) -> Iterator[tuple[ShardId, ShardAnswer]]:
        where = str(source)
        try:
            for shard, tensor in self.read_durable(source.name, source.step, shards, into):
                expected = checksums.get(shard)
                if expected is None or checksum(tensor_bytes(tensor)) == expected:
                    yield shard, tensor
                else:
                    why = "its bytes are not those of the schedule"
                    yield shard, ShardCorrupt(shard, where, why)
        except KeyError as error:
            shard = error.args[0]
            raise ShardUnavailable(shard, where, "the checkpoint has no such shard") from error


def _as_tensor(data: memoryview) -> Tensor:
    if not data.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(data, dtype=torch.uint8)
