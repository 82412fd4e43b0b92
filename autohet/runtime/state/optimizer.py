"""AdamW on fp32 masters, with linear warm-up and cosine decay, both functions of the step alone.
The arithmetic is PyTorch's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from autohet.runtime.job import TrainingSection
from autohet.runtime.layout import state_name


def learning_rate(settings: TrainingSection, step: int) -> float:
    """Of step `step` (0-based): rises linearly over the warm-up, then falls along a cosine to
    `min_learning_rate_ratio`.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    end = settings.decay_steps or settings.steps or step + 1
    progress = min(1.0, (step - settings.warmup_steps) / max(1, end - settings.warmup_steps))
    floor = settings.min_learning_rate_ratio
    return settings.learning_rate * (
        floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    )


def clip_factor(settings: TrainingSection, gradient_norm: float) -> float:
    """What gradients are multiplied by so that their global norm is at most `clip_norm` (as
    torch.nn.utils.clip_grad_norm_).
    """
    if settings.clip_norm is None:
        return 1.0
    return min(1.0, settings.clip_norm / (gradient_norm + 1e-6))


@torch.no_grad()
def update(
    state: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    settings: TrainingSection,
    step: int,
    factor: float,
) -> None:
    """Apply step `step`'s update to the local slices in `state` (masters and moments by state
    name), in place.

    gradients: summed fp32 slices by parameter name; `factor` scales them (token weighting and
    clipping). Elementwise, so that every holder of a shard gets the same bits.
    """
    names = sorted(gradients)
    scaled = [gradients[name] for name in names]
    if factor != 1.0:
        scaled = list(torch._foreach_mul(scaled, factor))
    masters = [state[state_name("param", name)] for name in names]
    moments = [
        [state[state_name(kind, name)] for name in names] for kind in ("exp_avg", "exp_avg_sq")
    ]
    steps = [torch.tensor(float(step)) for _ in names]
    beta1, beta2 = settings.betas
    adamw(
        masters,
        scaled,
        moments[0],
        moments[1],
        [],
        steps,
        foreach=True,
        capturable=False,
        differentiable=False,
        fused=False,
        grad_scale=None,
        found_inf=None,
        has_complex=False,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=learning_rate(settings, step),
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        maximize=False,
    )
