"""One worker's messages of a restore: packed, sent, received and checked, several in flight, in the order all share.

A message is one flat buffer on the group's device: each shard's bytes, 16-byte aligned, then one int64 for each: the
fingerprint of its bytes (`recovery.state.checksum` on the CPU, a sum of words on the device), or -1 where the sender could not get it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from recovery.state.checksum import checksum
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
    that came damaged or were not available.
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
    ) -> None:
        self._worker, self._layout, self._group, self._device = worker, layout, group, device
        self._view_of, self._take, self._miss = view_of, take, miss
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
        prints: list[Tensor] = []
        position = 0
        for shard in message.shards:
            size = self._layout.shard_bytes(shard)
            piece = buffer[position : position + size]
            view = self._view_of(shard)
            if view is None:
                prints.append(torch.tensor(NOT_AVAILABLE, device=self._device))
            else:
                piece.view(view.dtype).view(view.shape).copy_(view)
                prints.append(fingerprint(piece))
            position += _aligned(size)
        buffer[trailer:].view(torch.int64).copy_(torch.stack(prints))
        return buffer

    def _unpack(self, flight: _Flight) -> None:
        shards = flight.message.shards
        trailer, _ = self._extent(shards)
        pieces, position = [], 0
        for shard in shards:
            size = self._layout.shard_bytes(shard)
            pieces.append(flight.buffer[position : position + size])
            position += _aligned(size)
        sent = flight.buffer[trailer:].view(torch.int64)
        good = (torch.stack([fingerprint(piece) for piece in pieces]) == sent).tolist()
        for shard, piece, whole in zip(shards, pieces, good, strict=True):
            if whole:
                self._take(flight.message, shard, piece)
        if missed := [shard for shard, whole in zip(shards, good, strict=True) if not whole]:
            self._miss(flight.message, missed)


def fingerprint(piece: Tensor) -> Tensor:
    """A non-negative int64 scalar on the piece's device that changes with its bytes (a flat uint8 tensor)."""
    if piece.device.type == "cpu":
        return torch.tensor(checksum(piece.numpy().data) if piece.numel() else 0)
    spare = piece.numel() % 8
    words = piece[: piece.numel() - spare].view(torch.int64)
    rest = piece[piece.numel() - spare :].sum(dtype=torch.int64)
    # Twice the odd words over: exchanging neighbours shows, too.
    return (words.sum() + 2 * words[1::2].sum() + rest) & 0x7FFFFFFFFFFFFFFF


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
