"""Preparation of a node's data in a thread of its agent, with its progress and outcome."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from autohet.runtime.messages import DataState
from planner.errors import ConfigError

if TYPE_CHECKING:
    from autohet.runtime.job import Job

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
        from autohet.runtime.data.build import (
            prepare_dataset,
        )  # pyarrow takes its time: not in the agent's constructor

        data = self._job.require_training()
        length = self._job.training.sequence_length
        dataset = prepare_dataset(
            data, length, progress=self._progress, shared=shared_datasets(self._job)
        )
        evaluation_digest = self._prepare_evaluation()
        facts = dataset.facts
        total = max(self.state.total_bytes, 1)
        summary = dataset.summary
        self.state = DataState(
            total,
            total,
            facts.content_sha256,
            facts.num_rows,
            evaluation_digest=evaluation_digest,
            summary=summary,
        )

    def _prepare_evaluation(self) -> str | None:
        """Prepare the evaluation rows and return their digest; None if the job has none."""
        from autohet.runtime.data.build import prepare_dataset

        data = self._job.evaluation_data
        if data is None:
            return None
        dataset = prepare_dataset(
            data,
            self._job.training.sequence_length,
            progress=self._check_stop,
            shared=shared_datasets(self._job),
        )
        return dataset.facts.content_sha256

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
