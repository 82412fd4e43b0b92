"""Run a function in several real processes that share a store: results come home by rank, so do
tracebacks.
"""

import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.distributed import TCPStore

from tests.harness.fork_server import forking_context
from tests.harness.waits import GROUP_TIMEOUT, HANG_S

JOIN_S = 5.0


class ChildFailed(AssertionError):
    """At least one process raised, died or did not answer in time; the message holds every
    traceback.
    """


def run_distributed(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Call `function(rank, world_size, store, *arguments)` in `world_size` forked processes;
    results by rank.

    `function` is importable (module level) and its results pickle. The store listens on a free port
    that the system chose and lives in this process. Afterwards no process that it
    started is alive.

    Raises:
        ChildFailed: with the tracebacks of those that raised, and the exit codes of those that
        died.
    """
    store = TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=GROUP_TIMEOUT,
    )
    context = forking_context()
    children: list[tuple[BaseProcess, Connection]] = []
    try:
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            child = context.Process(
                target=_child,
                args=(there, function, rank, world_size, store.port, arguments),
                daemon=True,
            )
            child.start()
            there.close()
            children.append((child, here))
        return _collect(children, time.monotonic() + HANG_S)
    finally:
        _end(children)


def _child(
    home: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=GROUP_TIMEOUT)
        home.send((True, function(rank, world_size, store, *arguments)))
    except BaseException:  # noqa: BLE001
        home.send((False, traceback.format_exc()))


def _collect(children: list[tuple[BaseProcess, Connection]], deadline: float) -> list[Any]:
    """Results by rank.

    The first failure gives the others a moment to say theirs: often one is the cause of the rest.
    """
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {connection: rank for rank, (_, connection) in enumerate(children)}
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                good, answer = connection.recv()
            except EOFError:
                children[rank][0].join(JOIN_S)
                good = False
                answer = f"died without an answer, exit code {children[rank][0].exitcode}"
            (answers if good else failures)[rank] = answer
            if not good:
                deadline = min(deadline, time.monotonic() + JOIN_S)
    failures |= dict.fromkeys(waiting.values(), "did not answer in time")
    if failures:
        raise ChildFailed(
            "\n".join(f"--- rank {rank}: {failures[rank]}" for rank in sorted(failures))
        )
    return [answers[rank] for rank in range(len(children))]


def _end(children: list[tuple[BaseProcess, Connection]]) -> None:
    for child, connection in children:
        connection.close()
        child.join(0.2)
        if child.is_alive():
            child.kill()
        child.join(JOIN_S)
