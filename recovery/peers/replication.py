"""Replication of shards that one node alone holds to another node's host memory.

The worker writes two small files next to its snapshots: `<worker>.targets` once a generation (which
shards go to which nodes) and `<worker>.round` when a round opens (which step). The agent's
`Replicator` waits for that step's snapshot, pushes, and writes `<worker>.pushed`, which the worker
reads before its votes. All of them are replaced whole, and no process waits for one: training never
stands still for a copy.
"""

import contextlib
import logging
import os
import threading
import time
import urllib.parse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from recovery.errors import RecoveryError, ShardUnavailable
from recovery.local.agent_store import AgentStore
from recovery.local.private_files import make_private_directory, read_note, write_note
from recovery.local.snapshot_file import SnapshotFile
from recovery.peers.client import PushOptions, ShardClient
from recovery.peers.pool import ClientPool
from recovery.peers.protocol import FileBytes
from recovery.peers.replication_targets import ReplicationTarget
from recovery.state.holdings import Source
from recovery.state.layout import ShardId
from recovery.storage.protocol import BandwidthLimit

logger = logging.getLogger(__name__)

POLL_S = 0.02
NICENESS = 10

_T = TypeVar("_T")


class Endpoint(msgspec.Struct, frozen=True):
    """Address on which a node's agent listens."""

    node: str
    host: str
    port: int


class ReplicationTargets(msgspec.Struct, frozen=True):
    """Copies that one worker's agent pushes in every round of a generation.

    `max_bytes_per_s` None: no limit.
    """

    worker: str
    generation: int
    targets: tuple[ReplicationTarget, ...]
    endpoints: tuple[Endpoint, ...]
    max_bytes_per_s: float | None
    timeout_s: float


class PushRequest(msgspec.Struct, frozen=True):
    """Request to push the snapshot of `step`.

    `complete` is the last (generation, step) that every node has: older copies are not needed any
    more.
    """

    worker: str
    generation: int
    step: int
    complete: tuple[int, int] | None = None


class Pushed(msgspec.Struct, frozen=True):
    """Result of a round at one node: all its targets are done, or `error` says which failed.

    `ended_at` is on the node's monotonic clock, which all its processes share.
    """

    generation: int
    step: int
    error: str | None = None
    num_bytes: int = 0
    seconds: float = 0.0
    ended_at: float = 0.0

    def answers(self, opened: PushRequest) -> bool:
        return self.generation == opened.generation and self.step == opened.step


def write_targets(directory: Path | str, targets: ReplicationTargets) -> None:
    make_private_directory(directory)
    write_document(Path(directory), targets.worker, "targets", targets)


def write_round(directory: Path | str, opened: PushRequest) -> None:
    make_private_directory(directory)
    write_document(Path(directory), opened.worker, "round", opened)


def read_pushed(directory: Path | str, worker: str) -> Pushed | None:
    """Return the result of the last round that the agent finished; None if there was none."""
    return _read(_path(Path(directory), worker, "pushed"), Pushed)


def withdraw(directory: Path | str, worker: str) -> None:
    """End the rounds of this worker: its agent pushes nothing more for it."""
    for kind in ("round", "targets", "pushed"):
        _path(Path(directory), worker, kind).unlink(missing_ok=True)


def withdraw_others(directory: Path | str, living: Collection[str]) -> None:
    """End the rounds of workers that are not `living`: their snapshots are not needed any more."""
    for path in Path(directory).glob("*.round"):
        opened = _read(path, PushRequest)
        if opened is not None and opened.worker not in living:
            withdraw(directory, opened.worker)


class Replicator:
    """The agent's part of replication: pushes what the rounds of its node's workers ask for.

    It owns one thread, of low priority, and its connections.
    """

    def __init__(self, store: AgentStore, memory_directory: Path | str, token: str) -> None:
        self._store = store
        self._directory = Path(memory_directory)
        self._token = token
        self._done: dict[str, Pushed] = {}
        self._told: dict[str, Pushed] = {}
        self._untold: set[str] = set()
        self._waiting: dict[str, tuple[PushRequest, float]] = {}
        """Rounds whose snapshot is awaited, and the time since when."""
        self._limits: dict[float | None, BandwidthLimit] = {}
        self._pool = ClientPool()
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="replicator", daemon=True)
        self.thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Cancel the push in flight; join the thread."""
        self._stop.set()
        self.thread.join(timeout_s)
        self._pool.close()

    def _run(self) -> None:
        # Threads are processes to Linux's scheduler.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while not self._stop.wait(POLL_S):
            try:
                self._look()
            except OSError as error:
                logger.warning("rounds cannot be looked for: %s", error)
                self._stop.wait(1.0)

    def _look(self) -> None:
        """Serve the rounds that are open now."""
        for path in sorted(self._directory.glob("*.round")):
            if self._stop.is_set():
                return
            opened = _read(path, PushRequest)
            if opened is None:
                continue

            done = self._done.get(opened.worker)
            if done is None or not done.answers(opened):
                done = self._take(opened)
            if done is not None and self._told.get(opened.worker) is not done:
                self._done[opened.worker] = done
                self._tell(opened.worker, done)

    def _tell(self, worker: str, done: Pushed) -> None:
        """Write the result of a round for its worker to read.

        If that fails, memory is full. The next poll tries again, since no worker asks for a step
        twice.
        """
        try:
            write_document(self._directory, worker, "pushed", done)
            self._told[worker] = done
            self._untold.discard(worker)
        except OSError as error:
            if worker not in self._untold:
                logger.warning("the round of %s cannot be answered yet: %s", worker, error)
            self._untold.add(worker)

    def _take(self, opened: PushRequest) -> Pushed | None:
        """Push one worker's part of a round, if its snapshot is there already."""
        targets = _read(_path(self._directory, opened.worker, "targets"), ReplicationTargets)
        if targets is None or targets.generation != opened.generation:
            return None

        source = Source("memory", self._store.node, opened.worker, opened.step, opened.generation)
        error: str | None = None
        started = time.monotonic()
        sent = 0
        try:
            for target in targets.targets:
                sent += self._push(source, target, targets, opened)
        except ShardUnavailable as missing:
            # The snapshot may not be committed yet.
            if not self._waited(opened, targets.timeout_s):
                return None
            error = str(missing)
        except RecoveryError as failure:
            if self._stop.is_set():
                return None
            error = str(failure)
            logger.warning(
                "step %d of %s has no copy elsewhere: %s", opened.step, opened.worker, error
            )

        now = time.monotonic()
        return Pushed(
            generation=opened.generation,
            step=opened.step,
            error=error,
            num_bytes=sent,
            seconds=now - started,
            ended_at=now,
        )

    def _waited(self, opened: PushRequest, timeout_s: float) -> bool:
        """Return True if this round's snapshot has been awaited for `timeout_s` seconds.

        Its worker may have died before it committed the snapshot.
        """
        known, since = self._waiting.get(opened.worker, (None, 0.0))
        if known != opened:
            self._waiting[opened.worker] = opened, time.monotonic()
            return False
        return time.monotonic() - since > timeout_s

    def _push(
        self,
        source: Source,
        target: ReplicationTarget,
        targets: ReplicationTargets,
        opened: PushRequest,
    ) -> int:
        """Push a target's shards to the first peer that takes them; return the bytes sent.

        Raises the error of the last peer if none takes them.
        """
        pieces = {shard: self._checked(source, shard) for shard in target.shards}
        endpoints = {endpoint.node: endpoint for endpoint in targets.endpoints}
        failure: RecoveryError = RecoveryError(f"no peer of {source.node} can be reached")
        for node in target.peers:
            endpoint = endpoints.get(node)
            if endpoint is None or self._stop.is_set():
                continue
            try:
                return self._send(endpoint, source, pieces, targets, opened)
            except RecoveryError as error:
                failure = error
        raise failure

    def _checked(self, source: Source, shard: ShardId) -> tuple[FileBytes, int]:
        file = self._store.file_of(source, shard)
        return _range_of(file, shard), file.checksum(shard)

    def _send(
        self,
        endpoint: Endpoint,
        source: Source,
        pieces: Mapping[ShardId, tuple[FileBytes, int]],
        targets: ReplicationTargets,
        opened: PushRequest,
    ) -> int:
        """Send a target's shards to one peer; return the bytes sent."""
        views = {shard: view for shard, (view, _) in pieces.items()}
        checksums = [value for _, value in pieces.values()]
        first = next(iter(pieces))
        tensors = self._store.file_of(source, first).map.tensors

        # One limit for all peers: it is this node's link that must stay free for training.
        rate = targets.max_bytes_per_s
        limit = self._limits.setdefault(rate, BandwidthLimit(rate))
        lent = self._pool.client(endpoint.host, endpoint.port, self._token, targets.timeout_s)
        with lent as client:
            return client.push(
                source,
                tensors,
                views,
                checksums=checksums,
                options=PushOptions(limit, opened.complete, endpoint.node),
                cancelled=self._stop,
            )


def hand_over(
    store: AgentStore,
    parts: Sequence[tuple[Source, Sequence[ShardId]]],
    peers: Sequence[Endpoint],
    token: str,
    timeout_s: float,
) -> int:
    """Push these shards of this node's snapshots to other nodes, at full speed.

    Blocks; returns the bytes sent. Each part goes to the first of `peers` that takes it, beginning
    with another one each time. A part that no peer takes is logged and stays where it is.
    """
    sent = 0
    if not peers:
        return sent
    for number, (source, shards) in enumerate(parts):
        turn = number % len(peers)
        for endpoint in [*peers[turn:], *peers[:turn]]:
            try:
                files = {shard: store.file_of(source, shard) for shard in shards}
                with ShardClient(endpoint.host, endpoint.port, token, timeout_s) as client:
                    sent += _push_files(client, source, files, endpoint)
                break
            except RecoveryError as error:
                logger.warning("%s is not handed over to %s: %s", source, endpoint.node, error)
    return sent


def _push_files(
    client: ShardClient,
    source: Source,
    files: Mapping[ShardId, SnapshotFile],
    endpoint: Endpoint,
) -> int:
    """Push shards from the files that hold them; return the bytes sent."""
    views = {}
    tensors = {}
    checksums = []
    for shard, file in files.items():
        views[shard] = _range_of(file, shard)
        tensors[shard.tensor] = file.map.tensors[shard.tensor]
        checksums.append(file.checksum(shard))
    options = PushOptions(to=endpoint.node)
    return client.push(source, tensors, views, checksums=checksums, options=options)


def _range_of(file: SnapshotFile, shard: ShardId) -> FileBytes:
    extent = file.extent(shard)
    return FileBytes(file, extent.offset, extent.num_bytes)


def _path(directory: Path, worker: str, kind: str) -> Path:
    return directory / f"{urllib.parse.quote(worker, safe='')}.{kind}"


def write_document(directory: Path, worker: str, kind: str, document: msgspec.Struct) -> None:
    """Write a document that worker and replicator exchange, atomically."""
    write_note(_path(directory, worker, kind), msgspec.msgpack.encode(document))


def _read(path: Path, kind: type[_T]) -> _T | None:
    """Read a document; None if there is none, or one of another version of this package."""
    try:
        return msgspec.msgpack.decode(read_note(path), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read: %s", path, error)
        return None
