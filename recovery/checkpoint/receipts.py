"""Receipts of uploads, stored beside the files that they list.

A worker puts its receipt once its part of a checkpoint is durable. If the coordinator ends before
it commits, the next one commits from these objects. A commit removes them.
"""

import logging
import re
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from recovery.checkpoint.manifest import DataFile
from recovery.checkpoint.ownership import RECEIPT_SUFFIX, is_receipt, receipt_digest
from recovery.checkpoint.write import WorkerReceipt, step_prefix
from recovery.documents import DocumentDamaged, decode_json
from recovery.state.layout import Layout, TensorSpec
from recovery.storage.errors import ObjectMissing, StorageError
from recovery.storage.own_names import is_own_name, own_name
from recovery.storage.protocol import Storage

logger = logging.getLogger(__name__)
VERSION = 1


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Stored form of a receipt; `writers`: all workers whose parts make the checkpoint."""

    version: int = VERSION
    step: int
    generation: int
    worker: str
    writers: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    files: tuple[DataFile, ...]


@dataclass
class StoredUpload:
    """Receipts of one step and generation that are in the storage, by worker."""

    step: int
    generation: int
    writers: frozenset[str]
    receipts: dict[str, WorkerReceipt] = field(default_factory=dict)
    tensors: dict[str, TensorSpec] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """True if every worker's part is stored."""
        return self.receipts.keys() >= self.writers

    @property
    def layout(self) -> Layout:
        """Layout in which each worker holds what it wrote."""
        written = {worker: receipt.shards for worker, receipt in self.receipts.items()}
        return Layout(self.tensors, written)


def put_receipt(storage: Storage, receipt: WorkerReceipt, generation: int, layout: Layout) -> None:
    """Put a worker's receipt beside its files; blocks until it is durable.

    Raises:
        StorageError: the storage failed.
    """
    names = sorted({shard.tensor for shard in receipt.shards})
    stored = _Stored(
        step=receipt.step,
        generation=generation,
        worker=receipt.worker,
        writers=tuple(sorted(layout.workers)),
        tensors=tuple(layout.tensors[name] for name in names),
        files=receipt.files,
    )
    data = msgspec.json.encode(stored)
    writer = re.sub(r"[^A-Za-z0-9.-]", "_", receipt.worker)
    storage.put(
        step_prefix(receipt.step) + own_name(writer, receipt_digest(data), RECEIPT_SUFFIX), data
    )


def read_uploads(storage: Storage, after: int = -1) -> list[StoredUpload]:
    """Return the uploads of steps beyond `after` whose receipts are stored, oldest first.

    A damaged receipt, or one of a later release, is passed over with a warning.
    """
    # Without its coordinator, fewer workers may write a step once more.
    found: dict[tuple[int, int, tuple[str, ...]], StoredUpload] = {}
    for info in storage.list("step-"):
        if not info.name.endswith(RECEIPT_SUFFIX) or not is_own_name(info.name):
            continue
        stored = _read(storage, info.name)
        if stored is None or stored.step <= after:
            continue
        upload = found.setdefault(
            (stored.step, stored.generation, stored.writers),
            StoredUpload(stored.step, stored.generation, frozenset(stored.writers)),
        )
        receipt = WorkerReceipt(stored.step, stored.worker, stored.files)
        upload.receipts[stored.worker] = receipt
        upload.tensors |= {spec.name: spec for spec in stored.tensors}
    return [found[key] for key in sorted(found)]


def _read(storage: Storage, name: str) -> _Stored | None:
    try:
        data = storage.get(name)
        stored = decode_json(data, _Stored)
        if is_receipt(name, data) and name.startswith(step_prefix(stored.step)):
            return stored
    except ObjectMissing:
        return None
    except DocumentDamaged as error:
        logger.warning("%s/%s is not used: %s", storage.uri, name, error)
        return None
    logger.warning("%s/%s is not used: it is damaged, or in another's place", storage.uri, name)
    return None


def remove_receipts(storage: Storage, step: int) -> None:
    """Remove the receipts of a committed step; best effort."""
    with suppress(StorageError):
        names = [info.name for info in storage.list(step_prefix(step))]
        storage.delete(
            [each for each in names if each.endswith(RECEIPT_SUFFIX) and is_own_name(each)]
        )
