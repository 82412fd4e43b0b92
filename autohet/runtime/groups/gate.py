"""Gate of a step: no gradient sum starts before every worker has announced its last backward pass.

Sums are in place, so one that a dead peer never joins leaves partial sums in a worker's gradients.
As long as the gate is closed, whatever dies, the gradients of whole pipelines are whole.
"""

import threading

import torch

from autohet.runtime.groups.errors import Interrupted, PeerLost
from autohet.runtime.groups.group import Group


class Gate:
    """One worker's gate, opened by an all-reduce over `world` in each step."""

    def __init__(self, world: Group) -> None:
        self._world = world
        self._announcement = torch.ones(1, device=world.device)
        self._waiter: threading.Thread | None = None
        self._failure: Interrupted | PeerLost | None = None

    def announce(self) -> None:
        """Announce the last backward pass; no-op if it is announced.

        Neither blocks nor fails: the passes end, whatever has become of other workers.
        """
        if self._waiter is None:
            self._failure = None
            self._waiter = threading.Thread(target=self._open, name="gate", daemon=True)
            self._waiter.start()

    def _open(self) -> None:
        try:
            work = self._world.start_all_reduce(self._announcement)
            self._world.wait_on_host(work)
        except (Interrupted, PeerLost) as failure:
            self._failure = failure

    def is_open(self) -> bool:
        """Return True if all workers have announced theirs."""
        waiter = self._waiter
        return waiter is not None and not waiter.is_alive() and self._failure is None

    def wait(self) -> None:
        """Wait until the gate is open, and close it for the next step.

        Raises:
            PeerLost, Interrupted: it does not open any more.
        """
        self.announce()
        assert self._waiter is not None
        self._waiter.join()
        self._waiter = None
        if self._failure is not None:
            raise self._failure
