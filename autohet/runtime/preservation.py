"""Copies of a worker's state beyond its own memory.

They are a snapshot in the node's memory after each step, the shards that its agent copies to other
nodes, and its part of durable checkpoints.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from autohet.runtime.job import Job
from autohet.runtime.messages import GenerationOrder, Transfer, UploadRetried, WorkerPlace
from planner.cluster import node_of
from recovery.checkpoint.journal import entry_name
from recovery.checkpoint.upload import Uploader
from recovery.errors import RecoveryError, SnapshotError
from recovery.local.agent_store import write_copies_limit
from recovery.local.memory_budget import capacity_of, memory_remedy, share_out
from recovery.local.snapshot import SnapshotLease, SnapshotOptions, SnapshotWriter, remove_older
from recovery.peers.replication import (
    Endpoint,
    ReplicationTargets,
    Round,
    read_pushed,
    withdraw,
    write_round,
    write_targets,
)
from recovery.peers.replication_rounds import PreservationStatus, Rounds, Turns
from recovery.state.layout import ShardId
from recovery.storage.errors import StorageTimeout
from recovery.storage.protocol import Storage

logger = logging.getLogger("autohet.worker")

TRY_AGAIN_AFTER = 10
"""Skipped snapshots, for lack of host memory, before the worker tries again to make files."""


def _offloaded_bytes(order: GenerationOrder, node: str) -> int:
    """Return the bytes of masters and moments that the plan keeps in this node's host memory."""
    if not order.plan.offloads:
        return 0
    layout = order.layout
    mine = (worker for worker in order.plan.workers if node_of(worker) == node)
    shards = (shard for worker in mine for shard in layout.shards_by_worker[worker])
    return sum(map(layout.shard_bytes, shards))


class Preservation:
    """Snapshots, replication rounds and uploads of one worker, which owns this object.

    The generation's thread calls `begin`, `record_vote`, `is_turn`, `keep`, `status` and
    `before_update`; reports call the rest.
    """

    def __init__(self, place: WorkerPlace, job: Job, storage: Storage) -> None:
        self._place = place
        self._every = job.checkpoint.snapshot_every_steps
        timeouts = job.elastic.timeouts()
        self._uploader = Uploader(
            storage, patience_s=timeouts.checkpoint_s, on_failure=self._note_failure
        )
        self._push_timeout_s, self._timeout_s, self._leave_s = (
            timeouts.step_s,
            timeouts.checkpoint_s,
            timeouts.quiesce_s,
        )
        self._snapshots: SnapshotWriter | None = None
        self._budget: frozenset[ShardId] = frozenset()
        self.shortage: str | None = None
        """Sentence on too little host memory for snapshots, of a node's first worker."""
        self._try_again_at: int | None = None
        self._disk: SnapshotWriter | None = None
        self._order: GenerationOrder | None = None
        self._turns = Turns(job.checkpoint.every_steps)
        self._harvesting = threading.Lock()
        self._awaited: tuple[int, int] | None = None
        self._receipts: list[tuple[int, int, Any]] = []
        self._transfers: deque[tuple[float, Transfer]] = (
            deque()
        )  # with the moment of each one's end
        self._copied: tuple[int, int] | None = (
            None  # (generation, step) of the newest copies on other nodes
        )
        self._rounds = Rounds(0)
        self._complete: tuple[int, int] | None = (
            None  # (generation, step) of the last round that every node has ended
        )

    def snapshot_step(self, generation: int) -> int | None:
        """Return the step of the newest committed snapshot of this generation.

        None until `begin` has made its files.
        """
        writer = self._snapshots
        return None if writer is None or writer.generation != generation else writer.newest

    def replicated_step(self, generation: int) -> int | None:
        """Return the step of the last complete round of this generation."""
        complete = self._complete
        return None if complete is None or complete[0] != generation else complete[1]

    def snapshot_of(self, generation: int, step: int) -> SnapshotLease | None:
        """Return the committed snapshot of this step.

        None unless this worker has one of the last generation that it trained in.
        """
        writer = self._snapshots
        if writer is None or writer.generation != generation or writer.newest != step:
            return None
        return writer.lease(step)

    def begin(self, order: GenerationOrder) -> None:
        """Begin a generation, whose layout decides what this worker keeps and writes."""
        self._leave_writers()
        self._uploader.abandon()
        self._order = order
        self._begin_rounds(order)
        self._turns = Turns(self._turns.every)
        self._snapshots, self._try_again_at = None, None
        if self._every:
            self._budget = self._shared_out(order)
            self._snapshots = self._in_memory(order)
        self._disk = self._on_disk(order)

    def _leave_writers(self) -> None:
        """Close the writers, so that none still reads the old state.

        A disk that hangs is not waited for.
        """
        if self._snapshots is not None:
            self._snapshots.close()
        if self._disk is not None:
            with suppress(SnapshotError):
                self._disk.wait_copied(min(self._timeout_s, self._leave_s))
            self._disk.close(0.0)

    def _shared_out(self, order: GenerationOrder) -> frozenset[ShardId]:
        """Return the shards that this worker's snapshots may hold.

        The node's first worker logs the budget. If shards are left out, it keeps the shortage,
        which the driver logs.
        """
        self.shortage = None
        place, nodes = self._place, {worker: node_of(worker) for worker in order.layout.workers}
        try:
            node = nodes[place.worker]
            capacity = capacity_of(place.memory_directory, _offloaded_bytes(order, node))
            budget = share_out(node, order.layout, nodes, capacity, replicates=order.replicates)
            write_copies_limit(place.memory_directory, budget.copies_bytes)
        except OSError as error:
            reason = error.strerror or error
            self.shortage = f"No snapshots are kept in this node's memory: {reason}"
            logger.warning(self.shortage)
            return frozenset()
        if place.worker == min(budget.shards_by_worker):
            if budget.suffices:
                logger.info("%s", budget.sentence)
            else:
                remedy = memory_remedy(place.memory_directory, budget.wanted_bytes)
                self.shortage = f"{budget.sentence}. {remedy}"
                logger.warning(self.shortage)
        return budget.shards_by_worker[place.worker]

    def _in_memory(self, order: GenerationOrder) -> SnapshotWriter | None:
        """Return the writer of snapshots; None if the node's budget has no shard for it.

        The run then continues with the snapshots of other workers.
        """
        place = self._place
        if not self._budget:
            return None
        return SnapshotWriter(
            place.memory_directory,
            place.worker,
            order.layout,
            order.generation,
            SnapshotOptions(keep_older=order.replicates, in_background=True, only=self._budget),
        )

    def _begin_rounds(self, order: GenerationOrder) -> None:
        """Start the generation's replication rounds, now that all workers have the first state.

        Remove older snapshots, but for those of the two newest steps and those with copies on other
        nodes.
        """
        place, directory = self._place, self._place.memory_directory
        if self._complete is not None and self._complete[1] > order.start_step:
            self._complete = None  # the run has gone back behind it
        if self._every:
            newest = order.start_step - order.start_step % self._every
            kept = {
                order.start_step,
                newest,
                newest - self._every,
            }  # a worker that rolled forward has only the one before
            # The open round's, too: others may have seen the vote that completed it.
            kept |= {step for step in self._rounds.held if step <= order.start_step}
            kept |= set() if self._complete is None else {self._complete[1]}
            remove_older(directory, place.worker, order.generation, but_steps=kept)
        replicates = order.replicates and self._every > 0
        self._rounds = Rounds(order.replicate_every_steps if replicates else 0)
        withdraw(directory, place.worker)
        if order.replication_targets and self._rounds.every:
            endpoints = tuple(Endpoint(e.node, e.host, e.port) for e in order.agents.values())
            targets = ReplicationTargets(
                place.worker,
                order.generation,
                order.replication_targets,
                endpoints,
                order.replicate_bytes_per_s,
                self._push_timeout_s,
            )
            write_targets(directory, targets)

    def _on_disk(self, order: GenerationOrder) -> SnapshotWriter:
        """Return the writer of this node's disk copies.

        The writer's thread makes its files, since the disk may hang; a failure does not stop the
        run.
        """
        place = self._place
        return SnapshotWriter(
            place.disk_directory,
            place.worker,
            order.layout,
            order.generation,
            SnapshotOptions(
                force_to_device=True,
                in_background=True,
                on_commit=partial(self._note, "disk", order.generation),
            ),
        )

    def before_update(self) -> None:
        """Block until the state may change: all copies of the step before have been read."""
        try:
            self._uploader.wait_copied(self._timeout_s)
        except RecoveryError as error:
            logger.warning(
                "the upload under way is given up: %s", error
            )  # by itself, once the state has changed
        for writer in (self._snapshots, self._disk):
            if writer is None:
                continue
            try:
                writer.wait_copied(self._timeout_s)
            except SnapshotError as error:
                self._do_without(writer, error)

    def _do_without(self, writer: SnapshotWriter, error: RecoveryError) -> None:
        """Continue without a copy that cannot be written, with the copies that other workers keep.

        One failed snapshot is skipped. If files cannot be made or are not finished, snapshots in
        host memory are tried again later: files of an older generation are removed in time.
        """
        if writer is self._snapshots and writer.has_files and not writer.busy:
            logger.warning("a snapshot is left out: %s", error)
            return
        if writer is self._snapshots:
            logger.warning(
                "no snapshots in this node's memory for the next %d steps: %s",
                TRY_AGAIN_AFTER * self._every,
                error,
            )
            self._snapshots, self._try_again_at = None, TRY_AGAIN_AFTER
        else:
            logger.warning("no more copies on this node's disk in this generation: %s", error)
            self._disk = None
        writer.close(0.0)  # it may hang

    def _try_again(self, order: GenerationOrder) -> None:
        """Count down the skipped snapshots, and make new files at zero."""
        if self._try_again_at is not None:
            self._try_again_at -= 1
            if not self._try_again_at:
                self._try_again_at = None
                self._snapshots = self._in_memory(order)

    def status(self) -> PreservationStatus:
        """Return this worker's contribution to the vote.

        It reports this worker's part of the open round, and whether an earlier checkpoint is still
        being written. Blocks until this worker's snapshot of the step before is committed: a worker
        that passes the vote begins to overwrite the snapshot before that one. If all processes
        ended then, a worker without its own snapshot would leave no step that all nodes keep.
        """
        self._await_snapshot()
        writing = self._uploader.busy or (self._disk is not None and self._disk.busy)
        return replace(self._round_status(), writing=writing)

    def _await_snapshot(self) -> None:
        writer = self._snapshots
        if writer is None:
            return
        try:
            writer.wait(self._timeout_s)
        except SnapshotError as error:
            self._do_without(writer, error)

    def _round_status(self) -> PreservationStatus:
        """Return the status of the open round: done once snapshot and agent's copies are."""
        step, order = self._rounds.open, self._order
        if step is None or order is None:
            return PreservationStatus()
        if self._snapshots is None:
            return PreservationStatus(failed=True)
        if not self._snapshots.has(step):
            return PreservationStatus(pending=self._snapshots.busy, failed=not self._snapshots.busy)
        if not order.replication_targets:
            return PreservationStatus()
        pushed = read_pushed(self._place.memory_directory, self._place.worker)
        if pushed is None or (pushed.generation, pushed.step) != (order.generation, step):
            return PreservationStatus(pending=True)
        if pushed.error is None and self._copied != (pushed.generation, step):
            self._copied = (pushed.generation, step)
            self._note(
                "peer", pushed.generation, step, pushed.num_bytes, pushed.seconds, pushed.ended_at
            )
        return PreservationStatus(failed=pushed.error is not None)

    def record_vote(self, *, pending: bool, failed: bool) -> None:
        """Apply the step's vote to the open round."""
        assert self._order is not None
        before = self._rounds.complete
        self._rounds.record_vote(pending=pending, failed=failed)
        if self._rounds.complete != before and self._rounds.complete is not None:
            self._complete = (self._order.generation, self._rounds.complete)
            if self._snapshots is not None:
                self._snapshots.release_older()

    def is_turn(self, step: int, *, writing: bool) -> bool:
        """Return True if the step is to be durable, as all workers decide from its vote."""
        return self._turns.take(step, writing=writing)

    def keep(self, step: int, state: Mapping[str, Tensor], *, durable: bool) -> None:
        """Start the step's snapshot after its update.

        durable: also start to upload this worker's shards.
        """
        assert self._order is not None
        if self._every and (step % self._every == 0 or durable):
            self._snapshot(self._order, step, state)
        if durable:
            self._spill(step, self._read_once(step, state))
            self._upload(self._order, step, self._read_once(step, state))

    def _read_once(
        self, step: int, state: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor] | SnapshotLease:
        """Return the source of disk and durable copies: the snapshot, else the state.

        With the snapshot, the state itself is read once a step.
        """
        writer = self._snapshots
        return (
            state
            if writer is None or not writer.whole or not writer.takes(step)
            else writer.lease(step)
        )

    def _snapshot(self, order: GenerationOrder, step: int, state: Mapping[str, Tensor]) -> None:
        """Start the snapshot; if it opens a round, hold it and notify the agent.

        The round opens for all workers, including those that keep no snapshot.
        """
        if self._snapshots is None:
            self._try_again(order)
        opened, writer = self._rounds.snapshot(step), self._snapshots
        if writer is None:
            return
        writer.hold(self._rounds.held)
        if opened and order.replication_targets:
            write_round(
                self._place.memory_directory,
                Round(self._place.worker, order.generation, step, self._complete),
            )
        try:
            writer.start(step, state, self._timeout_s)
        except SnapshotError as error:
            self._do_without(writer, error)

    def _spill(self, step: int, state: Mapping[str, Tensor] | SnapshotLease) -> None:
        """Keep the durable step on the node's own disk; a full disk is no failure.

        After a loss, only shards that no node has are read from durable storage.
        """
        try:
            if self._disk is None:
                _release(state)
            else:
                self._disk.start(step, state, self._timeout_s)
        except RecoveryError as error:
            _release(state)
            logger.warning("step %d is not on this node's disk: %s", step, error)

    def _upload(
        self, order: GenerationOrder, step: int, state: Mapping[str, Tensor] | SnapshotLease
    ) -> None:
        """Start the upload of the step, and give up an older one that is being retried.

        Blocks only at the last step of all: otherwise no worker is writing in a checkpoint's turn.
        """
        self._uploader.abandon()
        try:
            self._uploader.wait_free(self._timeout_s)
        except StorageTimeout as error:
            with self._harvesting:
                self._receipts.append((order.generation, step, str(error)))
            _release(state)
            return
        with self._harvesting:
            self._harvest()
            self._uploader.submit(
                step,
                self._place.worker,
                state,
                order.layout,
                order.checkpoint_shards,
                entry_name(order.generation) if order.is_claimed else None,
            )
            self._awaited = (order.generation, step)

    def _note_failure(self, step: int, reason: str) -> None:
        """Record a failed upload attempt; called by the uploader's thread, which retries."""
        with self._harvesting:
            if self._awaited is not None:
                self._receipts.append((*self._awaited, UploadRetried(reason)))
        logger.warning("step %d is not in durable storage yet: %s", step, reason)

    def take_receipts(self) -> list[tuple[int, int, Any]]:
        """Return (generation, step, receipt) of each upload that has ended since the last call.

        A failed upload has its reason in place of a receipt; each failed attempt adds an
        `UploadRetried`.
        """
        with self._harvesting:
            self._harvest()
            found, self._receipts = self._receipts, []
        return found

    def _harvest(self) -> None:
        """Record the end of the last upload, if it has ended.

        It must be called before a later upload starts.
        """
        if self._awaited is None or self._uploader.busy:
            return
        awaited, self._awaited = self._awaited, None
        try:
            receipt = self._uploader.wait(0.0)
            self._receipts.append((*awaited, receipt))
            self._note("s3", *awaited, receipt.bytes_sent, receipt.seconds)
        except (RecoveryError, OSError) as error:
            logger.warning("step %d is not in durable storage: %s", awaited[1], error)
            self._receipts.append((*awaited, str(error)))

    def _note(
        self,
        tier: str,
        generation: int,
        step: int,
        num_bytes: int,
        seconds: float,
        ended_at: float | None = None,
    ) -> None:
        """Record a finished copy, which ended now or at `ended_at`; called by several threads."""
        transfer = Transfer(tier, self._place.worker, generation, step, num_bytes, seconds)
        self._transfers.append((time.monotonic() if ended_at is None else ended_at, transfer))

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Return the uploads, replication rounds and spills that have ended since the last call."""
        ended = [self._transfers.popleft() for _ in range(len(self._transfers))]
        now = time.monotonic()
        return tuple(replace(transfer, ended_ago_s=max(0.0, now - at)) for at, transfer in ended)

    def _close_snapshots(self) -> None:
        for writer in (self._snapshots, self._disk):
            if writer is not None:
                writer.close()
        self._snapshots = self._disk = None

    def close(self) -> None:
        self._close_snapshots()
        withdraw(self._place.memory_directory, self._place.worker)
        self._uploader.close()


def _release(state: Mapping[str, Tensor] | SnapshotLease) -> None:
    if isinstance(state, SnapshotLease):
        state.release()
