"""Removal of checkpoints that are not kept, and of what earlier runs have left unfinished."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from autohet.control.values.evaluation_log import best_steps
from recovery.checkpoint.commit import list_checkpoints, open_checkpoint
from recovery.checkpoint.errors import ManifestMisplaced
from recovery.checkpoint.manifest import Manifest
from recovery.checkpoint.retention import Removal, apply_retention, remove_orphans
from recovery.checkpoint.stock_metadata import correct_metadata
from recovery.errors import RecoveryError
from recovery.storage.protocol import Storage

logger = logging.getLogger("autohet")


@dataclass(frozen=True)
class Retention:
    """Checkpoints that are kept: the `newest` ones (None: all), and the `best` by their loss."""

    newest: int | None
    best: int | None = None


class CheckpointCleaner:
    """Cleaner of one job's checkpoints; used by one thread at a time.

    losses: evaluation losses by step, by which the best checkpoints are kept. Any thread may set
    them.
    """

    def __init__(self, storage: Storage, job: str, retention: Retention) -> None:
        self._storage = storage
        self._job = job
        self._retention = retention
        self.losses: Mapping[int, float] = {}
        self._logged: set[str] = set()
        """Logged reasons why something old was not removed."""
        self._retained: int | None = None
        """Generation whose first commit has applied the retention."""
        if retention.newest is None:
            logger.info(
                "Every checkpoint is kept; checkpoint.keep (num_to_keep in Python) leaves only the"
                " newest ones"
            )

    def retain(self, generation: int) -> list[int] | None:
        """Apply the retention after a commit of `generation`.

        Returns the generations of all checkpoints that stay if older journal entries may go, else
        None.
        """
        keeps_all = self._retention.newest is None
        if keeps_all and self._retained == generation:
            # Left-overs go with the generation's first commit. A look through all that is kept
            # would take longer with each commit.
            return None
        best = self._best_steps()
        newest = self._retention.newest
        removal = apply_retention(self._storage, newest, job=self._job, best=best)
        self._log_kept(removal)
        if removal.unknown:
            return None
        if keeps_all:
            # The oldest checkpoint stays, and so do its journal entries.
            self._retained = generation
            return None

        generations = []
        for info in list_checkpoints(self._storage):
            with suppress(ManifestMisplaced):
                checkpoint = open_checkpoint(self._storage, info.step)
                generations.append(checkpoint.generation)
        return generations

    def _best_steps(self) -> frozenset[int]:
        """Return the steps of checkpoints that are kept for their evaluation loss."""
        if self._retention.best is None:
            return frozenset()
        stored = {info.step for info in list_checkpoints(self._storage)}
        known = {step: loss for step, loss in self.losses.items() if step in stored}
        return frozenset(best_steps(known)[: self._retention.best])

    def _log_kept(self, removal: Removal) -> None:
        """Log once why something old was not removed."""
        if removal.unknown:
            what = "No checkpoint is"
            reasons = {removal.unknown}
        else:
            what = "Not everything old is"
            reasons = {reason for _, reason in removal.kept}
        for reason in sorted(reasons - self._logged):
            logger.warning("%s removed from %s: %s", what, self._storage.uri, reason)
        self._logged |= reasons

    def tidy(self, newest: Manifest | None) -> None:
        """Finish what an earlier driver left half-done; `newest` is the newest checkpoint.

        Its `.metadata` is corrected. Objects that belong to no checkpoint and were last touched
        hours ago are removed: what another job writes now is younger, or leased.
        """
        try:
            if newest is not None:
                correct_metadata(self._storage, newest)
            removal = remove_orphans(self._storage)
            self._log_kept(removal)
            if removal.num_objects:
                logger.info(
                    "Removed %d left-over objects from %s", removal.num_objects, self._storage.uri
                )
        except (RecoveryError, OSError) as error:
            logger.warning("Left-overs of earlier runs stay in the checkpoint storage: %s", error)
