"""A pool of processes that live through many cases: imports are paid once, and a case can kill,
freeze and talk to each while it works.
"""

import itertools
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from tests.harness.fork_server import forking_context
from tests.harness.waits import GROUP_TIMEOUT, HANG_S


class TaskFailed(AssertionError):
    """A task raised in its process (the message holds the traceback, `name` the exception's class),
    or the process died.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class NoAnswer(AssertionError):
    """A process has not answered for `HANG_S`."""


class PoolProcess:
    """One process.

    Tasks are module-level functions; each runs in a thread of its own there, so that one can
    disturb another.
    """

    def __init__(self, context: Any) -> None:
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there,), daemon=True)
        self._process.start()
        there.close()
        self._numbers = itertools.count()
        self._answers: dict[int, tuple[bool, Any]] = {}

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return bool(self._process.is_alive())

    def start(self, function: Callable[..., Any], *arguments: Any) -> int:
        """Begin a task; its number is for `result`. Raises TaskFailed if the process is dead."""
        number = next(self._numbers)
        try:
            self._connection.send((number, function, arguments))
        except (BrokenPipeError, ConnectionResetError):
            raise TaskFailed(
                "Died", f"process {self.pid} died before it was given {function.__name__}"
            ) from None
        return number

    def result(self, number: int) -> Any:
        """Wait for a task.

        Raises:
            TaskFailed: it raised, or the process died.
            NoAnswer: it hangs.
        """
        deadline = time.monotonic() + HANG_S
        while number not in self._answers:
            try:
                if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                    raise NoAnswer(f"no answer from process {self.pid} within {HANG_S:.0f} s")
                answered, good, answer = self._connection.recv()
            except (EOFError, ConnectionResetError):
                raise TaskFailed("Died", f"process {self.pid} died") from None
            self._answers[answered] = (good, answer)
        good, answer = self._answers.pop(number)
        if not good:
            raise TaskFailed(*answer)
        return answer

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.result(self.start(function, *arguments))

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.join(5)


class WorkerPool:
    """`size` processes, forked from a server that has imported everything."""

    def __init__(self, size: int) -> None:
        self._context = forking_context()
        self.processes = [PoolProcess(self._context) for _ in range(size)]

    def restore(self) -> None:
        """Replace the processes that a case killed or froze."""
        for index, process in enumerate(self.processes):
            if not process.alive:
                process.close()
                self.processes[index] = PoolProcess(self._context)

    def replace(self, index: int) -> None:
        self.processes[index].close()
        self.processes[index] = PoolProcess(self._context)

    def map(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run `function(*arguments[i])` in process i, all at once; results in order. Where one
        fails, these processes are replaced: a task that still runs in one of them, or a process
        that has died, would fail the next case too.
        """
        try:
            numbers = [
                process.start(function, *each)
                for process, each in zip(self.processes, arguments, strict=False)
            ]
            return [
                process.result(number)
                for process, number in zip(self.processes, numbers, strict=False)
            ]
        except (TaskFailed, NoAnswer):
            for index in range(len(arguments)):
                self.replace(index)
            raise

    def close(self) -> None:
        for process in self.processes:
            process.close()


@contextmanager
def pool_and_store(size: int) -> Iterator[tuple[WorkerPool, int]]:
    """A pool of `size` processes, and the port of a store at which they meet."""
    from torch.distributed import TCPStore  # imported late: a process that is forked needs no store

    store = TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=GROUP_TIMEOUT,
    )
    pool = WorkerPool(size)
    try:
        yield pool, store.port
    finally:
        pool.close()


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    lock = threading.Lock()

    def run(number: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            answer = (number, True, function(*arguments))
        except BaseException as error:  # noqa: BLE001
            answer = (number, False, (type(error).__name__, traceback.format_exc()))
        with lock:
            connection.send(answer)

    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        threading.Thread(target=run, args=task, daemon=True).start()
