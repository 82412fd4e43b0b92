"""Reads of one worker in a restore: from snapshots, peers' agents and durable storage.

Each tier has a thread pool of its own. A source that fails, gives wrong bytes or is late is
replaced by the next one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from torch import Tensor

from recovery.cancellation import ChildEvent, call_until, check, in_thread, result_until
from recovery.errors import Cancelled, RecoveryError
from recovery.state.holdings import Source
from recovery.state.layout import Layout, ShardId
from recovery.transfer.schedule import Fetch, TransferSchedule
from recovery.transfer.tier_threads import TierThreads, split_fetch
from recovery.transfer.tiers import Tier

logger = logging.getLogger(__name__)

FETCH_BYTES = 64 << 20
FETCH_BYTES_TO_DEVICE = 256 << 20
"""Bytes of one fetch from the node's own memory onto a device, which checks a fetch at once."""
LATE_RATIO = 3.0
"""Ratio to the scheduled time from which a read is late; the next source is then asked as well."""
LATE_AT_LEAST_S = 2.0
"""Seconds before which no read is late: connections, and a busy machine, take their time."""
WATCH_S = 0.05
Rest = tuple[list[ShardId], list[Source]]
"""Shards that are still to be had, and the sources that may be asked for them."""
UNSTOPPABLE = ("disk", "s3")
"""Tiers whose reads may hang in a system call for as long as a device or a server takes.

If another source could overtake such a read, it gets memory and a thread of its own, so that the
restore need not wait for it; agents' clients look at `cancelled`.
"""


class ShardSink(Protocol):
    """Destination of the shards that are read; any thread may call every method."""

    def memory_of(self, shard: ShardId) -> memoryview | None:
        """Return memory that the shard's bytes may be written to before they are checked.

        None if they come by `put` alone.
        """
        ...

    def put(self, shard: ShardId, data: Tensor, tier: str) -> None:
        """Take a shard's checked bytes, which may be in `memory_of` already."""
        ...


class _Destinations(Mapping[ShardId, memoryview]):
    """Memory of the sink for some shards, asked for as each is read: a tier may need none."""

    def __init__(self, sink: ShardSink, shards: Sequence[ShardId]) -> None:
        self._sink = sink
        self._shards = dict.fromkeys(shards)

    def __getitem__(self, shard: ShardId) -> memoryview:
        if shard not in self._shards:
            raise KeyError(shard)
        memory = self._sink.memory_of(shard)
        if memory is None:
            raise KeyError(shard)
        return memory

    def __iter__(self) -> Iterator[ShardId]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


class _Attempt(ChildEvent):
    """Shards requested from one source; set it to stop it, after which nothing more is put.

    `left` are the shards that it has not given yet; `ended`: it writes to no memory but its own any
    more.
    """

    def __init__(
        self,
        source: Source,
        shards: Sequence[ShardId],
        late_at: float,
        parent: threading.Event | None,
    ) -> None:
        super().__init__(parent)
        self.source = source
        self.left = dict.fromkeys(shards)
        self.late_at = late_at
        self.began = time.monotonic()
        self.num_bytes = 0
        self.ended = threading.Event()
        self.putting = threading.Lock()
        self.hedge: Future[Rest] | None = None

    def is_late(self, now: float) -> bool:
        return now > max(self.late_at, self.began + LATE_AT_LEAST_S)

    def release_references(self) -> None:
        """Wait until the put in progress, if any, has ended."""
        with self.putting:
            pass


@dataclass
class Reads:
    """Fetches of one restore: started, watched and reported; used within one `with`.

    `tier_of(source, cancelled)` reads a source; `failures` and `bad` are what failed on the way and
    was replaced, `slow` the bytes per second of nodes that the next source overtook, `missing` the
    shards that no source gave. `to_device`: the sink is on a device.
    """

    node: str
    layout: Layout
    schedule: TransferSchedule
    tier_of: Callable[[Source, threading.Event | None], Tier]
    sink: ShardSink
    cancelled: threading.Event | None
    failures: list[str] = field(default_factory=list)
    bad: list[tuple[Source, ShardId]] = field(default_factory=list)
    slow: dict[str, float] = field(default_factory=dict)
    to_device: bool = False
    missing: set[ShardId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._began = time.monotonic()
        self._watched: dict[_Attempt, Fetch] = {}
        self._too_slow: set[tuple[str, str]] = set()
        """Tier and node of the sources that were overtaken."""
        self._over = threading.Event()
        self._threads = TierThreads(to_device=self.to_device)
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Reads:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.close()
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()
        # The sink holds this, too: in a circle, its group and the state before would stay until
        # the interpreter next looks for such.
        del self.sink, self.tier_of

    def tier(self, source: Source) -> str:
        if source.kind == "s3":
            return "s3"
        if source.node == self.node:
            return source.kind
        return "peer"

    def start(self, fetch: Fetch) -> Future[None]:
        """Start a fetch. One thread calls it; its future raises Cancelled, or a fault of ours."""
        # Live workers serve nobody: they give in the messages that the schedule has fixed.
        readable = tuple(source for source in fetch.sources if source.kind != "worker")
        first = self.tier(readable[0]) if readable else "memory"
        asked = Fetch(readable, fetch.shards, fetch.expected_s)
        return self._threads.submit(first, lambda: self._fetch(asked))

    def in_background(self, work: Callable[[], None]) -> Future[None]:
        """Run other work of the restore in a separate thread; it is joined after an error, too."""
        return self._threads.submit("background", work)

    def split(self, fetches: Sequence[Fetch]) -> Iterator[Fetch]:
        """Yield fetches split so that several streams share a large one.

        Durable storage runs its own streams, so its fetches stay whole.
        """
        for fetch in fetches:
            tier = self.tier(fetch.sources[0])
            if tier == "s3":
                yield fetch
                continue

            limit_bytes = FETCH_BYTES
            if self.to_device and tier == "memory":
                limit_bytes = FETCH_BYTES_TO_DEVICE
            yield from split_fetch(fetch, self.layout, limit_bytes)

    def _fetch(self, fetch: Fetch) -> None:
        """Get these shards from the first source that gives each of them.

        Shards that no source gives are added to `missing`.
        """
        left = list(fetch.shards)
        sources = list(fetch.sources)
        with self._lock:
            # The sort is stable: sources known to be slow come last, the others stay in order.
            sources.sort(key=self._is_slow)

        while left and sources:
            source = sources.pop(0)
            rest = Fetch(tuple(sources), (), fetch.expected_s)
            left, sources = self._read_from(source, left, rest)

        with self._lock:
            self.missing.update(left)
            for shard in left:
                self.failures.append(f"{shard} has no source left")

    def _read_from(self, source: Source, shards: list[ShardId], rest: Fetch) -> Rest:
        """Read what `source` gives; returns what it does not, and the sources to ask for that."""
        after = max(LATE_AT_LEAST_S, LATE_RATIO * rest.expected_s)
        with self._lock:
            # A slow source is asked last, long after the time that the schedule foresaw for it.
            began = time.monotonic() if self._is_slow(source) else self._began
        attempt = _Attempt(source, shards, began + after, self.cancelled)
        apart = bool(rest.sources) and self.tier(source) in UNSTOPPABLE
        if rest.sources:
            self._watch(attempt, rest)
        try:
            if apart:
                problems = self._read_apart(attempt)
            else:
                problems = self._read(attempt, _Destinations(self.sink, shards))
        finally:
            with self._lock:
                self._watched.pop(attempt, None)
                attempt.ended.set()
                hedge = attempt.hedge
        if not attempt.left:
            return [], []
        if hedge is not None:
            try:
                return result_until(self.cancelled, hedge, f"{source}'s hedge")
            finally:
                attempt.release_references()
        self.note(source, list(attempt.left), problems)
        return list(attempt.left), list(rest.sources)

    def _read_apart(self, attempt: _Attempt) -> list[str]:
        """Read as `_read` does, in a separate thread and into separate memory.

        The thread is left behind once the attempt is stopped.
        """
        try:
            return call_until(attempt, lambda: self._read(attempt, {}), str(attempt.source))
        except Cancelled:
            # Only the whole restore's end is passed on: that of the attempt leads to its hedge.
            check(self.cancelled, str(attempt.source))
            return []
        finally:
            attempt.release_references()

    def _read(self, attempt: _Attempt, into: Mapping[ShardId, memoryview]) -> list[str]:
        """Read one source's shards into the sink; return the problems.

        Ends early, without an error, if the attempt is set.
        """
        source = attempt.source
        where = str(source)
        problems = list[str]()
        checksums = self.schedule.checksums_of(source)
        tier = self.tier(source)
        try:
            check(self.cancelled, where)
            reader = self.tier_of(source, attempt)
            for shard, data in reader.read(source, list(attempt.left), checksums, into):
                if isinstance(data, RecoveryError):
                    problems.append(str(data))
                elif data.nbytes != self.layout.shard_bytes(shard):
                    problems.append(f"{shard} from {source} has {data.nbytes} bytes")
                else:
                    self._put(attempt, shard, data, tier)
                check(attempt, where)
        except Cancelled:
            # The whole restore's end is passed on; that of this attempt alone is no error.
            check(self.cancelled, where)
        except (RecoveryError, OSError) as error:
            problems.append(f"{source}: {error}")
        return problems

    def _put(self, attempt: _Attempt, shard: ShardId, data: Tensor, tier: str) -> None:
        """Put a shard into the sink; raise Cancelled once the attempt is stopped."""
        with attempt.putting:
            check(attempt, str(attempt.source))
            self.sink.put(shard, data, tier)
            attempt.num_bytes += data.nbytes
            del attempt.left[shard]

    def note(self, source: Source, shards: Sequence[ShardId], problems: Sequence[str]) -> None:
        """Record and log the shards that `source` did not give, and the reasons."""
        logger.warning("%d shards not from %s: %s", len(shards), source, "; ".join(problems[:3]))
        with self._lock:
            self.failures += problems
            self.bad += _copies(source, shards)

    # sources that are late

    def _is_slow(self, source: Source) -> bool:
        if source.node in self.slow:
            return True
        return (self.tier(source), source.node) in self._too_slow

    def _watch(self, attempt: _Attempt, rest: Fetch) -> None:
        with self._lock:
            self._watched[attempt] = rest
            if self._watcher is None:
                self._watcher = threading.Thread(
                    target=self._look, name="restore-watch", daemon=True
                )
                self._watcher.start()

    def _look(self) -> None:
        while not self._over.wait(WATCH_S):
            now = time.monotonic()
            with self._lock:
                late = []
                for attempt, rest in self._watched.items():
                    if attempt.is_late(now):
                        late.append((attempt, rest))

                for attempt, rest in late:
                    del self._watched[attempt]
                    hedge = partial(self._hedge, attempt, rest.sources)
                    attempt.hedge = in_thread(hedge, f"{attempt.source}'s hedge")

            for attempt, rest in late:
                logger.warning(
                    "%s is late with %d shards: %s is asked, too",
                    attempt.source,
                    len(attempt.left),
                    rest.sources[0],
                )

    def _hedge(self, late: _Attempt, sources: Sequence[Source]) -> Rest:
        """Ask one source after the other for the rest of a late attempt, the last shard first.

        Once a source gives a shard before the late attempt has, the late one is stopped, and only
        then the same memory is written to. Returns the shards that no source gave, and the sources
        that were not asked.
        """
        left = list(late.left)[::-1]
        sources = list(sources)
        while left and sources:
            attempt = _Attempt(sources.pop(0), left, math.inf, self.cancelled)
            self._hedged_read(attempt, late)
            left = [shard for shard in attempt.left if shard in late.left]
            with self._lock:
                self.bad += _copies(attempt.source, left)
            if late.ended.is_set():
                break

        late.ended.wait()
        still_left = [shard for shard in left if shard in late.left]
        return still_left, sources

    def _hedged_read(self, attempt: _Attempt, late: _Attempt) -> None:
        """Read as `_read` does, in parallel with a late attempt.

        The bytes go into separate memory until the late attempt writes nothing any more.
        """
        source = attempt.source
        checksums = self.schedule.checksums_of(source)
        try:
            reader = self.tier_of(source, attempt)
            for shard, data in reader.read(source, list(attempt.left), checksums, {}):
                late_has_all = late.ended.is_set() and not late.left
                if late_has_all:
                    return
                if isinstance(data, RecoveryError):
                    continue
                if data.nbytes != self.layout.shard_bytes(shard):
                    continue

                if not late.is_set():
                    self.overtake(late, source)
                late.ended.wait()
                with late.putting:
                    check(self.cancelled, str(source))
                    if shard in late.left:
                        self.sink.put(shard, data, self.tier(source))
                del attempt.left[shard]
        except (RecoveryError, OSError) as error:
            with self._lock:
                self.failures.append(f"{source}: {error}")

    def overtake(self, late: _Attempt, by: Source) -> None:
        """Stop a late attempt and record its source as bad; `by` reads the rest."""
        failed = late.ended.is_set()
        late.set()
        late.ended.wait()
        seconds = max(time.monotonic() - late.began, WATCH_S)

        tier = self.tier(late.source)
        node = late.source.node
        with self._lock:
            self.bad += _copies(late.source, late.left)
            if not failed and late.left:
                self._too_slow.add((tier, node))
                # A slow disk says nothing of its node's links.
                if tier == "peer":
                    self.slow[node] = max(late.num_bytes / seconds, 1.0)
            self.failures.append(
                f"{late.source} gave {late.num_bytes} bytes in {seconds:.1f} s and was overtaken by"
                f" {by}"
            )


def _copies(source: Source, shards: Iterable[ShardId]) -> list[tuple[Source, ShardId]]:
    """Return the source's copies of `shards`, as `bad` lists them."""
    return [(source, shard) for shard in shards]
