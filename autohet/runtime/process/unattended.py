"""What a worker does for its run's checkpoints while no driver is there."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial

from torch import Tensor

from autohet.runtime.messages import STANDING_PHASES, GenerationOrder, Phase
from autohet.runtime.worker import Worker
from recovery.checkpoint.unattended import (
    HeldSteps,
    choose_step,
    commit_stored,
    put_held,
    read_held,
    remove_held,
)
from recovery.errors import RecoveryError
from recovery.local.snapshot import SnapshotLease
from recovery.state.layout import assign_writers
from recovery.storage.errors import StorageError
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage

logger = logging.getLogger("autohet.worker")
COMMIT_AFTER_S = 30.0
"""Seconds without a driver after which workers commit what is stored without a manifest."""
SETTLE_S = 15.0
"""Seconds in which the workers of a broken generation put what they hold into the storage."""
PAUSE_S = 0.5


class Unattended:
    """A worker's part in checkpoints that no driver commits. Owned by the thread that calls it."""

    def __init__(self, worker: Worker, settle_s: float = SETTLE_S) -> None:
        self._worker = worker
        self._settle_s = settle_s
        self._looked_at = 0.0

    @cached_property
    def _storage(self) -> Storage:
        """Client of this thread, opened when it is needed first."""
        return open_storage(self._worker.job.checkpoint_storage)

    def look(self, away_s: float) -> None:
        """Commit what is stored, now and then, if this is the first worker of the layout."""
        order = self._worker.preservation.order
        now = time.monotonic()
        if order is None or away_s < COMMIT_AFTER_S or now < self._looked_at + COMMIT_AFTER_S:
            return
        self._looked_at = now
        if self._worker.place.worker == min(order.layout.workers):
            self._commit()

    def save(self, has_to_end: Callable[[], bool]) -> None:
        """Make the newest step durable together with the other workers, and commit it.

        Workers that train stop at the same step. Those whose generation has lost a peer choose the
        newest step of which all shards are held. Returns early once `has_to_end` returns False, or
        where nothing can be saved.
        """
        worker = self._worker
        limits = worker.timeouts
        until = time.monotonic() + limits.step_s + limits.checkpoint_s

        def goes_on() -> bool:
            return has_to_end() and time.monotonic() < until

        while goes_on() and (worker.phase not in STANDING_PHASES or self._is_uploading()):
            worker.request_stop(checkpoint=True)
            time.sleep(PAUSE_S)
        order = worker.preservation.order
        if order is None or not goes_on():
            return
        live = worker.live
        step = 0 if live is None else live.version.step
        writers = order.layout.workers
        try:
            if worker.phase is Phase.HALTED:
                step, writers = self._save_broken(order, goes_on)
        except (RecoveryError, OSError) as error:
            logger.warning("The state is not in durable storage: %s", error)
            return
        if writers and worker.place.worker == min(writers):
            while goes_on() and self._commit() < step:
                time.sleep(PAUSE_S)

    def _is_uploading(self) -> bool:
        return self._worker.preservation.uploads.busy

    def _commit(self) -> float:
        """Commit what is stored; return the newest committed step.

        Infinity without any checkpoint: the next driver commits the first one.
        """
        try:
            step = commit_stored(self._storage)
        except StorageError as error:
            logger.warning("Nothing is committed: %s", error)
            return -math.inf
        return math.inf if step is None else step

    def _save_broken(
        self, order: GenerationOrder, goes_on: Callable[[], bool]
    ) -> tuple[int, tuple[str, ...]]:
        """Upload this worker's part of the newest step that the survivors hold together.

        Returns the step and the workers that write it; no workers if no step is held whole.
        """
        me = self._worker.place.worker
        sources = self._sources(order)
        mine = HeldSteps(worker=me, generation=order.generation, steps=tuple(sources))
        put_held(self._storage, mine)
        try:
            settled_at = time.monotonic() + self._settle_s
            while goes_on() and time.monotonic() < settled_at:
                time.sleep(PAUSE_S)
            chosen = choose_step(read_held(self._storage, order.generation), order.layout)
            if chosen is None:
                logger.warning("No step of generation %d is held whole", order.generation)
                return 0, ()
            step, layout = chosen
            if me in layout.workers:
                logger.info("Step %d is made durable by %d workers", step, len(layout.workers))
                shards = assign_writers(layout)[me]
                partly = replace(order, layout=layout, checkpoint_shards=shards)
                self._worker.preservation.uploads.start(partly, step, sources[step]())
            while goes_on() and self._is_uploading():
                time.sleep(PAUSE_S)
            return step, tuple(layout.workers)
        finally:
            with suppress(StorageError):
                remove_held(self._storage, mine)

    def _sources(
        self, order: GenerationOrder
    ) -> dict[int, Callable[[], Mapping[str, Tensor] | SnapshotLease]]:
        """Return what this worker can upload of `order`'s generation, by step."""
        found: dict[int, Callable[[], Mapping[str, Tensor] | SnapshotLease]] = {}
        snapshots = self._worker.preservation.snapshots
        writer = snapshots.writer
        if writer is not None and writer.whole and writer.generation == order.generation:
            for step in writer.files.steps:
                found[step] = partial(writer.lease, step)
        live = self._worker.live
        # A restore that was interrupted may have moved a part of the state off the device.
        if live is None or live.generation != order.generation or live.in_host_memory:
            return found
        if live.version.whole:
            state = live.state
            found.setdefault(live.version.step, lambda: state)
        return found
