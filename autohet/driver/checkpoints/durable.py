"""Driver's side of durable storage.

Owned threads write and read manifests and the journal of generations, so that ticks never wait for
S3.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autohet.control.ledger.skipped_steps import SKIPPED_FROM
from autohet.control.states.ways_back import SKIPPED_STEPS
from autohet.control.values.observation import CheckpointState
from autohet.driver.checkpoints.cleaning import CheckpointCleaner, Retention
from autohet.driver.checkpoints.resumption import require_some_intact
from autohet.runtime.job.identity import DATA_DIGEST, DATA_ROWS
from autohet.runtime.messages import WorkerReport
from autohet.runtime.state.model_files import ModelFiles
from autohet.runtime.step.loss_scale import LOSS_SCALE
from planner.errors import ConfigError
from recovery.checkpoint.commit import (
    CheckpointFacts,
    NewestCheckpoint,
    checkpoint_uri,
    commit_checkpoint,
    find_newest,
    list_checkpoints,
    of_present_history,
)
from recovery.checkpoint.epoch import claim_epoch, require_epoch
from recovery.checkpoint.errors import (
    CheckpointConflict,
    CheckpointCorrupt,
    CheckpointIncomplete,
    Superseded,
)
from recovery.checkpoint.journal import Journal, JournalUnreachable, oldest_needed
from recovery.checkpoint.lease import LEASE_S, DriverLease, LeaseKeeper
from recovery.checkpoint.manifest import Manifest, Scalar
from recovery.checkpoint.read import read_shards
from recovery.checkpoint.receipts import read_uploads
from recovery.errors import RecoveryError
from recovery.state.ancestry import Descent
from recovery.state.layout import Layout, ShardId
from recovery.storage.errors import StorageError
from recovery.storage.protocol import Storage

logger = logging.getLogger("autohet")

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 15.0
"""Seconds between two tries of one commit: the first pause, and the limit of its doubling."""

CARRIED_FACTS = (DATA_DIGEST, DATA_ROWS, LOSS_SCALE)
"""Facts of a run that the newest checkpoint knows before the first tick does."""
Suspect = tuple[int, ShardId]
"""Step, and a shard that a restore did not get from the durable checkpoint of that step."""


def durable_suspects(reports: Iterable[WorkerReport | None]) -> set[Suspect]:
    """Return the shards that restores failed to get from durable storage, as workers report it."""
    suspects: set[Suspect] = set()
    for report in reports:
        if report is None:
            continue
        for record in (report.broken, report.restore):
            if record is None:
                continue
            for source, shard in record.bad:
                if source.kind == "s3":
                    suspects.add((source.step, shard))
    return suspects


@dataclass(frozen=True)
class _Commit:
    """Checkpoint whose every part is stored; `tries` counts its failed commits so far."""

    step: int
    generation: int
    layout: Layout
    receipts: tuple[Any, ...]
    tries: int = 0


def _stored_uploads(storage: Storage, newest: Manifest | None) -> list[_Commit]:
    """Return the checkpoints beyond the newest whose every part is stored, oldest first."""
    found = []
    for upload in read_uploads(storage, -1 if newest is None else newest.step):
        if upload.is_complete:
            receipts = tuple(upload.receipts.values())
            found.append(_Commit(upload.step, upload.generation, upload.layout, receipts))
    return found


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that its checkpoints hold.

    `model_config` is the document of the model's config. `scalars` are in every manifest.
    model_files: files stored beside the checkpoints before the first one; None: stored already, or
    none.
    """

    job: str
    model_config: Mapping[str, Any]
    scalars: Mapping[str, Any]
    model_files: ModelFiles | None = None


class Durable:
    """Owner of the driver's lease and of the newest committed checkpoint's manifest.

    It also owns its threads. `state` and `fresh` may be called at any time.
    """

    def __init__(
        self,
        storage: Storage,
        facts: RunFacts,
        retention: Retention,
        *,
        lease_s: float = LEASE_S,
    ) -> None:
        self.storage = storage
        self._facts = facts
        self._scalars = dict(facts.scalars)
        self._model_files = facts.model_files
        self.cleaner = CheckpointCleaner(storage, facts.job, retention)
        self.work_pool = ThreadPoolExecutor(1, thread_name_prefix="durable")
        """One thread for commits, reads and cleaning, in the order of submission."""
        # A claim has its own thread, since it must not wait for a checkpoint.
        self.claim_pool = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self.lease = DriverLease(storage, lease_s)
        self.epoch = 0
        """Epoch of this driver, which its commands to processes carry; 0 before `take_lease`."""
        self._journal = Journal(storage, self.lease.driver)
        self._journal_lock = threading.Lock()
        self._keeper: LeaseKeeper | None = None
        self._lock = threading.Lock()
        self._state = CheckpointState()
        self._reads_under_way = 0
        self._retry: _Commit | None = None
        self._retry_at = 0.0
        self._closed = False
        self._rejected: dict[int, CheckpointCorrupt] = {}
        """Errors by step of damaged checkpoints whose manifests and sizes are right."""
        self._passed_over: frozenset[int] = frozenset()
        """Steps whose checkpoints are intact, and not gone on from."""
        self._given_up = (0, 0)
        """Generation that was given up, and the first of its steps that is not committed."""
        self._restored_step = -SKIPPED_STEPS
        """Step of the checkpoint that was found last, which a restore may have used."""
        self._tidied = False
        self.wake: Callable[[], None] = lambda: None
        """Called by a thread once a claim is answered, for which a driver waits."""

    def record(self, key: str, value: Scalar) -> None:
        """Add a fact of the run that is known now to the checkpoints from now on."""
        self._scalars[key] = value

    def state(self) -> CheckpointState:
        """Return what is known now, and begin a commit that is due for a retry."""
        self._retry_when_due()
        with self._lock:
            return self._state

    def fresh(self) -> bool:
        """Return True if no read of the newest checkpoint is in flight."""
        with self._lock:
            return self._reads_under_way == 0

    def take_lease(self) -> None:
        """Wait in the calling thread until no other driver of this job is alive.

        The lease is renewed from then on. No-op if it is held already.

        Raises:
            LeaseHeld: another is alive. StorageError: the storage does not answer.
        """
        if self._keeper is not None:
            return
        self.lease.take()
        self.epoch = claim_epoch(self.storage, self.lease.driver)
        self._journal.mark()
        self._keeper = LeaseKeeper(self.lease, lambda: self._guard(self._check_journal, None))

    def claim(self, entry: Descent) -> None:
        """Put the journal entry of a generation that is about to begin.

        The answer shows in `state`.
        """
        self.claim_pool.submit(self._claim, entry)

    def _claim(self, entry: Descent) -> None:
        superseded = None
        unclaimed = None
        try:
            require_epoch(self.storage, self.epoch)
            with self._journal_lock:
                self._journal.claim(entry)
        except Superseded as error:
            superseded = str(error)
        except Exception as error:  # noqa: BLE001
            logger.warning("Generation %d is not in the journal yet: %s", entry.generation, error)
            unclaimed = entry.generation
        with self._lock:
            superseded = superseded or self._state.superseded
            self._state = replace(
                self._state, claimed=entry.generation, unclaimed=unclaimed, superseded=superseded
            )
        self.wake()

    def _check_journal(self) -> None:
        require_epoch(self.storage, self.epoch)
        with self._journal_lock:
            ancestry = self._journal.check()
            # Under both locks: else a thread that is late would show an old ancestry.
            with self._lock:
                self._state = replace(self._state, ancestry=ancestry)

    def load_newest(self) -> CheckpointState:
        """Read the newest manifest now, in the calling thread.

        Storage errors are raised: at a job's start they are the user's. The first call also has the
        owned thread remove, afterwards, what earlier runs have left unfinished.
        """
        with self._journal_lock:
            ancestry = self._journal.read()
            with self._lock:
                self._state = replace(self._state, ancestry=ancestry)
        newest = self._newest_intact()
        if newest.info is not None and newest.manifest is not None:
            with self._journal_lock:
                self._journal.adopt_run(newest.manifest.run)
            self._restored_step = newest.manifest.step
            self._adopt(newest.manifest)
        if not self._tidied:
            self._tidied = True
            if newest.manifest is not None:
                for key in CARRIED_FACTS:
                    if key in newest.manifest.scalars:
                        self._scalars[key] = newest.manifest.scalars[key]
            # What an earlier driver left without a manifest, although all of it is stored.
            for left in _stored_uploads(self.storage, newest.manifest):
                try:
                    self._commit(left)
                    self._restored_step = left.step
                except (CheckpointIncomplete, CheckpointConflict) as error:
                    logger.warning("Step %d is not committed: %s", left.step, error)
            self.work_pool.submit(self.cleaner.tidy, newest.manifest)
        return self.state()

    def _newest_intact(self) -> NewestCheckpoint:
        """Return the newest checkpoint that is not known to be damaged.

        Damage that is new shows in `state`.
        """
        but = self._rejected.keys() | self._passed_over
        newest = find_newest(self.storage, but=but, whole=True)
        if self._rejected and newest.info is None:
            damaged = (*newest.damaged, *self._rejected.values())
            newest = replace(newest, damaged=damaged)
        require_some_intact(newest, self.storage)
        with self._lock:
            known = self._state.damaged
            errors = [str(error) for error in newest.damaged]
            new = tuple(error for error in errors if error not in known)
            self._state = replace(self._state, damaged=known + new, unknown=newest.unknown)
        return newest

    def _reject(self, suspects: Collection[Suspect]) -> None:
        """Read the shards of the newest checkpoint that a restore did not get from it.

        If one is damaged, the checkpoint is not used any more. Blocks; runs in the owned thread.
        """
        manifest = self.state().manifest
        if manifest is None:
            return
        suspected = {shard for step, shard in suspects if step == manifest.step}
        # Small ones first: one damaged shard is enough.
        wanted = sorted(
            suspected & manifest.shards,
            key=lambda shard: manifest.locations[shard][1].num_bytes,
        )
        try:
            for shard in wanted:
                for _ in read_shards(self.storage, manifest, [shard]):
                    pass
        except CheckpointCorrupt as error:
            # This raises if another file system lies in the storage's place: then nothing is
            # damaged.
            self._check_journal()
            self._rejected[manifest.step] = error
            with self._lock:
                self._state = replace(
                    self._state, step=None, damaged=(*self._state.damaged, str(error))
                )

    def refresh(self, suspects: Collection[Suspect] = ()) -> None:
        """Look for the newest checkpoint again.

        suspects: shards that a restore did not get from it. If it is damaged, an older one is
        taken.
        """
        with self._lock:
            self._reads_under_way += 1

        def work() -> None:
            try:
                self._reject(suspects)
                self.load_newest()
            finally:
                with self._lock:
                    self._reads_under_way -= 1

        self.work_pool.submit(self._guard, work, None)

    def commit(self, step: int, generation: int, layout: Layout, receipts: Sequence[Any]) -> None:
        """Write the manifest of `step`; the result shows in `state`.

        If the storage fails, the commit is retried until it succeeds or a later step is to be
        committed.
        """
        with self._lock:
            self._retry = None
        wanted = _Commit(step=step, generation=generation, layout=layout, receipts=tuple(receipts))
        work = partial(self._commit, wanted)
        self.work_pool.submit(self._guard, work, wanted)

    def fall_back(self, step: int, generation: int) -> None:
        """Pass over the checkpoints from `step` on of `generation` and of those before it.

        If no older one is intact, nothing changes. `CheckpointState.fallback` answers.
        """

        def work() -> None:
            later = {info.step for info in list_checkpoints(self.storage) if info.step >= step}
            but = self._rejected.keys() | later
            older = find_newest(self.storage, but=but, whole=True)
            if older.manifest is not None and not older.unknown:
                self._passed_over = frozenset(later)
                self._given_up = (generation, step)
                self._adopt(older.manifest)
            with self._lock:
                self._state = replace(self._state, fallback=step)

        self.work_pool.submit(self._guard, work, None)

    def _retry_when_due(self) -> None:
        with self._lock:
            is_due = time.monotonic() >= self._retry_at and not self._closed
            if not is_due:
                return
            due = self._retry
            self._retry = None
        if due is not None:
            self.work_pool.submit(self._guard, partial(self._commit, due), due)

    def _commit(self, wanted: _Commit) -> None:
        step = wanted.step
        generation = wanted.generation
        if self._model_files is not None:
            self._scalars |= self._model_files.store(self.storage)
            self._model_files = None

        given_up, first_step = self._given_up
        if generation <= given_up and step >= first_step:
            return
        self._check_journal()
        ancestry = self.state().ancestry
        if not of_present_history(ancestry, generation, step):
            logger.warning(
                "Step %d of generation %d is not committed: the run has gone back behind it",
                step,
                generation,
            )
            return

        scalars = {**self._scalars, "step": step}
        facts = CheckpointFacts(
            scalars=scalars,
            model_config=self._facts.model_config,
            job=self._facts.job,
            generation=generation,
        )
        manifest = commit_checkpoint(
            self.storage, step, wanted.layout, wanted.receipts, facts, ancestry=ancestry
        )
        self._rejected.pop(step, None)
        self._passed_over -= {step}
        self._adopt(manifest)
        is_proved = step > self._restored_step + SKIPPED_STEPS
        if self._scalars.get(SKIPPED_FROM) is not None or not is_proved:
            # The checkpoints before may be gone back to: they stay until weights have changed.
            return

        # A later driver may keep more: other steps are its best ones.
        require_epoch(self.storage, self.epoch)
        kept = self.cleaner.retain(generation)
        if kept is not None:
            # Entries older than the oldest checkpoint that stays have no use any more.
            with self._journal_lock:
                oldest = oldest_needed(kept, self.state().ancestry)
                self._journal.forget_before(oldest)

    def _adopt(self, manifest: Manifest) -> None:
        with self._lock:
            uri = checkpoint_uri(self.storage, manifest.step)
            self._state = self._state.followed_by(manifest.step, uri, manifest)

    def _guard(self, work: Callable[[], None], attempt: _Commit | None) -> None:
        """Run `work` at the thread's edge.

        An error is kept in the state, and training continues.
        """
        try:
            work()
        except (Superseded, ConfigError) as error:
            # Neither passes by itself: the driver ends.
            with self._lock:
                self._state = replace(self._state, superseded=str(error))
        except Exception as error:
            is_unexpected = not isinstance(error, RecoveryError)
            logger.warning("The checkpoint storage failed: %s", error, exc_info=is_unexpected)
            with self._lock:
                self._state = replace(
                    self._state,
                    error=str(error),
                    error_step=None if attempt is None else attempt.step,
                    error_generation=None if attempt is None else attempt.generation,
                    is_retried=self._try_again(attempt, error),
                    is_misplaced=isinstance(error, JournalUnreachable),
                )

    def _try_again(self, attempt: _Commit | None, error: Exception) -> bool:
        """Schedule a retry of the commit after a pause, if that may help. Call under the lock.

        Returns True if there will be one.
        """
        if attempt is None or not isinstance(error, StorageError):
            return False
        pause_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2**attempt.tries)
        self._retry_at = time.monotonic() + pause_s
        # A later step's commit, if that has failed, too, is the one to retry.
        if self._retry is None or self._retry.step <= attempt.step:
            self._retry = replace(attempt, tries=attempt.tries + 1)
        return True

    def close(self, *, at_once: bool = False) -> None:
        """Finish what is queued, bounded by the storage's own deadlines.

        at_once: drop what is queued. No-op after the first call.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for pool in (self.claim_pool, self.work_pool):
            pool.shutdown(wait=not at_once, cancel_futures=at_once)
        if self._keeper is not None:
            # The lease is released last: from then on another driver may begin.
            self._keeper.close()
            self._journal.unmark()
            self.lease.release()
        self.storage.close()
