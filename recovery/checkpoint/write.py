"""A worker's part of a checkpoint: which shards it writes, and writing them."""

import hashlib
import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from recovery.checkpoint.dcp import DATA_SUFFIX
from recovery.checkpoint.item import ALIGNMENT, envelope
from recovery.checkpoint.manifest import DataFile, StoredShard
from recovery.checkpoint.ownership import LEASE_CONTENT, TRAILER_BYTES, trailer
from recovery.errors import ShardCorrupt
from recovery.state.checksum import RunningChecksum
from recovery.state.layout import Layout, ShardId, TensorSpec
from recovery.state.slices import shard_views
from recovery.storage.contents import holds
from recovery.storage.own_names import own_name
from recovery.storage.payload import BytesPayload, ConcatPayload, Payload
from recovery.storage.protocol import Storage
from recovery.storage.tensor_payload import TensorPayload

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 30
_CHECKSUM_STRIDE = 1 << 20


def step_prefix(step: int) -> str:
    """Return the prefix of everything of the checkpoint of `step`, with its slash."""
    return f"step-{step:08d}/"


@dataclass(frozen=True)
class WorkerReceipt:
    """Receipt for what one worker wrote, from which the coordinator commits; picklable.

    `bytes_sent` counts the bytes that were sent, `bytes_present` those that an earlier attempt had
    already stored.
    """

    step: int
    worker: str
    files: tuple[DataFile, ...]
    bytes_sent: int = 0
    bytes_present: int = 0
    seconds: float = 0.0

    @property
    def shards(self) -> frozenset[ShardId]:
        shards: set[ShardId] = set()
        for file in self.files:
            shards.update(stored.shard for stored in file.shards)
        return frozenset(shards)


@dataclass(frozen=True)
class CheckpointPart:
    """Part of the checkpoint of `step` that one worker writes to `storage`."""

    storage: Storage
    step: int
    worker: str
    max_file_bytes: int = MAX_FILE_BYTES


def write_shards(
    part: CheckpointPart,
    state: Mapping[str, torch.Tensor],
    layout: Layout,
    ids: Collection[ShardId],
) -> WorkerReceipt:
    """Write this worker's assigned shards (`ids`) of a step; blocks until they are durable.

    Any worker calls it, none waits for another. `state` is the worker's whole local state by state
    name, as `layout` says it holds it, and must not change meanwhile. Tensors are read in place
    (GPU tensors piece by piece), never copied whole. A file's name is a digest of its content: a
    retry after a crash finds what is there already and does not send it again. A file of that name
    with other bytes is damaged, and is replaced.

    Raises:
        ValueError: the state is not what the layout says. StorageError: the storage failed.
    """
    views = shard_views(layout.tensors, layout.shards_by_worker[part.worker], state)
    return write_views(part, {shard: views[shard] for shard in ids}, layout.tensors)


def write_views(
    part: CheckpointPart,
    views: Mapping[ShardId, torch.Tensor],
    specs: Mapping[str, TensorSpec],
    progress: Callable[[int, int], None] | None = None,
    checksums: Mapping[ShardId, int] | None = None,
) -> WorkerReceipt:
    """Write one tensor per shard, as `write_shards` does.

    `progress(done_bytes, total_bytes)` is called for each piece. With `checksums`, those taken when
    the bytes were made, bytes that have changed since are not written.

    Raises:
        ShardCorrupt: some bytes have changed. Also the errors of `write_shards`.
    """
    storage = part.storage
    step = part.step
    prefix = step_prefix(step)
    started = time.monotonic()
    total = sum(specs[shard.tensor].unit_bytes(shard.unit) for shard in views)
    meter = _Meter(total, progress)
    files = []
    sent = 0
    present = 0
    for group in _file_groups(sorted(views), specs, part.max_file_bytes):
        items = [(shard, specs[shard.tensor], views[shard]) for shard in group]
        file, payload = _data_file(step, part.worker, items, checksums or {})
        name = prefix + file.name
        found = storage.size(name)
        if found is not None and holds(storage, name, payload):
            # What lies here may be old: something young beside it keeps clean-ups away until the
            # commit.
            if not present:
                lease = f"{prefix}resumed-{uuid.uuid4().hex[:12]}.lease"
                storage.put(lease, LEASE_CONTENT)
            present += file.num_bytes
            meter.add(file.num_bytes)
        else:
            if found is not None:
                logger.warning("%s/%s is damaged and is replaced", storage.uri, name)
            storage.put(name, meter.metered(payload))
            sent += file.num_bytes
        files.append(file)

    return WorkerReceipt(
        step=step,
        worker=part.worker,
        files=tuple(files),
        bytes_sent=sent,
        bytes_present=present,
        seconds=time.monotonic() - started,
    )


def _file_groups(
    shards: Sequence[ShardId], specs: Mapping[str, TensorSpec], max_file_bytes: int
) -> Iterator[list[ShardId]]:
    """Yield groups of consecutive shards, as many as fit into one file; at least one."""
    group: list[ShardId] = []
    filled = 0
    for shard in shards:
        size = specs[shard.tensor].unit_bytes(shard.unit)
        if group and filled + size > max_file_bytes:
            yield group
            group = []
            filled = 0
        group.append(shard)
        filled += size
    if group:
        yield group


def _data_file(
    step: int,
    worker: str,
    items: Sequence[tuple[ShardId, TensorSpec, torch.Tensor]],
    checksums: Mapping[ShardId, int],
) -> tuple[DataFile, ConcatPayload]:
    """Return the table and the bytes of one data file.

    Every tensor is read once, for its checksum.
    """
    parts: list[Payload] = []
    table: list[StoredShard] = []
    position = 0
    digest = hashlib.sha256()
    for shard, spec, tensor in items:
        data = TensorPayload(tensor)
        found = payload_checksum(data)
        if checksums.get(shard, found) != found:
            raise ShardCorrupt(
                shard, worker, "it has changed in host memory since its snapshot was taken"
            )

        shape = spec.unit_shape(shard.unit)
        wrap = envelope(spec.dtype, shape, data.size)
        stored = StoredShard(
            tensor=shard.tensor,
            unit=shard.unit,
            item_offset=position,
            item_bytes=wrap.num_bytes + data.size,
            offset=position + len(wrap.prefix),
            num_bytes=data.size,
            checksum=found,
        )
        table.append(stored)
        digest.update(repr((stored, spec.dtype, shape)).encode())

        position = math.ceil(stored.item_end / ALIGNMENT) * ALIGNMENT
        padding = bytes(position - stored.item_end)
        parts.append(BytesPayload(wrap.prefix))
        parts.append(data)
        parts.append(BytesPayload(wrap.suffix + padding))

    short = digest.hexdigest()[:16]
    writer = re.sub(r"[^A-Za-z0-9.-]", "_", worker)
    name = own_name(writer, short, DATA_SUFFIX)
    parts.append(BytesPayload(trailer(step, short)))
    file = DataFile(name, position + TRAILER_BYTES, worker, tuple(table))
    return file, ConcatPayload(parts)


def payload_checksum(payload: Payload) -> int:
    """Return the checksum of the whole payload, read a few MiB at a time."""
    running = RunningChecksum()
    for offset in range(0, payload.size, _CHECKSUM_STRIDE):
        length = min(_CHECKSUM_STRIDE, payload.size - offset)
        running.update(memoryview(payload.read(offset, length)))
    return running.value()


class _Meter:
    """Adds up progress of all files of one call.

    Parts may be read more than once (retries): capped at the total.
    """

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._total = total
        self._done = 0
        self._progress = progress

    def add(self, num_bytes: int) -> None:
        self._done = min(self._total, self._done + num_bytes)
        if self._progress:
            self._progress(self._done, self._total)

    def metered(self, payload: ConcatPayload) -> ConcatPayload:
        """Return the same bytes, whose reads of tensors are added up."""
        parts = payload.parts
        return ConcatPayload(
            [_Metered(part, self) if isinstance(part, TensorPayload) else part for part in parts]
        )


class _Metered:
    """A payload that reports what is read of it."""

    def __init__(self, payload: Payload, meter: _Meter) -> None:
        self._payload = payload
        self._meter = meter

    @property
    def size(self) -> int:
        return self._payload.size

    def read(self, offset: int, length: int) -> bytes | bytearray | memoryview:
        data = self._payload.read(offset, length)
        self._meter.add(length)
        return data
