"""A worker's part of durable checkpoints: uploads in the background, and their receipts."""

import logging
import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autohet.runtime.copies.transfer_log import TransferLog
from autohet.runtime.job.elastic import Timeouts
from autohet.runtime.messages import GenerationOrder, StateTransfer, UploadRetried
from recovery.checkpoint.journal import entry_name
from recovery.checkpoint.receipts import put_receipt
from recovery.checkpoint.upload import Uploader
from recovery.checkpoint.write import WorkerReceipt
from recovery.errors import RecoveryError
from recovery.local.snapshot import SnapshotLease
from recovery.storage.errors import StorageTimeout
from recovery.storage.protocol import Storage

logger = logging.getLogger("autohet.worker")


class DurableUploads:
    """Uploads of one worker, of which one is in flight at a time.

    The generation's thread starts uploads; reports take the receipts.
    """

    def __init__(
        self, worker: str, storage: Storage, timeouts: Timeouts, transfers: TransferLog
    ) -> None:
        self._worker = worker
        self._timeout_s = timeouts.checkpoint_s
        self._transfers = transfers
        self._uploader = Uploader(
            storage,
            patience_s=timeouts.checkpoint_s,
            on_failure=self._note_failure,
            on_written=self._store_receipt,
        )
        self._harvesting = threading.Lock()
        self._awaited: tuple[int, int] | None = None
        """Generation and step of the upload in flight."""
        self._order: GenerationOrder | None = None
        """Order of the upload in flight."""
        self._receipts: list[tuple[int, int, Any]] = []

    @property
    def busy(self) -> bool:
        """True while an upload is in flight."""
        return self._uploader.busy

    def start(
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
            if isinstance(state, SnapshotLease):
                state.release()
            return
        # Without this entry, another file system is mounted in the storage's place.
        entry = entry_name(order.generation) if order.is_claimed else None
        with self._harvesting:
            self._harvest()
            self._order = order
            self._uploader.submit(
                step, self._worker, state, order.layout, order.checkpoint_shards, entry
            )
            self._awaited = (order.generation, step)

    def abandon_beyond(self, step: int) -> None:
        """Retry the upload in flight no more if it is of a later step, since the run goes back."""
        if self._awaited is not None and self._awaited[1] > step:
            self._uploader.abandon()

    def wait_copied(self) -> None:
        """Block until the upload in flight has read the state.

        If it takes too long, the upload ends by itself once the state has changed.
        """
        try:
            self._uploader.wait_copied(self._timeout_s)
        except RecoveryError as error:
            logger.warning("the upload under way is given up: %s", error)

    def take_receipts(self) -> list[tuple[int, int, Any]]:
        """Return (generation, step, receipt) of each upload that has ended since the last call.

        A failed upload has its reason in place of a receipt; each failed attempt adds an
        `UploadRetried`.
        """
        with self._harvesting:
            self._harvest()
            found = self._receipts
            self._receipts = []
        return found

    def close(self) -> None:
        self._uploader.close()

    def _store_receipt(self, storage: Storage, receipt: WorkerReceipt) -> None:
        """Put the receipt into the storage; called by the uploader's thread.

        A driver that ends before it commits has told nobody which parts are stored.
        """
        assert self._order is not None
        put_receipt(storage, receipt, self._order.generation, self._order.layout)

    def _note_failure(self, step: int, reason: str) -> None:
        """Record a failed upload attempt; called by the uploader's thread, which retries."""
        with self._harvesting:
            if self._awaited is not None:
                self._receipts.append((*self._awaited, UploadRetried(reason)))
        logger.warning("step %d is not in durable storage yet: %s", step, reason)

    def _harvest(self) -> None:
        """Record the end of the last upload, if it has ended.

        It must be called before a later upload starts.
        """
        if self._awaited is None or self._uploader.busy:
            return
        generation, step = self._awaited
        self._awaited = None
        try:
            receipt = self._uploader.wait(0.0)
        except (RecoveryError, OSError) as error:
            logger.warning("step %d is not in durable storage: %s", step, error)
            self._receipts.append((generation, step, str(error)))
            return
        self._receipts.append((generation, step, receipt))
        transfer = StateTransfer(
            "s3", self._worker, generation, step, receipt.bytes_sent, receipt.seconds
        )
        self._transfers.add(transfer)
