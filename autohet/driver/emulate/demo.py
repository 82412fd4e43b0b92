"""Demonstration of one job on an emulated mixed spot fleet, with a check of its result.

It has four parts: the plan compared with the symmetric one; the symmetric plan's measured speed;
the run with a notice, a death and an arrival; and the same job undisturbed in one process, whose
losses are the reference.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autohet.driver.control.planning import Proposal, make_planning
from autohet.driver.emulate.fleet import read_document
from autohet.driver.run import Outcome, Show, connection, train_on
from autohet.runtime.batches import Batches
from autohet.runtime.data import prepare_dataset
from autohet.runtime.job import Job
from autohet.runtime.models import family_of, load_config
from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.reference import reference_model, train_reference
from planner.cluster import cluster_from_document

logger = logging.getLogger("autohet")
SYMMETRIC_STEPS = 8


@dataclass(frozen=True)
class Demonstration:
    """Result of the demonstration.

    Losses are by step; speeds are measured step seconds of the undisturbed fleet.
    """

    asymmetric: Proposal
    symmetric: Proposal
    symmetric_step_s: float
    outcome: Outcome
    reference_losses: tuple[float, ...]
    seconds: float

    @property
    def asymmetric_step_s(self) -> float:
        return float(self.outcome.summary["plans"][0]["measured_step_s"])

    @property
    def max_abs_loss_difference(self) -> float:
        return float(
            max(
                abs(a - b)
                for a, b in zip(self.outcome.summary["losses"], self.reference_losses, strict=True)
            )
        )

    @property
    def max_relative_loss_difference(self) -> float:
        return float(
            max(
                abs(a - b) / b
                for a, b in zip(self.outcome.summary["losses"], self.reference_losses, strict=True)
            )
        )

    def to_document(self) -> dict[str, Any]:
        """Return the run's summary and the results that it was compared with."""
        return {
            **self.outcome.summary,
            "ok": self.outcome.ok,
            "emulated": True,
            "reference": {
                "final_loss": self.reference_losses[-1],
                "max_abs_loss_difference": self.max_abs_loss_difference,
                "max_relative_loss_difference": self.max_relative_loss_difference,
            },
            "symmetric": {
                "strategy": "megatron",
                "plan": self.symmetric.plan.to_document(),
                "predicted_step_s": self.symmetric.predicted_step_s,
                "measured_step_s": self.symmetric_step_s,
            },
            "speedup_over_symmetric": self.symmetric_step_s / self.asymmetric_step_s,
            "seconds": self.seconds,
        }


def demonstrate(
    job: Job, cluster_path: str, directory: Path, show: Show, tell: Callable[[str, Any], None]
) -> Demonstration:
    """Run the demonstration.

    `tell(part, what)` is called with each part's result as soon as it is there.

    Raises:
        ConfigError: job or cluster are wrong.
    """
    started = time.monotonic()
    shutil.rmtree(directory, ignore_errors=True)
    job = replace(job, checkpoint=replace(job.checkpoint, storage=str(directory / "checkpoints")))
    symmetric_job = _symmetric(job, directory)
    document = read_document(cluster_path)
    cluster = cluster_from_document(document)
    plans = [make_planning(each).propose(cluster.fleet(), None) for each in (job, symmetric_job)]
    tell("plans", plans)
    with connection(job, document, None) as fleet:
        symmetric = train_on(
            symmetric_job, cluster, fleet, directory / "symmetric-events.jsonl", show
        )
        tell("symmetric", symmetric)
        outcome = train_on(job, cluster, fleet, directory / "events.jsonl", show)
    tell("outcome", outcome)
    losses = tuple(reference_losses(job, len(outcome.summary["losses"])))
    step_s = symmetric.summary["plans"][0]["measured_step_s"]
    return Demonstration(plans[0], plans[1], step_s, outcome, losses, time.monotonic() - started)


def _symmetric(job: Job, directory: Path) -> Job:
    """Return the same job with a few steps, under the symmetric plan and without events."""
    return replace(
        job,
        name=f"{job.name}-symmetric",
        training=replace(job.training, steps=SYMMETRIC_STEPS, decay_steps=job.training.steps),
        parallelism=replace(job.parallelism, strategy="megatron"),
        elastic=replace(job.elastic, script=()),
        checkpoint=replace(job.checkpoint, storage=str(directory / "symmetric-checkpoints")),
    )


def reference_losses(job: Job, steps: int) -> list[float]:
    """Return the losses of the same job, trained undisturbed in this process.

    The reference uses transformers' whole model and torch's AdamW.
    """
    torch.set_num_threads(1)
    config = load_config(job.model)
    dataset = prepare_dataset(job.require_training(), job.training.sequence_length)
    model = reference_model(
        config,
        initial_parameters(
            config, list(family_of(config).parameter_specs(config)), job.training.seed
        ),
    )
    batches = Batches(
        dataset, job.training.seed, job.training.global_batch_sequences, torch.device("cpu")
    )
    return list(train_reference(model, job.training, batches, steps))
