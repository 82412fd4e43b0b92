"""Retention of committed checkpoints, leases of readers, and clean-up of uncommitted data."""

import logging
import re
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from recovery.cancellation import call_until
from recovery.checkpoint.commit import (
    list_checkpoints,
    of_present_history,
    open_checkpoint,
    why_unknown,
)
from recovery.checkpoint.dcp import METADATA_NAME
from recovery.checkpoint.errors import CheckpointMissing, ManifestInvalid, ManifestMisplaced
from recovery.checkpoint.journal import read_ancestry
from recovery.checkpoint.manifest import MANIFEST_NAME, Manifest
from recovery.checkpoint.ownership import LEASE_CONTENT, owned
from recovery.checkpoint.write import step_prefix
from recovery.errors import Cancelled
from recovery.state.ancestry import Ancestry
from recovery.storage.errors import StorageError
from recovery.storage.protocol import ObjectInfo, Storage

logger = logging.getLogger(__name__)

LEASE_S = 3600.0
RENEWALS = 4
"""Renewals within the time of a lease: three of them may fail."""
ORPHAN_AGE_S = 6 * 3600.0
_STEP = re.compile(r"^step-(\d{8,})/")
_LEASE = re.compile(r"^step-\d{8,}/reader-[0-9a-f]+-(\d+)\.lease$")


@dataclass(frozen=True)
class Removal:
    """Result of a retention or clean-up: what was removed, what old data was kept and why.

    If it is not known which checkpoints are needed, nothing was removed and `unknown` says why.
    """

    removed_steps: tuple[int, ...]
    kept: tuple[tuple[int, str], ...] = ()
    num_objects: int = 0
    unknown: str = ""


@contextmanager
def reading_checkpoint(
    storage: Storage,
    step: int | None = None,
    lease_s: float = LEASE_S,
    cancelled: threading.Event | None = None,
) -> Iterator[Manifest]:
    """Open the checkpoint of `step` (the newest when None) and keep retention from removing it.

    That holds for retention of any process. The lease is an object in the checkpoint, renewed by a
    thread while the block runs, however long; it ends with the block or, if this process dies,
    `lease_s` after the last renewal. On a read-only storage there is no lease, which is logged.
    Once `cancelled` is set, this process no longer waits for the storage: the thread ends the lease
    by itself.

    Raises:
        CheckpointMissing: there is none (any more). Cancelled: it was cancelled before.
    """
    asked = storage if cancelled is None else storage.until(cancelled)
    step = open_checkpoint(asked).step if step is None else step
    # The lease's name says how long it lasts: retention in another process goes by it.
    lease = f"{step_prefix(step)}reader-{uuid.uuid4().hex[:12]}-{int(lease_s)}.lease"
    try:
        asked.put(lease, LEASE_CONTENT)
    except StorageError as error:
        logger.warning(
            "Reading step %d without a lease (%s): retention may remove it meanwhile", step, error
        )
        lease = ""

    done = threading.Event()
    # Without patience: the end waits for the thread.
    impatient = storage.patient(0.0)
    keeper = threading.Thread(
        target=_keep, args=(impatient, lease, lease_s, done), name="lease", daemon=True
    )
    if lease:
        keeper.start()
    try:
        # Opened now: it may have gone before the lease was seen.
        yield open_checkpoint(asked, step)
    finally:
        done.set()
        if lease:
            with suppress(Cancelled):
                call_until(
                    cancelled,
                    lambda: keeper.join(2 * storage.options.request_timeout_s),
                    "the end of a lease",
                )


def _keep(storage: Storage, lease: str, lease_s: float, done: threading.Event) -> None:
    """Renew the lease by the storage's own clock while it is in use; then remove it."""
    while not done.wait(lease_s / RENEWALS):
        try:
            storage.put(lease, LEASE_CONTENT)
        except StorageError as error:
            logger.warning("The lease %s is not renewed this time: %s", lease, error)
    # It expires by itself.
    with suppress(StorageError):
        storage.delete([lease])


def apply_retention(
    storage: Storage,
    keep: int | None,
    reading: Collection[int] = (),
    job: str | None = None,
    best: Collection[int] = (),
) -> Removal:
    """Remove all but the newest `keep` committed checkpoints of `job`.

    `keep` is at least 1; None keeps all. `job` None: checkpoints of any job. Checkpoints of an
    abandoned history are removed, too, and count for nothing; while there are no others, nothing is
    removed. Those of steps in `best` are kept in addition to the newest ones. One coordinator calls
    it.

    Never removes the newest, one in `reading`, one that another process holds a lease on, or one of
    another step or run than the place where it lies. Removes nothing while a manifest or an entry
    of the journal is damaged or lost. Of a checkpoint, only the files that its manifest names are
    removed, and other objects that are proven to be this package's. The manifest is removed first:
    a removal that is interrupted leaves an uncommitted prefix, which `remove_orphans` finishes.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep is {keep}; at least the newest checkpoint must stay: use 1 or more")

    found = _read_all(storage, job)
    if found.problem:
        return Removal((), unknown=found.problem)
    old = _unneeded_steps(found, keep, best)
    kept = list(found.misplaced)
    if not old:
        return Removal((), tuple(kept))

    now = storage.now()
    removed = []
    count = 0
    for step in old:
        objects = list(storage.list(step_prefix(step)))
        if step in reading or _leased(objects, now):
            kept.append((step, "is being read"))
            continue
        storage.delete([step_prefix(step) + MANIFEST_NAME])
        removed.append(step)

        # Once more: no reader can come any more, now that the manifest has gone.
        objects = list(storage.list(step_prefix(step)))
        if _leased(objects, now):
            kept.append(
                (
                    step,
                    "a reader came while it was being removed: its data stays until the lease ends",
                )
            )
        else:
            count += 1 + _delete_all(storage, owned(storage, step, objects, found.manifests[step]))
    return Removal(tuple(removed), tuple(kept), count)


@dataclass(frozen=True)
class _Found:
    """Manifests of committed checkpoints by step, oldest first, and those in a wrong place.

    `problem` is the reason why it is not known which of them are needed; empty if it is known.
    """

    manifests: Mapping[int, Manifest]
    misplaced: tuple[tuple[int, str], ...]
    ancestry: Ancestry
    problem: str


def _unneeded_steps(found: _Found, keep: int | None, best: Collection[int]) -> list[int]:
    """Return the steps that `apply_retention` may remove."""
    present = []
    abandoned = []
    for step, manifest in found.manifests.items():
        if of_present_history(found.ancestry, manifest.generation, step):
            present.append(step)
        else:
            abandoned.append(step)

    unneeded = []
    if keep is not None:
        unneeded = [step for step in present[:-keep] if step not in best]
    return unneeded + abandoned


def _read_all(storage: Storage, job: str | None) -> _Found:
    manifests = {}
    misplaced = []
    problem = ""
    ancestry = read_ancestry(storage)
    for info in list_checkpoints(storage):
        try:
            manifest = open_checkpoint(storage, info.step, ancestry)
        except ManifestMisplaced as error:
            misplaced.append((info.step, str(error)))
        except ManifestInvalid as error:
            problem = problem or str(error)
        except CheckpointMissing:
            continue
        else:
            if job is None or manifest.job == job:
                manifests[info.step] = manifest
    # Read after the manifests: a checkpoint that is committed meanwhile is no abandoned one.
    ancestry = read_ancestry(storage)
    problem = problem or why_unknown(ancestry, manifests.values())
    return _Found(manifests, tuple(misplaced), ancestry, problem)


def remove_orphans(
    storage: Storage, writing: Collection[int] = (), min_age_s: float = ORPHAN_AGE_S
) -> Removal:
    """Remove old objects of this package that belong to no committed checkpoint.

    They are proven to be this package's (`owned`) and were not touched for `min_age_s` by the
    storage's clock: prefixes without a manifest, data files that a committed checkpoint does not
    name (from a slow writer of an older attempt), expired leases, and unfinished multipart uploads.
    `writing` are steps in progress: they stay, whatever their age. Nothing is removed while a
    manifest or an entry of the journal is damaged or lost.
    """
    found = _read_all(storage, None)
    if found.problem:
        return Removal((), unknown=found.problem)

    now = storage.now()
    by_step = _objects_by_step(storage)
    removed = []
    kept = list(found.misplaced)
    for step in dict(kept):
        by_step.pop(step, None)
    count = storage.abort_uploads("step-", min_age_s)
    for step, objects in sorted(by_step.items()):
        if step in writing or _leased(objects, now):
            continue
        manifest = found.manifests.get(step)
        if manifest is not None:
            objects = _strays(manifest, objects, now - min_age_s)
        elif max(info.modified_s for info in objects) >= now - min_age_s:
            # A writer may still be at work here.
            continue

        mine = owned(storage, step, objects)
        count += _delete_all(storage, mine)
        if manifest is None and mine:
            removed.append(step)
        num_foreign = len(objects) - len(mine)
        if num_foreign:
            kept.append((step, f"{num_foreign} objects are not proven to be ours"))
    return Removal(tuple(removed), tuple(kept), count)


def _objects_by_step(storage: Storage) -> dict[int, list[ObjectInfo]]:
    by_step: dict[int, list[ObjectInfo]] = {}
    for info in storage.list("step-"):
        match = _STEP.match(info.name)
        if match:
            by_step.setdefault(int(match[1]), []).append(info)
    return by_step


def _strays(manifest: Manifest, objects: list[ObjectInfo], older_than: float) -> list[ObjectInfo]:
    """Return the old ones of `objects` that the manifest does not name."""
    named = {file.name for file in manifest.files}
    named |= {METADATA_NAME, MANIFEST_NAME}
    prefix = step_prefix(manifest.step)

    strays = []
    for info in objects:
        is_old = info.modified_s < older_than
        if is_old and info.name.removeprefix(prefix) not in named:
            strays.append(info)
    return strays


def _leased(objects: list[ObjectInfo], now: float) -> bool:
    for info in objects:
        match = _LEASE.match(info.name)
        if match and now < info.modified_s + float(match[1]):
            return True
    return False


def _delete_all(storage: Storage, objects: list[ObjectInfo]) -> int:
    storage.delete([info.name for info in objects])
    return len(objects)
