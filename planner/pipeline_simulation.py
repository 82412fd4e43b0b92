"""One pipeline's 1F1B step as an exact event simulation, and the bound that search uses.

Source of the schedule: Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (PipeDream-Flush), 2021,
section 2.2: stage i of P runs min(P - i - 1, K) warm-up forwards, then one forward and one backward in turn, then
the backwards that remain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
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


def simulate_pipeline(times: PipelineTimes, num_microbatches: int) -> Timeline:
    """Runs every stage's actions as soon as its worker is free and its input is there. Cost O(P K)."""
    forward_end, backward_end = (
        np.array(ends)
        for ends in run_1f1b(
            times.forward_s, times.backward_s, times.send_forward_s, times.send_backward_s, num_microbatches,
            times.transfers,
        )
    )  # fmt: skip
    forward, backward = (np.asarray(seconds)[:, None] for seconds in (times.forward_s, times.backward_s))
    return Timeline(forward_end - forward, forward_end, backward_end - backward, backward_end)


def run_1f1b(
    forward: Sequence[float], backward: Sequence[float], send_forward: Sequence[float], send_backward: Sequence[float],
    num_microbatches: int, transfers: Transfers,
) -> tuple[list[list[float]], list[list[float]]]:  # fmt: skip
    """Ends of every forward and every backward, [P][K], in plain floats: searches call it thousands of times."""
    depth, k = len(forward), num_microbatches
    before_f, before_b = [0.0, *send_forward, 0.0], [0.0, *send_backward, 0.0]  # boundary s lies before stage s
    wait = 1.0 if transfers != "none" else 0.0
    travel, hold = 1.0 - wait, 1.0 if transfers == "both" else 0.0
    travel_f, travel_b = [travel * seconds for seconds in before_f], [travel * seconds for seconds in before_b]
    wait_f, wait_b = [wait * seconds for seconds in before_f], [wait * seconds for seconds in before_b]
    hold_f, hold_b = [hold * seconds for seconds in before_f], [hold * seconds for seconds in before_b]
    done_f, done_b = [[0.0] * k for _ in range(depth)], [[0.0] * k for _ in range(depth)]
    free, last = [0.0] * depth, depth - 1
    for s, i in zip(*_actions(depth, k), strict=True):
        start = free[s]
        if i >= 0:
            if s and (ready := done_f[s - 1][i] + travel_f[s]) > start:
                start = ready
            done_f[s][i] = end = start + wait_f[s] + forward[s]
            free[s] = end + hold_f[s + 1]
        else:
            if s < last and (ready := done_b[s + 1][~i] + travel_b[s + 1]) > start:
                start = ready
            done_b[s][~i] = end = start + wait_b[s + 1] + backward[s]
            free[s] = end + hold_b[s]
    return done_f, done_b


@lru_cache(maxsize=64)
def _actions(depth: int, k: int) -> tuple[list[int], list[int]]:
    """(stage, microbatch) of every action in an order in which each comes after those that it waits for; ~microbatch: backward.

    The order of a lockstep in which every action takes one slot. Stage s of P goes forward in slots s, s + 1, ... until P - s
    microbatches are in flight, then backward in slots 2P - 1 - s, 2P + 1 - s, ... and forward in those between.
    """
    stage, microbatch = np.arange(depth)[:, None], np.arange(k)[None, :]
    forward = np.where(microbatch < depth - stage, stage + microbatch, stage + 2 * microbatch)
    backward = 2 * depth - 1 - stage + 2 * microbatch
    order = np.argsort(np.concatenate([forward.ravel(), backward.ravel()]), kind="stable")
    stages = np.tile(np.repeat(np.arange(depth), k), 2)[order]
    number = np.tile(np.arange(k), depth)
    return stages.tolist(), np.concatenate([number, ~number])[order].tolist()


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
