"""Measured speed of live senders, by the pieces that were waited for.

It shows whose node is slow, and how slow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from recovery.transfer.messages import Message
from recovery.transfer.reads import LATE_AT_LEAST_S, LATE_RATIO
from recovery.transfer.schedule import TransferSchedule


@dataclass
class _Pace:
    num_bytes: int = 0
    waited_s: float = 0.0


@dataclass
class Senders:
    """Bytes and waiting times of one worker's senders in a restore. Used by one thread."""

    worker: str
    schedule: TransferSchedule
    _paces: dict[str, _Pace] = field(default_factory=dict)

    def waited(self, message: Message, num_bytes: int, seconds: float) -> None:
        """Record that a piece of `message` has come after `seconds` of waiting for nothing else.

        The first piece of a sender only shows when it began. Shards that a sender passes on are not
        counted: they come as fast as it gets them.
        """
        pace = self._paces.get(message.source)
        if pace is None:
            self._paces[message.source] = _Pace()
        elif not self.schedule.sources_of(message.source, message.shards[0]):
            pace.num_bytes += num_bytes
            pace.waited_s += seconds

    def slow(self) -> Mapping[str, float]:
        """Return the bytes per second of the nodes of slow senders.

        A sender is slow if it was waited for as long as makes a read late (`reads`). One that gave
        nothing meanwhile is not slow: it has died, or waits for another worker itself.
        """
        found: dict[str, float] = {}
        if not self._paces:
            return found

        for fetch in self.schedule.parts[self.worker].message_fallbacks:
            sender = fetch.sources[0]
            pace = self._paces.get(sender.name, _Pace())
            late_after_s = max(LATE_AT_LEAST_S, LATE_RATIO * fetch.expected_s)
            if pace.num_bytes and pace.waited_s > late_after_s:
                found[sender.node] = pace.num_bytes / pace.waited_s
        return found
