"""The bytes of tensors, to put into storage.

Apart from other payloads, so that a process that stores no tensor needs no torch: a node's agent
starts in less than half of the time, with a third of the memory.
"""

from __future__ import annotations

import torch


class TensorPayload:
    """Payload of a tensor's elements in C order.

    The tensor may be a strided view (a unit of a larger tensor) on any device. Only the rows (along
    dimension 0) that a read touches are copied, so a whole contiguous copy never exists.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        self._rows = tensor if tensor.dim() > 1 else tensor.reshape(-1)
        self._row_bytes = self._rows[:1].numel() * tensor.element_size() if tensor.numel() else 0
        self._size = tensor.numel() * tensor.element_size()

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> memoryview:
        if length <= 0 or self._row_bytes == 0:
            return memoryview(b"")
        first = offset // self._row_bytes
        last = -(-(offset + length) // self._row_bytes)
        start = offset - first * self._row_bytes
        return tensor_bytes(self._rows[first:last])[start : start + length]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's bytes in C order.

    They are its own memory if it is contiguous on the CPU, else a copy.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data
