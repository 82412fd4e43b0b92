"""Worker processes of the recovery benchmark.

Each holds a known state, runs `recovery.transfer.restore` over gloo, agents, disk and S3, and
checks every tensor that it got.
"""

import importlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from autohet.bench.recovery.bare import S3, BareSender, flows_of, receive_flows
from autohet.bench.recovery.content import known_state, matches
from autohet.bench.recovery.links import LANES, Lanes
from autohet.bench.recovery.surroundings import TIMEOUT_S, TOKEN, Surroundings, Task, surroundings
from autohet.emulate.namespaces import enter_namespace
from recovery.local.agent_store import AgentStore
from recovery.peers.server import ShardServer
from recovery.state.layout import ShardId
from recovery.storage.open import open_storage
from recovery.transfer.links import LinkRates
from recovery.transfer.restore import LiveState, RestoreTask, restore

MAX_NODES = 8
BARE_DIRECTORY = "/dev/shm"
CLOSE = "close"
"""Message to an agent's process: one task is over; None: all tasks are."""


@dataclass(frozen=True)
class Result:
    """Report of one worker.

    `restore_s` runs from the common start until this worker's part is done; `bare_s` is what the
    same bytes took bare, before and after it; `cpu_s` the processor's seconds of this process
    meanwhile.
    """

    worker: str
    restore_s: float = 0.0
    group_s: float = 0.0
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)
    verified: bool = False
    s3_shards: frozenset[ShardId] = frozenset()
    bare_s: tuple[float, ...] = ()
    cpu_s: float = 0.0
    error: str | None = None


class _Work:
    """Part of one worker in one task."""

    def __init__(
        self, worker: str, task: Task, store: PrefixStore, node: Surroundings, stack: ExitStack
    ) -> None:
        self._worker = worker
        self._task = task
        self._store = store
        self._node = node
        self._bare: tuple[float, ...] = ()
        self._senders: dict[str, tuple[str, int]] = {}
        if task.wiring is not None:
            here = task.node_by_worker[worker]
            sender = stack.enter_context(
                closing(BareSender(BARE_DIRECTORY, task.wiring.hosts[here]))
            )
            store.set(f"bare/{here}", str(sender.port))
            nodes = {task.node_by_worker[each] for each in task.participants}
            self._senders = {
                name: (task.wiring.hosts[name], int(store.get(f"bare/{name}"))) for name in nodes
            }
            self._senders[S3] = task.wiring.bare_storage

    def run(self) -> Result:
        self._measure_bare("before")
        result = self._restore()
        self._measure_bare("after")
        return replace(result, bare_s=self._bare)

    def _measure_bare(self, when: str) -> None:
        """Measure the bare transfer, at all workers at the same time."""
        if not self._senders:
            return
        flows = flows_of(self._worker, self._task.transfers, self._task.before, self._task.after)
        scratch = next(
            iter(
                self._task.node_directory(self._task.node_by_worker[self._worker], "disk").glob("*")
            ),
            None,
        )
        self._meet(f"bare {when}")
        self._bare += (receive_flows(flows, self._senders, scratch) if flows else 0.0,)
        self._meet(f"bare {when} done")

    def _restore(self) -> Result:
        from autohet.runtime.groups import GlooGroup

        task = self._task
        worker = self._worker
        live = None
        if worker in task.givers and task.transfers.step == task.live_step:
            live = LiveState(task.before, known_state(task.before, worker, task.live_step))
        self._meet("prepared")
        began = time.monotonic()
        group = GlooGroup(
            "world", task.participants, worker, self._store, torch.device("cpu"), TIMEOUT_S
        )
        group_s = time.monotonic() - began
        self._meet("start")
        started = time.monotonic()
        cpu = time.process_time()
        over = self._node.group_over(group)
        restored = restore(
            RestoreTask(task.transfers, worker, task.after, live), over, self._node.access
        )
        restore_s = time.monotonic() - started
        cpu_s = time.process_time() - cpu
        self._meet("done")
        has_part = worker in task.after.shards_by_worker
        verified = not has_part or matches(task.after, worker, restored.state, task.transfers.step)
        shards = frozenset(self._node.s3_shards)
        return Result(
            worker, restore_s, group_s, restored.bytes_by_tier, verified, shards, cpu_s=cpu_s
        )

    def _meet(self, name: str) -> None:
        """Wait for all participants, by polling little: the moment decides when clocks start."""
        deadline = time.monotonic() + TIMEOUT_S
        self._store.add(name, 1)
        while self._store.add(name, 0) < len(self._task.participants):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all came to {name}")
            time.sleep(1e-3)


def work(worker: str, task: Task, lanes: Lanes, meeting: tuple[str, int]) -> Result:
    """Prepare, meet the others, restore, check.

    Every participant of the task calls it at the same time.
    """
    if task.wiring is not None:
        enter_namespace(task.wiring.namespaces[task.node_by_worker[worker]])
    client = TCPStore(*meeting, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    store = PrefixStore(task.name, client)
    with ExitStack() as stack:
        node = surroundings(task, worker, lanes, store, stack)
        return _Work(worker, task, store, node, stack).run()


class BenchProcess:
    """Process of the benchmark, to which messages go over a pipe; None ends it.

    target: called in the process with the other end of the pipe and the arguments.
    """

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, far = context.Pipe()
        self._process = context.Process(
            target=_enter, args=(target, far, *arguments), name=target.__name__, daemon=True
        )
        self._process.start()
        far.close()

    def answer(self) -> Any:
        """Block until the process sends something; return that."""
        if not self.connection.poll(TIMEOUT_S):
            raise TimeoutError(f"process {self._process.name} of the benchmark does not answer")
        return self.connection.recv()

    def end(self) -> None:
        if self._process.is_alive():
            self.connection.send(None)
        self._process.join(3.0)
        if self._process.is_alive():  # it waits for one that failed
            self._process.terminate()
            self._process.join(10.0)


def _enter(target: Callable[..., None], *arguments: Any) -> None:
    # Ctrl-C reaches all processes of a terminal; the parent ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    target(*arguments)


def _serve(connection: Any, free_at: Any, meeting: tuple[str, int], storage: str | None) -> None:
    """Run a worker process: report that it is up, then run tasks.

    With a `storage` it first imports and opens all that a training worker does, which is part of
    what a restart costs.
    """
    if storage is not None:
        importlib.import_module("autohet.runtime.worker")
        open_storage(storage).close()
    connection.send("up")
    while (order := connection.recv()) is not None:
        worker, task, row, links = order
        try:
            connection.send(work(worker, task, Lanes(free_at, row, links), meeting))
        except Exception:  # noqa: BLE001
            connection.send(Result(worker, error=traceback.format_exc(limit=8)))


def serve_agent(connection: Any, namespace: str, host: str) -> None:
    """Run an agent process in its node's namespace.

    It serves the directories that it is given and reports its address, until it is given others.
    """
    enter_namespace(namespace)
    connection.send("up")
    while (order := connection.recv()) is not None:
        memory, disk, node = order
        with (
            closing(AgentStore(memory, disk, node)) as store,
            ShardServer(store, TOKEN, host=host) as server,
        ):
            connection.send((host, server.port, TOKEN))
            if connection.recv() is None:
                return
            connection.send("closed")


class WorkerProcesses:
    """Owner of the worker processes and of the store that they meet at, on `host`.

    `start_s` are the seconds that starting the first one took, alone, with a client of the
    `storage`.
    """

    def __init__(self, size: int, storage: str, host: str = "127.0.0.1") -> None:
        self._store = TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self._meeting = (host, int(self._store.port))
        self._free_at = multiprocessing.get_context("spawn").Array("d", MAX_NODES * len(LANES))
        began = time.monotonic()
        self._workers = [self._launch(storage)]
        self._workers[0].answer()
        self.start_s = time.monotonic() - began
        others = [self._launch(None) for _ in range(size - 1)]
        for other in others:
            other.answer()
        self._workers += others

    def _launch(self, storage: str | None) -> BenchProcess:
        return BenchProcess(_serve, self._free_at, self._meeting, storage)

    def run(self, task: Task, links: LinkRates) -> list[Result]:
        """Run the task and return all participants' results.

        Raises RestoreFailed with the traceback if one failed.
        """
        os.makedirs(task.directory, exist_ok=True)
        try:
            nodes = list(dict.fromkeys(task.node_by_worker[worker] for worker in task.participants))
            assert len(nodes) <= MAX_NODES
            assert len(task.participants) <= len(self._workers)
            used = list(zip(task.participants, self._workers, strict=False))
            for worker, process in used:
                row = nodes.index(task.node_by_worker[worker])
                process.connection.send((worker, task, row, links))
            return self._gather(task.name, {process.connection: worker for worker, process in used})
        finally:
            shutil.rmtree(task.directory, ignore_errors=True)

    def _gather(self, name: str, waiting: dict[Any, str]) -> list[Result]:
        """Return every worker's result.

        The first failure is raised at once, since the other workers then wait in vain.
        """
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
        for worker in self._workers:
            worker.end()


class RestoreFailed(RuntimeError):
    """A restore of the benchmark failed in a worker process: (name of the task, traceback)."""

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"
