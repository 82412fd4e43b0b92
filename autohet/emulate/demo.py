"""Demonstration of one job on an emulated mixed spot fleet, with a check of its result.

It has four parts: the plan compared with the symmetric one; the symmetric plan's measured speed;
the run with a notice, a death and an arrival; and the same job undisturbed in one process, whose
losses are the reference. With adapters an export of the best checkpoint takes the place of the
first two.
"""

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autohet.control.planning.proposals import PlanProposal
from autohet.driver.job.job_run import Machines, Outcome
from autohet.driver.job.run import Show, connection, train_on
from autohet.driver.job.view import View, plan_table
from autohet.driver.loop.planning import make_planning
from autohet.driver.ray.cluster_file import read_document
from autohet.emulate.chat_demo import ExportedAdapter, chat_job, export_best, write_chat
from autohet.runtime.data import prepare_dataset
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config
from autohet.runtime.models.registry import family_of
from autohet.runtime.state.frozen import first_weights
from autohet.runtime.step.batches import Batches
from autohet.runtime.step.reference import peft_reference_model, reference_model, train_reference
from planner.inputs.cluster import Cluster, cluster_from_document
from planner.inputs.documents import Document

logger = logging.getLogger("autohet")
SYMMETRIC_STEPS = 8
MAX_DIFFERENCE = 1e-3
"""Limit on the relative difference of losses, which is rounding."""


@dataclass(frozen=True)
class SymmetricRun:
    """The symmetric plan and its measured step time."""

    proposal: PlanProposal
    measured_step_s: float

    def to_document(self) -> Document:
        return {
            "strategy": "megatron",
            "plan": self.proposal.plan.to_document(),
            "predicted_step_s": self.proposal.predicted_step_s,
            "measured_step_s": self.measured_step_s,
        }


@dataclass(frozen=True)
class Demonstration:
    """Result of the demonstration.

    Losses are by step; speeds are measured step seconds of the undisturbed fleet.
    """

    outcome: Outcome
    reference_losses: tuple[float, ...]
    seconds: float
    symmetric: SymmetricRun | None = None
    """The symmetric plan on the same fleet; None: it was not run."""
    adapter: ExportedAdapter | None = None
    """The best checkpoint as stock `peft` loads it; None: the job trains all weights."""

    @property
    def is_right(self) -> bool:
        """True if the run ended and its losses are the reference's, to rounding."""
        differences = [self.max_relative_loss_difference]
        if self.adapter is not None:
            differences.append(self.adapter.relative_difference)
        return self.outcome.ok and max(differences) <= MAX_DIFFERENCE

    @property
    def asymmetric_step_s(self) -> float:
        return float(self.outcome.summary["plans"][0]["measured_step_s"])

    @property
    def max_abs_loss_difference(self) -> float:
        return max(abs(loss - reference) for loss, reference in self._loss_pairs())

    @property
    def max_relative_loss_difference(self) -> float:
        return max(abs(loss - reference) / reference for loss, reference in self._loss_pairs())

    def _loss_pairs(self) -> list[tuple[float, float]]:
        """Return (loss of the run, loss of the reference) of each step."""
        return list(zip(self.outcome.summary["losses"], self.reference_losses, strict=True))

    def to_document(self) -> Document:
        """Return the run's summary and the results that it was compared with."""
        further: Document = {}
        if self.symmetric is not None:
            further["symmetric"] = self.symmetric.to_document()
            speedup = self.symmetric.measured_step_s / self.asymmetric_step_s
            further["speedup_over_symmetric"] = speedup
        if self.adapter is not None:
            further["adapter"] = asdict(self.adapter)
        return {
            **self.outcome.summary,
            "ok": self.outcome.ok,
            "emulated": True,
            "reference": {
                "final_loss": self.reference_losses[-1],
                "max_abs_loss_difference": self.max_abs_loss_difference,
                "max_relative_loss_difference": self.max_relative_loss_difference,
            },
            "seconds": self.seconds,
            **further,
        }


def demonstrate(
    job: Job, cluster_path: str, directory: Path, tell: Callable[[str, Any], None]
) -> Demonstration:
    """Run the demonstration, with a view of its runs on standard error.

    `tell(part, what)` is called with each part's result as soon as it is there: `plans` (tables of
    the chosen plan and the symmetric one), `symmetric` and `outcome`.

    Raises:
        ConfigError: job or cluster are wrong.
    """
    started = time.monotonic()
    # Otherwise the job would resume from the checkpoints of an earlier demonstration.
    shutil.rmtree(directory, ignore_errors=True)
    job = replace(job, checkpoint=replace(job.checkpoint, storage=str(directory / "checkpoints")))
    if job.model.adapter is not None:
        write_chat(directory, job.training.seed)
        job = chat_job(job, directory)
    document = read_document(cluster_path)
    cluster = cluster_from_document(document)
    symmetric = None
    with connection(job, document, None) as fleet, View(emulated=True) as show:
        machines = Machines(cluster, fleet)
        if job.model.adapter is None:
            symmetric = _run_symmetric(job, cluster, machines, directory, show, tell)
        outcome = train_on(job, machines, directory / "events.jsonl", show)
    tell("outcome", outcome)
    losses = tuple(reference_losses(job, len(outcome.summary["losses"])))
    adapter = None
    if job.model.adapter is not None:
        found = {each["step"]: each["loss"] for each in outcome.summary["evaluations"]}
        adapter = export_best(job, found, directory)
    return Demonstration(outcome, losses, time.monotonic() - started, symmetric, adapter)


def _run_symmetric(
    job: Job,
    cluster: Cluster,
    machines: Machines,
    directory: Path,
    show: Show,
    tell: Callable[[str, Any], None],
) -> SymmetricRun:
    """Compare the job's plan with the symmetric one, and measure that one's step time."""
    symmetric_job = replace(
        job,
        name=f"{job.name}-symmetric",
        training=replace(job.training, steps=SYMMETRIC_STEPS, decay_steps=job.training.steps),
        parallelism=replace(job.parallelism, strategy="megatron"),
        elastic=replace(job.elastic, script=()),
        checkpoint=replace(job.checkpoint, storage=str(directory / "symmetric-checkpoints")),
    )
    chosen = make_planning(job).propose(cluster.fleet(), None)
    symmetric = make_planning(symmetric_job).propose(cluster.fleet(), None)
    tell("plans", (plan_table(chosen), plan_table(symmetric)))

    events = directory / "symmetric-events.jsonl"
    outcome = train_on(symmetric_job, machines, events, show)
    tell("symmetric", outcome)
    return SymmetricRun(symmetric, outcome.summary["plans"][0]["measured_step_s"])


def reference_losses(job: Job, steps: int) -> list[float]:
    """Return the losses of the same job, trained undisturbed in this process.

    The reference uses transformers' whole model, torch's AdamW, and for adapters `peft`.
    """
    # As in each emulated worker, since more threads add numbers up in another order.
    torch.set_num_threads(1)
    config = load_config(job.model, job.training)
    dataset = prepare_dataset(job.require_training(), job.training.sequence_length)
    names = list(family_of(config).parameter_specs(config))
    first = first_weights(job.model, config, names, job.training.seed)
    if job.model.adapter is not None:
        model = peft_reference_model(config, dict(first))
    else:
        model = reference_model(config, first)

    training = job.training
    cpu = torch.device("cpu")
    batches = Batches(dataset, training.seed, training.global_batch_sequences, cpu)
    begins = batches.begins if dataset.facts.isolated else None
    return list(train_reference(model, training, batches, steps, begins=begins))
