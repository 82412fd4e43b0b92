"""Groups on the CPU.

gloo has no abort. What wakes its waiters (measured, torch 2.13: 15 ms) is a receive that times out on the same context: gloo then fails
every pending operation of that context ("Application timeout caused pair closure"). The group is dropped afterwards; new ones work.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import Store

from autohet.runtime.groups.group import Group

POISON_TAG = 1 << 30


class GlooGroup(Group):
    """A group whose waits are all the host's: its constructor connects everybody, and an error ends the wait that meets it."""

    in_stream_order = False

    def _create(self, store: Store) -> Any:
        return ProcessGroupGloo(store, self.rank, self.size, self._limit())

    def connect(self) -> None:
        """The constructor has done it."""

    def wait_on_stream(self, work: Work | None) -> None:
        if work is not None:
            self._call(lambda: work.wait(self._limit()))

    def wait_on_host(self, work: Work | None) -> None:
        """The same; `Work.is_completed` of gloo is true only once somebody waits."""
        self.wait_on_stream(work)

    def error(self) -> str | None:
        return None

    def _abort(self) -> None:
        close_connections(self._group, self.rank, self.size)


def close_connections(group: Any, rank: int, size: int) -> None:
    """Let a receive time out. Where a peer's connection is closed already (it died first), gloo refuses at once and closes nothing:
    then the next peer's.
    """
    for other in range(size):
        if other != rank:
            try:
                group.recv([torch.empty(1)], other, POISON_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "timed out" in str(error).lower():
                    return
