"""The learning rate of each step, as a function of the job and the step alone.

A run that is resumed or changes its fleet needs no state of a scheduler.
"""

import math

from autohet.runtime.job.training import TrainingSection

INVERSE_SQRT_TIMESCALE = 10_000
"""Timescale of `inverse_sqrt` without warm-up, in steps, as in transformers."""


def learning_rate(settings: TrainingSection, step: int) -> float:
    """Return the learning rate of step `step` (0-based).

    With `training.schedule`: the rate that `transformers.get_scheduler` gives that step, with the
    floor of its `cosine_with_min_lr`. Without: a linear warm-up whose last step has the full rate,
    then a cosine.
    """
    return settings.learning_rate * _factor(settings, step)


def matrix_learning_rate(settings: TrainingSection, step: int) -> float:
    """Return the learning rate of Muon's matrices at step `step`, before Muon adjusts it."""
    highest = settings.muon_learning_rate
    if highest is None:
        highest = settings.learning_rate
    return highest * _factor(settings, step)


def follows_steps(settings: TrainingSection) -> bool:
    """Return True if another `training.steps` changes the rates of the steps before it."""
    return settings.decay_steps is None and settings.schedule not in ("constant", "inverse_sqrt")


def _factor(settings: TrainingSection, step: int) -> float:
    """Return the rate as a fraction of `learning_rate`."""
    warmup = settings.warmup_steps
    schedule = settings.schedule
    if step < warmup:
        return _warmup(settings, step)
    if schedule == "constant":
        return 1.0
    if schedule == "inverse_sqrt":
        timescale = warmup or INVERSE_SQRT_TIMESCALE
        return 1.0 / math.sqrt((step + timescale - warmup) / timescale)
    end = settings.decay_steps or settings.steps or step + 1
    begin = warmup
    if schedule == "wsd":
        begin = max(warmup, end - settings.wsd_decay(end))
    progress = min(1.0, max(0, step - begin) / max(1, end - begin))
    if schedule == "linear":
        falling = 1.0 - progress
    else:
        falling = 0.5 * (1.0 + math.cos(math.pi * progress))
    floor = settings.floor_ratio
    return floor + (1.0 - floor) * falling


def _warmup(settings: TrainingSection, step: int) -> float:
    """Return the factor of a warm-up step: a line that rises to 1.

    It begins at 0, and for `wsd` at the floor, as in transformers. Without a schedule the first
    step has 1 / `warmup_steps`.
    """
    if settings.schedule is None:
        return (step + 1) / settings.warmup_steps
    risen = step / settings.warmup_steps
    if settings.schedule == "wsd":
        return settings.floor_ratio + (1.0 - settings.floor_ratio) * risen
    return risen
