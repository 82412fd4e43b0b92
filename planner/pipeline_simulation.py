"""One pipeline's 1F1B step as an exact event simulation, and the bound that search uses.

Source of the schedule: Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (PipeDream-Flush), 2021, section 2.2: stage i of P
runs min(P - i - 1, K) warm-up forwards, then one forward and one backward in turn, then the backwards that remain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """Seconds of one microbatch: per stage [P] forward and backward, per boundary [P - 1] activation and gradient transfer.

    A transfer follows its producer and delays its consumer. `blocking` transfers also keep the sender from its next action.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    send_forward_s: Sequence[float]
    send_backward_s: Sequence[float]
    blocking: bool = False


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end seconds of every action: arrays [P, K]; `end_s` [P] is when each stage has finished its last backward."""

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
    """Runs every stage's actions as soon as its worker is free and its input has arrived. Cost O(P K).

    The dependency graph is acyclic, so a sweep that takes each stage's next action whenever its input is known ends; the order in which
    stages are swept does not change any time.
    """
    num_stages = len(times.forward_s)
    shape = (num_stages, num_microbatches)
    f_start, f_end, b_start, b_end = (np.full(shape, np.nan) for _ in range(4))
    arrive_f = [[0.0 if s == 0 else -1.0] * num_microbatches for s in range(num_stages)]
    arrive_b = [[-1.0] * num_microbatches for _ in range(num_stages)]
    actions = [one_f_one_b(s, num_stages, num_microbatches) for s in range(num_stages)]
    position, free = [0] * num_stages, [0.0] * num_stages
    waiting = list(range(num_stages - 1, -1, -1))
    while waiting:
        stage = waiting.pop()
        while position[stage] < len(actions[stage]):
            is_forward, m = actions[stage][position[stage]]
            ready = (arrive_f if is_forward else arrive_b)[stage][m]
            if ready < 0.0:
                break
            start = max(free[stage], ready)
            if is_forward:
                end = start + times.forward_s[stage]
                f_start[stage, m], f_end[stage, m] = start, end
                last = stage == num_stages - 1
                sent = end if last else end + times.send_forward_s[stage]
                if last:
                    arrive_b[stage][m] = end
                else:
                    arrive_f[stage + 1][m] = sent
                    waiting.append(stage + 1)
            else:
                end = start + times.backward_s[stage]
                b_start[stage, m], b_end[stage, m] = start, end
                sent = end if stage == 0 else end + times.send_backward_s[stage - 1]
                if stage > 0:
                    arrive_b[stage - 1][m] = sent
                    waiting.append(stage - 1)
            free[stage] = sent if times.blocking else end
            position[stage] += 1
    return Timeline(f_start, f_end, b_start, b_end)


def pipeline_bound_s(times: PipelineTimes, num_microbatches: int) -> float:
    """A lower bound of `simulate_pipeline(...).total_s`: for each stage, the first microbatch's way to it, its work, the last one's way back.

    max over s of: sum over stages before s of (f + send) + K (f_s + b_s) + sum over stages before s of (b + send), and the whole way of one
    microbatch. Equality holds for a single stage, and for equal stages without transfers.
    """
    forward, backward = np.asarray(times.forward_s), np.asarray(times.backward_s)
    send = np.asarray(times.send_forward_s) + np.asarray(times.send_backward_s)
    reach = np.concatenate([[0.0], np.cumsum(forward[:-1] + backward[:-1] + send)])
    whole = float((forward + backward).sum() + send.sum())
    return max(whole, float((reach + num_microbatches * (forward + backward)).max()))
