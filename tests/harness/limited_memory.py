"""A device of limited memory, on the CPU: allocations beyond the limit fail as torch's allocator of
a GPU fails.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.harness.live_memory import LiveMemory


class LimitedMemory(LiveMemory):
    """Counts what operators of the entered threads allocate.

    Memory that comes from elsewhere (mapped files: the host's) is none of it.
    """

    limit_bytes: float = math.inf

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._add(leaf, counted=False)
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        if self.bytes > self.limit_bytes:
            del leaf, out
            raise torch.OutOfMemoryError(f"more than {self.limit_bytes:,.0f} bytes of this device")
        return out
