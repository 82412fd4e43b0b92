"""Newest reports of workers and agents, and which of their processes have ended.

The processes send reports over connections of their own, and Ray reports their ends. Nothing is
polled, and nothing is waited for.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from autohet.driver.ray.ray_calls import describe_death
from autohet.driver.ray.reports.report_server import ReportServer, Unreadable
from autohet.driver.ray.reports.silence import LONGEST_TICK_S
from autohet.driver.ray.reports.wake_up import WakeUp
from autohet.runtime.process.report_channel import ReportAddress

LAST_WORDS_S = 0.2
"""Seconds to wait for a process's last messages after Ray has reported its end.

The end of its connection comes after those messages, and is waited for no longer if a network does
not deliver it.
"""


@dataclass
class LatestReport:
    """Newest report of one actor.

    `heard_at`: time of its last heartbeat or report. `told_at`: time at which `value` came. `error`
    is set once the actor is known to be dead. `broke_off_at`: time at which its connection was
    found ended; None while it has one.
    """

    asked_at: float
    heard_at: float | None = None
    value: Any = None
    error: str | None = None
    told_at: float | None = None
    broke_off_at: float | None = None


class Reports:
    """Receives reports; owned by the workforce and called from its thread alone.

    `answers`: by actor. A sender without news sends a heartbeat every `beat_s`. News and ends that
    Ray reports wake `wake_up`, heartbeats do not; several instances may share it.
    """

    def __init__(
        self, host: str, clock: Callable[[], float], beat_s: float, wake_up: WakeUp
    ) -> None:
        self.answers: dict[str, LatestReport] = {}
        self.server = ReportServer(host, beat_s)
        self.epoch = 0
        """Epoch of this driver, for the actors that are expected from now on."""
        self._clock = clock
        self.wake_up = wake_up
        wake_up.watch(self.server)
        self._addresses: dict[str, ReportAddress] = {}
        self._keys: dict[str, str] = {}
        """Actor's key by the name in its address, which no earlier actor of the key has."""
        self._told_ends: deque[tuple[str, str]] = deque()
        """Ends that threads of Ray's have recorded: (name, error)."""
        self._unreachable: deque[tuple[str, Callable[[], ray.ObjectRef[Any]]]] = deque()
        """Actors that Ray could not reach, with the call that watches their end."""
        self._ends: dict[str, tuple[str, float]] = {}
        """Error, and time at which it was read, of ends that do not count yet, by name."""
        self.unread: list[Any] = []
        """Reports received and not yet returned by `fresh`, in order."""
        self._listened_at: float | None = None

    def expect(self, key: str) -> ReportAddress:
        """Return the address that a new actor needs in order to report under `key`.

        Messages of an earlier actor under this key are dropped from now on.
        """
        self.remove(key)
        address = replace(self.server.expect(key), epoch=self.epoch)
        self._addresses[key] = address
        self._keys[address.name] = key
        self.answers[key] = LatestReport(asked_at=self._clock())
        return address

    def watch(self, key: str, call: Callable[[], ray.ObjectRef[Any]]) -> None:
        """Watch the end of the actor of this key.

        `call`: a call that the actor answers only at its end. It is made again if Ray could not
        reach the actor, which may still live.
        """
        self._watch(self._addresses[key].name, call)

    def _watch(self, name: str, call: Callable[[], ray.ObjectRef[Any]]) -> None:
        call().future().add_done_callback(partial(self._take_end, name, call))

    def _take_end(
        self, name: str, call: Callable[[], ray.ObjectRef[Any]], end: Future[Any]
    ) -> None:
        """Record an actor's end; called by a thread of Ray's."""
        error = end.exception()
        if isinstance(error, ActorUnavailableError):
            self._unreachable.append((name, call))
        elif isinstance(error, RayError):
            self._told_ends.append((name, describe_death(error)))
            self.wake_up.wake()

    def _watch_again(self) -> None:
        # Only as many as there are now: a call that fails at once is added again.
        for _ in range(len(self._unreachable)):
            # Removed only after the call: if it raises, the actor stays to be watched.
            name, call = self._unreachable[0]
            if name in self._keys:
                self._watch(name, call)
            self._unreachable.popleft()

    def remove(self, key: str) -> None:
        self.answers.pop(key, None)
        address = self._addresses.pop(key, None)
        if address is not None:
            self.server.forget(address.name)
            self._ends.pop(address.name, None)
            del self._keys[address.name]

    def listen(self) -> None:
        """Receive the reports and ends that have come."""
        now = self._clock()
        before = self._listened_at
        self._forgive(now)
        self._watch_again()

        # A report came at some moment since the last call. The earliest is assumed, so that no
        # deadline that a report names is taken for later than it is.
        sent_at = now if before is None else before
        heard, news = self.server.take()
        for name, value, age_s in news:
            answer = self.answers[self._keys[name]]
            if isinstance(value, Unreadable):
                answer.error = (
                    "its report cannot be read; is the same version installed on its node?"
                    f" {value.why}"
                )
                continue
            answer.value = value
            answer.told_at = sent_at - age_s
            self.unread.append(value)

        for name in heard:
            answer = self.answers[self._keys[name]]
            answer.broke_off_at = None
            # An actor is up once it has reported; heartbeats before that do not count.
            answer.heard_at = None if answer.value is None else now
        for name in self.server.ended:
            answer = self.answers[self._keys[name]]
            if answer.broke_off_at is None:
                answer.broke_off_at = now
        self._take_ends(now)

    def acknowledge(self) -> None:
        """Tell the senders that what `fresh` has returned is recorded; else they send it again."""
        if not self.unread:
            self.server.acknowledge()

    def _take_ends(self, now: float) -> None:
        """Mark actors as ended once no last messages can come any more."""
        while self._told_ends:
            name, error = self._told_ends.popleft()
            if name in self._keys:
                self._ends.setdefault(name, (error, now))
        ended = []
        for name, (_, at) in self._ends.items():
            if not self.server.speaks(name) or now - at >= LAST_WORDS_S:
                ended.append(name)
        for name in ended:
            error, _ = self._ends.pop(name)
            self.answers[self._keys[name]].error = error

    @property
    def await_words(self) -> bool:
        """True if some reported end does not count yet, since last messages may still come."""
        return bool(self._ends)

    def _forgive(self, now: float) -> None:
        """Move all actors' times by the driver's own pause, so that it is no silence."""
        before = self._listened_at
        self._listened_at = now
        if before is None:
            return
        slept_s = now - before - LONGEST_TICK_S
        if slept_s <= 0:
            return

        for answer in self.answers.values():
            answer.asked_at = min(now, answer.asked_at + slept_s)
            if answer.heard_at is not None:
                answer.heard_at = min(now, answer.heard_at + slept_s)

    def fresh(self) -> list[Any]:
        """Return the reports received since the last call, in order."""
        fresh = self.unread
        self.unread = []
        return fresh

    def close(self) -> None:
        self.server.close()
