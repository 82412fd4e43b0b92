"""What a process group is to the runtime, whatever carries it: which calls order a device's stream,
and which hold up the host.

A GPU runs what it is given in streams, long after the host has gone on. An operation therefore ends
twice: for the *stream*, when what is launched next may use the result, and for the *host*, when
this process may read it, or tell others that it has happened. On the CPU both are the same moment.
Whoever decides something waits on the host; everything else waits on the stream.
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
from torch.distributed.distributed_c10d import AllgatherOptions, PrefixStore, Store

from autohet.runtime.groups.clock import HostClock, StreamClock
from autohet.runtime.groups.errors import Interrupted, PeerLost
from planner.communicators import max_sync_groups
from planner.plan import Plan

HOST_POLL_S = 2e-4


class Group(ABC):
    """Workers that communicate with each other, in one generation. One thread uses it; any thread
    may `interrupt` it.

    Every member calls collectives in the same order; `send` and `recv` start an operation that a
    wait ends. Messages between two members are taken in the order in which they were sent, or by
    `tag` where the back end has tags. A failure raises PeerLost with the back end's whole message,
    or Interrupted after `interrupt`; where the back end reports none by itself it is asked for
    while the host waits.

    check: called while the host waits; raises what ends the generation.
    """

    in_stream_order: ClassVar[bool]
    """Whether a group's operations run one after the other, in the order of a stream. Then each
    purpose needs a group of its own, all workers must start operations of several groups in one
    order, and only the order matches messages. Else they have tags.
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
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.members, self.me = name, tuple(members), me
        self.rank, self.size = self.members.index(me), len(members)
        self.timeout_s, self.device = timeout_s, device
        self._check_generation = check
        self._interrupted = threading.Event()
        self._group: Any = self._create(PrefixStore(name, store)) if self.size > 1 else None

    # what a back end brings
    # ------------------------------------------------------------------------------

    @abstractmethod
    def _create(self, store: Store) -> Any:
        """The back end's group; may block where nothing wakes it (see `GenerationGroups`, which
        calls it in a thread).
        """

    @abstractmethod
    def connect(self) -> None:
        """Whatever a first use would block for; every member calls it, and it may block where
        nothing wakes it.
        """

    @abstractmethod
    def wait_on_stream(self, work: Work | None) -> None:
        """End an operation for the stream: what this thread launches or computes next sees the
        result. The host goes on at once where the device has streams, and must not take the result
        for there.
        """

    @abstractmethod
    def error(self) -> str | None:
        """What the back end knows to have failed, in its own words; None where nothing has."""

    @abstractmethod
    def _abort(self) -> None:
        """Wake whoever waits on this group; the group is of no use afterwards.

        May raise RuntimeError, may take long.
        """

    @classmethod
    def is_healthy(cls, device: torch.device, limit_s: float) -> bool:
        """Whether the device still computes after an abort, asked so that no call blocks for
        good.
        """
        return True

    @classmethod
    def max_sync_groups(cls, plan: Plan) -> int | None:
        """How many groups of one worker gradient sync may have (None: one for each set of
        holders).
        """
        return max_sync_groups(plan) if cls.in_stream_order else None

    # operations
    # ------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over the group, in place, ended for the stream; the same bits on every member."""
        self.wait_on_stream(self.start_all_reduce(tensor))

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Elementwise maximum over the group, in place, ended for the stream."""
        self.wait_on_stream(self.start_all_reduce(tensor, ReduceOp.MAX))

    def start_all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Work | None:
        """As `all_reduce`, ended by a wait."""
        if self._group is None:
            return None
        options = dist.AllreduceOptions()
        options.reduceOp = op
        work: Work | None = self._call(lambda: self._group.allreduce([tensor], options))
        return work

    def start_reduce(self, tensor: Tensor, to: str) -> Work | None:
        """Sum over the group into `tensor` of the member `to`, ended by a wait; the others' is of
        no use afterwards.
        """
        if self._group is None:
            return None
        op: Any = ReduceOp.SUM
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = op, self.members.index(to)
        work: Work | None = self._call(lambda: self._group.reduce([tensor], options))
        return work

    def start_broadcast(self, tensor: Tensor, source: str) -> Work | None:
        """`tensor` of the member `source` to all others, ended by a wait; contiguous, and the same
        size everywhere.
        """
        if self._group is None:
            return None
        options = dist.BroadcastOptions()
        options.rootRank = self.members.index(source)
        work: Work | None = self._call(lambda: self._group.broadcast([tensor], options))
        return work

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        """Every member's `part`, one after the other in order of ranks, into `out`: as large as all
        parts together; both contiguous. Ended for the stream.
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
        """Sum `parts` [size, ...] over the group, this member's into `out`; ended for the stream.

        `parts` is contiguous and of no use afterwards. A back end without the operation sums all.
        """
        if self._group is not None:
            self.all_reduce(parts)
        out.copy_(parts[self.rank])

    def send(self, tensor: Tensor, to: str, tag: int) -> Work | None:
        """Start sending a contiguous tensor; it must not change before a wait."""
        work: Work | None = self._call(
            lambda: self._group.send([tensor], self.members.index(to), tag)
        )
        return work

    def recv(self, tensor: Tensor, source: str, tag: int) -> Work | None:
        """Start receiving into a contiguous tensor."""
        work: Work | None = self._call(
            lambda: self._group.recv([tensor], self.members.index(source), tag)
        )
        return work

    def wait_on_host(self, work: Work | None) -> None:
        """End an operation for the host, within the group's deadline: the result is there, and no
        abort has made it up.
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
        """Raise what has ended the generation, or PeerLost where the back end reports an error."""
        self._check_generation()
        failure = self.error()
        if failure is not None:
            raise PeerLost(f"{self.name}: {failure}")

    def barrier_on_host(self) -> None:
        """Return when every member has called this."""
        arrived = torch.ones(1, device=self.device)
        self.wait_on_host(self.start_all_reduce(arrived))
        assert arrived.item() == self.size, f"{self.name}: {arrived.item()} of {self.size} came"

    def interrupt(self) -> None:
        """Wake whoever waits on this group; the group is of no use afterwards. Any thread;
        idempotent.

        The flag is set before the abort, so that whoever is woken knows that what it finds in its
        tensors is worth nothing.
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
