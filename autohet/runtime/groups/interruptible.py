"""Life of a process group: who is in it, how its operations end, and how it fails.

A GPU runs its operations in streams, long after the host has launched them. An operation therefore
ends twice: for the *stream*, when later launches may use the result, and for the *host*, when this
process may read the result or report it to others. On the CPU both are the same moment. Code that
decides something waits on the host; all other code waits on the stream.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import Work
from torch.distributed.distributed_c10d import PrefixStore, Store

from autohet.runtime.groups.clock import HostClock, StreamClock
from autohet.runtime.groups.errors import Interrupted, PeerLost
from planner.plans.communicators import max_sync_groups
from planner.plans.plan import Plan

HOST_POLL_S = 2e-4


class InterruptibleGroup(ABC):
    """Members of a group in one generation, whose waits end at a failure or an interrupt.

    One thread uses the group; any thread may `interrupt` it. A failure raises PeerLost with the
    back end's whole message, or Interrupted after `interrupt`. The host polls for failures while it
    waits if the back end does not report them itself.
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
        self.name = name
        self.members = tuple(members)
        self.me = me
        self.rank = self.members.index(me)
        self.size = len(members)
        self.timeout_s = timeout_s
        self.device = device
        self.check_generation: Callable[[], None] = lambda: None
        """Called by the host while it waits; raises the error that ends the generation."""
        self._interrupted = threading.Event()
        self.process_group: Any = None
        if self.size > 1:
            self.process_group = self.create(PrefixStore(name, store))

    # what a back end brings
    # ------------------------------------------------------------------------------

    @abstractmethod
    def create(self, store: Store) -> Any:
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
        if not cls.in_stream_order:
            return None
        return max_sync_groups(plan)

    # waits, failures and interrupts
    # ------------------------------------------------------------------------------

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

    def interrupt(self) -> None:
        """Wake all waiters of this group, which is unusable afterwards; any thread, idempotent.

        Sets the flag before the abort, so that a woken thread knows that its tensors are invalid.
        """
        if self._interrupted.is_set():
            return
        self._interrupted.set()
        if self.process_group is not None:
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
