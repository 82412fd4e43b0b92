"""Live tensors that a training loop lends to another thread from one update to the next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


class BorrowedState:
    """A worker's local state by name, as it is now. Made by the training thread, read by another
    one; the tensors must not change until that one says so. `release` lets go of them.
    """

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = dict(state)
        self._versions = self._sum_of_versions()
        self._event: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in state.values()):
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def on_device(self) -> bool:
        return self._event is not None

    @property
    def changed(self) -> bool:
        """Whether an operation has written to any of them since they were borrowed."""
        return self._sum_of_versions() != self._versions

    @contextmanager
    def reading(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """The state, to be read on a CUDA stream of its own, behind what was under way when it was
        borrowed; read at the end.
        """
        if self._event is None:
            yield self._state
            return
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            stream.wait_event(self._event)
            yield self._state
        stream.synchronize()

    def release(self) -> None:
        self._state.clear()

    def _sum_of_versions(self) -> int:
        # Every in-place operation raises a tensor's version counter: their sum tells whether any
        # has changed.
        return sum(tensor._version for tensor in self._state.values())
