"""Committed checkpoints: the coordinator's commit, and finding them again.

A checkpoint of step s is the prefix `step-<s>/`: data files of the workers, then `.metadata` (for
stock PyTorch), then `manifest.json`, put only if there is none yet. Without its manifest a
checkpoint does not exist. See CHECKPOINTS.md.
"""

import logging
import re
import time
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from recovery.checkpoint.errors import (
    CheckpointConflict,
    CheckpointDamaged,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointMissing,
    LaterRelease,
    ManifestForeign,
    ManifestInvalid,
    ManifestMisplaced,
    Superseded,
)
from recovery.checkpoint.journal import read_ancestry, read_generation
from recovery.checkpoint.manifest import (
    MANIFEST_NAME,
    DataFile,
    Manifest,
    Scalar,
    decode_manifest,
    encode_manifest,
)
from recovery.checkpoint.receipts import remove_receipts
from recovery.checkpoint.stock_metadata import correct_metadata, offer_metadata
from recovery.checkpoint.write import CheckpointPart, WorkerReceipt, step_prefix, write_shards
from recovery.release import RELEASE
from recovery.state.ancestry import NOTHING_KNOWN, Ancestry
from recovery.state.layout import Layout, ShardId, TensorSpec
from recovery.storage.errors import ObjectExists, ObjectMissing
from recovery.storage.protocol import Storage

__all__ = [
    "CheckpointFacts",
    "CheckpointInfo",
    "CheckpointPart",
    "NewestCheckpoint",
    "WorkerReceipt",
    "checkpoint_uri",
    "commit_checkpoint",
    "find_newest",
    "list_checkpoints",
    "newest_checkpoint",
    "of_present_history",
    "open_checkpoint",
    "require_files",
    "step_prefix",
    "why_unknown",
    "write_shards",
    "wrong_files",
]

logger = logging.getLogger(__name__)

NO_GENERATION = 0
"""Generation of a checkpoint that was committed without a journal."""
_MANIFEST_PATTERN = re.compile(r"^step-(\d{8,})/" + re.escape(MANIFEST_NAME) + "$")


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint; `committed_unix_s` by the storage's clock."""

    step: int
    uri: str
    committed_unix_s: float


@dataclass(frozen=True)
class CheckpointFacts:
    """Facts in a checkpoint's manifest: the model's config, and by which run it was trained."""

    scalars: Mapping[str, Scalar]
    model_config: Mapping[str, Any]
    job: str = "job"
    generation: int = NO_GENERATION


def checkpoint_uri(storage: Storage, step: int) -> str:
    return f"{storage.uri.rstrip('/')}/{step_prefix(step).rstrip('/')}"


def commit_checkpoint(
    storage: Storage,
    step: int,
    layout: Layout,
    receipts: Iterable[WorkerReceipt],
    facts: CheckpointFacts,
    *,
    ancestry: Ancestry = NOTHING_KNOWN,
) -> Manifest:
    """Commit the checkpoint of `step`, once every shard of `layout` is in `receipts`.

    One coordinator calls it. Idempotent: if this job's checkpoint of this step is committed
    already, that one is returned, no matter which process wrote it. It is replaced if files of it
    are missing, or if it is of an abandoned history (`ancestry` knows its generation, and it is not
    on the newest one's line).

    Raises:
        CheckpointIncomplete: a shard was not written, or a file is not there; nothing is committed.
        CheckpointConflict: the step belongs to another job or model, or two receipts disagree about
        a shard. Superseded: this step was committed by a generation that is newer than all that
        `ancestry` knows: the caller stood still meanwhile. ManifestForeign: the step is of another
        run.
    """
    committed = _committed_or_quarantined(storage, step)
    if committed is not None and of_present_history(ancestry, committed.generation, step):
        same = _same_state(storage, committed, facts.job, layout.tensors)
        wrong = wrong_files(storage, same)
        if not wrong:
            correct_metadata(storage, same)
            return same
        first = next(iter(wrong))
        logger.warning("%s of step %d is damaged; the step is committed again", first, step)
    elif committed is not None and committed.generation > (ancestry.newest or 0):
        raise Superseded(storage.uri, committed.generation, "unknown")

    files = _chosen_files(storage, step, layout, list(receipts))
    claimed = ancestry.entries.get(facts.generation)
    manifest = Manifest(
        step=step,
        generation=facts.generation,
        job=facts.job,
        created_by=f"autohet {RELEASE}, torch {torch.__version__}",
        created_unix_s=round(time.time(), 3),
        scalars=dict(facts.scalars),
        model_config=dict(facts.model_config),
        num_bytes=layout.num_bytes,
        tensors=tuple(layout.tensors[name] for name in sorted(layout.tensors)),
        files=files,
        run="" if claimed is None else claimed.run,
        driver="" if claimed is None else claimed.driver,
    )
    _check_files(storage, manifest)
    if committed is not None:
        # Its data files stay until they are old enough for `remove_orphans`.
        storage.delete([step_prefix(step) + MANIFEST_NAME])
    manifest = _put_manifest(storage, manifest)
    remove_receipts(storage, step)
    return manifest


def list_checkpoints(storage: Storage) -> list[CheckpointInfo]:
    """Return all committed checkpoints, oldest step first."""
    infos = []
    for stored in storage.list("step-"):
        match = _MANIFEST_PATTERN.match(stored.name)
        if match:
            step = int(match[1])
            infos.append(CheckpointInfo(step, checkpoint_uri(storage, step), stored.modified_s))
    return sorted(infos, key=lambda info: info.step)


@dataclass(frozen=True)
class NewestCheckpoint:
    """Newest checkpoint that was found intact, if any, and what is wrong with later ones.

    `unknown` is the reason why it is not known to be of the job's present history; empty if it is.
    """

    info: CheckpointInfo | None
    manifest: Manifest | None
    damaged: tuple[CheckpointError, ...] = ()
    unknown: str = ""

    def require_undamaged(self) -> None:
        """Raise the error of a later checkpoint, if any.

        An older checkpoint is never taken for the newest.
        """
        if self.damaged:
            raise self.damaged[0]


def find_newest(
    storage: Storage, *, but: Collection[int] = (), whole: bool = False
) -> NewestCheckpoint:
    """Find the newest committed checkpoint of the job's present history.

    Steps in `but` are left out. With `whole`, all of its files must be there with their full sizes.

    If entries of the journal are lost or damaged, the newest is the one of the highest generation,
    and of its highest step: generations rise, and each commits only steps of its own history. If
    the journal leads to none, it is the highest step of all.

    Raises:
        LaterRelease: a later step, or the journal, is of a later release.
    """
    infos = [info for info in reversed(list_checkpoints(storage)) if info.step not in but]
    ancestry = read_ancestry(storage)
    damaged: list[CheckpointError] = []
    found: list[tuple[CheckpointInfo, Manifest]] = []
    unknown = _unknown_entries(ancestry, ())
    for info in infos:
        try:
            manifest = _committed(storage, info.step, ancestry)
            if whole and manifest is not None:
                require_files(storage, manifest)
        except LaterRelease:
            # Going on from an older one would leave what the later release has trained.
            raise
        except (ManifestInvalid, CheckpointDamaged) as error:
            damaged.append(error)
            continue
        if manifest is None:
            # It was removed after it was listed.
            continue

        found.append((info, manifest))
        unknown = unknown or _unknown_entries(ancestry, [manifest])
        if not unknown and of_present_history(ancestry, manifest.generation, info.step):
            return NewestCheckpoint(info, manifest, tuple(damaged))

    if not found:
        return NewestCheckpoint(None, None, tuple(damaged), unknown)
    if unknown:
        found.sort(key=lambda each: (each[1].generation, each[0].step), reverse=True)
    else:
        unknown = all_abandoned(ancestry)
    info, manifest = found[0]
    return NewestCheckpoint(info, manifest, tuple(damaged), unknown)


def _unknown_entries(ancestry: Ancestry, manifests: Iterable[Manifest]) -> str:
    """Name the journal entries that are lost or damaged; return "" if there is none.

    Evidence is the journal itself and `manifests`. A generation's entry is in the journal before
    any commit of it, and is removed only after all checkpoints of that generation. So a manifest
    whose generation has no entry shows that the entry is lost.
    """
    lost = set(ancestry.unknown)
    if ancestry.entries:
        generations = {manifest.generation for manifest in manifests}
        lost |= generations - ancestry.entries.keys() - {NO_GENERATION}
    if not lost:
        return ""
    names = ", ".join(map(str, sorted(lost)))
    return (
        f"the journal's entries of these generations are lost or damaged: {names}; put them back"
        f" from a backup, or move the entries in generations/ up to {max(lost)} and the checkpoints"
        " of these generations out of the storage"
    )


def why_unknown(ancestry: Ancestry, manifests: Collection[Manifest]) -> str:
    """Return why the checkpoints of the job's present history are not known; empty if they are."""
    unknown = _unknown_entries(ancestry, manifests)
    if unknown or not manifests:
        return unknown
    for manifest in manifests:
        if of_present_history(ancestry, manifest.generation, manifest.step):
            return ""
    return all_abandoned(ancestry)


def all_abandoned(ancestry: Ancestry) -> str:
    """Describe a storage whose checkpoints are all of histories that the newest generation left."""
    return (
        f"no checkpoint is of generation {ancestry.newest}, which left the histories of those that"
        " are there"
    )


def newest_checkpoint(storage: Storage) -> CheckpointInfo | None:
    """Return the committed checkpoint that `find_newest` finds; None if there is none."""
    return find_newest(storage).info


def of_present_history(ancestry: Ancestry, generation: int, step: int) -> bool:
    """Return True if a checkpoint is on the line of descent of the newest generation.

    A checkpoint that is older than the whole journal counts as on every line.
    """
    newest = ancestry.newest
    if newest is None or ancestry.contains(newest, generation, step):
        return True
    return generation not in ancestry.entries and ancestry.begins_after(newest, step)


def open_checkpoint(
    storage: Storage, step: int | None = None, ancestry: Ancestry | None = None
) -> Manifest:
    """Return the checked manifest of the committed checkpoint of `step` (the newest when None).

    `ancestry` is the storage's journal if the caller has read it.

    Raises:
        CheckpointMissing: there is none. ManifestInvalid: it is damaged. ManifestMisplaced: it is
        of another step or run than the place where it lies.
    """
    if step is None:
        newest = find_newest(storage)
        newest.require_undamaged()
        if newest.manifest is None:
            raise CheckpointMissing(storage.uri, None)
        return newest.manifest

    manifest = _committed(storage, step, ancestry)
    if manifest is None:
        there = tuple(info.step for info in list_checkpoints(storage))
        raise CheckpointMissing(storage.uri, step, there)
    return manifest


def _committed(storage: Storage, step: int, ancestry: Ancestry | None = None) -> Manifest | None:
    name = step_prefix(step) + MANIFEST_NAME
    uri = f"{storage.uri}/{name}"
    try:
        manifest = decode_manifest(storage.get(name), uri)
    except ObjectMissing:
        return None
    if ancestry is None:
        ancestry = read_generation(storage, manifest.generation, manifest.driver)
    _check_place(manifest, step, uri, ancestry)
    return manifest


def _check_place(manifest: Manifest, step: int, uri: str, ancestry: Ancestry) -> None:
    """Raise ManifestMisplaced unless the manifest is of this step's directory and of this run."""
    if manifest.step != step:
        raise ManifestMisplaced(
            uri,
            f"is of step {manifest.step}, not {step}: its directory was copied or renamed; rename"
            f" it to {step_prefix(manifest.step).rstrip('/')}, or remove it",
        )
    remedy = "move its directory out of this storage"
    claimed = ancestry.entries.get(manifest.generation)
    if claimed is not None and manifest.driver and claimed.driver not in ("", manifest.driver):
        raise ManifestForeign(
            uri,
            f"is of another run: driver {manifest.driver} wrote its generation"
            f" {manifest.generation}, that of this storage is of {claimed.driver}; {remedy}",
        )
    if manifest.run and ancestry.run not in ("", manifest.run):
        raise ManifestForeign(
            uri,
            f"is of run {manifest.run}, the journal of this storage of {ancestry.run}; {remedy}",
        )


def _committed_or_quarantined(storage: Storage, step: int) -> Manifest | None:
    """Return the committed manifest.

    One that is damaged, or of another step, is kept under another name, so that the step can be
    committed again.
    """
    try:
        return _committed(storage, step)
    except (ManifestForeign, LaterRelease):
        raise
    except ManifestInvalid as error:
        name = step_prefix(step) + MANIFEST_NAME
        data = storage.get(name)
        quarantined = f"{name}.damaged-{zlib.crc32(data):08x}"
        logger.warning("%s; it is kept as %s, and the step is committed again", error, quarantined)
        storage.put(quarantined, data)
        storage.delete([name])
        return None


def _same_state(
    storage: Storage, manifest: Manifest, job: str, specs: Mapping[str, TensorSpec]
) -> Manifest:
    """Return the committed manifest if it is of this job and of the same tensors.

    Raises CheckpointConflict if it is not.
    """
    if manifest.job != job:
        reason = (
            f"is committed by job {manifest.job!r}, not {job!r}; give each job a storage prefix of"
            " its own"
        )
        raise CheckpointConflict(storage.uri, manifest.step, reason)
    if _shapes(manifest.specs) != _shapes(specs):
        reason = (
            f"is committed by job {job!r} with other tensors: has its model changed? use another"
            " storage prefix"
        )
        raise CheckpointConflict(storage.uri, manifest.step, reason)
    return manifest


def _shapes(specs: Mapping[str, TensorSpec]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of each tensor; cuts may differ between layouts of one model."""
    return {name: (spec.shape, spec.dtype) for name, spec in specs.items()}


def _chosen_files(
    storage: Storage, step: int, layout: Layout, receipts: list[WorkerReceipt]
) -> tuple[DataFile, ...]:
    """Return the files of the receipts with each shard once.

    If two workers wrote the same bytes of a shard, the first receipt counts.
    """
    checksums: dict[ShardId, int] = {}
    files = []
    for receipt in receipts:
        assert receipt.step == step, f"receipt of step {receipt.step} for a commit of step {step}"
        for file in receipt.files:
            for stored in file.shards:
                if checksums.get(stored.shard, stored.checksum) != stored.checksum:
                    reason = (
                        f"two workers wrote shard {stored.shard} with different content: replicas"
                        " have diverged"
                    )
                    raise CheckpointConflict(storage.uri, step, reason)

            fresh = tuple(stored for stored in file.shards if stored.shard not in checksums)
            for stored in fresh:
                checksums[stored.shard] = stored.checksum
            if fresh:
                files.append(DataFile(file.name, file.num_bytes, file.writer, fresh))

    missing = sorted(layout.shards - checksums.keys())
    if missing:
        raise CheckpointIncomplete(step, tuple(map(str, missing)))
    return tuple(files)


def _check_files(storage: Storage, manifest: Manifest) -> None:
    """Check before the commit that every data file is in the storage, whole."""
    missing = wrong_files(storage, manifest)
    if missing:
        raise CheckpointIncomplete(manifest.step, tuple(missing))


def wrong_files(storage: Storage, manifest: Manifest) -> dict[str, int]:
    """Return the data files that are missing, or whose size is not the manifest's, with their size.

    The size of a missing one is 0.
    """
    prefix = step_prefix(manifest.step)
    sizes = {info.name: info.size for info in storage.list(prefix)}
    wrong = {}
    for file in manifest.files:
        size = sizes.get(prefix + file.name)
        if size != file.num_bytes:
            wrong[file.name] = size or 0
    return wrong


def require_files(storage: Storage, manifest: Manifest) -> None:
    """Raise CheckpointDamaged unless all data files of a committed checkpoint are there, whole."""
    wrong = wrong_files(storage, manifest)
    if wrong:
        reason = f"{len(wrong)} files are missing or have a wrong size ({next(iter(wrong))})"
        raise CheckpointDamaged(storage.uri, manifest.step, reason)


def _put_manifest(storage: Storage, manifest: Manifest) -> Manifest:
    """Write `.metadata` and the manifest, if there are none yet; return the committed manifest."""
    prefix = step_prefix(manifest.step)
    encoded = encode_manifest(manifest)
    is_new = offer_metadata(storage, manifest)
    try:
        # If there is none: of two coordinators one commits, and both get the same manifest.
        storage.put(prefix + MANIFEST_NAME, encoded, if_none_match=True)
    except ObjectExists:
        winner = _committed(storage, manifest.step)
        assert winner is not None, "a conditional put said that the manifest exists"
        # Ours may have come before the winner's, whose files are not ours.
        correct_metadata(storage, winner)
        return _same_state(storage, winner, manifest.job, manifest.specs)
    if not is_new:
        correct_metadata(storage, manifest)
    return decode_manifest(encoded, prefix + MANIFEST_NAME)
