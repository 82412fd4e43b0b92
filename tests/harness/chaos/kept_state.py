"""What is left of a run while no driver of it lives: read from its files, by no driver."""

from collections.abc import Iterator
from pathlib import Path

from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config
from planner.plans.plan import Pipeline, Plan, Stage
from recovery.checkpoint.commit import find_newest
from recovery.checkpoint.journal import read_ancestry
from recovery.errors import RecoveryError
from recovery.local.snapshot_file import SnapshotFile
from recovery.local.snapshot_format import SUFFIX
from recovery.state.holdings import Holding, restorable_step
from recovery.state.layout import ShardId
from recovery.storage.open import open_storage
from tests.harness.chaos.places import Places
from tests.harness.exact_job import BATCH, LAYERS, LENGTH


def newest_kept_step(job: Job, places: Places) -> int | None:
    """Return a step that the next driver can go on from: it may find a newer one, never an older.

    It is the newest step that snapshots of the journal's newest generation hold whole and intact,
    or that of the newest intact checkpoint. None while the storage cannot be read.
    """
    if any(path.stem.startswith("storage") for path in places.outages()):
        return None
    storage = open_storage(str(places.storage))
    try:
        generation = read_ancestry(storage).newest
        checkpoint = find_newest(storage, whole=True).info
    finally:
        storage.close()
    held = [
        holding for holding in _intact_snapshots(places) if holding.source.generation == generation
    ]
    kept = restorable_step(_shards(job), held)
    steps = [step for step in (kept, checkpoint and checkpoint.step) if step is not None]
    return max(steps, default=0)


def _intact_snapshots(places: Places) -> Iterator[Holding]:
    for kind, root in (("memory", places.memory), ("disk", places.disk)):
        for path in sorted(root.rglob(f"*{SUFFIX}")):
            yield from _intact_part(path, kind)


def _intact_part(path: Path, kind: str) -> Iterator[Holding]:
    """The shards of one snapshot whose checksums are right, if there are any."""
    try:
        with SnapshotFile(path) as file:
            whole = file.holding(kind, path.parent.name)
            intact = frozenset(shard for shard in file.shards if _is_intact(file, shard))
    except RecoveryError:
        return
    if intact:
        yield Holding(whole.source, intact)


def _is_intact(file: SnapshotFile, shard: ShardId) -> bool:
    try:
        file.read(shard).release()
    except RecoveryError:
        return False
    return True


def _shards(job: Job) -> frozenset[ShardId]:
    plan = Plan("exact", BATCH, 1, LENGTH, (Pipeline((Stage(0, LAYERS, ("one/0",)),), BATCH, 1),))
    return layout_of_plan(plan, load_config(job.model, job.training)).shards
