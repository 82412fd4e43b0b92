"""Workers on links of limited speed: a process each, in the network namespace of its node."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from statistics import median
from typing import Any

import torch
from torch.distributed import TCPStore

from autohet.emulate.namespaces import NamespaceNetwork, enter_namespace
from autohet.runtime.groups import GenerationGroups, GroupTimeouts
from tests.harness.fork_server import forking_context
from tests.harness.waits import HANG_S

STEPS = 4
CPU = torch.device("cpu")

Build = Callable[[Any, str, GenerationGroups], Callable[[], object]]
"""(case, worker, groups) -> what the worker does in a step; picklable, since each process calls it.
"""


def measured_step_s(
    network: NamespaceNetwork, nodes: Mapping[str, str], build: Build, case: Any
) -> float:
    """The median step of all workers (worker -> node), from when all begin to when all have ended;
    the first one left out, since connections are made in it.
    """
    store = TCPStore(
        network.head,
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=HANG_S),
    )
    context = forking_context()
    answers = context.Queue()
    workers = tuple(nodes)
    processes = [
        context.Process(
            target=_work,
            args=(
                network.namespace(node),
                build,
                case,
                worker,
                workers,
                network.head,
                store.port,
                answers,
            ),
            daemon=True,
        )
        for worker, node in nodes.items()
    ]
    for process in processes:
        process.start()
    try:
        steps = [answers.get(timeout=HANG_S) for _ in processes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return median(max(seconds) for seconds in list(zip(*steps, strict=True))[1:])


def _work(namespace: str, *arguments: Any) -> None:
    enter_namespace(namespace)
    _steps(*arguments)


def _steps(
    build: Build,
    case: Any,
    worker: str,
    workers: tuple[str, ...],
    host: str,
    port: int,
    answers: Any,
) -> None:
    torch.set_num_threads(1)
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=HANG_S))
    groups = GenerationGroups(store, 0, worker, CPU, GroupTimeouts(HANG_S, HANG_S))
    groups.meet(workers)
    everyone = groups.group(workers)
    step = build(case, worker, groups)
    seconds = []
    for _step in range(STEPS):
        everyone.all_reduce(torch.zeros(1))
        begun = time.perf_counter()
        step()
        everyone.all_reduce(torch.zeros(1))
        seconds.append(time.perf_counter() - begun)
    answers.put(seconds)
