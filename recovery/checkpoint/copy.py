"""Copy of a committed checkpoint from one storage to another, each shard checked on its way."""

import logging
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from recovery.checkpoint.commit import (
    checkpoint_uri,
    list_checkpoints,
    of_present_history,
    open_checkpoint,
    require_files,
)
from recovery.checkpoint.errors import (
    CheckpointConflict,
    CheckpointCorrupt,
    CheckpointMissing,
    LaterRelease,
    ManifestInvalid,
    ManifestMisplaced,
)
from recovery.checkpoint.journal import PREFIX as JOURNAL
from recovery.checkpoint.journal import read_ancestry
from recovery.checkpoint.lease import has_living_driver
from recovery.checkpoint.manifest import MANIFEST_NAME, DataFile, Manifest, encode_manifest
from recovery.checkpoint.retention import reading_checkpoint
from recovery.checkpoint.stock_metadata import correct_metadata, offer_metadata
from recovery.checkpoint.write import step_prefix
from recovery.state.ancestry import Ancestry
from recovery.state.checksum import checksum
from recovery.storage.contents import holds
from recovery.storage.protocol import Storage

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
"""progress(done_bytes, total_bytes) after each data file."""


def copy_checkpoint(
    source: Storage,
    target: Storage,
    step: int | None = None,
    *,
    beside: Callable[[Manifest], Collection[str]] = lambda manifest: (),
    progress: Progress | None = None,
) -> Manifest:
    """Copy the checkpoint of `step` (the newest when None) and the journal; return its manifest.

    Afterwards a driver on `target` resumes from this checkpoint, as one on `source` would. Call it
    while no driver uses either storage. The manifest is written last: a copy that is cut short
    leaves no checkpoint, and a second call sends only what is missing or damaged. A data file is
    held in memory while it is checked (1 GiB by default). `beside` returns prefixes of further
    objects that the checkpoint needs.

    Raises:
        CheckpointMissing: `source` has no such checkpoint. CheckpointConflict: a driver uses
        `target`, or it holds checkpoints of another job, or one that a driver would go on from
        instead. CheckpointCorrupt: a shard's bytes are not the manifest's.
    """
    with reading_checkpoint(source, step) as manifest:
        require_files(source, manifest)
        _require_free(source, target, manifest)
        prefix = step_prefix(manifest.step)
        total = sum(file.num_bytes for file in manifest.files)
        done = 0
        for file in manifest.files:
            name = prefix + file.name
            data = _checked(source, manifest, file)
            if not holds(target, name, data):
                target.put(name, data)
            done += file.num_bytes
            if progress is not None:
                progress(done, total)

        for further in beside(manifest):
            _copy_all(source, target, further)
        # A generation that only the target's journal has was abandoned.
        names = {info.name for info in source.list(JOURNAL)}
        _copy_all(source, target, JOURNAL)
        abandoned = [info.name for info in target.list(JOURNAL) if info.name not in names]
        target.delete(abandoned)

        is_new = offer_metadata(target, manifest)
        # Last: before, the target has no checkpoint of this step.
        target.put(prefix + MANIFEST_NAME, encode_manifest(manifest))
        if not is_new:
            correct_metadata(target, manifest)
        require_files(target, manifest)

    logger.info("Copied step %d to %s", manifest.step, checkpoint_uri(target, manifest.step))
    return manifest


def _require_free(source: Storage, target: Storage, copied: Manifest) -> None:
    """Raise CheckpointConflict unless a driver on `target` goes on from `copied` afterwards."""
    if has_living_driver(target):
        reason = "is not copied there, since a driver uses that storage; stop it first"
        raise CheckpointConflict(target.uri, copied.step, reason)

    ours = read_ancestry(source)
    theirs = read_ancestry(target)
    for info in reversed(list_checkpoints(target)):
        try:
            held = open_checkpoint(target, info.step, theirs)
        except (ManifestInvalid, CheckpointMissing) as error:
            is_foreign = isinstance(error, ManifestMisplaced) and info.step == copied.step
            if is_foreign or isinstance(error, LaterRelease):
                # It is not ours to replace.
                raise
            continue
        if held.job != copied.job:
            reason = f"is of job {held.job!r}, not {copied.job!r}"
        elif held != copied and _goes_on(ours, theirs, held, copied.step):
            reason = f"would be gone on from, and not step {copied.step} of {source.uri}"
        else:
            continue
        reason += "; use a storage prefix of its own, or remove it"
        raise CheckpointConflict(target.uri, held.step, reason)


def _goes_on(ours: Ancestry, theirs: Ancestry, held: Manifest, step: int) -> bool:
    """Return True if `held` of the target competes with the copy of `step`.

    It is of the copy's own history and not older, or of a history that the copy does not know.
    """
    number = held.generation
    is_forgotten = number < min(ours.entries, default=0)
    is_known = number in theirs.entries and number not in theirs.unknown
    if is_known and not is_forgotten and theirs.entries[number] != ours.entries.get(number):
        return True
    return held.step >= step and of_present_history(ours, number, held.step)


def _checked(source: Storage, manifest: Manifest, file: DataFile) -> bytearray:
    """Return a data file; raise CheckpointCorrupt if a shard in it has another checksum."""
    name = step_prefix(manifest.step) + file.name
    data = bytearray(file.num_bytes)
    whole = memoryview(data)
    stride = source.options.part_bytes

    def fetch(start: int) -> None:
        source.get_into(name, start, whole[start : start + stride])

    with ThreadPoolExecutor(source.options.concurrency, "checkpoint-copy") as pool:
        # The list takes every result, so that an error of any part is raised.
        list(pool.map(fetch, range(0, file.num_bytes, stride)))

    for stored in file.shards:
        found = checksum(whole[stored.offset : stored.end])
        if found != stored.checksum:
            reason = f"its checksum is {found:#018x}, not the recorded {stored.checksum:#018x}"
            raise CheckpointCorrupt(f"{source.uri}/{name}", stored.shard, reason)
    return data


def _copy_all(source: Storage, target: Storage, prefix: str) -> None:
    for info in source.list(prefix):
        target.put(info.name, source.get(info.name))
