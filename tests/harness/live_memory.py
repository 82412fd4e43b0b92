"""Bytes of tensors alive, counted operator by operator: what a GPU's allocator would be asked for,
on any device.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """While entered, counts the storages that operators of this thread make until they are freed.
    `known` tensors count from the start (parameters, whose views would else be taken for new) but
    are in neither `bytes` nor `peak_bytes`.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.bytes = self.peak_bytes = 0
        self._alive: dict[int, int] = {}
        for tensor in known:
            self._add(tensor, counted=False)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return out

    def _add(self, tensor: Tensor, *, counted: bool = True) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = (
            storage.nbytes() if counted and tensor.device.type != "meta" else 0
        )  # shapes without memory
        self.bytes += self._alive[key]
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.bytes -= self._alive.pop(key)
