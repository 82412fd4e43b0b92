"""Preparation of a node's data in a thread of its agent, with its progress and outcome."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from autohet.runtime.messages import DataState
from planner.errors import ConfigError

if TYPE_CHECKING:
    from autohet.runtime.data import TokenDataset
    from autohet.runtime.job import DataSection, Job

logger = logging.getLogger("autohet.data")
ATTEMPTS = 3
PAUSE_S = 5.0
S3_SCHEME = "s3://"


class Preparation:
    """Owner of the preparation thread.

    The next attempt, in this process or another, reuses what an attempt has done.
    """

    def __init__(self, job: Job) -> None:
        self.state = DataState()
        self._job = job
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="data-preparation", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self._stop.set()
        self.thread.join(timeout=5)

    def _run(self) -> None:
        """Run the thread: report wrong data at once, and retry other failures."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._prepare()
            except ConfigError as error:
                return self._end(str(error))
            except InterruptedError:
                return None
            except Exception as error:
                logger.exception("attempt %d to prepare the data failed", attempt)
                if attempt == ATTEMPTS or self._stop.wait(PAUSE_S):
                    return self._end(
                        f"its data cannot be prepared: {type(error).__name__}: {error}"
                    )
        return None

    def _prepare(self) -> None:
        dataset = self._prepare_dataset(self._job.require_training(), self._progress)
        evaluation_digest = None
        if self._job.evaluation_data is not None:
            rows = self._prepare_dataset(self._job.evaluation_data, self._check_stop)
            evaluation_digest = rows.facts.content_sha256
        total = max(self.state.total_bytes, 1)
        self.state = DataState(
            total,
            total,
            dataset.facts.content_sha256,
            dataset.facts.num_rows,
            evaluation_digest=evaluation_digest,
            summary=dataset.summary,
        )

    def _prepare_dataset(
        self, data: DataSection, progress: Callable[[int, int], None]
    ) -> TokenDataset:
        # pyarrow takes its time: not in the agent's constructor.
        from autohet.runtime.data.build import prepare_dataset

        length = self._job.training.sequence_length
        return prepare_dataset(data, length, progress=progress, shared=shared_datasets(self._job))

    def _check_stop(self, done_bytes: int, total_bytes: int) -> None:
        if self._stop.is_set():
            raise InterruptedError

    def _progress(self, done_bytes: int, total_bytes: int) -> None:
        self._check_stop(done_bytes, total_bytes)
        self.state = DataState(done_bytes, total_bytes)

    def _end(self, error: str) -> None:
        self.state = DataState(self.state.done_bytes, self.state.total_bytes, error=error)


def shared_datasets(job: Job) -> str | None:
    """Return the storage where nodes publish tokenized data: beside checkpoints in S3, else None.

    On a shared file system, nodes share the work through `data.cache`.
    """
    storage = job.checkpoint_storage
    return f"{storage.rstrip('/')}/datasets" if storage.startswith(S3_SCHEME) else None
