"""Inputs of a stage's blocks, in host memory between their forward and their backward pass.

Copies run on streams of their own, beside the passes: an input goes down while its block runs, and
comes up while the block after it runs backward. So a device holds two inputs at a time. On the CPU
inputs are copied at once, and nothing is saved.
"""

import weakref
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Moved:
    """One input. before: that of the block before, in the same pass."""

    def __init__(self, device_tensor: Tensor, before: "weakref.ref[_Moved] | None") -> None:
        self._before = before
        self._device = device_tensor.device
        self._arriving: Tensor | None = None
        given = device_tensor.detach()
        if self._device.type != "cuda":
            self._host = given.clone()
            return
        # The allocator keeps pinned memory, and gives it out again only after its copies.
        self._host = torch.empty(given.shape, dtype=given.dtype, pin_memory=True)
        stream = _stream(self._device, "down")
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._host.copy_(given, non_blocking=True)
        given.record_stream(stream)

    def fetch(self) -> None:
        """Begin to copy it to the device, if that has not begun."""
        if self._arriving is not None:
            return
        if self._device.type != "cuda":
            self._arriving = self._host
            return
        stream = _stream(self._device, "up")
        stream.wait_stream(_stream(self._device, "down"))
        with torch.cuda.stream(stream):
            self._arriving = self._host.to(self._device, non_blocking=True)

    def take(self) -> Tensor:
        """Return it on the device for the current stream, and begin to fetch the one before."""
        self.fetch()
        found = self._arriving
        assert found is not None
        self._arriving = None
        if self._device.type == "cuda":
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(_stream(self._device, "up"))
            found.record_stream(current)
        before = self._before() if self._before is not None else None
        if before is not None:
            before.fetch()
        return found


class MovedInputs:
    """Moves the inputs of one stage's blocks, which run in order in each pass."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin the pass of a microbatch through the blocks."""
        self._last: weakref.ref[_Moved] | None = None

    def moving(self) -> AbstractContextManager[None]:
        """Return a context in which what a checkpointed block saves, its input, goes to the host.

        What the block saves inside is saved by the checkpoint's own rules.
        """
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, saved: Tensor) -> "Tensor | _Moved":
        # A checkpoint saves an empty tensor, too.
        if saved.numel() == 0:
            return saved
        moved = _Moved(saved, self._last)
        self._last = weakref.ref(moved)
        return moved


def _unpack(held: "Tensor | _Moved") -> Tensor:
    return held.take() if isinstance(held, _Moved) else held


_STREAMS: dict[tuple[torch.device, str], torch.cuda.Stream] = {}


def _stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    """Return the stream of one direction between a device and the host."""
    key = device, direction
    if key not in _STREAMS:
        _STREAMS[key] = torch.cuda.Stream(device)
    return _STREAMS[key]
