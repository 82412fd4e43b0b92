"""Reason for the ways in which the tokens of a plan's stages reach their experts."""

from planner.cost.model import CostModel
from planner.plan import Plan


def dispatch_reason(cost: CostModel, plan: Plan) -> str:
    """Return what was chosen for the stages with a choice, and what it gains; else empty.

    Seconds are those of a microbatch in both passes of the stage with the largest difference.
    """
    gains: dict[bool, list[float]] = {True: [], False: []}
    num_mixed = 0
    for pipeline in plan.pipelines:
        for index, stage in enumerate(pipeline.stages):
            if cost.dispatch.applies(stage) and cost.dispatch.mixes_types(stage):
                num_mixed += 1
            elif cost.dispatch.applies(stage):
                gain_s = cost.stage_choices.dispatch_gain_s(pipeline, index)
                gains[stage.expert_dispatch == "all_to_all"].append(gain_s)
    sending = gains[True]
    summing = gains[False]
    total = len(sending) + len(summing)
    if cost.choices.expert_dispatch == "sum" or not total + num_mixed:
        return ""
    if cost.choices.expert_dispatch == "all_to_all":
        asked = total + num_mixed
        return f"tokens go to their experts by all-to-all in {asked} stages, as the job asks"
    parts = []
    if num_mixed:
        parts.append(f"all-to-all in {num_mixed} stages of unlike GPUs, where a sum may differ")
    if sending:
        parts.append(_part("all-to-all", len(sending), total, "a sum", max(sending)))
    if summing:
        parts.append(
            _part("a sum", len(summing), total, "all-to-all", max(-each for each in summing))
        )
    return "tokens reach their experts by " + " and by ".join(parts)


def _part(way: str, count: int, total: int, other: str, gain_s: float) -> str:
    said = f"{way} in {count} of {total} stages with a choice"
    if gain_s > 0:
        return f"{said} ({other} would take up to {gain_s * 1e3:.3g} ms more a microbatch)"
    return f"{said} ({other} would not fit the memory)"
