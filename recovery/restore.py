"""Executes one worker's part of a transfer schedule: keeps, reads, sends and receives shards until its new state is
whole.

Reads from snapshots, peers' agents and durable storage run in threads beside the messages of the group. Every byte
is checked before it is used; a source that fails or lies is replaced by the next one that the schedule names.
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from recovery.agent_store import AgentStore
from recovery.errors import RecoveryError, RestoreError, ShardCorrupt, ShardUnavailable
from recovery.holdings import Source
from recovery.layout import Layout, ShardId
from recovery.messages import Message
from recovery.schedule import Fetch, TransferSchedule, WorkerPart
from recovery.shard_server import ShardClient
from recovery.slices import TORCH_DTYPES, empty_local, shard_views

logger = logging.getLogger(__name__)

FETCH_THREADS = 4
SENDS_IN_FLIGHT = 4
_CRC_BYTES = 8


class MessageGroup(Protocol):
    """What carries live state between workers: a process group's point-to-point operations, each bounded by its
    deadline.
    """

    def send(self, tensor: Tensor, to: str, tag: int) -> Any: ...
    def recv(self, tensor: Tensor, source: str, tag: int) -> Any: ...
    def wait(self, work: Any) -> None: ...


@dataclass(frozen=True)
class LiveState:
    """What a worker has in its own memory: local tensors by state name, as `layout` says."""

    layout: Layout
    state: Mapping[str, Tensor]


@dataclass(frozen=True)
class Access:
    """How this worker reaches sources that are no live worker.

    `store` is its own node's; `agents` maps other nodes to (host, port, token); `read_durable(uri, step, shards)`
    yields verified tensors.
    """

    store: AgentStore
    agents: Mapping[str, tuple[str, int, str]]
    read_durable: Callable[[str, int, Sequence[ShardId]], Iterable[tuple[ShardId, Tensor]]]
    timeout_s: float


@dataclass
class Restored:
    """The new local state and where its bytes came from (what was kept in place counts nowhere)."""

    state: dict[str, Tensor]
    bytes_by_tier: dict[str, int] = field(default_factory=lambda: {"memory": 0, "disk": 0, "peer": 0, "s3": 0})


def restore(
    schedule: TransferSchedule, worker: str, layout: Layout, live: LiveState | None, group: MessageGroup, access: Access,
    device: torch.device | str = "cpu",
) -> Restored:  # fmt: skip
    """Fill `worker`'s part of `layout`, and serve the others. Every worker with a part calls it; it blocks until
    this one has done its part.

    A local tensor whose units are all kept is taken over as it is, not copied; `live` must stay untouched until
    everybody is done.

    Raises:
        RestoreError: every source of some shard failed. What `group` raises when a peer is lost comes through.
    """
    part = schedule.parts.get(worker)
    if part is None:
        part = WorkerPart(worker, "", schedule.step)
    return _Restore(part, layout, live, group, access, torch.device(device), schedule).run()


class _Restore:
    """One execution; used once."""

    def __init__(
        self, part: WorkerPart, layout: Layout, live: LiveState | None, group: MessageGroup, access: Access, device: torch.device,
        schedule: TransferSchedule,
    ) -> None:  # fmt: skip
        self._part, self._layout, self._group, self._access = part, layout, group, access
        self._device, self._schedule = device, schedule
        held = (
            {}
            if live is None
            else shard_views(live.layout.tensors, live.layout.shards_by_worker[part.worker], live.state)
        )
        self._live: dict[ShardId, Tensor] = held
        self._state, self._moved_in_place = self._allocate(live)
        wanted = layout.shards_by_worker.get(part.worker, frozenset())
        self._targets = shard_views(layout.tensors, wanted, self._state) if wanted else {}
        self._arrived: dict[ShardId, Future[None]] = {}
        self._node_by_worker = {name: each.node for name, each in schedule.parts.items()}
        self._bytes: Counter[str] = Counter()

    def _allocate(self, live: LiveState | None) -> tuple[dict[str, Tensor], set[str]]:
        """Local tensors of the new layout: the old ones where all their units stay, else new memory."""
        keep = set(self._part.keep)
        state: dict[str, Tensor] = {}
        taken: set[str] = set()
        if self._part.worker not in self._layout.shards_by_worker:
            return state, taken
        before = {} if live is None else live.layout.units_of(self._part.worker)
        for name, units in self._layout.units_of(self._part.worker).items():
            if live is not None and before.get(name) == units and all(ShardId(name, unit) in keep for unit in units):
                state[name] = live.state[name]
                taken.add(name)
            else:
                state[name] = empty_local(self._layout.tensors[name], units, self._device)
        return state, taken

    def run(self) -> Restored:
        for shard in self._part.keep:
            if shard.tensor not in self._moved_in_place:
                self._targets[shard].copy_(self._live[shard])
        with ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="restore") as pool:
            for fetch in self._part.fetches:
                done: Future[None] = pool.submit(self._fetch, fetch)
                self._arrived.update(dict.fromkeys(fetch.shards, done))
            self._exchange()
            for done in set(self._arrived.values()):
                done.result()
        return Restored(self._state, {tier: self._bytes[tier] for tier in ("memory", "disk", "peer", "s3")})

    # messages --------------------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """All messages in their common order: the first unfinished one can always proceed."""
        sending: list[tuple[Any, Tensor]] = []
        bad: list[ShardId] = []
        for message in self._part.messages:
            if message.source == self._part.worker:
                buffer = self._packed(message)
                sending.append((self._group.send(buffer, message.destination, message.position), buffer))
                if len(sending) > SENDS_IN_FLIGHT:
                    self._group.wait(sending.pop(0)[0])
            else:
                bad += self._receive(message)
        for work, _ in sending:
            self._group.wait(work)
        if bad:
            self._replace(bad)

    def _source_view(self, shard: ShardId) -> Tensor:
        """A shard that this worker passes on: its old state, or what it has got meanwhile."""
        if shard in self._live:
            return self._live[shard]
        if shard in self._arrived:
            self._arrived[shard].result()
        return self._targets[shard]

    def _packed(self, message: Message) -> Tensor:
        """One buffer: each shard's bytes, then (from host memory) each one's checksum."""
        pieces = [self._source_view(shard).contiguous().view(-1).view(torch.uint8) for shard in message.shards]
        sums = [zlib.crc32(piece.numpy().data) if piece.device.type == "cpu" else 0 for piece in pieces]
        trailer = torch.tensor(sums, dtype=torch.int64).view(torch.uint8).to(self._device)
        return torch.cat([*pieces, trailer])

    def _receive(self, message: Message) -> list[ShardId]:
        """Take a message apart; returns the shards whose bytes are not what was sent."""
        sizes = [self._layout.shard_bytes(shard) for shard in message.shards]
        buffer = torch.empty(sum(sizes) + _CRC_BYTES * len(sizes), dtype=torch.uint8, device=self._device)
        self._group.wait(self._group.recv(buffer, message.source, message.position))
        sums = buffer[sum(sizes) :].clone().view(torch.int64).tolist()
        same_node = self._node_by_worker.get(message.source) == self._part.node
        bad, position = [], 0
        for shard, size, crc in zip(message.shards, sizes, sums, strict=True):
            piece = buffer[position : position + size]
            position += size
            if self._device.type == "cpu" and zlib.crc32(piece.numpy().data) != crc:
                bad.append(shard)
                continue
            self._put(shard, piece)
            self._bytes["memory" if same_node else "peer"] += size
        return bad

    def _replace(self, shards: Sequence[ShardId]) -> None:
        """Get shards that a live worker sent damaged from wherever else they lie."""
        for shard in shards:
            sources = [
                source for source in self._schedule.sources_of(self._part.worker, shard) if source.kind != "worker"
            ]
            logger.warning("%s arrived damaged; trying %d other sources", shard, len(sources))
            self._fetch(Fetch(tuple(sources), (shard,)))

    # reads -----------------------------------------------------------------------------------------------------------

    def _fetch(self, fetch: Fetch) -> None:
        """Get these shards from the first source that gives each of them."""
        left = list(fetch.shards)
        failures: list[str] = []
        for source in fetch.sources:
            if not left or source.kind == "worker":
                continue
            try:
                left = self._read_from(source, left, failures)
            except (RecoveryError, OSError) as error:
                failures.append(f"{source}: {error}")
        if left:
            raise RestoreError(self._part.worker, tuple(failures) or tuple(f"{shard} has no source" for shard in left))

    def _read_from(self, source: Source, shards: Sequence[ShardId], failures: list[str]) -> list[ShardId]:
        """Read what `source` gives; returns what it does not."""
        left = dict.fromkeys(shards)
        tier = "s3" if source.kind == "s3" else source.kind if source.node == self._part.node else "peer"
        try:
            for shard, data in self._pieces(source, shards):
                if isinstance(data, RecoveryError):
                    failures.append(str(data))
                    continue
                if data.numel() * data.element_size() != self._layout.shard_bytes(shard):
                    failures.append(f"{shard} from {source} has the wrong length")
                    continue
                self._put(shard, data)
                self._bytes[tier] += self._layout.shard_bytes(shard)
                del left[shard]
        except (RecoveryError, OSError) as error:
            failures.append(f"{source}: {error}")
        return list(left)

    def _pieces(self, source: Source, shards: Sequence[ShardId]) -> Iterator[tuple[ShardId, Tensor | RecoveryError]]:
        """Each shard's verified bytes (or values) from one source, or why it has none."""
        if source.kind == "s3":
            yield from self._access.read_durable(source.name, source.step, shards)
        elif source.node == self._part.node:
            for shard in shards:
                yield shard, self._from_own_node(source, shard)
        else:
            yield from self._from_peer(source, shards)

    def _from_own_node(self, source: Source, shard: ShardId) -> Tensor | RecoveryError:
        try:
            return torch.frombuffer(self._access.store.read(source, shard), dtype=torch.uint8)
        except (ShardUnavailable, ShardCorrupt) as error:
            return error

    def _from_peer(self, source: Source, shards: Sequence[ShardId]) -> Iterator[tuple[ShardId, Tensor | RecoveryError]]:
        endpoint = self._access.agents.get(source.node)
        if endpoint is None:
            raise ShardUnavailable(shards[0], str(source), "its node has no agent")
        client = ShardClient(*endpoint, self._access.timeout_s)
        try:
            for shard, data in client.read(source, shards):
                yield shard, data if isinstance(data, RecoveryError) else torch.frombuffer(data, dtype=torch.uint8)
        finally:
            client.close()

    def _put(self, shard: ShardId, data: Tensor) -> None:
        """Write raw bytes, or a tensor of the shard's own type, where the shard belongs."""
        target = self._targets[shard]
        if data.dtype == torch.uint8 and target.dtype != torch.uint8:
            data = data.view(TORCH_DTYPES[self._layout.tensors[shard.tensor].dtype])
        target.copy_(data.view(target.shape))
