"""Copies of a worker's state beyond its own memory: a snapshot to the node after each step, and its part of durable
checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autohet.runtime.job import Job
from autohet.runtime.messages import GenerationOrder, WorkerPlace
from recovery.checkpoint_upload import Uploader, UploaderBusy
from recovery.errors import RecoveryError
from recovery.snapshot import SnapshotWriter
from recovery.storage import open_storage

logger = logging.getLogger("autohet.worker")
RECEIPT_POLL_S = 0.0


class Preservation:
    """Owned by the worker; `begin`, `keep` and `before_update` are called by the generation's thread,
    `take_receipts` by reports.
    """

    def __init__(self, place: WorkerPlace, job: Job) -> None:
        self._place = place
        self._every = job.checkpoint.snapshot_every_steps
        self._uploader = Uploader(open_storage(job.checkpoint_storage))
        self._timeout_s = job.elastic.timeouts().checkpoint_s
        self._snapshots: SnapshotWriter | None = None
        self._disk: SnapshotWriter | None = None
        self._order: GenerationOrder | None = None
        self._awaited: tuple[int, int] | None = None
        self.snapshot_step: int | None = None

    def begin(self, order: GenerationOrder) -> None:
        """A new generation: its layout decides what this worker keeps and writes."""
        self._close_snapshots()
        self._order = order
        if self._every:
            self._snapshots = SnapshotWriter(
                self._place.memory_directory, self._place.worker, order.layout, order.generation
            )
        self._disk = self._on_disk(order)

    def _on_disk(self, order: GenerationOrder) -> SnapshotWriter | None:
        """The writer of this node's disk copies; None, with a warning, where the disk has no room: no reason to stop."""
        place = self._place
        try:
            return SnapshotWriter(
                place.disk_directory, place.worker, order.layout, order.generation, force_to_device=True
            )
        except RecoveryError as error:
            logger.warning("checkpoints are not kept on this node's disk: %s", error)
            return None

    def before_update(self) -> None:
        """Blocks until the state may change: the snapshot of the step before is copied."""
        for writer in (self._snapshots, self._disk):
            if writer is not None:
                writer.wait_copied(self._timeout_s)

    def keep(self, step: int, state: Mapping[str, Tensor], *, durable: bool) -> None:
        """After the step's update: start its snapshot; with `durable`, start to upload this worker's shards."""
        assert self._order is not None
        if self._snapshots is not None and (step % self._every == 0 or durable):
            self._snapshots.start(step, state, self._timeout_s)
            self.snapshot_step = step
        if durable:
            self._spill(step, state)
            self._upload(self._order, step, state)

    def _spill(self, step: int, state: Mapping[str, Tensor]) -> None:
        """Keep the durable step on the node's own disk: after a loss, only what no node has comes from storage. A
        full disk is no failure.
        """
        if self._disk is None:
            return
        try:
            self._disk.start(step, state, self._timeout_s)
        except RecoveryError as error:
            logger.warning("step %d is not on this node's disk: %s", step, error)

    def _upload(self, order: GenerationOrder, step: int, state: Mapping[str, Tensor]) -> None:
        if self._uploader.busy:
            self._uploader.wait(self._timeout_s)
        try:
            self._uploader.submit(step, self._place.worker, state, order.layout, order.checkpoint_shards)
            self._awaited = (order.generation, step)
        except UploaderBusy as error:
            logger.warning("%s", error)

    def take_receipts(self) -> list[tuple[int, int, Any]]:
        """(generation, step, receipt) of an upload that has ended since; its failure is logged and gives none."""
        awaited = self._awaited
        if awaited is None or self._uploader.busy:
            return []
        self._awaited = None
        try:
            return [(*awaited, self._uploader.wait(RECEIPT_POLL_S))]
        except (RecoveryError, OSError) as error:
            logger.warning("step %d is not in durable storage: %s", awaited[1], error)
            return [(*awaited, str(error))]

    def _close_snapshots(self) -> None:
        for writer in (self._snapshots, self._disk):
            if writer is not None:
                writer.close()
        self._snapshots = self._disk = None

    def close(self) -> None:
        self._close_snapshots()
        self._uploader.close()
