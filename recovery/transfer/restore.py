"""Execution of one worker's part of a transfer schedule.

It keeps, reads, sends and receives shards until its new state is whole. Reads from snapshots,
peers' agents and durable storage run in threads in parallel to the messages of the group. Every
byte is checked before it is used. A source that fails or gives wrong bytes is replaced by the next
one that the schedule names.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from recovery.errors import RestoreError
from recovery.peers.pool import ClientPool
from recovery.state.holdings import Source
from recovery.state.layout import ShardId
from recovery.state.slices import TORCH_DTYPES, empty_local, names_by_memory, shard_views
from recovery.transfer.device_reads import DeviceTier
from recovery.transfer.device_writes import writes_to
from recovery.transfer.exchange import IN_FLIGHT_BYTES, Exchange, ExchangedState, MessageGroup
from recovery.transfer.messages import Message
from recovery.transfer.reads import Reads
from recovery.transfer.restore_task import (
    Access,
    LiveState,
    Restored,
    RestoreProgress,
    RestoreTask,
)
from recovery.transfer.schedule import TIERS, Fetch, shards_of
from recovery.transfer.senders import Senders
from recovery.transfer.tiers import NodeTier, Tier

__all__ = [
    "Access",
    "LiveState",
    "MessageGroup",
    "RestoreProgress",
    "RestoreTask",
    "Restored",
    "restore",
]

WAKE_S = 0.05
"""Seconds between two looks at a fetch that may have ended without the shard that is waited for."""


def restore(
    task: RestoreTask,
    group: MessageGroup,
    access: Access,
    progress: RestoreProgress | None = None,
) -> Restored:
    """Fill the worker's part of the task's layout, and serve the other workers.

    Every worker with a part calls it; it blocks until this one has done its part. A local tensor
    whose units are all kept is taken over as it is, not copied, if everything that shares its
    memory is, too. `progress` fills up meanwhile.

    Raises:
        RestoreError: every source of some shard failed; raised only after this worker has served
        all others. Its `bad` is what the next schedule has to exclude. Raised at once if the
        schedule keeps what this worker's memory does not hold. Errors of `group` when a peer is
        lost are passed on at once, too.
        Cancelled: it was cancelled (`access.cancelled`); what came before is in
        `progress.arrived`.
    """
    execution = _Restore(task, group, access, progress or RestoreProgress())
    try:
        return execution.run()
    finally:
        execution.release_references()


class _Restore:
    """Execution of one restore; used once."""

    def __init__(
        self, task: RestoreTask, group: MessageGroup, access: Access, progress: RestoreProgress
    ) -> None:
        self._group = group
        self._access = access
        self._progress = progress
        self._part = part = task.part
        self._worker = part.worker
        self._layout = layout = task.layout
        self._schedule = schedule = task.schedule
        self._device = torch.device(task.device)
        self._state_device = torch.device(task.state_device or task.device)

        live, self._state, self._in_place = self._with_room(task.live)
        self._live: dict[ShardId, Tensor] = {}
        if live is not None:
            own = live.layout.shards_by_worker.get(part.worker, frozenset())
            here = frozenset(shard for shard in own if shard.tensor in live.state)
            self._live.update(shard_views(live.layout.tensors, here, live.state))
            self._live.update(live.arrived)

        self._targets: dict[ShardId, Tensor] = {}
        wanted = layout.shards_by_worker.get(part.worker, frozenset())
        if wanted:
            self._targets = shard_views(layout.tensors, wanted, self._state)

        self._writes = writes_to(self._state_device)
        self._fetched: dict[ShardId, Future[None]] = {}
        self._received = set(shards_of(part.message_fallbacks))
        self._node_by_worker = {name: each.node for name, each in schedule.parts.items()}
        self._lock = threading.Lock()
        self._came = threading.Condition(self._lock)
        self._here: set[ShardId] = set()
        self._bytes: Counter[str] = Counter()
        self._pool = ClientPool()
        self._reads = Reads(
            part.node,
            layout,
            schedule,
            self._tier_of,
            self,
            access.cancelled,
            slow=progress.slow,
            to_device=self._writes is not None,
        )

        coming = [*shards_of(part.fetches), *self._received]
        self._total = sum(layout.shard_bytes(shard) for shard in coming)

    def _with_room(
        self, live: LiveState | None
    ) -> tuple[LiveState | None, dict[str, Tensor], set[str]]:
        """Allocate the new state; return the live state, the new tensors, and the names taken over.

        If the device has not enough memory for both states, the old one moves to the host first.
        Raises OutOfMemoryError if that does not help.
        """
        try:
            return live, *self._allocate(live)
        except torch.OutOfMemoryError:
            if live is None or live.make_room is None:
                raise
        # Behind the handler: the error's traceback would keep what was allocated before it.
        live = live.make_room(self._taken_over(live))
        return live, *self._allocate(live)

    def _allocate(self, live: LiveState | None) -> tuple[dict[str, Tensor], set[str]]:
        """Allocate the local tensors of the new layout, with room for messages.

        Old tensors are reused if all their units stay; the others get new memory.
        """
        if self._worker not in self._layout.shards_by_worker:
            return {}, set()

        in_place = self._taken_over(live)
        state: dict[str, Tensor] = {}
        for name, units in self._layout.units_of(self._worker).items():
            if live is not None and name in in_place:
                state[name] = live.state[name]
            else:
                state[name] = empty_local(self._layout.tensors[name], units, self._state_device)

        message_bytes = 0
        for message in self._part.messages:
            for shard in message.shards:
                message_bytes += self._layout.shard_bytes(shard)
        # Allocated and released: the messages' memory must not be short once they run.
        torch.empty(min(IN_FLIGHT_BYTES, message_bytes), dtype=torch.uint8, device=self._device)
        return state, in_place

    def _taken_over(self, live: LiveState | None) -> set[str]:
        """Return the names of old tensors that the new state takes over as they are.

        All their units stay, and on the device, and so does everything that shares their memory. If
        only a part of a flat tensor were taken over, the rest would stay allocated, too; so the
        kept part is copied instead.
        """
        worker = self._worker
        if live is None or worker not in self._layout.shards_by_worker:
            return set()
        if worker not in live.layout.shards_by_worker:
            return set()

        keep = set(self._part.keep)
        before = live.layout.units_of(worker)
        found = set()
        for name, units in self._layout.units_of(worker).items():
            here = [ShardId(name, unit) for unit in units]
            as_it_is = (
                name in live.state
                and before.get(name) == units
                and all(shard in keep for shard in here)
                and live.state[name].device.type == self._state_device.type
            )
            # Shards that arrived lie in memory of their own, not in the old tensor.
            if as_it_is and not any(shard in live.arrived for shard in here):
                found.add(name)

        whole = set(found)
        for sharing in names_by_memory(live.state):
            if not sharing <= found:
                whole -= sharing
        return whole

    @torch.no_grad()
    def run(self) -> Restored:
        began = time.monotonic()
        with self._pool, self._reads as reads:
            for fetch in reads.split(self._part.fetches):
                self._start(fetch)
            self._require_kept()

            pending = []
            if self._device.type == self._state_device.type == "cpu":
                pending.append(reads.in_background(self._copy_kept))
            else:
                # On the stream of the calling thread, which does not wait for it.
                self._copy_kept()

            self._exchange()
            for done in {*self._fetched.values(), *pending}:
                done.result()

        if reads.missing:
            raise RestoreError(self._worker, tuple(reads.failures), tuple(reads.bad))
        return Restored(
            state=self._state,
            bytes_by_tier={tier: self._bytes[tier] for tier in TIERS},
            seconds=time.monotonic() - began,
            failures=tuple(reads.failures),
            bad=tuple(reads.bad),
            slow=dict(reads.slow),
        )

    def _require_kept(self) -> None:
        for shard in self._part.keep:
            if shard not in self._live:
                why = (
                    f"the schedule keeps {shard} in this worker's memory, which does not hold it at"
                    f" step {self._part.step}"
                )
                raise RestoreError(self._worker, (why,), ())

    @torch.no_grad()
    def _copy_kept(self) -> None:
        """Copy the shards that stay with this worker, but in another tensor."""
        for shard in self._part.keep:
            if shard.tensor not in self._in_place:
                self._targets[shard].copy_(self._live[shard])

    def release_references(self) -> None:
        """Release references to the old state and the new one.

        This object and its reads refer to each other: both states would otherwise stay in the
        device's memory until the garbage collector runs.
        """
        self._live = {}
        self._targets = {}
        self._state = {}
        self._writes = None

    # messages

    def _exchange(self) -> None:
        senders = Senders(self._worker, self._schedule)
        state = ExchangedState(
            view_of=self._view_of,
            place_of=self._place_of,
            take=self._take,
            miss=self._miss,
            expected=self._schedule.checksums_of_message,
            waited=senders.waited,
        )
        try:
            exchange = Exchange(self._worker, self._layout, self._group, self._device, state)
            exchange.run(self._part.messages)
        finally:
            self._progress.slow.update(senders.slow())

    def _view_of(self, shard: ShardId) -> Tensor | None:
        """Return a shard that this worker passes on.

        What the schedule brings here takes precedence over live memory, which may be of another
        step.
        """
        if shard in self._fetched:
            self._await(shard)
        elif shard not in self._received:
            return self._live[shard]

        if shard in self._reads.missing:
            return None
        return self._targets[shard]

    def _place_of(self, shard: ShardId) -> Tensor | None:
        """Return the bytes of the new state that a shard belongs to, if they are contiguous.

        Received bytes are written there, then checked. None if messages come to another device.
        """
        target = self._targets[shard]
        if target.device.type != self._device.type or not _is_one_piece(target):
            return None
        return target.view(-1).view(torch.uint8)

    def _await(self, shard: ShardId) -> None:
        """Wait until this shard is here, or its fetch has ended without it.

        The shards of a large fetch are passed on while the fetch is still in progress.
        """
        done = self._fetched[shard]
        with self._lock:
            while shard not in self._here and not done.done():
                self._came.wait(WAKE_S)
        if done.done():
            done.result()

    def _take(self, message: Message, shard: ShardId, data: Tensor) -> None:
        same_node = self._node_by_worker.get(message.source) == self._part.node
        self.put(shard, data, "memory" if same_node else "peer")

    def _miss(self, message: Message, shards: Sequence[ShardId]) -> None:
        """Read shards that came damaged or not at all from their next sources.

        Shards with the same sources are read together, while messages continue.
        """
        shards_by_sources: dict[tuple[Source, ...], list[ShardId]] = {}
        for shard in shards:
            sources = self._schedule.sources_of(self._worker, shard)
            shards_by_sources.setdefault(sources, []).append(shard)

        for (first, *others), group in shards_by_sources.items():
            problems = [f"{shard} from {first} arrived damaged or not at all" for shard in group]
            self._reads.note(first, group, problems)
            self._start(Fetch(tuple(others), tuple(group)))

    # reads

    def _tier_of(self, source: Source, cancelled: threading.Event | None) -> Tier:
        """Return the tier that reads `source` for this worker.

        Onto a device, the node's own memory is read by a DeviceTier.
        """
        tier = self._access.tier(source, cancelled, node=self._part.node, pool=self._pool)
        if self._writes is None:
            return tier
        if source.kind == "memory" and isinstance(tier, NodeTier):
            return DeviceTier(tier, self._writes.copies, self._targets)
        return tier

    def _start(self, fetch: Fetch) -> None:
        """Start a fetch; only the thread that runs the messages calls it and uses `_fetched`."""
        done = self._reads.start(fetch)
        self._fetched.update(dict.fromkeys(fetch.shards, done))

    def memory_of(self, shard: ShardId) -> memoryview | None:
        """Return the memory to read a shard into (see `reads.ShardSink`).

        It is the target itself if that is one piece of host memory, or pinned memory on the way to
        a device.
        """
        target = self._targets[shard]
        if self._writes is not None:
            return self._writes.memory_of(shard, target.nbytes)
        if target.device.type != "cpu" or not _is_one_piece(target):
            return None
        return target.view(-1).view(torch.uint8).numpy().data

    def put(self, shard: ShardId, data: Tensor, tier: str) -> None:
        """Write raw bytes, or a tensor of the shard's own type, where the shard belongs."""
        target = self._targets[shard]
        if data.dtype == torch.uint8 and target.dtype != torch.uint8:
            data = data.view(TORCH_DTYPES[self._layout.tensors[shard.tensor].dtype])

        in_place = data.data_ptr() == target.data_ptr()
        if self._writes is not None and data.device.type == "cpu" and not in_place:
            self._writes.write(shard, target, data.view(target.shape))
        elif not in_place:
            target.copy_(data.view(target.shape))

        with self._lock:
            self._progress.arrived[shard] = target
            self._here.add(shard)
            self._came.notify_all()
            self._bytes[tier] += target.nbytes
            done = self._bytes.total()
        if self._progress.report is not None:
            self._progress.report(done, self._total)


def _is_one_piece(target: Tensor) -> bool:
    return target.is_contiguous() and target.numel() > 0
