"""Ray actor that runs for each GPU: a thin shell around the worker's runtime.

The runtime does all the work and knows no Ray.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray

from autohet.runtime.job import Job
from autohet.runtime.messages import (
    GenerationOrder,
    Phase,
    PreparationOrder,
    RollForwardOutcome,
    WorkerPlace,
    WorkerReport,
)
from autohet.runtime.process.log import RunRecord, log_as
from autohet.runtime.process.report_channel import ReportAddress, ReportSender
from planner.errors import ConfigError

if TYPE_CHECKING:
    from autohet.runtime.worker import Worker

CALL_THREADS = 6
"""Threads for calls: an interrupt must be taken while an order is being carried out."""


@ray.remote(  # type: ignore[call-overload]
    num_cpus=0,
    max_restarts=0,
    max_task_retries=0,
    max_concurrency=CALL_THREADS,
    concurrency_groups={"life": 1},
)
class WorkerActor:
    """Process of one GPU, which lives through every generation; Ray never restarts it."""

    def __init__(
        self,
        place: WorkerPlace,
        job: Job,
        num_threads: int,
        environment: Mapping[str, str],
        record: RunRecord | None,
        driver: ReportAddress,
    ) -> None:
        self._log = log_as(place.worker, record)
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import torch

        torch.set_num_threads(num_threads)
        from autohet.runtime.worker import Worker

        self._worker: Worker | None = None
        try:
            self._worker = Worker(place, job, record=record)
        except ConfigError as error:
            # It would be so in every start: report it, and do not die of it, which is retried.
            self._unfit = WorkerReport(
                place.worker, os.getpid(), 0, Phase.FAILED, 0, None, error=str(error), unfit=True
            )
        self._reports = ReportSender(
            driver, self._report, lambda before, report: report.is_news_after(before)
        )

    def _report(self) -> WorkerReport:
        return self._unfit if self._worker is None else self._worker.report()

    @ray.method(concurrency_group="life")
    def until_end(self) -> None:
        """Return when this worker is closed; raise the error that ends its reports earlier.

        The end of its process ends the call, too.
        """
        self._reports.wait()

    def prepare(self, order: PreparationOrder) -> None:
        self._here().prepare(order)

    def begin(self, order: GenerationOrder) -> None:
        self._log.generation = max(self._log.generation or 0, order.generation)
        self._here().begin(order)

    def request_stop(self, checkpoint: bool) -> None:
        self._here().request_stop(checkpoint=checkpoint)

    def request_checkpoint(self) -> None:
        self._here().request_checkpoint()

    def interrupt(self, generation: int, keep: bool) -> None:
        self._here().interrupt(generation, keep=keep)

    def roll_forward(self, generation: int, vote: tuple[int, Any]) -> RollForwardOutcome:
        return self._here().roll_forward(generation, vote)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._reports.close()
        self._log.close()

    def _here(self) -> Worker:
        assert self._worker is not None, "an unfit worker gets no orders"
        return self._worker
