"""Rounds of replication and turns of durable checkpoints, decided alike by all workers.

All workers are in the same round and know the two newest replicated steps without extra messages. A
step can be restored only if every shard of it is somewhere. Copies of one node's shards at step r
help only if the others still have their own snapshots of r. So all workers open a round at the same
step, pin that step's snapshot, and keep it until a later round is complete at every one of them.
They agree through the vote that ends every training step. In it each reports whether its part of
the round is still open or has failed, and all see the same sums. Turns of durable checkpoints are
decided in the same way.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PreservationStatus:
    """Status of one worker in the open round, and of its part of an earlier checkpoint.

    Neither `pending` nor `failed`: its part is done, or no round is open. `writing`: it is still
    writing its part of an earlier checkpoint.
    """

    pending: bool = False
    failed: bool = False
    writing: bool = False


@dataclass
class Rounds:
    """Rounds of one generation, the same at every worker.

    `every` is the least number of steps between two rounds' steps; 0: no rounds.
    """

    every: int
    open: int | None = None
    complete: int | None = None
    _last: int | None = field(default=None, repr=False)

    def record_vote(self, *, pending: bool, failed: bool) -> None:
        """Apply the sums of a step's vote to the open round.

        It is complete if no worker's part is pending, and given up if any failed.
        """
        if self.open is None:
            return
        if failed:
            self.open = None
        elif not pending:
            self.complete = self.open
            self.open = None

    def snapshot(self, step: int) -> bool:
        """Record that all workers take a snapshot of `step`; return True if it opens a round."""
        due = self._last is None or step >= self._last + self.every
        if not self.every or self.open is not None or not due:
            return False
        self.open = self._last = step
        return True

    @property
    def held(self) -> frozenset[int]:
        """Steps whose snapshots must stay."""
        return frozenset(step for step in (self.open, self.complete) if step is not None)


@dataclass
class Turns:
    """Choice of the steps that become durable checkpoints, the same at every worker.

    One step in `every` is chosen (None: those that are asked for), and there are never two
    checkpoints in progress. A checkpoint is of one step at all workers, so one that could begin
    here, but not there, would be lost. While any worker still writes the previous checkpoint, the
    next one is owed. It is taken at the newest step once no worker writes, which must be a multiple
    of `unit`. Training never waits for storage.
    """

    every: int | None
    unit: int = 1
    owed: bool = False

    def take(self, step: int, *, writing: bool, asked: bool = False) -> bool:
        """Return True if `step` is to be made durable.

        `writing`, `asked`: some worker reported it in the vote that ended the step.
        """
        is_due = self.every is not None and step % self.every == 0
        self.owed = self.owed or asked or is_due
        if writing or not self.owed or step % self.unit:
            return False
        self.owed = False
        return True
