"""Transfers between workers, bundled into messages.

All workers share one order of messages, so that no two wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from recovery.state.layout import ShardId

if TYPE_CHECKING:
    from recovery.transfer.placement import Placement

MESSAGE_BYTES = 8 << 20
"""Size in bytes of one message.

The first message is packed before anything is sent, and the last is checked after everything has
arrived: no link works during both.
"""


class Send(NamedTuple):
    """Transfer of one shard from one worker's memory to another's.

    `depth` counts the transfers that must have come before it.
    """

    shard: int
    source: str
    destination: str
    depth: int


@dataclass(frozen=True)
class Message:
    """Shards that go from one worker to another in one buffer.

    `position` is its place in the order of all messages.
    """

    position: int
    source: str
    destination: str
    shards: tuple[ShardId, ...]


def make_messages(
    sends: Sequence[Send], placement: Placement, message_bytes: int = MESSAGE_BYTES
) -> list[Message]:
    """Bundle `sends` into messages of about `message_bytes`, ordered.

    A message that passes on received shards comes after every message that brings them, so the
    globally first unfinished message can always proceed: no deadlock, whatever the number of
    messages that a worker keeps in flight. Shards keep their own order, the same as in reads of
    durable storage: what is read first is sent first.
    """
    streams: dict[tuple[int, str, str], list[int]] = {}
    for send in sends:
        stream = streams.setdefault((send.depth, send.source, send.destination), [])
        stream.append(send.shard)

    arrival: dict[tuple[str, int], int] = {}
    keyed: list[tuple[int, int, str, str, list[int]]] = []
    # Streams by depth: when one passes a shard on, the round in which the shard comes is known.
    for (depth, source, destination), shards in sorted(streams.items()):
        round_number = 0
        for bundle in _bundles(sorted(shards), placement.num_bytes, message_bytes):
            for shard in bundle:
                first_possible = arrival.get((source, shard), -1) + 1
                round_number = max(round_number, first_possible)

            keyed.append((round_number, depth, source, destination, bundle))
            for shard in bundle:
                arrival[destination, shard] = round_number
            round_number += 1

    keyed.sort(key=lambda entry: entry[:4])
    return [
        Message(position, source, destination, placement.shards_at(bundle))
        for position, (_, _, source, destination, bundle) in enumerate(keyed)
    ]


def _bundles(shards: list[int], num_bytes: Sequence[int], limit: int) -> list[list[int]]:
    """Cut a stream, kept in order, into bundles of at most `limit` bytes.

    A larger shard is a bundle by itself.
    """
    bundles: list[list[int]] = []
    size = 0
    for shard in shards:
        is_full = size + num_bytes[shard] > limit
        if not bundles or is_full:
            bundles.append([])
            size = 0
        bundles[-1].append(shard)
        size += num_bytes[shard]
    return bundles
