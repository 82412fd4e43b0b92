"""Copies between the device and optimizer state in host memory, through a little pinned memory.

Gradients come down, weights go up (ZeRO-Offload, Ren et al. 2021, without its delayed update). The
state itself is not pinned: pinning takes a quarter of a second a GB in each generation, and torch's
allocator of pinned memory rounds up to powers of two. The host converts weights into the pinned
buffers anyway.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autohet.runtime.parallel.buckets import ALIGNMENT
from planner.inputs.fleet import node_of
from planner.plans.plan import Plan

STAGING_BYTES = 32 << 20
"""Size of each of the two buffers: large enough for a link's full speed, small beside any state."""


class HostStaging:
    """Memory of a worker whose optimizer state is offloaded, and its copies to and from `device`.

    One thread at a time uses it. On the CPU its buffers are plain memory, and each copy ends before
    its call returns.
    """

    def __init__(self, device: torch.device, staging_bytes: int = STAGING_BYTES) -> None:
        self.device = device
        self._pinned = device.type == "cuda"
        self._num_elements = max(ALIGNMENT, staging_bytes // 4 // ALIGNMENT * ALIGNMENT)
        # Two, so that the host fills or reads one while the device copies the other.
        self._buffers = []
        for _ in range(2):
            buffer = torch.empty(self._num_elements, dtype=torch.float32, pin_memory=self._pinned)
            self._buffers.append(buffer)
        self._events: list[Any] = [None, None]

    def zeros(self, *shape: int) -> Tensor:
        """Return fp32 zeros in host memory."""
        return torch.zeros(*shape, dtype=torch.float32)

    def down(self, source: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (offset, elements) of a flat fp32 tensor of the device in host memory, in order.

        Each part is valid until the next one is asked for, and may be written to. Meanwhile the
        next part is copied.
        """
        if not source.numel():
            return
        coming = self._start_down(source, 0, 0)
        starts = range(0, source.numel(), self._num_elements)
        for number, start in enumerate(starts):
            part = coming
            self._await(number % 2)
            following = start + self._num_elements
            if following < source.numel():
                coming = self._start_down(source, following, (number + 1) % 2)
            yield start, part

    def _start_down(self, source: Tensor, start: int, buffer: int) -> Tensor:
        self._await(buffer)
        taken = source[start : start + self._num_elements]
        part = self._buffers[buffer][: taken.numel()]
        part.copy_(taken, non_blocking=True)
        self._record(buffer)
        return part

    def up(self, source: Tensor, target: Tensor) -> None:
        """Start a copy of a contiguous fp32 tensor of host memory into one of the device.

        The destination is contiguous and has the device's type. The copy has ended for the stream;
        `source` may change.
        """
        flat = source.view(-1)
        into = target.view(-1)
        starts = range(0, flat.numel(), self._num_elements)
        for number, start in enumerate(starts):
            buffer = number % 2
            self._await(buffer)
            taken = flat[start : start + self._num_elements]
            stop = start + taken.numel()
            staged = self._buffers[buffer].view(target.dtype)
            part = staged[: taken.numel()]
            # The host converts: across devices torch would convert into pageable memory first.
            part.copy_(taken)
            into[start:stop].copy_(part, non_blocking=True)
            self._record(buffer)

    def _record(self, buffer: int) -> None:
        if not self._pinned:
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._events[buffer] = event

    def _await(self, buffer: int) -> None:
        """Wait until the device has finished with this buffer."""
        event = self._events[buffer]
        if event is not None:
            event.synchronize()
            self._events[buffer] = None


def state_device(plan: Plan, device: torch.device) -> torch.device:
    """Return the device of masters and moments in a worker of `device`."""
    return torch.device("cpu") if plan.offloads else device


def use_cores(plan: Plan, me: str) -> None:
    """Let this process's host operators use its share of the node's cores, if that is more.

    The update of an offloaded state takes as long as these operators do.
    """
    own_node = node_of(me)
    beside = [worker for worker in plan.workers if node_of(worker) == own_node]
    num_cores = len(os.sched_getaffinity(0))
    own_cores = num_cores // max(1, len(beside))
    torch.set_num_threads(max(torch.get_num_threads(), own_cores))
