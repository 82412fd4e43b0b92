"""Schedule of one stage as data: one-forward-one-backward.

Stage s may keep n = `Pipeline.in_flight(s)` of the K microbatches: 1F1B's min(P - s, K) unless the
plan sets another number. It runs n - 1 forwards, then one forward and one backward in turn, then
drains. That order is `planner.plans.stage_order`, which the planner simulates; this module adds the
messages.

A receive blocks until its message has arrived. A send may block while CHANNEL_DEPTH earlier ones in
its direction have not been received. With depth d there is no deadlock as long as a stage keeps at
most 2 d more than the stage after it. Before the stage takes its first gradient, the next stage
takes its own number and d more (it can send d gradients), and d wait in the channel.
`planner.plans.plan.check_plan` admits at most MOST_AHEAD more, which is less.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from planner.plans.in_flight import one_each
from planner.plans.plan import Pipeline
from planner.plans.stage_order import stage_order

CHANNEL_DEPTH = 2


class ActionKind(Enum):
    RECV_ACTIVATION = "recv_activation"
    FORWARD = "forward"
    SEND_ACTIVATION = "send_activation"
    RECV_GRADIENT = "recv_gradient"
    BACKWARD = "backward"
    SEND_GRADIENT = "send_gradient"


class StageAction(NamedTuple):
    """Single action of a stage for one microbatch."""

    kind: ActionKind
    microbatch: int


def one_forward_one_backward(pipeline: Pipeline, stage: int) -> list[StageAction]:
    """Return the actions of one stage for one optimizer step, in order.

    They are the same on every rank of the stage.
    """
    num_stages = len(pipeline.stages)
    in_flight = pipeline.most_in_flight or one_each(num_stages)
    actions: list[StageAction] = []
    for microbatch in stage_order(in_flight, stage, pipeline.num_microbatches):
        if microbatch >= 0:
            actions += _forward(stage, num_stages, microbatch)
        else:
            actions += _backward(stage, num_stages, ~microbatch)
    return actions


def _forward(stage: int, num_stages: int, microbatch: int) -> list[StageAction]:
    kinds = [ActionKind.FORWARD]
    if stage > 0:
        kinds.insert(0, ActionKind.RECV_ACTIVATION)
    if stage < num_stages - 1:
        kinds.append(ActionKind.SEND_ACTIVATION)
    return [StageAction(kind, microbatch) for kind in kinds]


def _backward(stage: int, num_stages: int, microbatch: int) -> list[StageAction]:
    kinds = [ActionKind.BACKWARD]
    if stage < num_stages - 1:
        kinds.insert(0, ActionKind.RECV_GRADIENT)
    if stage > 0:
        kinds.append(ActionKind.SEND_GRADIENT)
    return [StageAction(kind, microbatch) for kind in kinds]
