"""A message that is half through when its peer stops or dies: gloo itself wakes nobody then before
the operation's deadline.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess

import pytest
import torch
from torch.distributed import TCPStore, Work

from autohet.runtime.groups import GlooGroup, Interrupted
from autohet.runtime.groups.gloo import Waiter

NUM_BYTES = 64 << 20
"""More than the buffers of a connection's two ends take."""


def peer(port: int, tensor: torch.Tensor) -> None:
    """Receives, and stands still as soon as the message begins to come."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    group = GlooGroup("pair", ("a", "b"), "b", store, torch.device("cpu"), 60.0)
    work = group.recv(tensor, "a", 1)
    while not tensor[0]:
        pass
    os.kill(os.getpid(), signal.SIGSTOP)
    del work


Sending = tuple[GlooGroup, Work, BaseProcess]


@pytest.fixture
def half_sent() -> Iterator[Sending]:
    """A group, a send of which the peer has read the beginning and not the end, and the peer, which
    stands still.
    """
    processes: list[BaseProcess] = []
    try:
        while True:
            group, work, process, received = begin_to_send(processes)
            if not received[-1]:
                break
            assert len(processes) < 10, "the peer is never stopped in time"
            group.interrupt()
        yield group, work, process
    finally:
        for process in processes:
            process.kill()
            process.join(20)


def begin_to_send(
    processes: list[BaseProcess],
) -> tuple[GlooGroup, Work, BaseProcess, torch.Tensor]:
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=40)
    )
    received = torch.zeros(NUM_BYTES, dtype=torch.uint8).share_memory_()
    process = multiprocessing.get_context("spawn").Process(target=peer, args=(store.port, received))
    process.start()
    processes.append(process)
    group = GlooGroup("pair", ("a", "b"), "a", store, torch.device("cpu"), 60.0)
    work = group.send(torch.ones(NUM_BYTES, dtype=torch.uint8), "b", 1)
    assert process.pid is not None
    assert work is not None
    until = time.monotonic() + 20
    while not _is_stopped(process.pid):
        assert time.monotonic() < until
        time.sleep(0.01)
    return group, work, process, received


def _is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] == "T"


@pytest.mark.parametrize("dies", [False, True], ids=["the peer stands still", "the peer is dead"])
def test_an_interrupt_wakes_who_waits_for_half_a_message(half_sent: Sending, dies: bool) -> None:
    group, work, process = half_sent
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            group.wait_on_host(work)
        except Interrupted as error:
            raised.append(error)

    if dies:
        process.kill()
        process.join(20)
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(0.5)
    group.interrupt()
    waiting.join(20)  # the group's own deadline is 60 s
    assert raised, "not woken" if waiting.is_alive() else "woken with the wrong error"


def test_waiters_end_with_their_group(half_sent: Sending) -> None:
    group, _, _ = half_sent
    before = set(threading.enumerate())
    group.waiters.extend([Waiter(group.name) for _ in range(2)])
    waiters = set(threading.enumerate()) - before
    assert len(waiters) == 2
    group.interrupt()
    for thread in waiters:
        thread.join(20)
        assert not thread.is_alive()
