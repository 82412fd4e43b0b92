"""Torch profiler trace of some steps of one worker, copied to the run's record in the storage."""

import logging
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from autohet.runtime.process.log import RunRecord
from autohet.runtime.process.stored_copies import StoredCopies, tail_of

logger = logging.getLogger("autohet.worker")


class StepProfiler:
    """Profiler of the steps [first, last] of `training.profile_steps`.

    A generation that ends between them leaves a trace of the steps that it has run. The training
    thread calls all methods but `close`. steps: None: no profiling.
    """

    def __init__(
        self, steps: tuple[int, int] | None, worker: str, record: RunRecord, device: torch.device
    ) -> None:
        self._steps = steps
        self._worker = worker
        self._record = record
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._running: Any = None
        self._begun_at = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._copies: StoredCopies | None = None

    def before(self, step: int) -> None:
        """Start the profiler at the first step of the range that this generation runs."""
        if self._steps is None or self._running is not None:
            return
        first, last = self._steps
        if first <= step <= last:
            self._begun_at = step
            self._running = profile(activities=self._activities)
            self._running.start()

    def after(self, step: int) -> None:
        """Stop the profiler and write the trace after the last step of the range."""
        if self._steps is not None and step >= self._steps[1]:
            self.stop(step)

    def stop(self, step: int) -> None:
        """Write the trace of the steps up to `step`; no-op if no profiler runs."""
        running = self._running
        self._running = None
        if running is None:
            return
        running.stop()
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="autohet-profile-")
            self._copies = StoredCopies(self._record.storage, self._record.prefix, {})
        worker = self._worker.replace("/", "-")
        name = f"profile-{worker}-steps-{self._begun_at}-{step}.json.gz"
        path = Path(self._folder.name, name)
        running.export_chrome_trace(str(path))
        assert self._copies is not None
        self._copies.add(name, partial(tail_of, str(path)))
        self._copies.soon()
        logger.info(
            "Profiled steps %d to %d: %s/%s goes to %s",
            self._begun_at,
            step,
            self._record.prefix,
            name,
            self._record.storage,
        )

    def close(self) -> None:
        """Wait until traces are copied; the wait is bounded."""
        if self._copies is not None:
            self._copies.close()
        if self._folder is not None:
            self._folder.cleanup()
