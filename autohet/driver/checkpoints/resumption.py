"""State of a job's checkpoint storage before anything is started for it.

The storage holds nothing, a step to go on from, or the job's end.
"""

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from autohet.control.ledger.ledger import Ledger
from autohet.control.ledger.run_summary import ledger_summary
from autohet.control.ledger.skipped_steps import SKIPPED_FROM
from autohet.control.values.evaluation_log import EvaluationLog
from autohet.driver.checkpoints.evaluation_losses import read_evaluations
from autohet.driver.events.event_log import EventLog
from autohet.runtime.facts.layout import tensor_specs
from autohet.runtime.job import Job
from autohet.runtime.job.identity import (
    ADAPTER,
    DATA_DIGEST,
    DATA_PLACES,
    DATA_ROWS,
    TEMPLATE_DATE,
    KeyChange,
    changes,
    check_changes,
    config_changes,
    has_effect,
    with_implied,
)
from autohet.runtime.models.config import saved_document
from autohet.runtime.models.registry import FAMILIES, used_keys
from autohet.runtime.state.frozen import run_identity
from autohet.runtime.step.learning_rate import follows_steps, learning_rate
from autohet.runtime.step.loss_scale import LOSS_SCALE
from planner.errors import ConfigError
from recovery.checkpoint.commit import CheckpointInfo, NewestCheckpoint, find_newest
from recovery.checkpoint.errors import LaterRelease
from recovery.checkpoint.manifest import Manifest
from recovery.state.layout import TensorSpec
from recovery.storage.protocol import Storage

logger = logging.getLogger("autohet")
DROPOUT = "model.dropout"
"""Key of a run's identity: whether it trains with the dropouts of its model's config."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """Checkpoint that a job resumes from. ended: reason why it has no step left; None: it has."""

    step: int
    uri: str
    ended: str | None
    row_offset: int = 0
    """The job's `training.row_offset` from here on."""
    template_date: str | None = None
    """Date that the run's chat template prints."""


def found_checkpoint(
    job: Job, config: PreTrainedConfig, storage: Storage
) -> FoundCheckpoint | None:
    """Return the newest intact checkpoint, if there is one. Damaged ones of later steps are logged.

    Raises:
        ConfigError: all are damaged, or it is of another job or model: this one would overwrite
        it, or could not be restored. StorageError: the storage does not answer.
    """
    try:
        newest = find_newest(storage, whole=True)
    except LaterRelease as error:
        raise ConfigError(f"{error}, or name another checkpoint.storage") from error
    if newest.info is None or newest.manifest is None:
        require_some_intact(newest, storage)
        return None
    for damage in newest.damaged:
        logger.warning("%s: going on from step %d", damage, newest.info.step)
    if newest.unknown:
        logger.warning("%s: no checkpoint is removed", newest.unknown)
    row_offset = _row_offset(job, newest.manifest)
    job = replace(job, training=replace(job.training, row_offset=row_offset))
    _check_same(job, config, newest.info, newest.manifest)
    evaluations = read_evaluations(storage, newest.manifest, job.evaluation)
    ended = _end_reason(job, newest.manifest, evaluations)
    date = newest.manifest.scalars.get(TEMPLATE_DATE)
    found_date = None if date is None else str(date)
    return FoundCheckpoint(newest.info.step, newest.info.uri, ended, row_offset, found_date)


def _row_offset(job: Job, manifest: Manifest) -> int:
    """Return the `training.row_offset` with which a job goes on at the row that the run came to."""
    scalars = manifest.scalars
    batch = scalars.get(GLOBAL_BATCH)
    offset = int(scalars.get(ROW_OFFSET) or 0)
    if batch is None:
        return offset
    now = job.training.global_batch_sequences
    return offset + manifest.step * (int(batch) - now)


def _end_reason(job: Job, manifest: Manifest, evaluations: EvaluationLog) -> str | None:
    """Return the reason why a run at this checkpoint has nothing left to do; None: it has."""
    step = manifest.step
    if evaluations.ends_run(step):
        return f"already at step {step}, {evaluations.early_end_reason}"
    last = job.training.last_step(_rows_that_stay(job, manifest))
    is_evaluated = job.evaluation is None or step in evaluations.losses
    if last is None or step < last or not is_evaluated:
        return None
    return f"already at step {step} of {last}"


def _rows_that_stay(job: Job, manifest: Manifest) -> int:
    """Return the rows of the run's data set; 0: they are unknown, or may be others now."""
    allowed = job.checkpoint.allow_changes
    if any(key.startswith("data.") or key == "training.sequence_length" for key in allowed):
        return 0
    return int(manifest.scalars.get(DATA_ROWS) or 0)


def require_some_intact(newest: NewestCheckpoint, storage: Storage) -> None:
    """Raise ConfigError if there are checkpoints and all are damaged.

    A job never starts anew by itself then.
    """
    if newest.info is None and newest.damaged:
        raise ConfigError(
            f"{newest.damaged[0]}; {storage.uri} holds no intact checkpoint: to start anew, remove"
            " what is there or name another checkpoint.storage"
        )


def _check_same(
    job: Job, config: PreTrainedConfig, found: CheckpointInfo, manifest: Manifest
) -> None:
    remedy = "name another checkpoint.storage, or remove that one"
    if manifest.job != job.name:
        raise ConfigError(f"{found.uri} is of job '{manifest.job}', not of '{job.name}'; {remedy}")
    # Before the comparison of tensors, which another adapter changes.
    scalars = manifest.scalars
    then = {key: value for key, value in scalars.items() if key.startswith(ADAPTER)}
    differences = changes(then, job.identity())
    check_changes(differences, job.checkpoint.allow_changes, found.uri)
    _check_tensors(tensor_specs(config), found, manifest, remedy)

    allowed = identity_changes(job, found.uri, manifest)
    if allowed:
        sentences = "; ".join(str(change) for change in allowed)
        logger.info("Going on from %s although %s", found.uri, sentences)
        rows = _rows_that_stay(job, manifest)
        sentence = schedule_change(job, found.step, allowed, rows)
        if sentence:
            logger.warning("%s", sentence)
    _check_updates(job, found, manifest)


def _check_tensors(
    ours: Mapping[str, TensorSpec], found: CheckpointInfo, manifest: Manifest, remedy: str
) -> None:
    """Raise ConfigError if the checkpoint's tensors are not ours, or are cut in another way."""
    theirs = manifest.specs
    for name in sorted(ours.keys() | theirs.keys()):
        mine = ours[name].shape if name in ours else "not there"
        other = theirs[name].shape if name in theirs else "not there"
        if mine != other:
            raise ConfigError(
                f"{found.uri} is of another model: {name} is {other} in it and {mine} in the job;"
                f" {remedy}"
            )
        if ours[name].cuts != theirs[name].cuts:
            raise ConfigError(
                f"{found.uri} is of another version, which cut {name} into {theirs[name].num_units}"
                f" units, not {ours[name].num_units}; autohet checkpoint export it and train from"
                f" model.pretrained, or {remedy}"
            )


_SCHEDULE_FIELDS = (
    "steps",
    "max_epochs",
    "learning_rate",
    "schedule",
    "warmup_steps",
    "decay_steps",
    "stable_steps",
    "min_learning_rate_ratio",
)
SCHEDULE_KEYS = frozenset(f"training.{key}" for key in _SCHEDULE_FIELDS)
GLOBAL_BATCH = "training.global_batch_sequences"
ROW_OFFSET = "training.row_offset"


def _ends_schedule(key: str) -> bool:
    """Return True if a change of `key` changes the number of steps in an epoch."""
    keys = (GLOBAL_BATCH, ROW_OFFSET, "training.sequence_length")
    return key in keys or key.startswith("data.")


def schedule_change(
    job: Job, step: int, told: Collection[KeyChange], num_rows: int = 0
) -> str | None:
    """Describe how a resumed run's learning rate changes at `step`.

    None: no key of the schedule has changed the rate, and it goes on as it would have. num_rows:
    rows of the data set, by which `training.max_epochs` becomes steps; 0: unknown.
    """
    then = {change.key: change.then for change in told if change.key in SCHEDULE_KEYS}
    in_epochs = job.training.max_epochs is not None or "training.max_epochs" in then
    if in_epochs:
        then |= {change.key: change.then for change in told if _ends_schedule(change.key)}
    if not then:
        return None
    fields = {}
    for key, value in then.items():
        if not key.startswith("data."):
            fields[key.removeprefix("training.")] = value
    try:
        before = replace(job.training, **fields).with_rows(num_rows)
    except ConfigError:
        # The old values do not fit the job's other ones, so that the old rate is unknown.
        return None

    after = job.training.with_rows(num_rows)
    names = ", ".join(sorted(then))
    schedule = after.schedule or "cosine"
    follows = follows_steps(after)
    if follows and (before.max_epochs or after.max_epochs):
        return (
            f"The learning rate from step {step} on may not be what it would have been before"
            f" {names} changed: the {schedule} schedule ends with training.max_epochs, after a"
            " number of steps that is not known yet; training.decay_steps fixes it"
        )
    was = learning_rate(before, step)
    now = learning_rate(after, step)
    if math.isclose(was, now, rel_tol=1e-9):
        return None

    sentence = (
        f"The learning rate of step {step} is {now:.3g}, where it was {was:.3g} before {names}"
        " changed"
    )
    if before.steps != after.steps and before.steps is not None and follows:
        sentence += (
            f": the {schedule} schedule now ends at step {after.steps}, not {before.steps};"
            f" set training.decay_steps: {before.steps} to stay on the old one"
        )
    return sentence


def skipped_from(manifest: Manifest) -> int | None:
    """Return the first of the skipped steps that the checkpoint's run ended with."""
    first = manifest.scalars.get(SKIPPED_FROM)
    return int(first) if isinstance(first, int) else None


def loss_scales(manifest: Manifest) -> str:
    """Return the changes of the scale in fp16 stages until the checkpoint; empty: it has none."""
    return str(manifest.scalars.get(LOSS_SCALE) or "")


def _check_updates(job: Job, found: CheckpointInfo, manifest: Manifest) -> None:
    """Raise ConfigError if the run is at its last step but its last steps changed no weights.

    Such a run is not done.
    """
    first = skipped_from(manifest)
    limit = job.training.max_skipped_steps
    if first is None or job.training.steps is None or found.step < job.training.steps:
        return
    num_skipped = found.step - first
    is_too_many = limit is not None and num_skipped >= limit
    if first == 0 or is_too_many:
        raise ConfigError(
            f"{found.uri} is at step {found.step} of {job.training.steps}, but its last"
            f" {num_skipped} steps changed no weights (the events of kind 'skipped' in"
            " runs/ name the causes); repair the cause and name another checkpoint.storage, or"
            " raise training.steps to go on"
        )


def identity_changes(job: Job, uri: str, manifest: Manifest) -> list[KeyChange]:
    """Return the allowed differences between the job and a checkpoint's run.

    Raises:
        ConfigError: something differs that changes the mathematics, and is not allowed to.
    """
    model = job.model
    now = run_identity(job)
    then = with_implied(manifest.scalars, now)
    then.setdefault("training.seed", then.get("seed", job.training.seed))
    if now.get(TEMPLATE_DATE) is None:
        # The run goes on with its own.
        then.pop(TEMPLATE_DATE, None)
    then.setdefault(DROPOUT, False)  # an older version trained all dropouts as 0

    document = saved_document(model)
    kind = str(document["model_type"])
    keys = used_keys(kind)
    family = FAMILIES.get(kind)
    dropouts = frozenset() if family is None else frozenset(family.dropouts)
    if not any(document.get(key) for key in dropouts):
        then.pop(DROPOUT, None)
    elif not then.get(DROPOUT):
        keys -= dropouts  # they had no effect

    found = config_changes(manifest.model_config, document, keys)
    for change in changes(then, now):
        if has_effect(change.key, then) or has_effect(change.key, now):
            found.append(change)
    allowed = set(job.checkpoint.allow_changes)
    if manifest.scalars.get(DATA_DIGEST):
        # Nodes whose data has other tokens are refused before the first step.
        allowed |= DATA_PLACES
    return check_changes(found, allowed, uri)


def summary_of_finished(
    job: Job, found: FoundCheckpoint, events_path: Path | None
) -> tuple[str, dict[str, Any]]:
    """Return the reason and summary of a run that finds its last step done.

    Also writes the run's events.
    """
    reason = str(found.ended)
    events = EventLog(events_path)
    try:
        events.emit("started", 0, job=job.name, step=found.step, checkpoint=found.uri)
        events.emit(
            "finished", 0, f"Nothing to do: {reason}", reason=reason, ok=True, step=found.step
        )
        ledger = Ledger(job)
        ledger.go_on_from(found.step)
        ledger.checkpoints.uri = found.uri
        return reason, ledger_summary(ledger, [], events.path)
    finally:
        events.close()
