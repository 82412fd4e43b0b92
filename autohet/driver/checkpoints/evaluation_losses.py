"""Evaluation losses that a checkpoint's scalars carry, by which the best checkpoints are kept."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

EVALUATION_LOSSES = "evaluation.losses"
"""Name of the checkpoint scalar with the losses: a JSON object of losses by step."""
NEWEST = 8
"""Number of newest losses that are always carried: their checkpoints may still be committed."""


def losses_of(scalars: Mapping[str, Any]) -> dict[int, float]:
    """Return the losses by step; empty where the scalars have none."""
    text = scalars.get(EVALUATION_LOSSES)
    if not isinstance(text, str):
        return {}
    document = json.loads(text)
    return {int(step): float(loss) for step, loss in document.items()}


def best_steps(losses: Mapping[int, float], number: int) -> list[int]:
    """Return the steps of the lowest losses, best first; of equal ones the earlier first."""
    return sorted(losses, key=lambda step: (losses[step], step))[:number]


def losses_text(losses: Mapping[int, float], every_steps: int, keep_best: int) -> str:
    """Return the scalar: losses of steps with a checkpoint, the best ones and the newest.

    every_steps: steps between checkpoints. A loss that is not finite is never among the best.
    """
    scored = {}
    for step, loss in losses.items():
        has_checkpoint = step > 0 and step % every_steps == 0
        if has_checkpoint and math.isfinite(loss):
            scored[step] = loss
    best = best_steps(scored, keep_best)
    newest = sorted(scored)[-NEWEST:]
    kept = sorted({*best, *newest})
    return json.dumps({str(step): scored[step] for step in kept})


__all__ = ["EVALUATION_LOSSES", "best_steps", "losses_of", "losses_text"]
