"""Arithmetic of a faulty device: results of some operators with flipped bits."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
NORMS = (aten.rsqrt,)
SOFTMAX = (aten._softmax, aten._safe_softmax)


@dataclass(frozen=True)
class Fault:
    """rate: of the elements of results. bit: the one that flips, of 32; None: any of the mantissa.
    passes: forward, backward or both. part: number of the matrix of a batch (a head) whose results
    are wrong; None: all.
    """

    operators: Collection[Any] = PRODUCTS
    rate: float = 1e-4
    bit: int | None = None
    passes: str = "both"
    part: int | None = None
    seed: int = 0


@dataclass
class FaultyArithmetic(TorchDispatchMode):
    """Within it, operators of this thread have the fault."""

    fault: Fault
    generator: torch.Generator = field(init=False)
    flips: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(self.fault.seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_backward = torch._C._current_graph_task_id() != -1
        wanted = {"both": True, "forward": not is_backward, "backward": is_backward}
        if func.overloadpacket in self.fault.operators and wanted[self.fault.passes]:
            self._disturb(out)
        return out

    def _disturb(self, out: Tensor) -> None:
        fault = self.fault
        if fault.part is not None:
            if out.dim() != 3 or out.shape[0] <= fault.part:
                return
            out = out[fault.part]
        hit = torch.rand(out.shape, generator=self.generator) < fault.rate
        bits = torch.full((), 23)
        if fault.bit is None:
            bits = torch.randint(0, 23, out.shape, generator=self.generator)
        else:
            bits = torch.full(out.shape, fault.bit)
        self.flips += int(hit.sum())
        wrong = out.view(torch.int32) ^ (1 << bits).int()
        out.view(torch.int32).copy_(torch.where(hit, wrong, out.view(torch.int32)))
