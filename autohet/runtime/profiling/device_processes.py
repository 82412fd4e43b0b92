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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from autohet.runtime.models.layers.tensor_parallel import ReduceGroup, TensorParallel
from autohet.runtime.profiling.device_profile import OutOfMemory, ProfileRequest, measure_layers
from planner.inputs.profile import Measurement

DEADLINE = timedelta(seconds=120)
LIMIT_S = 1800.0
RESULT = "result"
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
    found: list[Measurement | OutOfMemory] = _run(
        _tensor_parallel_rank, request.device_type, degree, request
    )
    return found


def measure_links(
    device_type: str, num_bytes: tuple[int, ...] = LINK_SIZES
) -> list[LinkMeasurement]:
    """Measure the bandwidth between two devices of this machine by message size.

    Blocks until measured.
    """
    found: list[LinkMeasurement] = _run(_link_rank, device_type, 2, num_bytes)
    return found


def _run(
    function: Callable[[int, int, str, Any], Any], device_type: str, degree: int, argument: Any
) -> Any:
    """Run `function(rank, degree, device type, argument)` in processes.

    Return rank 0's result.

    Raises:
        ProcessException: a process failed. TimeoutError: they took longer than LIMIT_S.
    """
    with tempfile.TemporaryDirectory() as directory:
        call = (function, device_type, degree, argument, Path(directory))
        processes: Any = torch.multiprocessing.spawn(_enter, call, degree, join=False)
        end = time.monotonic() + LIMIT_S
        try:
            while not processes.join(timeout=1.0):
                if time.monotonic() > end:
                    raise TimeoutError("the measuring processes did not answer within 30 minutes")
        finally:
            for process in processes.processes:
                process.kill()
                process.join()
        return pickle.loads((Path(directory) / RESULT).read_bytes())


def _enter(
    rank: int,
    function: Callable[[int, int, str, Any], Any],
    device_type: str,
    degree: int,
    argument: Any,
    directory: Path,
) -> None:
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device_type == "cuda" else "gloo"
    store = f"file://{directory / 'rendezvous'}"
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=degree, timeout=DEADLINE
    )
    result = function(rank, degree, device_type, argument)
    if rank == 0:
        (directory / RESULT).write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _tensor_parallel_rank(rank: int, degree: int, device_type: str, request: ProfileRequest) -> Any:
    return list(measure_layers(request, TensorParallel.even(_Group(), rank, degree), rank))


def _link_rank(
    rank: int, degree: int, device_type: str, num_bytes: tuple[int, ...]
) -> list[LinkMeasurement]:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
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
