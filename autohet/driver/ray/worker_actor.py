"""Ray actor that runs for each GPU: a thin shell around the worker's runtime.

The runtime does all the work and knows no Ray.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from autohet.driver.ray.run_actor import RunActor, fingerprint
from autohet.runtime.job import Job
from autohet.runtime.messages import (
    GenerationOrder,
    Phase,
    PreparationOrder,
    RollForwardOutcome,
    WorkerPlace,
    WorkerReport,
)
from autohet.runtime.process.epoch_fence import EpochFence
from autohet.runtime.process.headless_watch import HeadlessWatch
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
class WorkerActor(RunActor):
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
        # For the audits' deterministic products; read when CUDA starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        import torch

        torch.set_num_threads(num_threads)
        from autohet.runtime.process.unattended import Unattended
        from autohet.runtime.profiling.exact_products import FaultyDevice
        from autohet.runtime.worker import Worker

        self._fingerprint = fingerprint(job)
        self._fence = EpochFence(driver.epoch)
        self._newest_order: GenerationOrder | None = None
        self._worker: Worker | None = None
        self._is_faulty = False
        try:
            self._worker = Worker(place, job, record=record)
        except ConfigError as error:
            # It would be so in every start: report it, and do not die of it, which is retried.
            self._unfit = WorkerReport(
                place.worker,
                os.getpid(),
                0,
                Phase.FAILED,
                0,
                None,
                error=str(error),
                unfit=True,
                has_faulty_device=isinstance(error, FaultyDevice),
            )
        self._reports = ReportSender(
            driver, self._report, lambda before, report: report.is_news_after(before)
        )
        alone = None if self._worker is None else Unattended(self._worker)
        self._watch = HeadlessWatch(self._reports, job.elastic.headless_s, alone)

    def _report(self) -> WorkerReport:
        report = self._unfit if self._worker is None else self._worker.report()
        return replace(report, has_faulty_device=True) if self._is_faulty else report

    def check_device(self) -> None:
        """Report the device as faulty from now on unless it has the exact products."""
        from autohet.runtime.profiling.exact_products import has_exact_products

        worker = self._here()
        self._is_faulty |= not has_exact_products(worker.device, worker.dtype)

    @ray.method(concurrency_group="life")
    def until_end(self) -> None:
        """Return when this worker is closed; raise the error that ends its reports earlier.

        The end of its process ends the call, too.
        """
        self._reports.wait()

    def _knowledge(self) -> tuple[int, ...]:
        return tuple(order.generation for order in self._orders())

    def _orders(self) -> list[GenerationOrder]:
        """Return the order of the live state and the newest one, oldest first; each once."""
        live = None if self._worker is None else self._worker.preservation.order
        found = {order.generation: order for order in (live, self._newest_order) if order}
        return [found[generation] for generation in sorted(found)]

    def adopt(self, driver: ReportAddress) -> None:
        self._fence.admit(driver.epoch)
        if self._worker is not None:
            # The next driver gives the number of what is prepared to another generation, once it
            # has a report of this worker.
            self._worker._next.drop()
        super().adopt(driver)

    def order(self, generation: int) -> GenerationOrder | None:
        """Return the order of a generation for this worker, if it knows it, without transfers."""
        for order in self._orders():
            if order.generation == generation:
                return replace(order, transfers=None, store_secret=b"")
        return None

    def prepare(self, order: PreparationOrder) -> None:
        self._here().prepare(order)

    def withdraw(self, generation: int) -> None:
        self._here()._next.withdraw(generation)

    def begin(self, common: GenerationOrder, own: Mapping[str, Any]) -> None:
        order = replace(common, **own)
        self._log.generation = max(self._log.generation or 0, order.generation)
        if self._newest_order is None or self._newest_order.generation < order.generation:
            self._newest_order = order
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
        self._watch.close()
        if self._worker is not None:
            self._worker.close()
        self._reports.close()
        self._log.close()

    def _here(self) -> Worker:
        assert self._worker is not None, "an unfit worker gets no orders"
        return self._worker
