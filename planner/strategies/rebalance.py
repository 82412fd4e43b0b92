"""Microbatches shared anew once the workers are known: pipelines that meet on a NIC end later than the tables say."""

from collections.abc import Sequence
from dataclasses import replace

from planner.plan import Plan


def rebalanced(plan: Plan, ends_s: Sequence[float]) -> Plan:
    """Moves microbatches, one at a time, from the pipeline that ends last to the one that would end first, among pipelines of one
    microbatch size. ends_s: when each pipeline of the plan ends as it is; one microbatch more is charged the mean of its slots,
    (K + depth - 1) of which 1F1B takes."""
    counts = [pipeline.num_microbatches for pipeline in plan.pipelines]
    slots = [k + len(p.stages) - 1 for k, p in zip(counts, plan.pipelines, strict=True)]
    each = [end / n for end, n in zip(ends_s, slots, strict=True)]
    ends = list(ends_s)
    for size in sorted({pipeline.microbatch_sequences for pipeline in plan.pipelines}):
        mine = [i for i, pipeline in enumerate(plan.pipelines) if pipeline.microbatch_sequences == size]
        for _ in range(sum(counts[i] for i in mine)):
            late = max(mine, key=lambda i: ends[i])
            early = min(mine, key=lambda i: ends[i] + each[i])
            if counts[late] == 1 or ends[early] + each[early] >= ends[late]:
                break
            for i, step in ((late, -1), (early, 1)):
                counts[i] += step
                ends[i] += step * each[i]
    pipelines = tuple(replace(p, num_microbatches=k) for p, k in zip(plan.pipelines, counts, strict=True))
    return replace(plan, pipelines=pipelines)
