"""A worker's part of replication rounds: which snapshots its agent copies to other nodes."""

from autohet.runtime.copies.transfer_log import TransferLog
from autohet.runtime.messages import GenerationOrder, StateTransfer, WorkerPlace
from recovery.local.snapshot import SnapshotWriter, remove_older
from recovery.peers.replication import (
    Endpoint,
    PushRequest,
    ReplicationTargets,
    read_pushed,
    withdraw,
    write_round,
    write_targets,
)
from recovery.peers.replication_rounds import PreservationStatus, Rounds


class ReplicationState:
    """Rounds of the present generation, and the last round that every node has ended."""

    def __init__(
        self,
        place: WorkerPlace,
        snapshot_every_steps: int,
        push_timeout_s: float,
        transfers: TransferLog,
    ) -> None:
        self.rounds = Rounds(0)
        self.complete: tuple[int, int] | None = None
        """Generation and step of the last round that every node has ended."""
        self._place = place
        self._every = snapshot_every_steps
        self._push_timeout_s = push_timeout_s
        self._transfers = transfers
        self._copied: tuple[int, int] | None = None
        """Generation and step of the newest copies on other nodes."""

    def complete_step(self, generation: int) -> int | None:
        """Return the step of the last complete round of this generation."""
        if self.complete is None:
            return None
        completed_in, step = self.complete
        return step if completed_in == generation else None

    def begin(self, order: GenerationOrder) -> None:
        """Start the generation's rounds, now that all workers have the first state.

        Remove older snapshots, but for those of the two newest steps and those with copies on other
        nodes.
        """
        directory = self._place.memory_directory
        if self.complete is not None and self.complete[1] > order.start_step:
            # The run has gone back behind it.
            self.complete = None
        if self._every:
            newest = order.start_step - order.start_step % self._every
            # A worker that rolled forward has only the one before.
            kept = {order.start_step, newest, newest - self._every}
            # The open round's, too: others may have seen the vote that completed it.
            kept |= {step for step in self.rounds.held if step <= order.start_step}
            if self.complete is not None:
                _, complete_step = self.complete
                kept.add(complete_step)
            remove_older(directory, self._place.worker, order.generation, but_steps=kept)
        replicates = order.replicates and self._every > 0
        self.rounds = Rounds(order.replicate_every_steps if replicates else 0)
        withdraw(directory, self._place.worker)
        if order.replication_targets and self.rounds.every:
            write_targets(directory, self._targets(order))

    def _targets(self, order: GenerationOrder) -> ReplicationTargets:
        agents = order.agents.values()
        return ReplicationTargets(
            self._place.worker,
            order.generation,
            order.replication_targets,
            tuple(Endpoint(agent.node, agent.host, agent.port) for agent in agents),
            order.replicate_bytes_per_s,
            self._push_timeout_s,
        )

    def begin_step(self, order: GenerationOrder, step: int, writer: SnapshotWriter | None) -> None:
        """Hold the snapshots that rounds need, and tell the agent if the step opens a round.

        The round opens for all workers, including those that keep no snapshot.
        """
        opened = self.rounds.snapshot(step)
        if writer is None:
            return
        writer.files.hold(self.rounds.held)
        if opened and order.replication_targets:
            request = PushRequest(self._place.worker, order.generation, step, self.complete)
            write_round(self._place.memory_directory, request)

    def status(self, order: GenerationOrder, writer: SnapshotWriter | None) -> PreservationStatus:
        """Return the status of the open round: done once snapshot and agent's copies are."""
        step = self.rounds.open
        if step is None:
            return PreservationStatus()
        if writer is None:
            return PreservationStatus(failed=True)
        if not writer.files.has(step):
            return PreservationStatus(pending=writer.busy, failed=not writer.busy)
        if not order.replication_targets:
            return PreservationStatus()
        pushed = read_pushed(self._place.memory_directory, self._place.worker)
        if pushed is None or (pushed.generation, pushed.step) != (order.generation, step):
            return PreservationStatus(pending=True)
        # The agent's answer is read at each vote until the round ends, and reported once.
        if pushed.error is None and self._copied != (pushed.generation, step):
            self._copied = (pushed.generation, step)
            transfer = StateTransfer(
                "peer",
                self._place.worker,
                pushed.generation,
                step,
                pushed.num_bytes,
                pushed.seconds,
            )
            self._transfers.add(transfer, pushed.ended_at)
        return PreservationStatus(failed=pushed.error is not None)

    def record_vote(self, generation: int, *, pending: bool, failed: bool) -> bool:
        """Apply the step's vote to the open round; return True if it completed a round."""
        before = self.rounds.complete
        self.rounds.record_vote(pending=pending, failed=failed)
        completed = self.rounds.complete
        if completed == before or completed is None:
            return False
        self.complete = (generation, completed)
        return True

    def close(self) -> None:
        withdraw(self._place.memory_directory, self._place.worker)
