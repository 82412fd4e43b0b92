"""Interface of process groups: which calls order a device's stream, and which block the host.

A GPU runs its operations in streams, long after the host has launched them. An operation therefore
ends twice: for the *stream*, when later launches may use the result, and for the *host*, when this
process may read the result or report it to others. On the CPU both are the same moment. Code that
decides something waits on the host; all other code waits on the stream.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    PrefixStore,
    Store,
)

from autohet.runtime.groups.clock import HostClock, StreamClock
from autohet.runtime.groups.errors import Interrupted, PeerLost
from planner.communicators import max_sync_groups
from planner.plan import Plan

HOST_POLL_S = 2e-4


class Group(ABC):
    """Workers that communicate with each other in one generation.

    One thread uses the group; any thread may `interrupt` it.

    Every member calls collectives in the same order. `send` and `recv` start an operation, which a
    wait ends. Messages between two members match in the order of sending, or by `tag` if the back
    end has tags. A failure raises PeerLost with the back end's whole message, or Interrupted after
    `interrupt`. The host polls for failures while it waits if the back end does not report them
    itself.
    """

    in_stream_order: ClassVar[bool]
    """True if a group's operations run one after another, in the order of a stream.

    Each purpose then needs a group of its own, all workers must start operations of several groups
    in the same order, and only the order matches messages. False: messages have tags.
    """
    abort_may_hang: ClassVar[bool] = False
    clock: ClassVar[StreamClock] = HostClock()

    def __init__(
        self,
        name: str,
        members: Sequence[str],
        me: str,
        store: Store,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.name, self.members, self.me = name, tuple(members), me
        self.rank, self.size = self.members.index(me), len(members)
        self.timeout_s = timeout_s
        self.device = device
        self.check_generation: Callable[[], None] = lambda: None
        """Called by the host while it waits; raises the error that ends the generation."""
        self._interrupted = threading.Event()
        self._group: Any = self._create(PrefixStore(name, store)) if self.size > 1 else None

    # what a back end brings
    # ------------------------------------------------------------------------------

    @abstractmethod
    def _create(self, store: Store) -> Any:
        """Create the back end's group.

        It may block where nothing can wake it (see `GenerationGroups`, which calls it in a thread).
        """

    @abstractmethod
    def connect(self) -> None:
        """Do the work for which the first operation would block; every member calls it.

        It may block where nothing can wake it.
        """

    @abstractmethod
    def wait_on_stream(self, work: Work | None) -> None:
        """End an operation for the stream.

        This thread's later launches and computations see the result. If the device has streams, the
        host continues at once and must not read the result.
        """

    @abstractmethod
    def error(self) -> str | None:
        """Return the back end's own message about a failure; None if it knows of none."""

    @abstractmethod
    def _abort(self) -> None:
        """Wake all waiters of this group, which is unusable afterwards.

        May raise RuntimeError, and may take long.
        """

    @classmethod
    def is_healthy(cls, device: torch.device, limit_s: float) -> bool:
        """Return True if the device still computes after an abort; poll for at most `limit_s`."""
        return True

    @classmethod
    def max_sync_groups(cls, plan: Plan) -> int | None:
        """Return the most gradient-sync groups per worker; None: one for each set of holders."""
        return max_sync_groups(plan) if cls.in_stream_order else None

    # operations
    # ------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the group in place and end the operation for the stream.

        All members get the same bits.
        """
        self.wait_on_stream(self.start_all_reduce(tensor))

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Take the elementwise maximum over the group in place; end it for the stream."""
        self.wait_on_stream(self.start_all_reduce(tensor, ReduceOp.MAX))

    def start_all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Work | None:
        """Start an in-place all-reduce; a wait ends it."""
        if self._group is None:
            return None
        options = dist.AllreduceOptions()
        options.reduceOp = op
        work: Work | None = self._call(lambda: self._group.allreduce([tensor], options))
        return work

    def start_reduce(self, tensor: Tensor, to: str) -> Work | None:
        """Start to sum over the group into `tensor` of the member `to`; a wait ends the operation.

        The other members' tensors are undefined afterwards.
        """
        if self._group is None:
            return None
        op: Any = ReduceOp.SUM
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = op, self.members.index(to)
        work: Work | None = self._call(lambda: self._group.reduce([tensor], options))
        return work

    def start_broadcast(self, tensor: Tensor, source: str) -> Work | None:
        """Start to copy `tensor` of the member `source` to all members; a wait ends the operation.

        The tensor is contiguous, and has the same size on every member.
        """
        if self._group is None:
            return None
        options = dist.BroadcastOptions()
        options.rootRank = self.members.index(source)
        work: Work | None = self._call(lambda: self._group.broadcast([tensor], options))
        return work

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        """Gather every member's `part` in rank order into `out`; end the operation for the stream.

        `out` is as large as all parts together; both are contiguous.
        """
        assert out.numel() == self.size * part.numel(), (
            f"{self.size} parts of {part.numel()} into {out.numel()}"
        )
        if self._group is None:
            out.view(-1).copy_(part.view(-1))
            return
        self.wait_on_stream(
            self._call(
                lambda: self._group._allgather_base(out.view(-1), part.view(-1), AllgatherOptions())
            )
        )

    def reduce_scatter(self, out: Tensor, parts: Tensor) -> None:
        """Sum `parts` [size, ...] over the group, and put this member's part into `out`.

        Ends the operation for the stream. `parts` is contiguous, and undefined afterwards. A back
        end without the operation sums all parts.
        """
        if self._group is not None:
            self.all_reduce(parts)
        out.copy_(parts[self.rank])

    def all_to_all(
        self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        """Send rows of `given` to every member and receive rows of every member into `out`.

        Ends the operation for the stream. received, sent: rows by rank of the other member; rows
        are in the order of these ranks. Both tensors are contiguous.
        """
        self.wait_on_stream(self._start_all_to_all(out, given, received, sent))

    def exchange_counts(self, counts: Tensor) -> tuple[list[int], list[int]]:
        """Send `counts[rank]` to each member; return the sent and the received counts by rank.

        counts: int64 [size]. Ends the operation for the host.
        """
        theirs = torch.empty_like(counts)
        ones = [1] * self.size
        self.wait_on_host(self._start_all_to_all(theirs, counts, ones, ones))
        return counts.tolist(), theirs.tolist()

    def _start_all_to_all(
        self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work | None:
        if self._group is None:
            out.copy_(given)
            return None
        options = AllToAllOptions()
        work: Work | None = self._call(
            lambda: self._group.alltoall_base(out, given, list(received), list(sent), options)
        )
        return work

    def send(self, tensor: Tensor, to: str, tag: int) -> Work | None:
        """Start to send a contiguous tensor, which must not change before a wait."""
        work: Work | None = self._call(
            lambda: self._group.send([tensor], self.members.index(to), tag)
        )
        return work

    def recv(self, tensor: Tensor, source: str, tag: int) -> Work | None:
        """Start to receive into a contiguous tensor."""
        work: Work | None = self._call(
            lambda: self._group.recv([tensor], self.members.index(source), tag)
        )
        return work

    def wait_on_host(self, work: Work | None) -> None:
        """End an operation for the host, within the group's deadline.

        Afterwards the result is complete and genuine, not left by an abort.
        """
        if work is None:
            return
        deadline = time.monotonic() + self.timeout_s
        while not self._call(work.is_completed):
            self._raise_failure()
            if time.monotonic() > deadline:
                raise PeerLost(f"{self.name}: no answer within {self.timeout_s:.0f} s")
            time.sleep(HOST_POLL_S)
        # After an abort, or a failure, an operation counts as completed whatever its tensor holds.
        self._raise_failure()
        self.wait_on_stream(work)

    def _raise_failure(self) -> None:
        """Raise the error that ended the generation, or PeerLost for an error of the back end."""
        self.check_generation()
        failure = self.error()
        if failure is not None:
            raise PeerLost(f"{self.name}: {failure}")

    def barrier_on_host(self) -> None:
        """Wait on the host until every member has called this."""
        arrived = torch.ones(1, device=self.device)
        self.wait_on_host(self.start_all_reduce(arrived))
        assert arrived.item() == self.size, f"{self.name}: {arrived.item()} of {self.size} came"

    def interrupt(self) -> None:
        """Wake all waiters of this group, which is unusable afterwards; any thread, idempotent.

        Sets the flag before the abort, so that a woken thread knows that its tensors are invalid.
        """
        if self._interrupted.is_set():
            return
        self._interrupted.set()
        if self._group is not None:
            self._abort()

    def _call(self, operation: Callable[[], Any]) -> Any:
        if self._interrupted.is_set():
            raise Interrupted(self.name)
        try:
            return operation()
        except RuntimeError as error:
            if self._interrupted.is_set():
                raise Interrupted(self.name) from None
            raise PeerLost(f"{self.name}: {error}") from None

    def _limit(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)
