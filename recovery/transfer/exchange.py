"""One worker's messages of a restore: packed, sent, received and checked, several in flight, in the order all share.

A message is one flat buffer on the group's device: each shard's bytes, 16-byte aligned, then one int64 for each: its checksum
(`recovery.state.device_checksum`, the same on every device), or -1 where the sender could not get it. The receiver believes the
schedule's checksum where it has one; the sender's guards what has no snapshot yet against damage on the way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from recovery.state.device_checksum import checksums
from recovery.state.layout import Layout, ShardId
from recovery.transfer.messages import Message

IN_FLIGHT_BYTES = 256 << 20
NOT_AVAILABLE = -1
_ALIGNMENT = 16


class MessageGroup(Protocol):
    """What carries live state between workers: a process group's point-to-point operations, each bounded by its
    deadline. After `wait_on_host` the tensor may be read by the host.
    """

    def send(self, tensor: Tensor, to: str, tag: int) -> Any: ...
    def recv(self, tensor: Tensor, source: str, tag: int) -> Any: ...
    def wait_on_host(self, work: Any) -> None: ...


@dataclass
class _Flight:
    message: Message
    work: Any
    buffer: Tensor


class Exchange:
    """Runs one worker's messages once. Blocks only for older messages of the common order: no deadlock.

    `view_of(shard)` gives what is to be sent (waiting for it if it is being fetched), None if it could not be had.
    `take(message, shard, data)` gets the bytes of a shard that has come; `miss(message, shards)` names those of a message
    that came damaged or were not available. `expected(shard)` is the checksum that a shard must have, None where only its sender
    knows it.
    """

    def __init__(
        self,
        worker: str,
        layout: Layout,
        group: MessageGroup,
        device: torch.device,
        view_of: Callable[[ShardId], Tensor | None],
        take: Callable[[Message, ShardId, Tensor], None],
        miss: Callable[[Message, Sequence[ShardId]], None],
        expected: Callable[[ShardId], int | None],
    ) -> None:
        self._worker, self._layout, self._group, self._device = worker, layout, group, device
        self._view_of, self._take, self._miss, self._expected = view_of, take, miss, expected
        self._flights: deque[_Flight] = deque()
        self._coming: dict[ShardId, int] = {}
        self._bytes = 0
        self._free: list[Tensor] = []

    def run(self, messages: Sequence[Message]) -> None:
        """Do all of them. What the group raises when a peer is lost comes through."""
        for message in messages:
            if message.source == self._worker:
                while any(shard in self._coming for shard in message.shards):
                    self._finish_oldest()
                buffer = self._packed(message)
                work = self._group.send(buffer, message.destination, message.position)
            else:
                buffer = self._buffer(self._extent(message.shards)[1])
                work = self._group.recv(buffer, message.source, message.position)
                self._coming.update(dict.fromkeys(message.shards, message.position))
            self._flights.append(_Flight(message, work, buffer))
            self._bytes += buffer.numel()
            while self._bytes > IN_FLIGHT_BYTES and len(self._flights) > 1:
                self._finish_oldest()
        while self._flights:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        flight = self._flights.popleft()
        self._group.wait_on_host(flight.work)
        self._bytes -= flight.buffer.numel()
        if flight.message.source != self._worker:
            self._unpack(flight)
            for shard in flight.message.shards:
                self._coming.pop(shard, None)
        self._free.append(flight.buffer)

    def _extent(self, shards: Sequence[ShardId]) -> tuple[int, int]:
        """Where the trailer begins, and the whole message's bytes."""
        trailer = sum(_aligned(self._layout.shard_bytes(shard)) for shard in shards)
        return trailer, trailer + 8 * len(shards)

    def _buffer(self, num_bytes: int) -> Tensor:
        """A buffer of exactly this size, over memory that an earlier message used where that fits."""
        for number, old in enumerate(self._free):
            storage_bytes = old.untyped_storage().nbytes()
            if num_bytes <= storage_bytes <= 2 * num_bytes:
                del self._free[number]
                return torch.empty(0, dtype=torch.uint8, device=self._device).set_(
                    old.untyped_storage(), 0, (num_bytes,), (1,)
                )
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _packed(self, message: Message) -> Tensor:
        trailer, num_bytes = self._extent(message.shards)
        buffer = self._buffer(num_bytes)
        pieces: list[Tensor | None] = []
        position = 0
        for shard in message.shards:
            size = self._layout.shard_bytes(shard)
            piece = buffer[position : position + size]
            view = self._view_of(shard)
            if view is not None:
                piece.view(view.dtype).view(view.shape).copy_(view)
            pieces.append(None if view is None else piece)
            position += _aligned(size)
        sums = iter(checksums([piece for piece in pieces if piece is not None]))
        words = [NOT_AVAILABLE if piece is None else _as_word(next(sums)) for piece in pieces]
        buffer[trailer:].view(torch.int64).copy_(torch.tensor(words))
        return buffer

    def _unpack(self, flight: _Flight) -> None:
        shards = flight.message.shards
        trailer, _ = self._extent(shards)
        pieces, position = [], 0
        for shard in shards:
            size = self._layout.shard_bytes(shard)
            pieces.append(flight.buffer[position : position + size])
            position += _aligned(size)
        missed = []
        sent = flight.buffer[trailer:].view(torch.int64).tolist()
        for shard, piece, came, said in zip(shards, pieces, checksums(pieces), sent, strict=True):
            expected = self._expected(shard)
            if said != NOT_AVAILABLE and _as_word(came) == (said if expected is None else _as_word(expected)):
                self._take(flight.message, shard, piece)
            else:
                missed.append(shard)
        if missed:
            self._miss(flight.message, missed)


def _as_word(value: int) -> int:
    """64 bits as torch's int64 has them. All ones would read as not available, and the shard come from elsewhere."""
    return value - (1 << 64) if value >> 63 else value


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
