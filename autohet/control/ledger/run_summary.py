"""Summary and status of a run, as documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from autohet.runtime.step.learning_rate import learning_rate
from planner.inputs.catalogue import find_gpu_type
from planner.inputs.documents import Document

if TYPE_CHECKING:
    from autohet.control.ledger.ledger import Ledger
    from autohet.control.planning.proposals import PlanProposal
    from autohet.control.values.change import Change
    from planner.cost.model import CostModel
    from planner.plans.plan import Plan


def ledger_status(ledger: Ledger) -> Document:
    """Return the ledger's part of the document that `autohet status` shows."""
    evaluation_step = max(ledger.evaluations, default=None)
    evaluation_loss = None
    if evaluation_step is not None:
        evaluation_loss = ledger.evaluations[evaluation_step].loss
    changes = [change for change in ledger.changes if change.cause != "start"]
    return {
        "step": ledger.committed_steps,
        "steps": ledger.last_step,
        **_last_step_status(ledger),
        "evaluation_loss": evaluation_loss,
        "evaluation_step": evaluation_step,
        "checkpoint": ledger.checkpoints.uri,
        "checkpoint_step": ledger.checkpoints.step,
        "checkpoint_failing": _failing_document(ledger),
        "reconfigurations": len(changes),
    }


def _last_step_status(ledger: Ledger) -> dict[str, float | None]:
    """Return the figures of the newest step; None where it has none."""
    found: dict[str, float | None] = {
        "loss": None,
        "gradient_norm": None,
        "learning_rate": None,
        "epoch": None,
        "tokens_per_s": None,
        "computed_tokens_per_s": None,
    }
    last = ledger.records.get(ledger.committed_steps - 1)
    if last is None:
        return found
    found["loss"] = last.loss
    found["gradient_norm"] = last.gradient_norm
    found["learning_rate"] = learning_rate(ledger.training, last.step)
    found["epoch"] = ledger.epoch(last.step + 1)
    if last.seconds:
        # All tokens that a step computes, whether they count as targets or not.
        training = ledger.job.training
        computed = training.global_batch_sequences * training.sequence_length
        found["tokens_per_s"] = last.tokens / last.seconds
        found["computed_tokens_per_s"] = computed / last.seconds
    return found


def _failing_document(ledger: Ledger) -> Document | None:
    failing = ledger.checkpoints.failing
    return None if failing is None else asdict(failing)


def ledger_summary(
    ledger: Ledger, plans: Sequence[tuple[int, Plan, float | None]], events: Path | None
) -> Document:
    """Return the document that `autohet train --json` prints.

    events: the file that the run's events are in, if any.
    """
    first = min(ledger.records, default=ledger.resumed_at)
    final_loss = None
    losses: list[float | None] = []
    for step in range(first, max(ledger.committed_steps, first)):
        # A step that nobody alive saw and that only a snapshot proves has its place, and no loss.
        loss = None
        if step in ledger.records:
            loss = ledger.records[step].loss
        losses.append(loss)
        if loss is not None:
            final_loss = loss

    evaluations = [
        {"step": step, "loss": record.loss, "sequences": record.sequences}
        for step, record in sorted(ledger.evaluations.items())
    ]
    changes = [change for change in ledger.changes if change.is_told]
    return {
        "steps": len(losses),
        "first_step": first,
        "final_loss": final_loss,
        "losses": losses,
        "evaluations": evaluations,
        "generations": len(plans),
        "steps_lost": sum(change.steps_lost for change in changes),
        "goodput": ledger.goodput(),
        "reconfigurations": [_change_document(ledger, change) for change in changes],
        "plans": [_plan_document(ledger, *each) for each in plans],
        "checkpoint": ledger.checkpoints.uri,
        "checkpoint_failing": _failing_document(ledger),
        "events": None if events is None else str(events),
    }


def _change_document(ledger: Ledger, change: Change) -> Document:
    """Return a change's entry in the summary, by the step seconds that were measured since."""
    measured_s = ledger.measured_step_s(change.generation)
    change.step_s = measured_s or change.step_s
    return change.to_document()


def _plan_document(
    ledger: Ledger, generation: int, plan: Plan, predicted_s: float | None
) -> Document:
    return {
        "generation": generation,
        "plan": plan.to_document(),
        "predicted_step_s": predicted_s,
        "measured_step_s": ledger.measured_step_s(generation),
    }


def utilisation_by_gpu_type(
    proposal: PlanProposal, step_s: float | None, peak_bytes: Mapping[str, int]
) -> dict[str, Document]:
    """Return the utilisation by GPU type of the plan.

    Each entry has `gpus`, `mfu` and `predicted_mfu`, `peak_memory_bytes` and
    `predicted_memory_bytes` (of the fullest GPU). A value is None where it is not measured, or
    where the catalogue has no peak rate of the type.

    step_s: measured seconds of a step. peak_bytes: measured by worker.
    """
    plan = proposal.plan
    cost = proposal.cost
    if cost is None or plan.spmd is not None:
        return {}
    workers: dict[str, list[str]] = defaultdict(list)
    for worker in plan.workers:
        workers[cost.fleet.gpu_type(worker)].append(worker)
    flops = _flops_by_gpu_type(plan, cost)
    formats = cost.stage_formats.in_use(plan)
    predicted = proposal.prediction.memory_bytes_by_worker
    found = {}
    for gpu_type, mine in sorted(workers.items()):
        known = find_gpu_type(gpu_type)
        rate = None
        if known is not None:
            compute = formats[gpu_type][0]
            rate = len(mine) * known.peak_flops(compute)
        measured = [peak_bytes[worker] for worker in mine if worker in peak_bytes]
        found[gpu_type] = {
            "gpus": len(mine),
            "mfu": _share(flops[gpu_type], step_s, rate),
            "predicted_mfu": _share(flops[gpu_type], proposal.predicted_step_s, rate),
            "peak_memory_bytes": max(measured, default=None),
            "predicted_memory_bytes": max(predicted[worker] for worker in mine),
        }
    return found


def _share(flops: float, seconds: float | None, rate: float | None) -> float | None:
    """Return the part of the peak rate that a step of this number of FLOPs reaches."""
    if not seconds or not rate:
        return None
    return round(flops / (seconds * rate), 5)


def _flops_by_gpu_type(plan: Plan, cost: CostModel) -> dict[str, float]:
    """Return the model FLOPs of a step by GPU type."""
    found: dict[str, float] = defaultdict(float)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            gpu_type = cost.fleet.gpu_type(stage.workers[0])
            spec = cost.spec
            layers = list(spec.blocks[stage.first_layer : stage.end_layer])
            if stage.first_layer == 0:
                layers.append(spec.embedding)
            if stage.end_layer == spec.num_layers:
                layers.append(spec.head)
            # MFU counts no recomputation (Chowdhery et al., PaLM, appendix B).
            flops_per_sequence = sum(layer.training_flops(cost.sequence_length) for layer in layers)
            found[gpu_type] += flops_per_sequence * pipeline.num_sequences
    return found
