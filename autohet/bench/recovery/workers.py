"""Worker processes of the recovery benchmark: each holds a known state, runs `recovery.transfer.restore` over gloo, agents, disk
and S3, and checks every tensor that it got.
"""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from autohet.bench.recovery.content import known_content, known_state, matches
from autohet.bench.recovery.links import (
    LANES,
    Lanes,
    ServedStore,
    ThrottledGroup,
    ThrottledProxy,
    ThrottledStorage,
    ThrottledStore,
)
from recovery.checkpoint.durable_reads import DurableReads
from recovery.local.snapshot_file import SnapshotFileWriter
from recovery.local.snapshot_format import SUFFIX, FileMap
from recovery.peers.server import ShardServer
from recovery.state.layout import Layout, ShardId
from recovery.storage.open import open_storage
from recovery.transfer.links import Links
from recovery.transfer.restore import Access, LiveState, restore
from recovery.transfer.schedule import TransferSchedule

TOKEN = "bench"
MAX_NODES = 8
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Task:
    """One policy of one scenario, for all workers. `on_disk` maps workers to the step of their disk snapshot."""

    name: str
    before: Layout
    after: Layout
    transfers: TransferSchedule
    participants: tuple[str, ...]
    node_by_worker: Mapping[str, str]
    live_step: int
    givers: tuple[str, ...]
    disk_step: int | None
    directory: str
    storage: str


@dataclass(frozen=True)
class Result:
    """What one worker reports. `restore_s` runs from the common start until this worker's part is done."""

    worker: str
    restore_s: float = 0.0
    group_s: float = 0.0
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    verified: bool = False
    s3_shards: frozenset[ShardId] = frozenset()
    error: str | None = None


class _Node:
    """What surrounds one worker for one task: its store, its shard server, ways to the others; closed at the end."""

    def __init__(self, task: Task, worker: str, lanes: Lanes, store: PrefixStore, stack: ExitStack) -> None:
        self.task, self.worker, self.lanes = task, worker, lanes
        self.node = task.node_by_worker[worker]
        self.s3_shards: set[ShardId] = set()
        root = Path(task.directory, self.node)
        places = (str(root / "memory"), str(root / "disk"), self.node)
        if task.disk_step is not None and worker in task.givers:
            write_disk(root / "disk", task.before, worker, task.disk_step)
        own = stack.enter_context(_closing(ThrottledStore(*places, lanes)))
        served = stack.enter_context(_closing(ServedStore(*places, lanes)))
        server = stack.enter_context(ShardServer(served, TOKEN, host="127.0.0.1"))
        store.set(f"agent/{worker}", str(server.port))
        peers = {w: n for w, n in task.node_by_worker.items() if w in task.participants and n != self.node}
        agents: dict[str, tuple[str, int, str]] = {}
        for peer, node in peers.items():
            proxy = ThrottledProxy(("127.0.0.1", int(store.get(f"agent/{peer}"))), lanes)
            stack.callback(proxy.close)
            agents.setdefault(node, ("127.0.0.1", proxy.port, TOKEN))
        storage: Any = ThrottledStorage(open_storage(task.storage), lanes)
        stack.callback(storage.close)
        self._durable = stack.enter_context(DurableReads(storage))
        self.access = Access(own, agents, self._read_durable, TIMEOUT_S)

    def _read_durable(self, uri: str, step: int, shards: Sequence[ShardId]) -> Iterator[tuple[ShardId, Tensor]]:
        for shard, tensor in self._durable(uri, step, shards):
            self.s3_shards.add(shard)
            yield shard, tensor


class _closing:
    """Closes a store at the end of the block, whether or not its class has a context manager."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __enter__(self) -> Any:
        return self._thing

    def __exit__(self, *_: object) -> None:
        self._thing.close()


def write_disk(directory: Path, layout: Layout, worker: str, step: int) -> None:
    """A committed snapshot of the worker's known state on its node's disk."""
    file_map = FileMap.of(worker, layout.tensors, sorted(layout.shards_by_worker[worker]))
    writer = SnapshotFileWriter(directory / f"{worker.replace('/', '%2F')}.g0.0{SUFFIX}", file_map)
    whole = torch.frombuffer(writer.buffer, dtype=torch.uint8)
    writer.begin()
    for shard, extent in file_map.extents.items():
        content = known_content(layout.tensors[shard.tensor], shard.unit, step).view(-1).view(torch.uint8)
        whole[extent.offset : extent.offset + extent.num_bytes] = content
    writer.commit(step, 0)
    del whole
    writer.close()


def work(worker: str, task: Task, lanes: Lanes, store_port: int) -> Result:
    """Prepare, meet the others, restore, check. Every participant of the task calls it at the same time."""
    from autohet.runtime.groups import GlooGroup

    client = TCPStore("127.0.0.1", store_port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    store = PrefixStore(task.name, client)
    with ExitStack() as stack:
        node = _Node(task, worker, lanes, store, stack)
        live = None
        if worker in task.givers and task.transfers.step == task.live_step:
            live = LiveState(task.before, known_state(task.before, worker, task.live_step))
        _meet(store, "prepared", len(task.participants))
        began = time.monotonic()
        group = GlooGroup("world", task.participants, worker, store, torch.device("cpu"), TIMEOUT_S)
        group_s = time.monotonic() - began
        throttled = ThrottledGroup(group, lanes, node.node, task.node_by_worker)
        _meet(store, "start", len(task.participants))
        started = time.monotonic()
        restored = restore(task.transfers, worker, task.after, live, throttled, node.access)
        restore_s = time.monotonic() - started
        _meet(store, "done", len(task.participants))
        verified = worker not in task.after.shards_by_worker or matches(
            task.after, worker, restored.state, task.transfers.step
        )
        return Result(worker, restore_s, group_s, restored.bytes_by_tier, verified, frozenset(node.s3_shards))


def _meet(store: PrefixStore, name: str, size: int) -> None:
    """Wait for all participants, by polling little: the moment decides when clocks start."""
    deadline = time.monotonic() + TIMEOUT_S
    store.add(name, 1)
    while store.add(name, 0) < size:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all {size} came to {name}")
        time.sleep(1e-3)


def _serve(connection: Any, free_at: Any, store_port: int, storage: str | None) -> None:
    """A worker process: says when it is up, then does tasks. With a `storage` it first imports and opens all that a training
    worker does: part of what a restart costs.
    """
    if storage is not None:
        importlib.import_module("autohet.runtime.worker")
        open_storage(storage).close()
    torch.set_num_threads(1)
    connection.send("up")
    while (order := connection.recv()) is not None:
        worker, task, row, links = order
        try:
            connection.send(work(worker, task, Lanes(free_at, row, links), store_port))
        except Exception:  # noqa: BLE001  the process's edge: the benchmark shows it
            connection.send(Result(worker, error=traceback.format_exc(limit=8)))


class WorkerProcesses:
    """Owns the processes and the store that they meet at. `start_s` is what starting the first one took, alone, with a client
    of the `storage`.
    """

    def __init__(self, size: int, storage: str) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self.store_port = int(self._store.port)
        self._context = multiprocessing.get_context("spawn")
        self._free_at = self._context.Array("d", MAX_NODES * len(LANES))
        self._workers: list[tuple[Any, Any]] = []
        began = time.monotonic()
        self._launch(storage)
        self._expect_up(0)
        self.start_s = time.monotonic() - began
        for _ in range(size - 1):
            self._launch(None)
        for index in range(1, size):
            self._expect_up(index)

    def _launch(self, storage: str | None) -> None:
        near, far = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(far, self._free_at, self.store_port, storage), name="bench worker", daemon=True
        )
        process.start()
        far.close()
        self._workers.append((process, near))

    def _expect_up(self, index: int) -> None:
        assert self._workers[index][1].poll(TIMEOUT_S), "a worker process did not start"
        assert self._workers[index][1].recv() == "up"

    def run(self, task: Task, links: Links) -> list[Result]:
        """All participants' results. Raises RestoreFailed with the traceback where one failed."""
        os.makedirs(task.directory, exist_ok=True)
        try:
            nodes = list(dict.fromkeys(task.node_by_worker[worker] for worker in task.participants))
            assert len(nodes) <= MAX_NODES
            assert len(task.participants) <= len(self._workers)
            used = list(zip(task.participants, self._workers, strict=False))
            for worker, (_, connection) in used:
                connection.send((worker, task, nodes.index(task.node_by_worker[worker]), links))
            results = self._gather(task.name, {connection: worker for worker, (_, connection) in used})
        finally:
            shutil.rmtree(task.directory, ignore_errors=True)
        return results

    def _gather(self, name: str, waiting: dict[Any, str]) -> list[Result]:
        """Every worker's result; the first failure is raised at once, as the others then wait in vain."""
        results: list[Result] = []
        while waiting:
            ready: list[Any] = multiprocessing.connection.wait([*waiting], 2 * TIMEOUT_S)
            if not ready:
                raise RestoreFailed(name, f"no answer from {', '.join(waiting.values())}")
            for connection in ready:
                del waiting[connection]
                results.append(connection.recv())
                if results[-1].error:
                    raise RestoreFailed(name, results[-1].error)
        return results

    def close(self) -> None:
        for process, connection in self._workers:
            if process.is_alive():
                connection.send(None)
        for process, _ in self._workers:
            process.join(1.0)
            if process.is_alive():  # it waits for one that failed
                process.terminate()
                process.join(10.0)


class RestoreFailed(RuntimeError):
    """A restore of the benchmark failed in a worker process."""

    def __init__(self, name: str, trace: str) -> None:
        super().__init__(name, trace)

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"
