"""Reason for the ways in which the tokens of a plan's stages reach their experts."""

from planner.cost.model import CostModel
from planner.plans.plan import Plan


def dispatch_reason(cost: CostModel, plan: Plan) -> str:
    """Return what was chosen for the stages with a choice, and what it gains; else empty.

    Seconds are those of a microbatch in both passes of the stage with the largest difference.
    """
    sending_gains_s: list[float] = []
    summing_gains_s: list[float] = []
    num_mixed = 0
    for pipeline in plan.pipelines:
        for index, stage in enumerate(pipeline.stages):
            if not cost.dispatch.applies(stage):
                continue
            if cost.dispatch.mixes_types(stage):
                num_mixed += 1
                continue

            # of all-to-all over a sum; negative if a sum is faster
            gain_s = cost.stage_choices.dispatch_gain_s(pipeline, index)
            if stage.expert_dispatch == "all_to_all":
                sending_gains_s.append(gain_s)
            else:
                summing_gains_s.append(-gain_s)

    num_sending = len(sending_gains_s)
    num_summing = len(summing_gains_s)
    total = num_sending + num_summing
    asked = total + num_mixed
    if cost.choices.expert_dispatch == "sum" or not asked:
        return ""
    if cost.choices.expert_dispatch == "all_to_all":
        return f"tokens go to their experts by all-to-all in {asked} stages, as the job asks"

    parts = []
    if num_mixed:
        parts.append(f"all-to-all in {num_mixed} stages of unlike GPUs, where a sum may differ")
    if num_sending:
        parts.append(_part("all-to-all", num_sending, total, "a sum", max(sending_gains_s)))
    if num_summing:
        parts.append(_part("a sum", num_summing, total, "all-to-all", max(summing_gains_s)))
    return "tokens reach their experts by " + " and by ".join(parts)


def _part(way: str, count: int, total: int, other: str, gain_s: float) -> str:
    said = f"{way} in {count} of {total} stages with a choice"
    if gain_s > 0:
        return f"{said} ({other} would take up to {gain_s * 1e3:.3g} ms more a microbatch)"
    return f"{said} ({other} would not fit the memory)"
