"""One-forward-one-backward (1F1B; PipeDream-Flush, Narayanan et al. 2021, section 2.2) as data: what one stage does, in order.

A stage s of P keeps min(P - s - 1, K) forwards in flight before its first backward, then alternates, then drains. A
receive blocks until its
message is there. A send may block while CHANNEL_DEPTH earlier ones in its direction have not been taken; even with 1 there is no deadlock.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

CHANNEL_DEPTH = 2


class Kind(Enum):
    RECV_ACTIVATION = "recv_activation"
    FORWARD = "forward"
    SEND_ACTIVATION = "send_activation"
    RECV_GRADIENT = "recv_gradient"
    BACKWARD = "backward"
    SEND_GRADIENT = "send_gradient"


class Action(NamedTuple):
    """One thing that a stage does for one microbatch."""

    kind: Kind
    microbatch: int


def num_in_flight(stage: int, num_stages: int, num_microbatches: int) -> int:
    """Most microbatches whose activations stage `stage` keeps at one time."""
    return min(num_stages - stage, num_microbatches)


def one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """The actions of one stage for one optimizer step, in the order in which it takes them."""
    warm_up = num_in_flight(stage, num_stages, num_microbatches) - 1
    actions: list[Action] = []
    for microbatch in range(warm_up):
        actions += _forward(stage, num_stages, microbatch)
    for microbatch in range(num_microbatches - warm_up):
        actions += _forward(stage, num_stages, warm_up + microbatch)
        actions += _backward(stage, num_stages, microbatch)
    for microbatch in range(num_microbatches - warm_up, num_microbatches):
        actions += _backward(stage, num_stages, microbatch)
    return actions


def _forward(stage: int, num_stages: int, microbatch: int) -> list[Action]:
    kinds = [Kind.RECV_ACTIVATION] * (stage > 0) + [Kind.FORWARD] + [Kind.SEND_ACTIVATION] * (stage < num_stages - 1)
    return [Action(kind, microbatch) for kind in kinds]


def _backward(stage: int, num_stages: int, microbatch: int) -> list[Action]:
    kinds = [Kind.RECV_GRADIENT] * (stage < num_stages - 1) + [Kind.BACKWARD] + [Kind.SEND_GRADIENT] * (stage > 0)
    return [Action(kind, microbatch) for kind in kinds]
