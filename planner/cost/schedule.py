"""Exact event simulation of a pipeline's 1F1B step, and the bound that search uses.

The order of actions is the runtime's, from `planner.plans.stage_order`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.arrays import Floats
from planner.plans.in_flight import one_each
from planner.plans.stage_order import action_slots

IntArray = NDArray[np.int32]
Transfers = Literal["both", "receiver", "none"]


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """Seconds of one microbatch in a pipeline.

    Per stage [P]: forward and backward. Per boundary [P - 1]: activation and gradient transfer.

    A transfer follows its producer and delays its consumer. `transfers` says whom it occupies in
    addition: "both" the receiver before its action and the sender after it (blocking calls that
    meet), the "receiver" alone, or "none" (it runs beside all work; transfers of one sender follow
    each other). `most_in_flight`: microbatches that each stage keeps; empty: 1F1B's.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    send_forward_s: Sequence[float]
    send_backward_s: Sequence[float]
    transfers: Transfers = "none"
    most_in_flight: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end seconds of every action: arrays [P, K]."""

    forward_start_s: Floats
    forward_end_s: Floats
    backward_start_s: Floats
    backward_end_s: Floats

    @property
    def total_s(self) -> float:
        return float(self.backward_end_s.max())


def simulate_pipeline(times: PipelineTimes, num_microbatches: int) -> Timeline:
    """Run every stage's actions as soon as its worker is free and its input is there.

    Cost O(P K).
    """
    forward_ends, backward_ends = run_1f1b(times, num_microbatches)
    forward_end = np.array(forward_ends)
    backward_end = np.array(backward_ends)
    forward = np.asarray(times.forward_s)[:, None]
    backward = np.asarray(times.backward_s)[:, None]
    return Timeline(
        forward_start_s=forward_end - forward,
        forward_end_s=forward_end,
        backward_start_s=backward_end - backward,
        backward_end_s=backward_end,
    )


def ends_of_stages(times: PipelineTimes, num_microbatches: int) -> tuple[float, ...]:
    """Return the seconds at which each stage has finished its last backward, [P]."""
    _, backward_ends = run_1f1b(times, num_microbatches)
    return tuple(ends[-1] for ends in backward_ends)


_Actions = Iterable[tuple[int, int]]  # stage and microbatch; ~microbatch marks a backward
_Ends = tuple[list[list[float]], list[list[float]]]


def run_1f1b(times: PipelineTimes, num_microbatches: int) -> _Ends:
    """Return ends of every forward and every backward, [P][K].

    They are plain floats, since searches call it thousands of times.
    """
    numbers = times.most_in_flight or one_each(len(times.forward_s))
    stages, microbatches = _actions(numbers, num_microbatches)
    actions = zip(stages.tolist(), microbatches.tolist(), strict=True)
    if times.transfers == "none":
        return _run_beside(times, num_microbatches, actions)
    return _run_occupying(times, num_microbatches, actions)


def _no_ends(depth: int, k: int) -> list[list[float]]:
    return [[0.0] * k for _ in range(depth)]


def _run_beside(times: PipelineTimes, k: int, actions: _Actions) -> _Ends:
    """Run the pipeline with transfers beside all work.

    Transfers of one sender follow each other.
    """
    # Indices and comparisons instead of enumerate, min and max: this loop is most of a simulation.
    forward = times.forward_s
    backward = times.backward_s
    # boundary s lies before stage s
    before_f = [0.0, *times.send_forward_s, 0.0]
    before_b = [0.0, *times.send_backward_s, 0.0]
    depth = len(forward)
    last = depth - 1
    done_f = _no_ends(depth, k)
    done_b = _no_ends(depth, k)
    # when each microbatch is there; the first stage's forwards, and the last one's backwards, wait
    # for nobody
    there_f = _no_ends(depth + 1, k)
    there_b = _no_ends(depth + 1, k)
    free = [0.0] * depth
    sent = [0.0] * depth
    for s, i in actions:
        start = free[s]
        if i >= 0:
            ready = there_f[s][i]
            if ready > start:
                start = ready
            end = start + forward[s]
            done_f[s][i] = end
            free[s] = end
            if s < last:
                begin = end if end > sent[s] else sent[s]
                arrival = begin + before_f[s + 1]
                sent[s] = arrival
                there_f[s + 1][i] = arrival
        else:
            ready = there_b[s][~i]
            if ready > start:
                start = ready
            end = start + backward[s]
            done_b[s][~i] = end
            free[s] = end
            if s:
                begin = end if end > sent[s] else sent[s]
                arrival = begin + before_b[s]
                sent[s] = arrival
                there_b[s - 1][~i] = arrival
    return done_f, done_b


def _run_occupying(times: PipelineTimes, k: int, actions: _Actions) -> _Ends:
    """Run the pipeline with transfers that occupy their receiver before its action.

    If they occupy "both", they also occupy the sender after its action.
    """
    forward = times.forward_s
    backward = times.backward_s
    # boundary s lies before stage s
    before_f = [0.0, *times.send_forward_s, 0.0]
    before_b = [0.0, *times.send_backward_s, 0.0]
    depth = len(forward)
    last = depth - 1
    hold = 1.0 if times.transfers == "both" else 0.0
    hold_f = [hold * seconds for seconds in before_f]
    hold_b = [hold * seconds for seconds in before_b]
    done_f = _no_ends(depth, k)
    done_b = _no_ends(depth, k)
    free = [0.0] * depth
    for s, i in actions:
        start = free[s]
        if i >= 0:
            if s:
                ready = done_f[s - 1][i]
                if ready > start:
                    start = ready
            end = start + before_f[s] + forward[s]
            done_f[s][i] = end
            free[s] = end + hold_f[s + 1]
        else:
            if s < last:
                ready = done_b[s + 1][~i]
                if ready > start:
                    start = ready
            end = start + before_b[s + 1] + backward[s]
            done_b[s][~i] = end
            free[s] = end + hold_b[s]
    return done_f, done_b


@lru_cache(maxsize=16)  # of 80 stages and 1,600 microbatches 2 MB each
def _actions(in_flight: tuple[int, ...], k: int) -> tuple[IntArray, IntArray]:
    """Return (stage, microbatch) of every action, in an order that respects all dependencies.

    ~microbatch marks a backward. Each stage's actions are in its `stage_order`.
    """
    depth = len(in_flight)
    forward, backward = action_slots(in_flight, k)
    slots = np.concatenate([forward.ravel(), backward.ravel()])
    order = np.argsort(slots, kind="stable")
    stages = np.tile(np.repeat(np.arange(depth), k), 2)[order]
    number = np.tile(np.arange(k), depth)
    microbatches = np.concatenate([number, ~number])[order]
    return stages.astype(np.int32), microbatches.astype(np.int32)


def pipeline_bound_s(times: PipelineTimes, num_microbatches: int) -> float:
    """Return a lower bound of `simulate_pipeline(...).total_s`.

    It is each stage's work, after the way of a first microbatch to it and back.

    max over s of: sum over stages before s of (f + b) and their transfers, + K (f_s + b_s) (and the
    transfers that occupy the stage for all but one microbatch), and the whole way of one
    microbatch. Equality holds for one stage, and for equal stages without transfers.
    """
    # plain floats: searches ask thousands of times, and arrays this short cost ten times as much
    there_s = times.send_forward_s
    back_s = times.send_backward_s
    last = len(times.forward_s) - 1
    # the transfers of the first microbatch are in `reach`
    again = num_microbatches - 1
    reach = 0.0
    most = 0.0
    for stage, (forward, backward) in enumerate(zip(times.forward_s, times.backward_s)):
        busy = num_microbatches * (forward + backward)
        if times.transfers != "none":
            busy += again * (there_s[stage - 1] if stage else 0.0)
            busy += again * (back_s[stage] if stage < last else 0.0)
        if times.transfers == "both":
            busy += again * (there_s[stage] if stage < last else 0.0)
            busy += again * (back_s[stage - 1] if stage else 0.0)
        most = max(most, reach + busy)
        reach += forward + backward
        if stage < last:
            reach += there_s[stage] + back_s[stage]
    return max(reach, most)
