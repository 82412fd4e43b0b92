"""An object in a process of its own, forked from a server that has imported everything: asked now,
answered later.
"""

import itertools
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.harness.fork_server import forking_context
from tests.harness.waits import HANG_S

NEWS = -1  # the number of a message that nobody asked for


@dataclass(frozen=True)
class Answer:
    """What came from the process: the answer to call `number` (or news).

    `good` False: it raised, `value` is the traceback.
    """

    number: int
    good: bool
    value: Any


class RemoteProcess:
    """One process that serves one object, made there by `build(tell, *arguments)`; `tell(value)`
    sends news from any thread.

    Each call runs in a thread of its own there, as in a threaded actor. The process ends with its
    parent.
    """

    def __init__(self, name: str, log: Path, build: Callable[..., Any], *arguments: Any) -> None:
        context = forking_context()
        self.name = name
        self.connection, there = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(there, log, build, arguments), daemon=True, name=name
        )
        self._process.start()
        there.close()
        self._numbers = itertools.count()
        self.gone = False

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, method: str, *arguments: Any) -> int:
        """Start a call; returns its number. Nothing comes of it if the process is gone."""
        number = next(self._numbers)
        try:
            self.connection.send((number, method, arguments))
        except OSError:
            self.gone = True
        return number

    def take(self) -> list[Answer]:
        """All answers and news that are there; `gone` is set once the process has ended and all is
        taken.
        """
        found = []
        try:
            while not self.gone and self.connection.poll():
                found.append(Answer(*self.connection.recv()))
        except (EOFError, OSError):
            self.gone = True
        return found

    def send_signal(self, number: signal.Signals) -> None:
        """A process that is gone already is left alone."""
        if self._process.exitcode is None:
            with suppress(ProcessLookupError):  # the fork server has reaped it and not said so yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill and reap."""
        self.kill()
        self._process.join(HANG_S)
        assert self._process.exitcode is not None, f"{self.name} outlives SIGKILL"
        self.connection.close()
        self.gone = True
        self._process.close()


def await_answers(calls: dict[RemoteProcess, int], timeout_s: float = 30.0) -> None:
    """Wait for these answers; a process that was frozen gives none."""
    deadline = time.monotonic() + timeout_s
    left = {process.connection: process for process in calls}
    while left and time.monotonic() < deadline:
        for connection in wait(list(left), 0.1):
            process = left[connection]  # type: ignore[index]
            if any(answer.number == calls[process] for answer in process.take()) or process.gone:
                del left[connection]  # type: ignore[arg-type]


def _serve(
    connection: Connection, log: Path, build: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    torch.set_num_threads(1)
    log.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        filename=log,
        level=logging.INFO,
        format="%(asctime)s %(threadName)s %(message)s",
        force=True,
    )
    lock = threading.Lock()

    def say(number: int, good: bool, value: Any) -> None:
        try:
            with lock:
                connection.send((number, good, value))
        except OSError:
            os._exit(0)

    served = build(lambda value: say(NEWS, True, value), *arguments)

    def run(number: int, method: str, given: tuple[Any, ...]) -> None:
        try:
            say(number, True, getattr(served, method)(*given))
        except BaseException:  # noqa: BLE001
            logging.getLogger("harness").error("%s failed: %s", method, traceback.format_exc())
            say(number, False, traceback.format_exc())

    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # the driver is gone: as Ray ends the actors of a dead driver
        threading.Thread(target=run, args=task, daemon=True).start()
