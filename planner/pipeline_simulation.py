"""One pipeline's 1F1B step as an exact event simulation, and the bound that search uses.

Source of the schedule: Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (PipeDream-Flush), 2021,
section 2.2: stage i of P runs min(P - i - 1, K) warm-up forwards, then one forward and one backward in turn, then
the backwards that remain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Transfers = Literal["both", "receiver", "none"]


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """Seconds of one microbatch: per stage [P] forward and backward, per boundary [P - 1] activation and gradient
    transfer.

    A transfer follows its producer and delays its consumer. `transfers` says whom it occupies besides: "both" the
    receiver before its action and the sender after it (blocking calls that meet), the "receiver" alone, or "none"
    (it runs beside all work).
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    send_forward_s: Sequence[float]
    send_backward_s: Sequence[float]
    transfers: Transfers = "none"


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end seconds of every action: arrays [P, K]; `end_s` [P] is when each stage has finished its last
    backward."""

    forward_start_s: FloatArray
    forward_end_s: FloatArray
    backward_start_s: FloatArray
    backward_end_s: FloatArray

    @property
    def end_s(self) -> FloatArray:
        return np.asarray(self.backward_end_s[:, -1])

    @property
    def total_s(self) -> float:
        return float(self.backward_end_s.max())


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> list[tuple[bool, int]]:
    """The actions of one stage in order: (is forward, microbatch)."""
    warmup = min(num_stages - stage - 1, num_microbatches)
    actions = [(True, m) for m in range(warmup)]
    for m in range(num_microbatches - warmup):
        actions += [(True, warmup + m), (False, m)]
    return actions + [(False, m) for m in range(num_microbatches - warmup, num_microbatches)]


def simulate_pipeline(times: PipelineTimes, num_microbatches: int) -> Timeline:
    """Runs every stage's actions as soon as its worker is free and its input is there. Cost O(P K).

    The dependency graph is acyclic, so a sweep that takes each stage's next action whenever its input is known ends,
    and the order in which stages are swept does not change any time.
    """
    num_stages = len(times.forward_s)
    state = _Simulation(times, num_stages, num_microbatches)
    waiting = list(range(num_stages - 1, -1, -1))
    while waiting:
        waiting += state.advance(waiting.pop())
    return Timeline(*(np.array(table) for table in (state.f_start, state.f_end, state.b_start, state.b_end)))


class _Simulation:
    """What `simulate_pipeline` knows: per stage its next action and when it is free, per input when it is there
    (None: not yet)."""

    def __init__(self, times: PipelineTimes, num_stages: int, num_microbatches: int) -> None:
        self.times, self.last = times, num_stages - 1
        self.receiver_waits, self.sender_waits = times.transfers != "none", times.transfers == "both"
        self.f_start, self.f_end, self.b_start, self.b_end = (
            [[0.0] * num_microbatches for _ in range(num_stages)] for _ in range(4)
        )
        self.inputs: list[list[list[float | None]]] = [
            [[None] * num_microbatches for _ in range(num_stages)] for _ in range(2)
        ]
        self.inputs[0][0] = [0.0] * num_microbatches
        self.actions = [one_f_one_b(s, num_stages, num_microbatches) for s in range(num_stages)]
        self.position, self.free = [0] * num_stages, [0.0] * num_stages

    def advance(self, stage: int) -> list[int]:
        """Runs the stage's actions until one lacks its input; returns the stages that got new input."""
        woken: list[int] = []
        actions = self.actions[stage]
        while self.position[stage] < len(actions):
            is_forward, m = actions[self.position[stage]]
            ready = self.inputs[0 if is_forward else 1][stage][m]
            if ready is None:
                break
            self.position[stage] += 1
            if is_forward:
                self._forward(stage, m, ready)
                woken += [stage + 1] if stage < self.last else []
            else:
                self._backward(stage, m, ready)
                woken += [stage - 1] if stage > 0 else []
        return woken

    def _forward(self, stage: int, m: int, ready: float) -> None:
        receive = self.times.send_forward_s[stage - 1] if stage > 0 else 0.0
        start = max(self.free[stage], ready) + (receive if self.receiver_waits else 0.0)
        end = start + self.times.forward_s[stage]
        self.f_start[stage][m], self.f_end[stage][m], self.free[stage] = start, end, end
        if stage == self.last:
            self.inputs[1][stage][m] = end
            return
        send = self.times.send_forward_s[stage]
        self.inputs[0][stage + 1][m] = end if self.receiver_waits else end + send
        self.free[stage] = end + send if self.sender_waits else end

    def _backward(self, stage: int, m: int, ready: float) -> None:
        receive = self.times.send_backward_s[stage] if stage < self.last else 0.0
        start = max(self.free[stage], ready) + (receive if self.receiver_waits else 0.0)
        end = start + self.times.backward_s[stage]
        self.b_start[stage][m], self.b_end[stage][m], self.free[stage] = start, end, end
        if stage == 0:
            return
        send = self.times.send_backward_s[stage - 1]
        self.inputs[1][stage - 1][m] = end if self.receiver_waits else end + send
        self.free[stage] = end + send if self.sender_waits else end


def pipeline_bound_s(times: PipelineTimes, num_microbatches: int) -> float:
    """A lower bound of `simulate_pipeline(...).total_s`: each stage's work, after the way of a first microbatch to
    it and back.

    max over s of: sum over stages before s of (f + b) and their transfers, + K (f_s + b_s) (and the transfers that
    occupy the stage for all but one microbatch), and the whole way of one microbatch. Equality holds for one stage,
    and for equal stages without transfers.
    """
    work = np.asarray(times.forward_s) + np.asarray(times.backward_s)
    send = np.asarray(times.send_forward_s) + np.asarray(times.send_backward_s)
    reach = np.concatenate([[0.0], np.cumsum(work[:-1] + send)])
    busy = num_microbatches * work
    if times.transfers != "none":
        received = np.concatenate([[0.0], times.send_forward_s]) + np.concatenate([times.send_backward_s, [0.0]])
        busy = busy + (num_microbatches - 1) * received
    if times.transfers == "both":
        sent = np.concatenate([times.send_forward_s, [0.0]]) + np.concatenate([[0.0], times.send_backward_s])
        busy = busy + (num_microbatches - 1) * sent
    return max(float(work.sum() + send.sum()), float((reach + busy).max()))
