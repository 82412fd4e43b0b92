"""Replication goes in rounds, and all workers are in the same one: what the two newest replicated steps are, without a messenger.

A step can be restored only if every shard of it is somewhere. Copies of one node's shards at step r help only if the
others still have their own snapshots of r. So all workers open a round at the same step, hold that step's snapshot, and keep
it until a later round is complete at every one of them. They agree through the vote that ends every training step: each says
whether its part of the round is still open or has failed, and all see the same sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Standing:
    """One worker's part of the open round. Neither: its part is done, or no round is open."""

    pending: bool = False
    failed: bool = False


@dataclass
class Rounds:
    """The rounds of one generation, the same at every worker. `every` is how many steps lie between two rounds' steps at
    the least; 0: no rounds.
    """

    every: int
    open: int | None = None
    complete: int | None = None
    _last: int | None = field(default=None, repr=False)

    def settle(self, *, pending: bool, failed: bool) -> None:
        """Take the sums of a step's vote: the open round is complete if nobody waits, given up if anybody failed."""
        if self.open is None:
            return
        if failed:
            self.open = None
        elif not pending:
            self.complete, self.open = self.open, None

    def snapshot(self, step: int) -> bool:
        """A snapshot of `step` is being taken, by all; True if it opens a round."""
        due = self._last is None or step >= self._last + self.every
        if not self.every or self.open is not None or not due:
            return False
        self.open = self._last = step
        return True

    @property
    def held(self) -> frozenset[int]:
        """Steps whose snapshots must stay."""
        return frozenset(step for step in (self.open, self.complete) if step is not None)
