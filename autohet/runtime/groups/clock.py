"""When the stream of a device came to a place in it: the host's clock says only when something was
launched.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class StreamClock(Protocol):
    """`mark` notes a place in the current stream. `seconds` between two places may be asked for
    once the host has waited for what came after them (a step's vote): asking earlier may hold up
    the host. `in_step_with_host`: a mark is reached when it is made.
    """

    in_step_with_host: bool

    def mark(self) -> Any: ...
    def seconds(self, begin: Any, end: Any) -> float: ...


class HostClock:
    """Of the CPU, which computes when it is told to."""

    in_step_with_host = True

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class EventClock:
    """Of a GPU: events in its stream, which tell its own time."""

    in_step_with_host = False

    def mark(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3
