"""Live tensors that a training loop lends to another thread from one update to the next."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch


class BorrowedState:
    """Borrowed state: a worker's local tensors by name, as they are now.

    The training thread makes it and another thread reads it. The tensors must not change until the
    reader allows it. `release` drops the references to them.
    """

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = dict(state)
        self._versions = self._sum_of_versions()
        self.event: torch.cuda.Event | None = None
        """Recorded behind the work in flight; None if the state is in host memory."""
        if any(tensor.is_cuda for tensor in state.values()):
            self.event = torch.cuda.Event()
            self.event.record()

    @property
    def on_device(self) -> bool:
        return self.event is not None

    @property
    def changed(self) -> bool:
        """True if an operation has written to any of the tensors since they were borrowed."""
        return self._sum_of_versions() != self._versions

    @contextmanager
    def reading(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield the state, to be read on a separate CUDA stream.

        Reads come after the work that was in flight when the state was borrowed. At the end, after
        an error too, all that was queued there has ended: the host memory that it writes to may be
        unmapped next.
        """
        if self.event is None:
            yield self._state
            return
        stream = _reading_stream(self.event.device)
        stream.wait_event(self.event)
        try:
            with torch.cuda.stream(stream):
                yield self._state
        finally:
            stream.synchronize()

    def release(self) -> None:
        self._state.clear()

    def _sum_of_versions(self) -> int:
        # Every in-place operation raises a tensor's version counter: their sum tells whether any
        # has changed.
        return sum(tensor._version for tensor in self._state.values())


@cache
def _reading_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the process's one stream for reading borrowed state.

    PyTorch hands out 32 streams of each priority in turn: new ones for each snapshot would meet
    those of communicators, and each has its own pool of the allocator. Communicators take streams
    of normal priority, so this one is of high priority.
    """
    return torch.cuda.Stream(device, priority=-1)
