"""Measurements that need several processes of this machine.

They cover tensor-parallel layers, and links between devices.
"""

import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from autohet.runtime.models.layers.tensor_parallel import ReduceGroup, TensorParallel
from autohet.runtime.profiling.device_profile import OutOfMemory, ProfileRequest, measure_layers
from planner.inputs.profile import Measurement

DEADLINE = timedelta(seconds=120)
LIMIT_S = 1800.0
RESULT = "result"
T = TypeVar("T")
LINK_SIZES = tuple(2**power for power in range(18, 29, 2))


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """Bandwidth of a flow between two devices of this machine, for messages of one size.

    In bytes per second.
    """

    message_bytes: int
    bytes_per_s: float


class _Group(ReduceGroup):
    """Process group of all ranks."""

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def all_reduce_max(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        dist.all_gather_into_tensor(out, part)

    def reduce_scatter(self, out: Tensor, parts: Tensor) -> None:
        dist.all_reduce(parts)
        out.copy_(parts[dist.get_rank()])

    def all_to_all(
        self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        dist.all_to_all_single(out, given, list(received), list(sent))


def measure_tensor_parallel(
    request: ProfileRequest, degree: int
) -> list[Measurement | OutOfMemory]:
    """Measure the layers at one TP degree, in `degree` processes; blocks until they end."""
    measure = partial(_tensor_parallel_rank, request, degree)
    return run_in_processes(measure, request.device_type, degree)


def measure_links(
    device_type: str, num_bytes: tuple[int, ...] = LINK_SIZES
) -> list[LinkMeasurement]:
    """Measure the bandwidth between two devices of this machine by message size.

    Blocks until measured.
    """
    return run_in_processes(partial(_link_rank, num_bytes), device_type, 2)


def run_in_processes(function: Callable[[int, torch.device], T], device_type: str, count: int) -> T:
    """Run `function(rank, device)` in `count` processes of one group; return rank 0's result.

    Raises:
        ProcessException: a process failed. TimeoutError: they took longer than LIMIT_S.
    """
    with tempfile.TemporaryDirectory() as directory:
        call = (function, device_type, count, Path(directory))
        processes: Any = torch.multiprocessing.spawn(_enter, call, count, join=False)
        end = time.monotonic() + LIMIT_S
        try:
            while not processes.join(timeout=1.0):
                if time.monotonic() > end:
                    raise TimeoutError("the measuring processes did not answer within 30 minutes")
        finally:
            for process in processes.processes:
                process.kill()
                process.join()
        result: T = pickle.loads((Path(directory) / RESULT).read_bytes())
        return result


def _enter(
    rank: int,
    function: Callable[[int, torch.device], Any],
    device_type: str,
    count: int,
    directory: Path,
) -> None:
    if device_type == "cuda":
        device = torch.device(device_type, rank)
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        device = torch.device("cpu")
        # the processes share this machine's cores
        torch.set_num_threads(1)
        backend = "gloo"
    store = f"file://{directory / 'rendezvous'}"
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=count, timeout=DEADLINE
    )
    result = function(rank, device)
    if rank == 0:
        (directory / RESULT).write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _tensor_parallel_rank(
    request: ProfileRequest, degree: int, rank: int, device: torch.device
) -> list[Measurement | OutOfMemory]:
    return list(measure_layers(request, TensorParallel.even(_Group(), rank, degree), rank))


def _link_rank(
    num_bytes: tuple[int, ...], rank: int, device: torch.device
) -> list[LinkMeasurement]:
    found = []
    for size in num_bytes:
        message = torch.empty(size, dtype=torch.uint8, device=device)
        seconds = [_round_trip(rank, message, device) / 2 for _ in range(7)][2:]
        found.append(LinkMeasurement(size, size / statistics.median(seconds)))
    return found


def _round_trip(rank: int, message: Tensor, device: torch.device) -> float:
    """Send a message from rank 0 to rank 1 and back; return the seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for sender in (0, 1):
        if rank == sender:
            dist.send(message, 1 - rank)
        else:
            dist.recv(message, 1 - rank)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
