"""Process groups of GPUs.

The constructor of `ProcessGroupNCCL` contacts no peer. Its first operation creates the communicator
on the host, where nothing can wake it. `connect` therefore creates it at once, and
`GenerationGroups` calls `connect` in a thread after all members have reached the store. Operations
run in the order of a stream of the communicator's own. `Work.wait` orders the current stream and
raises the error of a failed operation; else it returns. A lost peer is an error that must be polled
for, or silence. After an abort every operation counts as completed.

`Work.exception` is not called: its binding raises TypeError before PyTorch 2.13 (pytorch issue
147312), and `Work.wait` raises the error that it would return.
"""

import os
import time
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import ReduceScatterOptions, Store

from autohet.runtime.groups.clock import EventClock
from autohet.runtime.groups.group import Group
from autohet.runtime.groups.interruptible import HOST_POLL_S

ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else a watchdog ends the process when a peer is lost
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else a monitor ends it when an abort takes long
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else a stale key of the store ends a newcomer
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # else dropping a group may take a minute
    "TORCH_NCCL_PROPAGATE_ERROR": "1",  # a remote error is reported to whoever asks
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # seconds; what an abort may wait for a communicator in the making
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "15",
    # memory of a killed process of the node stays valid for those who map it
    "NCCL_CUMEM_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    # messages of one group follow each other on purpose: each direction has groups of its own
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}
"""Settings of PyTorch's NCCL back end; the job's environment overrides them."""


class NcclGroup(Group):
    """Group of GPUs: `wait_on_stream` never blocks the host, `wait_on_host` polls.

    Its communicator is blocking. If a member is lost between the store's barrier and the
    connection, the communicator is still being created, and only an outside process can end an
    abort.
    """

    in_stream_order = True
    abort_may_hang = True
    clock = EventClock()

    def create(self, store: Store) -> Any:
        from torch.distributed import ProcessGroupNCCL

        # Before the first group is created: the back end reads some values only once.
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        options = ProcessGroupNCCL.Options()
        options._timeout = self._limit()
        options.group_name = self.name  # type: ignore[assignment]
        options.global_ranks_in_group = list(range(self.size))
        return ProcessGroupNCCL(store, self.rank, self.size, options)

    def connect(self) -> None:
        """Create the communicator and run one operation.

        The first operation connects on the host, and an abort before it may leave kernels behind.
        """
        if self.process_group is None:
            return
        self.process_group.eager_connect_single_device(self.device)
        self.barrier_on_host()

    def wait_on_stream(self, work: Work | None) -> None:
        if work is not None:
            self._call(work.wait)

    def reduce_scatter(self, out: Tensor, parts: Tensor) -> None:
        if self.process_group is None:
            out.copy_(parts[self.rank])
            return
        options = ReduceScatterOptions()
        work = self._call(
            lambda: self.process_group._reduce_scatter_base(out.view(-1), parts.view(-1), options)
        )
        self.wait_on_stream(work)

    def error(self) -> str | None:
        if self.process_group is None:
            return None
        found = self.process_group.get_error()
        return None if found == type(found).SUCCESS else f"NCCL reports {found}"

    def _abort(self) -> None:
        self.process_group.abort()

    @classmethod
    def is_healthy(cls, device: torch.device, limit_s: float) -> bool:
        """Run a small kernel and poll an event for its end.

        A kernel that fails indicates an error of the context, which cannot be repaired.
        """
        try:
            total = torch.ones(8, device=device).sum()
            done: Any = torch.cuda.Event()
            done.record()
            deadline = time.monotonic() + limit_s
            while not done.query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(HOST_POLL_S)
            return total.item() == 8.0
        except RuntimeError:
            return False
