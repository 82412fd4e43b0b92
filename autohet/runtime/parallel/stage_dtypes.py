"""Dtypes of a stage: in which it computes, and in which tensors leave it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autohet.runtime.models.family import COMPUTE_DTYPES
from autohet.runtime.parallel.borders import border_dtype
from autohet.runtime.parallel.place import Place
from planner.plans.plan import Plan, Stage


@dataclass(frozen=True)
class StageDtypes:
    """Dtypes of one stage.

    compute: of compute weights and hidden states inside it. weights: of weights that owners send to
    other holders, equal in the whole plan. before, after: of what crosses its borders.
    """

    compute: torch.dtype
    weights: torch.dtype
    before: torch.dtype
    after: torch.dtype

    @classmethod
    def of_place(cls, plan: Plan, place: Place, precision: str) -> StageDtypes:
        """Return the dtypes of the stage at `place`.

        precision: format of the stages that name none.
        """
        stages = place.pipeline.stages
        own = compute_dtype(place.stage, precision)
        before = own
        if not place.is_first:
            before = compute_dtype(stages[place.stage_index - 1], precision)
        after = own
        if not place.is_last:
            after = compute_dtype(stages[place.stage_index + 1], precision)
        # Holders of one shard may compute in several formats: fp32 can be rounded to each of them.
        all_dtypes = {compute_dtype(stage, precision) for stage in plan.stages}
        weights = own if len(all_dtypes) == 1 else torch.float32
        crosses_before = border_dtype(before, own)
        crosses_after = border_dtype(own, after)
        return cls(own, weights, crosses_before, crosses_after)


def compute_dtype(stage: Stage, precision: str) -> torch.dtype:
    """Return the dtype of a stage's compute weights and hidden states.

    Products in fp8 take theirs from bf16 and return to it. precision: the format of a stage that
    names none.
    """
    return COMPUTE_DTYPES[stage.compute or precision]


def scales_gradients(plan: Plan, precision: str) -> bool:
    """Return True if some stage of the plan computes in fp16, so that a step may overflow."""
    return any(compute_dtype(stage, precision) == torch.float16 for stage in plan.stages)
