"""The bytes of tensors, to put into storage.

Apart from other payloads, so that a process that stores no tensor needs no torch: a node's agent
starts in less than half of the time, with a third of the memory.
"""

import torch


class TensorPayload:
    """Payload of a tensor's elements in C order.

    The tensor may be a strided view (a unit of a larger tensor) on any device. Only the rows (along
    dimension 0) that a read touches are copied, so a whole contiguous copy never exists.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        item_bytes = tensor.element_size()
        self._rows = tensor if tensor.dim() > 1 else tensor.reshape(-1)
        self._row_bytes = 0
        if tensor.numel():
            self._row_bytes = self._rows[:1].numel() * item_bytes
        self._size = tensor.numel() * item_bytes

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> memoryview:
        if length <= 0 or self._row_bytes == 0:
            return memoryview(b"")
        end = offset + length
        first = offset // self._row_bytes
        # Rounded up: the last row may be needed in part.
        last = -(-end // self._row_bytes)
        rows = tensor_bytes(self._rows[first:last])
        start = offset - first * self._row_bytes
        return rows[start : start + length]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's bytes in C order.

    They are its own memory if it is contiguous on the CPU, else a copy.
    """
    on_host = tensor.detach().cpu().contiguous()
    flat = on_host.reshape(-1).view(torch.uint8)
    return flat.numpy().data
