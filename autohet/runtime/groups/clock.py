"""Clocks of device streams: they time when a stream reaches a place in it.

The host's clock gives only the time of a launch.
"""

import time
from typing import Any, Protocol

import torch


class StreamClock(Protocol):
    """Clock of the current stream.

    `mark` notes a place in the stream; `seconds` returns the time between two places. Call
    `seconds` only after the host has waited for later work (a step's vote); an earlier call may
    block the host. `in_step_with_host`: the stream reaches a mark as soon as it is made.
    """

    in_step_with_host: bool

    def mark(self) -> Any: ...
    def seconds(self, begin: Any, end: Any) -> float: ...


class HostClock:
    """Clock of the CPU, which computes each operation at its call."""

    in_step_with_host = True

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class EventClock:
    """Clock of a GPU: events in its stream, which carry the GPU's own time."""

    in_step_with_host = False

    def mark(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3
