"""Schedule of one stage as data: one-forward-one-backward.

Source: 1F1B; PipeDream-Flush, Narayanan et al. 2021, section 2.2.

Stage s may keep n = `Pipeline.in_flight(s)` of the K microbatches: 1F1B's min(P - s, K) unless the
plan sets another number. It runs n - 1 forwards, then one forward and one backward in turn, then
drains. A receive blocks until its message has arrived. A send may block while CHANNEL_DEPTH earlier
ones in its direction have not been received. With depth d there is no deadlock as long as a stage
keeps at most 2 d more than the stage after it. Before the stage takes its first gradient, the next
stage takes its own number and d more (it can send d gradients), and d wait in the channel.
`planner.plan.check_plan` admits at most MOST_AHEAD more, which is less.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from planner.plan import Pipeline

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
    num_microbatches = pipeline.num_microbatches
    warm_up = pipeline.in_flight(stage) - 1
    actions: list[StageAction] = []
    for microbatch in range(warm_up):
        actions += _forward(stage, num_stages, microbatch)
    for microbatch in range(num_microbatches - warm_up):
        actions += _forward(stage, num_stages, warm_up + microbatch)
        actions += _backward(stage, num_stages, microbatch)
    for microbatch in range(num_microbatches - warm_up, num_microbatches):
        actions += _backward(stage, num_stages, microbatch)
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
