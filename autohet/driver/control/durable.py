"""The driver's side of durable checkpoints: manifests are written and read in one owned thread, so that ticks never wait for S3."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from autohet.driver.control.observation import CheckpointState
from recovery.checkpoint.commit import checkpoint_uri, commit_checkpoint, newest_checkpoint, open_checkpoint
from recovery.checkpoint.manifest import Manifest
from recovery.checkpoint.retention import apply_retention, remove_orphans
from recovery.errors import RecoveryError
from recovery.state.layout import Layout
from recovery.storage.protocol import Storage

logger = logging.getLogger("autohet")


class Durable:
    """Owns a thread and the newest committed checkpoint's manifest. `state` and `fresh` may be called at any time."""

    def __init__(
        self, storage: Storage, job: str, model_config: Mapping[str, Any], scalars: Mapping[str, Any], keep: int
    ) -> None:
        self._storage = storage
        self._job = job
        self._model_config = dict(model_config)
        self._scalars = dict(scalars)
        self._keep = keep
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="durable")
        self._lock = threading.Lock()
        self._state = CheckpointState()
        self._reads_under_way = 0
        self._tidied = False

    def state(self) -> CheckpointState:
        with self._lock:
            return self._state

    def fresh(self) -> bool:
        """Whether no reading of the newest checkpoint is under way."""
        with self._lock:
            return self._reads_under_way == 0

    def load_newest(self) -> CheckpointState:
        """Read the newest manifest now, in the calling thread; storage errors come through (at a job's start they are the user's).
        The first time, what earlier runs have left unfinished is removed afterwards, in the owned thread.
        """
        newest = newest_checkpoint(self._storage)
        if newest is not None:
            self._adopt(open_checkpoint(self._storage, newest.step))
        if not self._tidied:
            self._tidied = True
            self._pool.submit(self._tidy)
        return self.state()

    def _tidy(self) -> None:
        """Remove what belongs to no checkpoint and was last touched hours ago: what another job writes now is younger, or leased."""
        try:
            removal = remove_orphans(self._storage)
            if removal.num_objects:
                logger.info("Removed %d left-over objects from %s", removal.num_objects, self._storage.uri)
        except (RecoveryError, OSError) as error:
            logger.warning("Left-overs of earlier runs stay in the checkpoint storage: %s", error)

    def refresh(self) -> None:
        with self._lock:
            self._reads_under_way += 1
        self._pool.submit(self._guard, self._refresh, None)

    def commit(self, step: int, generation: int, layout: Layout, receipts: Sequence[Any]) -> None:
        """Write the manifest of `step`; the result shows in `state`."""
        self._pool.submit(self._guard, lambda: self._commit(step, generation, layout, receipts), (generation, step))

    def _refresh(self) -> None:
        try:
            self.load_newest()
        finally:
            with self._lock:
                self._reads_under_way -= 1

    def _commit(self, step: int, generation: int, layout: Layout, receipts: Sequence[Any]) -> None:
        scalars = {**self._scalars, "step": step}
        manifest = commit_checkpoint(
            self._storage, step, layout, receipts, scalars, self._model_config, job=self._job, generation=generation
        )
        self._adopt(manifest)
        apply_retention(self._storage, self._keep)

    def _adopt(self, manifest: Manifest) -> None:
        with self._lock:
            uri = checkpoint_uri(self._storage, manifest.step)
            self._state = self._state.followed_by(manifest.step, uri, manifest)

    def _guard(self, work: Callable[[], None], attempt: tuple[int, int] | None) -> None:
        """The thread's edge: whatever goes wrong is kept as the state's error, and training goes on."""
        try:
            work()
        except (RecoveryError, OSError) as error:
            # Its text, since the error itself holds on to an open connection wherever the record is kept.
            logger.warning("The checkpoint storage failed: %s", str(error))
            with self._lock:
                generation, step = attempt or (None, None)
                self._state = replace(self._state, error=str(error), error_step=step, error_generation=generation)

    def close(self, *, at_once: bool = False) -> None:
        """Finish what is queued, bounded by the storage's own deadlines; `at_once`: drop it."""
        self._pool.shutdown(wait=not at_once, cancel_futures=at_once)
        self._storage.close()
