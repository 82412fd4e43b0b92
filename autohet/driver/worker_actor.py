"""One Ray actor per GPU: a thin shell around the worker's runtime, which does all the work and knows no Ray."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import ray

from autohet.runtime.job import Job
from autohet.runtime.messages import GenerationOrder, WorkerPlace, WorkerReport

CALL_THREADS = 6  # reports must be answered while an order, an interrupt and a poll are under way


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, max_concurrency=CALL_THREADS)  # type: ignore[call-overload]
class WorkerActor:
    """The process of one GPU. It lives through every generation; Ray never restarts it."""

    def __init__(self, place: WorkerPlace, job: Job, num_threads: int, environment: Mapping[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import torch

        torch.set_num_threads(num_threads)
        from autohet.runtime.worker import Worker

        self._worker = Worker(place, job)

    def report(self) -> WorkerReport:
        return self._worker.report()

    def begin(self, order: GenerationOrder) -> None:
        self._worker.begin(order)

    def request_stop(self, checkpoint: bool) -> None:
        self._worker.request_stop(checkpoint=checkpoint)

    def interrupt(self) -> None:
        self._worker.interrupt()

    def roll_forward(self, vote: tuple[int, Any]) -> None:
        self._worker.roll_forward(vote)

    def close(self) -> None:
        self._worker.close()
