"""Links of stated speeds on one machine, by a software throttle.

Each transfer is delayed to when a real link would end it. A node has five lanes (out, in, memory,
disk, s3) that all its processes share. A transfer reserves its time on the lanes that it uses and
sleeps until the last of them; reservations of one lane follow each other.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recovery.local.agent_store import AgentStore
from recovery.local.snapshot_file import SnapshotFile
from recovery.state.holdings import Source
from recovery.state.layout import ShardId
from recovery.storage.protocol import Storage
from recovery.transfer.links import LinkRates

LANES = ("out", "in", "memory", "disk", "s3")
_PIECE_BYTES = 256 << 10


@dataclass(frozen=True)
class Lanes:
    """Lanes of one node.

    `free_at` is an array shared by all processes (monotonic seconds), `node` its row there.
    """

    free_at: Any
    node: int
    links: LinkRates

    def rate(self, lane: str) -> float:
        """Bytes per second."""
        rates = self.links
        return {
            "out": rates.network_bytes_per_s,
            "in": rates.network_bytes_per_s,
            "memory": rates.memory_bytes_per_s,
            "disk": rates.disk_bytes_per_s,
            "s3": rates.s3_bytes_per_s,
        }[lane]

    def reserve(
        self, lane: str, num_bytes: int, not_before: float | None = None
    ) -> tuple[float, float]:
        """Reserve a transfer; return its start and end (monotonic seconds) without waiting."""
        index = self.node * len(LANES) + LANES.index(lane)
        with self.free_at.get_lock():
            if not_before is None:
                not_before = time.monotonic()
            start = max(self.free_at[index], not_before)
            end = start + num_bytes / self.rate(lane)
            self.free_at[index] = end
        return start, end

    def pass_through(self, lanes: Sequence[str], num_bytes: int) -> None:
        """Block until the bytes would have passed all of `lanes`, in parallel."""
        ends = []
        for lane in lanes:
            _, end = self.reserve(lane, num_bytes)
            ends.append(end)
        sleep_until_monotonic(max(ends))


def sleep_until_monotonic(moment: float) -> None:
    """Sleep to a moment of the monotonic clock."""
    left = moment - time.monotonic()
    while left > 0:
        time.sleep(left)
        left = moment - time.monotonic()


@dataclass
class _Transfer:
    """Message in flight; its stamp [start, end] on the sender's lane is sent with it."""

    works: tuple[Any, Any]
    stamp: Tensor
    tensor: Tensor
    source: str | None
    posted: float


@dataclass(frozen=True)
class ThrottledGroup:
    """Send and receive of a process group at the speed of the nodes' lanes.

    The messages really go over gloo. A message starts when it was sent and its receive is posted,
    whichever is later (gloo's rendezvous), and takes both nodes' cards at the same time; between
    workers of one node, its memory.
    """

    group: Any
    lanes: Lanes
    node: str
    node_by_worker: Mapping[str, str]

    def send(self, tensor: Tensor, to: str, tag: int) -> _Transfer:
        lane = "memory" if self.node_by_worker[to] == self.node else "out"
        reserved = self.lanes.reserve(lane, tensor.numel())
        stamp = torch.tensor(reserved, dtype=torch.float64)
        works = (self.group.send(stamp, to, 2 * tag + 1), self.group.send(tensor, to, 2 * tag))
        return _Transfer(works, stamp, tensor, None, time.monotonic())

    def recv(self, tensor: Tensor, source: str, tag: int) -> _Transfer:
        stamp = torch.empty(2, dtype=torch.float64)
        works = (
            self.group.recv(stamp, source, 2 * tag + 1),
            self.group.recv(tensor, source, 2 * tag),
        )
        return _Transfer(works, stamp, tensor, source, time.monotonic())

    def wait_on_host(self, transfer: _Transfer) -> None:
        for work in transfer.works:
            self.group.wait_on_host(work)
        start, end = transfer.stamp.tolist()
        # the sender has reserved its own lane; a message from another node takes this node's too
        if transfer.source is not None and self.node_by_worker[transfer.source] != self.node:
            both_ready = max(start, transfer.posted)
            _, received = self.lanes.reserve("in", transfer.tensor.numel(), both_ready)
            end = max(end, received)
        sleep_until_monotonic(end)


class ThrottledStore(AgentStore):
    """A node's snapshots, read by its own worker at the speed of its memory or disk."""

    def __init__(self, memory: str, disk: str, node: str, lanes: Lanes) -> None:
        super().__init__(memory, disk, node)
        self._lanes = lanes

    def read(self, source: Source, shard: ShardId, expected: int | None = None) -> memoryview:
        data = super().read(source, shard, expected)
        self._lanes.pass_through((source.kind,), len(data))
        return data


class ServedStore(ThrottledStore):
    """The same as its shard server gives it to peers: through the node's card too."""

    def file_of(self, source: Source, shard: ShardId) -> SnapshotFile:
        file = super().file_of(source, shard)
        self._lanes.pass_through((source.kind, "out"), file.map.extents[shard].num_bytes)
        return file


@dataclass(frozen=True)
class ThrottledStorage:
    """Durable storage at a node's speed to it; what enters takes the node's card too.

    Only reads are throttled.
    """

    inner: Storage
    lanes: Lanes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        data = self.inner.get(name, start, length)
        self.lanes.pass_through(("s3", "in"), len(data))
        return data

    def get_into(self, name: str, start: int, buffer: memoryview) -> None:
        self.inner.get_into(name, start, buffer)
        self.lanes.pass_through(("s3", "in"), len(buffer))


class ThrottledProxy:
    """TCP proxy in front of a peer's shard server; owns its threads.

    Answers of the server pass this node's card.
    """

    def __init__(self, target: tuple[str, int], lanes: Lanes) -> None:
        self._target = target
        self._lanes = lanes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads: list[threading.Thread] = []
        self._open: list[socket.socket] = []
        self._start(self._accept)

    def _start(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="throttled proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target, 30.0)
            except OSError:
                return
            far.settimeout(None)
            self._open += [near, far]
            self._start(self._pump, near, far, False)
            self._start(self._pump, far, near, True)

    def _pump(self, source: socket.socket, sink: socket.socket, throttled: bool) -> None:
        try:
            while data := source.recv(_PIECE_BYTES):
                if throttled:
                    self._lanes.pass_through(("in",), len(data))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(5.0)
