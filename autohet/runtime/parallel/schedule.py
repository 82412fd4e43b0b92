"""Schedule of one stage: one-forward-one-backward.

Stage s may keep n = `Pipeline.in_flight(s)` of the K microbatches: 1F1B's min(P - s, K) unless the
plan sets another number. It runs n - 1 forwards, then one forward and one backward in turn, then
drains. That order is `planner.plans.stage_order`, which the planner simulates. The executor
receives before each pass and sends after it.

A receive blocks until its message has arrived. A send may block while CHANNEL_DEPTH earlier ones in
its direction have not been received. With depth d there is no deadlock as long as a stage keeps at
most 2 d more than the stage after it. Before the stage takes its first gradient, the next stage
takes its own number and d more (it can send d gradients), and d wait in the channel.
`planner.plans.plan.check_plan` admits at most MOST_AHEAD more, which is less.
"""

from planner.plans.in_flight import one_each
from planner.plans.plan import Pipeline
from planner.plans.stage_order import stage_order

CHANNEL_DEPTH = 2


def one_forward_one_backward(pipeline: Pipeline, stage: int, count: int | None = None) -> list[int]:
    """Return the passes of one stage in one step, in order: m forward, ~m backward.

    They are the same on every rank of the stage. count: microbatches; None: those of the plan.
    """
    in_flight = pipeline.most_in_flight or one_each(len(pipeline.stages))
    return stage_order(in_flight, stage, pipeline.num_microbatches if count is None else count)
