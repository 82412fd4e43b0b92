"""`ProcessGroupNCCL` as PyTorch binds it, carried by gloo: it takes what the real one takes and
refuses what the real one refuses.

Signatures: torch/csrc/distributed/c10d/init.cpp of 2.11 and 2.13. The two differ in one point that
this project met: `Work.exception` raises TypeError before 2.13 (pytorch issue 147312).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (
    AllreduceOptions,
    BroadcastOptions,
    DistBackendError,
    ProcessGroupGloo,
    ReduceOptions,
)
from torch.distributed.distributed_c10d import AllgatherOptions, Store

from tests.harness.waits import GROUP_TIMEOUT

VERSIONS = ("2.11", "2.13")


class ErrorType(Enum):
    """Result of `get_error`."""

    SUCCESS = 0
    TIMEOUT = 1
    COMM_ERROR = 2
    REMOTE_ERROR = 3


class FakeWork:
    """One started operation."""

    def __init__(self, group: FakeProcessGroupNCCL, work: Any) -> None:
        self._group = group
        self._work = work
        self._done = False

    def is_completed(self) -> bool:
        """Completed also where the operation failed or the communicator was aborted, as NCCL's."""
        if self._group.failure is not None or self._group.aborted:
            return True
        if self._group.silent:
            return False
        if not self._done:
            self._work.wait(GROUP_TIMEOUT)
            self._done = True
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raise the failure; after an abort return normally, with garbage in the tensors."""
        _check_type("wait", timeout, timedelta)
        if self._group.failure is not None:
            raise DistBackendError(self._group.failure)
        if not self._group.aborted and not self._done:
            self._work.wait(GROUP_TIMEOUT)
            self._done = True
        return True

    def exception(self) -> BaseException | None:
        if self._group.version == "2.11":
            raise TypeError("Unregistered type : std::__exception_ptr::exception_ptr")
        return None if self._group.failure is None else DistBackendError(self._group.failure)

    def is_success(self) -> bool:
        raise RuntimeError("NCCL's WorkNCCL::isSuccess is deprecated")


class FakeProcessGroupNCCL:
    """The binding of one PyTorch version; `failure`, `reported` and `silent` play lost peers.

    failure: message that a failed operation's `wait` raises.
    reported: what `get_error` says.
    silent: operations never complete, as where a peer of the same node was killed.
    """

    version = "2.13"

    class Options:
        """Attributes that the binding has; others cannot be set."""

        __slots__ = (
            "_timeout",
            "config",
            "global_ranks_in_group",
            "group_name",
            "is_high_priority_stream",
            "split_color",
            "split_from",
        )

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self._timeout = timedelta(minutes=10)
            self.is_high_priority_stream = is_high_priority_stream
            self.global_ranks_in_group: list[int] = []
            self.group_name = ""

    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None:
        _check_type("ProcessGroupNCCL", options, FakeProcessGroupNCCL.Options)
        _check_type("ProcessGroupNCCL", options._timeout, timedelta)
        _check_type("ProcessGroupNCCL", options.group_name, str)
        _check_type("ProcessGroupNCCL", options.global_ranks_in_group, list)
        self.options = options
        self.failure: str | None = None
        self.reported = ErrorType.SUCCESS
        self.silent = False
        self.aborted = False
        self.connected_to: torch.device | None = None
        self._gloo: Any = None
        self._connect: Callable[[], Any] = lambda: ProcessGroupGloo(
            store, rank, size, GROUP_TIMEOUT
        )

    def eager_connect_single_device(self, device: torch.device) -> None:
        _check_type("eager_connect_single_device", device, torch.device)
        self.connected_to = device
        self._carrier()

    def _carrier(self) -> Any:
        """Return gloo's group; made by the first operation, as a communicator is."""
        if self._gloo is None:
            self._gloo = self._connect()
        return self._gloo

    def get_error(self) -> ErrorType:
        return self.reported

    def abort(self) -> None:
        self.aborted = True

    def allreduce(self, tensors: list[Tensor], opts: AllreduceOptions) -> FakeWork:
        return self._start("allreduce", tensors, opts, AllreduceOptions)

    def reduce(self, tensors: list[Tensor], opts: ReduceOptions) -> FakeWork:
        return self._start("reduce", tensors, opts, ReduceOptions)

    def broadcast(self, tensors: list[Tensor], opts: BroadcastOptions) -> FakeWork:
        return self._start("broadcast", tensors, opts, BroadcastOptions)

    def _start(self, name: str, tensors: list[Tensor], opts: Any, kind: type) -> FakeWork:
        _check_tensors(name, tensors)
        _check_type(name, opts, kind)
        return self._work(lambda: getattr(self._carrier(), name)(tensors, opts))

    def _allgather_base(self, output: Tensor, input: Tensor, opts: AllgatherOptions) -> FakeWork:
        _check_tensors("_allgather_base", [output, input])
        _check_type("_allgather_base", opts, AllgatherOptions)
        return self._work(lambda: self._carrier()._allgather_base(output, input, opts))

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> FakeWork:
        _check_tensors("send", tensors)
        _check_type("send", dstRank, int)
        return self._work(lambda: self._carrier().send(tensors, dstRank, 0))

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> FakeWork:
        _check_tensors("recv", tensors)
        _check_type("recv", srcRank, int)
        return self._work(lambda: self._carrier().recv(tensors, srcRank, 0))

    def _work(self, start: Callable[[], Any]) -> FakeWork:
        if self.aborted:
            raise DistBackendError("NCCL communicator was aborted")
        lost = self.failure is not None or self.silent
        return FakeWork(self, None if lost else start())


def _check_type(where: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(
            f"{where}(): incompatible function arguments: {value!r} is no {kind.__name__}"
        )


def _check_tensors(where: str, tensors: list[Tensor]) -> None:
    """NCCL takes a list of one contiguous tensor, of at least one dimension."""
    _check_type(where, tensors, list)
    for tensor in tensors:
        _check_type(where, tensor, Tensor)
        if not tensor.is_contiguous():
            raise ValueError(f"{where}(): Tensors must be contiguous")
