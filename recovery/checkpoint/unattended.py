"""Checkpoints of a run whose coordinator is away, made by its workers through the storage alone.

Workers that have lost a peer cannot vote. Each puts an object `driver/held-<generation>-<worker>`
with the steps that it holds; from these objects all choose the same step and the same writers.
"""

import logging
import re
from collections.abc import Mapping

import msgspec

from recovery.checkpoint.commit import (
    CheckpointFacts,
    commit_checkpoint,
    find_newest,
    of_present_history,
)
from recovery.checkpoint.errors import CheckpointConflict, CheckpointIncomplete, Superseded
from recovery.checkpoint.journal import Journal
from recovery.checkpoint.lease import PREFIX
from recovery.checkpoint.receipts import read_uploads
from recovery.documents import DocumentDamaged, decode_json
from recovery.state.layout import Layout
from recovery.storage.errors import ObjectMissing
from recovery.storage.protocol import Storage

logger = logging.getLogger(__name__)


class HeldSteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Steps of one generation whose state a worker holds, all shards of it that it is to hold."""

    worker: str
    generation: int
    steps: tuple[int, ...]


def _prefix(generation: int) -> str:
    return f"{PREFIX}held-{generation:08d}-"


def _name(held: HeldSteps) -> str:
    writer = re.sub(r"[^A-Za-z0-9.-]", "_", held.worker)
    return f"{_prefix(held.generation)}{writer}.json"


def put_held(storage: Storage, held: HeldSteps) -> None:
    """Put the steps that a worker holds. Raises StorageError."""
    storage.put(_name(held), msgspec.json.encode(held))


def remove_held(storage: Storage, held: HeldSteps) -> None:
    storage.delete([_name(held)])


def read_held(storage: Storage, generation: int) -> dict[str, HeldSteps]:
    """Return the steps that workers of a generation hold, by worker. Raises StorageError."""
    found = {}
    for info in storage.list(_prefix(generation)):
        try:
            held = decode_json(storage.get(info.name), HeldSteps)
        except (ObjectMissing, DocumentDamaged) as error:
            logger.warning("%s/%s is not used: %s", storage.uri, info.name, error)
            continue
        if held.generation == generation:
            found[held.worker] = held
    return found


def choose_step(held: Mapping[str, HeldSteps], layout: Layout) -> tuple[int, Layout] | None:
    """Return the newest step of which every shard is held, and the layout of its holders.

    None: there is no such step.
    """
    steps = {step for each in held.values() for step in each.steps}
    for step in sorted(steps, reverse=True):
        holders = {}
        for worker, shards in layout.shards_by_worker.items():
            if worker in held and step in held[worker].steps:
                holders[worker] = shards
        found = Layout(layout.tensors, holders)
        if all(found.holders(shard) for shard in layout.shards):
            return step, found
    return None


def commit_stored(storage: Storage) -> int | None:
    """Commit the newest upload whose every receipt is stored, if the journal says that it counts.

    The manifest's facts are those of the checkpoint before. A coordinator may commit the same step
    at the same time: the manifest is put once. Return the newest committed step; None: there is no
    checkpoint yet, so that the coordinator's facts are not known.

    Raises:
        StorageError: the storage failed.
    """
    ancestry = Journal(storage, "").read()
    before = find_newest(storage).manifest
    if before is None:
        return None
    for upload in reversed(read_uploads(storage, before.step)):
        is_known = upload.generation in ancestry.entries
        counts = is_known and of_present_history(ancestry, upload.generation, upload.step)
        if not upload.is_complete or not counts:
            continue
        scalars = {**before.scalars, "step": upload.step}
        facts = CheckpointFacts(scalars, before.model_config, before.job, upload.generation)
        receipts = upload.receipts.values()
        try:
            commit_checkpoint(
                storage, upload.step, upload.layout, receipts, facts, ancestry=ancestry
            )
        except (CheckpointIncomplete, CheckpointConflict, Superseded) as error:
            logger.warning("Step %d is not committed: %s", upload.step, error)
            continue
        return upload.step
    return before.step
