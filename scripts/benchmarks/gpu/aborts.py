"""NCCL abort drills: a peer is killed, freezes or never comes, and the survivors react.

As many ranks as GPUs. With one GPU two ranks share it, over sockets and under made-up host ids, if
NCCL lets them; else the drills are skipped. On the CPU the same code drives gloo.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import TCPStore

from autohet.runtime.groups import (
    GenerationGroups,
    Group,
    GroupTimeouts,
    Interrupted,
    PeerLost,
    reconfigure,
)
from scripts.benchmarks.gpu.part import Failed, Machine, PartSkipped, share_gpu

GROUP_TIMEOUT_S = 20.0
RENDEZVOUS_S = 40.0
MISSING_S = 3.0
ANSWER_S = 60.0
NUM_GENERATIONS = 5
ERROR_CHARACTERS = 1500
STRIKES = {
    "killed": signal.SIGKILL,
    "killed_message": signal.SIGKILL,
    "frozen": signal.SIGSTOP,
}
MESSAGE_ELEMENTS = 4 << 20


def run(machine: Machine) -> dict[str, Any]:
    """Run the drills one after the other, each with processes of its own."""
    size = max(2, machine.count)
    found: dict[str, Any] = {
        "ranks": size,
        "shared_gpu": machine.device_type == "cuda" and machine.count == 1,
    }
    for drill in DRILLS:
        found[drill] = run_drill(drill, size, machine)
    return found


def run_drill(drill: str, size: int, machine: Machine) -> Any:
    """Run one drill in `size` processes and return what it found."""
    context = multiprocessing.get_context("spawn")
    store = TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=RENDEZVOUS_S),
    )
    pipes = [context.Pipe() for _ in range(size)]
    arguments = (size, (machine.device_type, machine.count), store.port, drill)
    processes = [
        context.Process(target=_rank, args=(rank, *arguments, pipes[rank][1]))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        return _conduct(drill, [pipe[0] for pipe in pipes], processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(10)


def _conduct(drill: str, pipes: Sequence[Connection], processes: Sequence[Any]) -> Any:
    """Drive one drill: strike the last rank, interrupt the survivors, and collect their answers."""
    ranks = list(zip(pipes, processes, strict=True))
    victim = len(ranks) - 1
    if drill in STRIKES:
        for pipe, process in ranks:
            _hear(pipe, process, "running")
        time.sleep(0.3)
        os.kill(processes[victim].pid, STRIKES[drill])
        time.sleep(0.2)
        for pipe in pipes[:victim]:
            pipe.send("interrupt")
    answering = ranks if drill == "generations" else ranks[:victim]
    answers = [_hear(pipe, process, "done") for pipe, process in answering]
    merged = {key: max(answer[key] for answer in answers) for key in answers[0]}
    if not all(answer.get("right", True) for answer in answers):
        raise Failed(f"{drill}: the survivors' sum in the next generation is wrong", merged)
    return merged


def _hear(pipe: Connection, process: Any, wanted: str) -> Any:
    """Return a rank's answer; raise Failed if the rank has ended or does not answer in time."""
    deadline = time.monotonic() + ANSWER_S
    while not pipe.poll(0.05):
        if not process.is_alive() and not pipe.poll(0.0):
            raise Failed(f"a rank ended with exit code {process.exitcode} and no answer", {})
        if time.monotonic() > deadline:
            raise Failed(f"a rank did not answer within {ANSWER_S:.0f} s", {})
    try:
        kind, value = pipe.recv()
    except EOFError:
        raise Failed(f"a rank ended with exit code {process.exitcode} and no answer", {}) from None
    if kind == "refused":
        raise PartSkipped(f"NCCL refuses two ranks on one GPU: {value}")
    if kind != wanted:
        raise Failed(f"{value}", {})
    return value


def _rank(
    rank: int,
    size: int,
    machine: tuple[str, int],
    port: int,
    drill: str,
    pipe: Connection,
) -> None:
    """Run one rank's process; send any error to the driver with its traceback."""
    try:
        device = _device_of(rank, size, *machine)
        found = DRILLS[drill](rank, size, device, port, pipe)
    except PeerLost as error:
        shared = machine[0] == "cuda" and machine[1] < size
        refused = shared and "Duplicate GPU" in str(error)
        pipe.send(("refused" if refused else "failed", traceback.format_exc()[-ERROR_CHARACTERS:]))
        return
    except Exception:  # noqa: BLE001
        pipe.send(("failed", traceback.format_exc()[-ERROR_CHARACTERS:]))
        return
    if found is not None:
        pipe.send(("done", found))


def _device_of(rank: int, size: int, device_type: str, num_devices: int) -> torch.device:
    """Return the device of a rank; ranks that share a GPU pose as ranks of different hosts."""
    if device_type != "cuda":
        return torch.device("cpu")
    shared = num_devices < size
    if shared:
        share_gpu(os.environ, f"drill-{rank}")
    device = torch.device("cuda", 0 if shared else rank)
    torch.cuda.set_device(device)
    return device


def _groups(
    rank: int, size: int, device: torch.device, port: int, rendezvous_s: float = RENDEZVOUS_S
) -> Any:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=RENDEZVOUS_S))
    groups = GenerationGroups(
        store, 0, f"n/{rank}", device, GroupTimeouts(GROUP_TIMEOUT_S, rendezvous_s)
    )
    groups.meet([f"n/{each}" for each in range(size)])
    return store, groups


def _struck_message(
    rank: int, size: int, device: torch.device, port: int, pipe: Connection
) -> dict[str, Any] | None:
    """Run the drill of `_struck` with messages from each rank to the next."""

    def pass_on(world: Group, message: torch.Tensor) -> None:
        members = world.members
        following = members[(rank + 1) % size]
        before = members[rank - 1]
        received = torch.empty_like(message)
        if rank % 2:
            world.wait_on_host(world.recv(received, before, 1))
            world.wait_on_host(world.send(message, following, 1))
        else:
            world.wait_on_host(world.send(message, following, 1))
            world.wait_on_host(world.recv(received, before, 1))

    return _survive(rank, size, device, port, pipe, pass_on)


def _struck(
    rank: int, size: int, device: torch.device, port: int, pipe: Connection
) -> dict[str, Any] | None:
    """Run all-reduces until a peer is reported gone, then form the next generation without it."""

    def reduce(world: Group, message: torch.Tensor) -> None:
        world.wait_on_host(world.start_all_reduce(message))
        message.fill_(1.0)

    return _survive(rank, size, device, port, pipe, reduce)


def _survive(
    rank: int,
    size: int,
    device: torch.device,
    port: int,
    pipe: Connection,
    communicate: Callable[[Group, torch.Tensor], None],
) -> dict[str, Any]:
    """Communicate until a peer is gone, then form the next generation without it.

    Returns the seconds from the interrupt to the end of the wait, and from there to the end of the
    next generation's first all-reduce.
    """
    store, groups = _groups(rank, size, device, port)
    members = [f"n/{each}" for each in range(size)]
    world = groups.group(members, "world")
    interrupted_at: list[float] = []

    def listen() -> None:
        pipe.recv()
        interrupted_at.append(time.perf_counter())
        groups.interrupt()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    message = torch.ones(MESSAGE_ELEMENTS, device=device)
    pipe.send(("running", None))
    try:
        for _ in itertools.count():
            communicate(world, message)
    except (PeerLost, Interrupted):
        raised_at = time.perf_counter()
    listener.join(ANSWER_S)
    begun = time.perf_counter()
    groups = reconfigure(
        groups, 1, store, f"n/{rank}", device, GroupTimeouts(GROUP_TIMEOUT_S, RENDEZVOUS_S)
    )
    groups.meet(members[:-1])
    world = groups.group(members[:-1], "world")
    one = torch.ones(1, device=device)
    world.wait_on_host(world.start_all_reduce(one))
    return {
        "noticed_s": max(0.0, raised_at - interrupted_at[0]),
        "next_generation_s": time.perf_counter() - begun,
        "right": one.item() == size - 1,
    }


def _missing(
    rank: int, size: int, device: torch.device, port: int, pipe: Connection
) -> dict[str, Any] | None:
    """Check that no rank waits longer than the deadline for a last rank that never comes."""
    if rank == size - 1:
        time.sleep(2 * MISSING_S)
        return None
    began = time.perf_counter()
    try:
        _groups(rank, size, device, port, MISSING_S)
    except PeerLost:
        waited = time.perf_counter() - began
        return {"gave_up_s": waited, "right": waited < 5 * MISSING_S}
    return {"gave_up_s": 0.0, "right": False}


def _generations(
    rank: int, size: int, device: torch.device, port: int, pipe: Connection
) -> dict[str, Any]:
    """Measure the time to make a communicator, and what it leaves, over several generations."""
    store, groups = _groups(rank, size, device, port)
    members = [f"n/{each}" for each in range(size)]
    seconds = []
    free = []
    right = True
    for number in range(1, NUM_GENERATIONS + 1):
        begun = time.perf_counter()
        groups = reconfigure(
            groups, number, store, f"n/{rank}", device, GroupTimeouts(GROUP_TIMEOUT_S, RENDEZVOUS_S)
        )
        groups.meet(members)
        world = groups.group(members, "world")
        one = torch.ones(1, device=device)
        world.wait_on_host(world.start_all_reduce(one))
        seconds.append(time.perf_counter() - begun)
        right = right and one.item() == size
        free.append(torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0)
    return {
        "first_s": seconds[0],
        "later_s": max(seconds[1:]),
        "bytes_lost_a_generation": (free[0] - free[-1]) / (NUM_GENERATIONS - 1),
        "threads": threading.active_count(),
        "right": right,
    }


DRILLS: Any = {
    "killed": _struck,
    "killed_message": _struck_message,
    "frozen": _struck,
    "missing": _missing,
    "generations": _generations,
}
