"""How long a rank computes between its collectives; EMULATION of a GPU type's speed by sleeping before each of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from autohet.runtime.groups import Group

SLICE_S = 0.05


class ComputeClock:
    """seconds: since `begin`, of the host's time outside collectives. What operators `owe` on the emulated device is slept out there.
    stopped: whether sleeping is to end."""

    def __init__(self, stopped: Callable[[], bool] = lambda: False) -> None:
        self.seconds = 0.0
        self._stopped, self._owed, self._since = stopped, 0.0, time.perf_counter()

    def begin(self) -> None:
        self.seconds, self._owed, self._since = 0.0, 0.0, time.perf_counter()

    def owe(self, seconds: float) -> None:
        self._owed += seconds

    def pause(self) -> None:
        """The rank is about to wait for others, or has ended."""
        while (left := self._since + self._owed - time.perf_counter()) > 0 and not self._stopped():
            time.sleep(min(left, SLICE_S))
        self.seconds += time.perf_counter() - self._since
        self._owed = 0.0

    def resume(self) -> None:
        self._since = time.perf_counter()


class ClockedGroup:
    """A group during whose calls the clock stands still."""

    def __init__(self, group: Group, clock: ComputeClock) -> None:
        self._group, self._clock = group, clock
        self.rank, self.size, self.members = group.rank, group.size, group.members

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._clock.pause()
        try:
            return function(*arguments)
        finally:
            self._clock.resume()

    def all_reduce(self, tensor: Tensor) -> None:
        self._call(self._group.all_reduce, tensor)

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        self._call(self._group.all_gather, out, part)

    def send(self, tensor: Tensor, to: str, tag: int) -> Any:
        return self._call(self._group.send, tensor, to, tag)

    def recv(self, tensor: Tensor, source: str, tag: int) -> Any:
        return self._call(self._group.recv, tensor, source, tag)

    def wait_on_stream(self, work: Any) -> None:
        self._call(self._group.wait_on_stream, work)

    def start_all_reduce(self, tensor: Tensor) -> Any:
        return self._call(self._group.start_all_reduce, tensor)

    def wait_on_host(self, work: Any) -> None:
        self._call(self._group.wait_on_host, work)
