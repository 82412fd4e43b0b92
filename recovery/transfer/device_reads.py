"""Reads of this node's snapshots in host memory onto a device.

Several threads copy through a little pinned memory, and the device checks what arrives.

One core of the host copies and checks a few GB/s; a GPU takes 50 GB/s from pinned memory and checks
what it has at many times that. So threads only copy out of the file, in large pieces, and the
device computes the checksums of what has arrived.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recovery.errors import RecoveryError, ShardCorrupt, ShardUnavailable
from recovery.local.snapshot_file import SnapshotFile
from recovery.state.holdings import Source
from recovery.state.layout import ShardId
from recovery.transfer.device_writes import Copies
from recovery.transfer.tiers import Into, NodeTier, ShardAnswer

SLOT_BYTES = 16 << 20
NUM_SLOTS = 2
"""Pinned pieces of each thread: one is filled while the device reads the other."""


@dataclass(frozen=True)
class ReadSpan:
    """Bytes `start` to `end` of a file, and the parts of targets (flat uint8) that they fill."""

    file: SnapshotFile
    start: int
    end: int
    parts: tuple[tuple[int, Tensor], ...]
    """Offset in the file and target of each."""


@dataclass(frozen=True)
class DeviceTier:
    """Reads `source.kind` "memory" of the reader's own node into the new state's own tensors.

    Only a reader that may write to the targets at once gets that (`into` is not empty); another
    one, and a host that pins no memory, reads as `NodeTier`.
    """

    tier: NodeTier
    copies: Copies
    targets: Mapping[ShardId, Tensor]

    def read(
        self,
        source: Source,
        shards: Sequence[ShardId],
        checksums: Mapping[ShardId, int],
        into: Into,
    ) -> Iterator[tuple[ShardId, ShardAnswer]]:
        slots = self._pin() if into else None
        if slots is None:
            yield from self.tier.read(source, shards, checksums, into)
            return

        files: dict[ShardId, SnapshotFile] = {}
        for shard in shards:
            try:
                files[shard] = self.tier.store.file_of(source, shard)
            except ShardUnavailable as error:
                yield shard, error

        arrived = {shard: _contiguous(self.targets[shard]) for shard in files}
        try:
            self._fill(slots, files, arrived)
        except (EOFError, OSError) as error:
            raise ShardUnavailable(shards[0], str(source), str(error)) from error

        found = self.copies.checksums(list(arrived.values()))
        for (shard, tensor), checksum in zip(arrived.items(), found, strict=True):
            problem = _problem(files[shard], shard, checksum, checksums.get(shard))
            if problem is not None:
                yield shard, problem
                continue

            target = self.targets[shard]
            if tensor is not target:
                self.copies.move(target, tensor)
            yield shard, target

    def _pin(self) -> list[Tensor] | None:
        try:
            return [self.copies.pinned(SLOT_BYTES) for _ in range(NUM_SLOTS)]
        except RuntimeError:
            return None

    def _fill(
        self,
        slots: Sequence[Tensor],
        files: Mapping[ShardId, SnapshotFile],
        arrived: Mapping[ShardId, Tensor],
    ) -> None:
        """Copy the shards' bytes; return when the device has them, also after an error."""
        pending = [self.copies.start([], []) for _ in slots]
        try:
            for number, span in enumerate(_spans(files, arrived)):
                turn = number % len(slots)
                # The device may still read the slot's former bytes.
                pending[turn]()

                slot = slots[turn][: span.end - span.start]
                span.file.read_bytes_into(slot.numpy().data, span.start)
                pending[turn] = self._copy_parts(span, slot)
        finally:
            for wait in pending:
                wait()

    def _copy_parts(self, span: ReadSpan, slot: Tensor) -> Callable[[], None]:
        """Begin to copy a span's bytes in `slot` to its targets; return the wait for that."""
        targets = []
        sources = []
        for offset, target in span.parts:
            begin = offset - span.start
            targets.append(target)
            sources.append(slot[begin : begin + target.numel()])
        return self.copies.start(targets, sources)


def _contiguous(target: Tensor) -> Tensor:
    """Return the target itself, or memory of its size if its units are not contiguous."""
    if target.is_contiguous():
        return target
    return torch.empty_like(target, memory_format=torch.contiguous_format)


def _spans(
    files: Mapping[ShardId, SnapshotFile], arrived: Mapping[ShardId, Tensor]
) -> Iterator[ReadSpan]:
    """Cut what is to be read into pieces of at most SLOT_BYTES that lie together in a file."""
    offsets = {shard: file.extent(shard).offset for shard, file in files.items()}
    open_span: ReadSpan | None = None
    for shard in sorted(files, key=offsets.__getitem__):
        file = files[shard]
        target = arrived[shard].view(-1).view(torch.uint8)
        for position in range(0, target.numel(), SLOT_BYTES):
            part = target[position : position + SLOT_BYTES]
            start = offsets[shard] + position
            end = start + part.numel()

            if open_span is not None and open_span.file is file:
                fits = end - open_span.start <= SLOT_BYTES
                if fits:
                    parts = (*open_span.parts, (start, part))
                    open_span = ReadSpan(file, open_span.start, end, parts)
                    continue

            if open_span is not None:
                yield open_span
            open_span = ReadSpan(file, start, end, ((start, part),))

    if open_span is not None:
        yield open_span


def _problem(
    file: SnapshotFile, shard: ShardId, found: int, expected: int | None
) -> RecoveryError | None:
    """Return the error of a shard with the checksum `found`; None if it is the committed one."""
    try:
        file.require(shard, found, expected)
    except (ShardCorrupt, ShardUnavailable) as error:
        return error
    return None
