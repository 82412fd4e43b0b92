"""Copies of a worker's state beyond its own memory.

They are a snapshot in the node's memory after each step, the shards that its agent copies to other
nodes, and its part of durable checkpoints, which is kept on the node's disk as well.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from torch import Tensor

from autohet.runtime.copies.durable_uploads import DurableUploads
from autohet.runtime.copies.memory_snapshots import MemorySnapshots
from autohet.runtime.copies.replication_state import ReplicationState
from autohet.runtime.copies.transfer_log import TransferLog
from autohet.runtime.job import Job
from autohet.runtime.messages import GenerationOrder, StateTransfer, WorkerPlace
from recovery.errors import RecoveryError, SnapshotError
from recovery.local.snapshot import SnapshotLease, SnapshotOptions, SnapshotWriter
from recovery.peers.replication_rounds import PreservationStatus, Turns
from recovery.storage.protocol import Storage

logger = logging.getLogger("autohet.worker")


class Preservation:
    """Snapshots, replication rounds and uploads of one worker, which owns this object.

    The generation's thread calls its methods; reports read its parts. turns: decides from a step's
    vote whether the step is to be durable, for all workers alike.
    """

    def __init__(self, place: WorkerPlace, job: Job, storage: Storage) -> None:
        self.place = place
        self._every = job.checkpoint.snapshot_every_steps
        timeouts = job.elastic.timeouts()
        self._timeout_s = timeouts.checkpoint_s
        self._leave_s = timeouts.quiesce_s
        self.transfers = TransferLog()
        self.snapshots = MemorySnapshots(place, self._every, timeouts.checkpoint_s)
        self.replication = ReplicationState(place, self._every, timeouts.step_s, self.transfers)
        self.uploads = DurableUploads(place.worker, storage, timeouts, self.transfers)
        self._disk: SnapshotWriter | None = None
        self.order: GenerationOrder | None = None
        self.turns = Turns(job.checkpoint.fixed_steps, job.checkpoint_unit)
        self._newest_snapshot: int | None = None
        self._newest_durable: int | None = None
        """Steps that `keep` was last called with in this generation, and made durable."""

    def plan(self, order: GenerationOrder) -> None:
        """Compute ahead what a cut-over to this order needs of its layout, which keeps it."""
        layout = order.layout
        if self.place.worker in layout.shards_by_worker:
            self.snapshots.plan(order)
            layout.units_of(self.place.worker)
            for shard in layout.shards:
                layout.shard_bytes(shard)

    def begin(self, order: GenerationOrder) -> None:
        """Begin a generation, whose layout decides what this worker keeps and writes."""
        self._close_writers()
        self.uploads.abandon_beyond(order.start_step)
        self.order = order
        self.replication.begin(order)
        self.turns = Turns(self.turns.every, self.turns.unit)
        self._newest_snapshot = None
        self._newest_durable = None
        self.snapshots.begin(order)
        self._disk = self._on_disk(order)

    def _close_writers(self) -> None:
        """Close the writers, so that none still reads the old state.

        A disk that hangs is not waited for.
        """
        self.snapshots.close()
        if self._disk is not None:
            with suppress(SnapshotError):
                self._disk.wait_copied(min(self._timeout_s, self._leave_s))
            self._disk.close(0.0)

    def _on_disk(self, order: GenerationOrder) -> SnapshotWriter:
        """Return the writer of this node's disk copies.

        The writer's thread makes its files, since the disk may hang; a failure does not stop the
        run.
        """
        place = self.place

        def note(step: int, num_bytes: int, seconds: float) -> None:
            transfer = StateTransfer(
                "disk", place.worker, order.generation, step, num_bytes, seconds
            )
            self.transfers.add(transfer)

        return SnapshotWriter(
            place.disk_directory,
            place.worker,
            order.layout,
            order.generation,
            SnapshotOptions(force_to_device=True, in_background=True, on_commit=note),
        )

    def before_update(self) -> None:
        """Block until the state may change: all copies of the step before have been read."""
        self.uploads.wait_copied()
        self.snapshots.wait_copied()
        disk = self._disk
        if disk is None:
            return
        try:
            disk.wait_copied(self._timeout_s)
        except SnapshotError as error:
            logger.warning("no more copies on this node's disk in this generation: %s", error)
            self._disk = None
            # Without a wait, since the disk may hang.
            disk.close(0.0)

    def status(self) -> PreservationStatus:
        """Return this worker's contribution to the vote.

        It reports this worker's part of the open round, and whether an earlier checkpoint is still
        being written. Blocks until this worker's snapshot of the step before is committed: a worker
        that passes the vote begins to overwrite the snapshot before that one. If all processes
        ended then, a worker without its own snapshot would leave no step that all nodes keep.
        """
        self.snapshots.wait()
        spills = self._disk is not None and self._disk.busy
        writing = self.uploads.busy or spills
        if self.order is None:
            return PreservationStatus(writing=writing)
        status = self.replication.status(self.order, self.snapshots.writer)
        return replace(status, writing=writing)

    def record_vote(self, *, pending: bool, failed: bool) -> None:
        """Apply the step's vote to the open round."""
        assert self.order is not None
        completed = self.replication.record_vote(
            self.order.generation, pending=pending, failed=failed
        )
        if completed and self.snapshots.writer is not None:
            self.snapshots.writer.release_older()

    def keep(self, step: int, state: Mapping[str, Tensor], *, durable: bool) -> None:
        """Start the step's snapshot after its update.

        durable: also start to upload this worker's shards. Another call for the same step starts
        only what no earlier one has.
        """
        order = self.order
        assert order is not None
        is_snapshot_step = self._every > 0 and (step % self._every == 0 or durable)
        if is_snapshot_step and step != self._newest_snapshot:
            self._newest_snapshot = step
            self.snapshots.try_again(order)
            self.replication.begin_step(order, step, self.snapshots.writer)
            self.snapshots.start(step, state)
        if durable and step != self._newest_durable:
            self._newest_durable = step
            # Each of the two releases a lease of its own on the snapshot.
            self._spill(step, self.snapshots.source(step, state))
            self.uploads.start(order, step, self.snapshots.source(step, state))

    def _spill(self, step: int, state: Mapping[str, Tensor] | SnapshotLease) -> None:
        """Keep the durable step on the node's own disk; a full disk is no failure.

        After a loss, only shards that no node has are read from durable storage.
        """
        try:
            if self._disk is not None:
                self._disk.start(step, state, self._timeout_s)
            elif isinstance(state, SnapshotLease):
                state.release()
        except RecoveryError as error:
            if isinstance(state, SnapshotLease):
                state.release()
            logger.warning("step %d is not on this node's disk: %s", step, error)

    def close(self) -> None:
        self.snapshots.close()
        if self._disk is not None:
            self._disk.close()
        self.replication.close()
        self.uploads.close()
