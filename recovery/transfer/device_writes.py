"""Copies of a restore's shards from host memory onto a GPU.

They go from pinned memory, on a stream of their own.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from recovery.state.device_checksum import view_checksums
from recovery.state.layout import ShardId

logger = logging.getLogger(__name__)

PINNED_BYTES = 256 << 20
"""Limit in bytes on the host memory that a worker's restores pin.

It is one fetch (`reads.FETCH_BYTES`) for each of the streams from peers. PyTorch rounds each
shard's memory up to a power of two, and keeps it for the next restore.
"""


class Copies(Protocol):
    """Copies from host memory to one device; both may be called from any thread."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Return host memory, uint8, that the device reads by itself.

        Raises RuntimeError if there is none.
        """
        ...

    def copy(self, target: Tensor, data: Tensor) -> None:
        """Copy `data`, on the host and of `target`'s shape and type; return when it is there."""
        ...

    def move(self, target: Tensor, data: Tensor) -> None:
        """Copy as `copy` does, from `data` that is on the device already."""
        ...

    def start(self, targets: list[Tensor], sources: list[Tensor]) -> Callable[[], None]:
        """Begin to copy each source, pinned, to its target; the result waits for all of them."""
        ...

    def checksums(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the checksums of tensors on the device, after all copies that were begun."""
        ...


class CudaCopies:
    """Copies on a CUDA stream of their own.

    Neither the messages between workers nor the caller's computation waits for them. They start
    after the caller's stream has finished its work on the targets' memory, which may have belonged
    to other tensors before.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, data: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(data, non_blocking=True)
            done = self._stream.record_event()
        done.synchronize()

    move = copy

    def start(self, targets: list[Tensor], sources: list[Tensor]) -> Callable[[], None]:
        with torch.cuda.stream(self._stream):
            if targets:
                torch._foreach_copy_(targets, sources, non_blocking=True)
            done = self._stream.record_event()
        wait: Callable[[], None] = done.synchronize
        return wait

    def checksums(self, tensors: Sequence[Tensor]) -> list[int]:
        with torch.cuda.stream(self._stream):
            return view_checksums(tensors)


class DeviceWrites:
    """Writes of one restore to a device.

    A source writes a shard to the pinned memory from `memory_of`, and `write` copies it from there
    to its target. Data from other memory takes the same way, only slower.
    """

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self._lock = threading.Lock()
        self.pinned_by_shard: dict[ShardId, Tensor] = {}
        """Pinned memory of shards that are not written yet."""
        self.room_bytes = PINNED_BYTES
        """How much more memory may be pinned."""

    def memory_of(self, shard: ShardId, num_bytes: int) -> memoryview | None:
        """Return pinned memory for a shard, the same until the shard is written.

        None if no more memory may be pinned.
        """
        with self._lock:
            pinned = self.pinned_by_shard.get(shard)
            if pinned is not None:
                return pinned.numpy().data

            if not 0 < num_bytes <= self.room_bytes:
                return None
            try:
                pinned = self.copies.pinned(num_bytes)
            except RuntimeError as error:
                logger.warning(
                    "a shard is restored through memory that is not pinned, slower: %s", error
                )
                return None

            self.pinned_by_shard[shard] = pinned
            self.room_bytes -= num_bytes
            return pinned.numpy().data

    def write(self, shard: ShardId, target: Tensor, data: Tensor) -> None:
        """Write a shard; return when the device has it and `data` may be overwritten."""
        self.copies.copy(target, data)
        with self._lock:
            used = self.pinned_by_shard.pop(shard, None)
            if used is not None:
                self.room_bytes += used.nbytes


def writes_to(device: torch.device) -> DeviceWrites | None:
    """Return the writes to a device; None if the targets are in host memory.

    Call it after the targets are allocated, in the thread that allocated them.
    """
    if device.type != "cuda":
        return None
    return DeviceWrites(CudaCopies(device))
