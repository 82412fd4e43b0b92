"""Messages of one worker in a restore: packed, sent, received and checked.

Several are in flight, in the order that all workers share.

A message is one flat buffer on the group's device: each small shard's bytes, 16-byte aligned, then
one int64 for each shard: its checksum (`recovery.state.device_checksum`, the same on every device),
0 if the schedule has one, or -1 if the sender could not get the shard. Large shards follow it by
themselves, from the sender's live memory into the receiver's new state, without a copy at either
end. The receiver believes the schedule's checksum if there is one. The sender's checksum detects
damage on the way to shards that have no snapshot yet; others are checked once, where they arrive.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from recovery.state.device_checksum import checksums
from recovery.state.layout import Layout, ShardId
from recovery.transfer.messages import Message

IN_FLIGHT_BYTES = 128 << 20
DIRECT_BYTES = 256 << 10
"""Size in bytes from which shards are sent by themselves.

New memory for a buffer costs more than what packing saves. Measured on loopback, 1 GB in shards of
half a MB: a quarter less processor time than with 1 MiB, and half of the memory in flight.
"""
_TENSORS = 256
"""Number of tags of one message.

One for its buffer, and no more than MESSAGE_BYTES / DIRECT_BYTES + 1 for shards sent by themselves.
"""
NOT_AVAILABLE = -1
_IN_SCHEDULE = 0
_ALIGNMENT = 16
_WORD_BYTES = 8
"""Size in bytes of one shard's checksum in a message."""


class MessageGroup(Protocol):
    """Transport of live state between workers: point-to-point operations of a process group.

    Each operation is bounded by its deadline. After `wait_on_host` the host may read the tensor.
    """

    def send(self, tensor: Tensor, to: str, tag: int) -> Any: ...
    def recv(self, tensor: Tensor, source: str, tag: int) -> Any: ...
    def wait_on_host(self, work: Any) -> None: ...


@dataclass
class _Flight:
    """Message in flight: its buffer of small shards, and the flat bytes of each large one.

    `works` belong to `tensors`, in the same order.
    """

    message: Message
    works: list[Any]
    buffer: Tensor
    direct: Mapping[ShardId, Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.buffer, *self.direct.values()]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)


@dataclass(frozen=True)
class ExchangedState:
    """State that messages are sent from and received into, as functions."""

    view_of: Callable[[ShardId], Tensor | None]
    """Return what is to be sent, waiting for it if it is being fetched; None if it is not there."""
    place_of: Callable[[ShardId], Tensor | None]
    """Return the flat bytes that a shard may be received into before it is checked, or None."""
    take: Callable[[Message, ShardId, Tensor], None]
    """Take the bytes of a shard that has come."""
    miss: Callable[[Message, Sequence[ShardId]], None]
    """Note the shards of a message that came damaged or were not available."""
    expected: Callable[[str, ShardId], Collection[int]]
    """Return the checksums that a shard may have at a receiver, none if only its sender knows."""
    waited: Callable[[Message, int, float], None]
    """Note bytes and seconds of each piece of a message that was waited for."""


class Exchange:
    """Exchange of one worker's messages; used once.

    It blocks only for older messages of the common order, so there is no deadlock.
    """

    def __init__(
        self,
        worker: str,
        layout: Layout,
        group: MessageGroup,
        device: torch.device,
        state: ExchangedState,
    ) -> None:
        self._worker = worker
        self._layout = layout
        self._group = group
        self._device = device
        self._state = state
        self._flights: deque[_Flight] = deque()
        self._coming: set[ShardId] = set()
        self._bytes = 0
        self._free: list[Tensor] = []

    def run(self, messages: Sequence[Message]) -> None:
        """Run all messages; errors of the group when a peer is lost are passed on."""
        for message in messages:
            if message.source == self._worker:
                # What this message passes on may itself be on the way here.
                while any(shard in self._coming for shard in message.shards):
                    self._finish_oldest()
                flight = self._sent(message)
            else:
                flight = self._awaited(message)
                self._coming.update(message.shards)

            self._flights.append(flight)
            self._bytes += flight.num_bytes
            while self._bytes > IN_FLIGHT_BYTES and len(self._flights) > 1:
                self._finish_oldest()

        while self._flights:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        flight = self._flights.popleft()
        message = flight.message
        is_received = message.source != self._worker

        for work, tensor in zip(flight.works, flight.tensors, strict=True):
            began = time.monotonic()
            self._group.wait_on_host(work)
            if is_received:
                self._state.waited(message, tensor.numel(), time.monotonic() - began)

        self._bytes -= flight.num_bytes
        if is_received:
            self._unpack(flight)
            self._coming.difference_update(message.shards)

        self._free.append(flight.buffer)
        self._trim_free()

    def _trim_free(self) -> None:
        """Release the oldest free buffers, but never the last one, beyond the bytes in flight."""
        while len(self._free) > 1:
            free_bytes = sum(old.untyped_storage().nbytes() for old in self._free)
            if free_bytes <= IN_FLIGHT_BYTES:
                return
            del self._free[0]

    def _split(self, shards: Sequence[ShardId]) -> tuple[list[ShardId], list[ShardId]]:
        """Split shards into packed ones and those sent by themselves, alike at both ends."""
        packed = []
        direct = []
        for shard in shards:
            if self._layout.shard_bytes(shard) >= DIRECT_BYTES:
                direct.append(shard)
            else:
                packed.append(shard)
        assert len(direct) < _TENSORS, f"{len(direct)} large shards in one message"
        return packed, direct

    def _sent(self, message: Message) -> _Flight:
        packed, direct = self._split(message.shards)
        views = {shard: self._state.view_of(shard) for shard in message.shards}
        flats: dict[ShardId, Tensor] = {}
        for shard in direct:
            view = views[shard]
            if view is not None:
                flats[shard] = _flat(view.to(self._device))
        buffer = self._packed(message, packed, views, flats)

        sent = {}
        for shard in direct:
            if shard in flats:
                sent[shard] = flats[shard]
            else:
                # What is not to be had is sent as anything: the receiver waits for as many bytes.
                sent[shard] = self._buffer(self._layout.shard_bytes(shard))

        works = [
            self._group.send(tensor, message.destination, tag)
            for tag, tensor in _tagged(message, [buffer, *sent.values()])
        ]
        return _Flight(message, works, buffer, sent)

    def _awaited(self, message: Message) -> _Flight:
        packed, direct = self._split(message.shards)
        trailer = self._trailer_offset(packed)
        buffer = self._buffer(trailer + _WORD_BYTES * len(message.shards))
        places = {shard: self._place(shard) for shard in direct}

        works = [
            self._group.recv(tensor, message.source, tag)
            for tag, tensor in _tagged(message, [buffer, *places.values()])
        ]
        return _Flight(message, works, buffer, places)

    def _place(self, shard: ShardId) -> Tensor:
        place = self._state.place_of(shard)
        if place is None:
            return self._buffer(self._layout.shard_bytes(shard))
        return place

    def _trailer_offset(self, packed: Sequence[ShardId]) -> int:
        """Return the offset in bytes of a message's checksums, behind its packed shards."""
        return sum(_aligned(self._layout.shard_bytes(shard)) for shard in packed)

    def _pieces(
        self, buffer: Tensor, packed: Sequence[ShardId]
    ) -> Iterator[tuple[ShardId, Tensor]]:
        """Yield each packed shard with its bytes in a message's buffer."""
        position = 0
        for shard in packed:
            size = self._layout.shard_bytes(shard)
            yield shard, buffer[position : position + size]
            position += _aligned(size)

    def _buffer(self, num_bytes: int) -> Tensor:
        """Return a buffer of exactly this size, over an earlier message's memory if that fits."""
        for number, old in enumerate(self._free):
            storage = old.untyped_storage()
            # Not a much larger one: the next large message would have to allocate again.
            if num_bytes <= storage.nbytes() <= 2 * num_bytes:
                del self._free[number]
                buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
                return buffer.set_(storage, 0, (num_bytes,), (1,))
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _packed(
        self,
        message: Message,
        packed: Sequence[ShardId],
        views: Mapping[ShardId, Tensor | None],
        flats: Mapping[ShardId, Tensor],
    ) -> Tensor:
        """Pack a message's buffer: the small shards' bytes, and a word for each shard."""
        shards = message.shards
        trailer = self._trailer_offset(packed)
        buffer = self._buffer(trailer + _WORD_BYTES * len(shards))
        pieces = dict(flats)
        for shard, piece in self._pieces(buffer, packed):
            view = views[shard]
            if view is not None:
                piece.view(view.dtype).view(view.shape).copy_(view)
                pieces[shard] = piece

        word_by_shard = dict.fromkeys(pieces, _IN_SCHEDULE)
        receiver = message.destination
        unknown = [shard for shard in pieces if not self._state.expected(receiver, shard)]
        sums = checksums([pieces[shard] for shard in unknown])
        for shard, value in zip(unknown, sums, strict=True):
            word_by_shard[shard] = _as_word(value)

        words = [word_by_shard.get(shard, NOT_AVAILABLE) for shard in shards]
        buffer[trailer:].view(torch.int64).copy_(torch.tensor(words))
        return buffer

    def _unpack(self, flight: _Flight) -> None:
        shards = flight.message.shards
        packed, _ = self._split(shards)
        by_shard = dict(flight.direct)
        by_shard.update(self._pieces(flight.buffer, packed))
        pieces = [by_shard[shard] for shard in shards]

        trailer = self._trailer_offset(packed)
        sent = flight.buffer[trailer:].view(torch.int64).tolist()
        missed = []
        for shard, piece, came, said in zip(shards, pieces, checksums(pieces), sent, strict=True):
            expected = self._state.expected(self._worker, shard)
            if expected:
                is_intact = came in expected
            else:
                is_intact = _as_word(came) == said

            if said != NOT_AVAILABLE and is_intact:
                self._state.take(flight.message, shard, piece)
            else:
                missed.append(shard)
        if missed:
            self._state.miss(flight.message, missed)


def _flat(view: Tensor) -> Tensor:
    """Return a shard's bytes in place, or a copy of them if they are not contiguous."""
    return view.contiguous().view(-1).view(torch.uint8)


def _tagged(message: Message, tensors: Sequence[Tensor]) -> Iterable[tuple[int, Tensor]]:
    """Return each of a message's tensors with its tag, which both ends count alike."""
    first_tag = message.position * _TENSORS
    return enumerate(tensors, first_tag)


def _as_word(value: int) -> int:
    """Return a 64-bit checksum as torch's int64 has it.

    All ones would read as not available, and the shard would come from elsewhere.
    """
    is_negative = value >> 63
    if is_negative:
        return value - (1 << 64)
    return value


def _aligned(size: int) -> int:
    """Return `size` rounded up to the alignment."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
