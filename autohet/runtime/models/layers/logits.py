"""Elementwise adjustment of a decoder's logits before the loss: a factor, a divisor or a soft-cap.

It is the same on every slice of the vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from autohet.runtime.models.layers.autograd import apply


@dataclass(frozen=True)
class LogitAdjustment:
    """Adjustment x * factor / divisor, then softcap * tanh(x / softcap)."""

    factor: float = 1.0
    divisor: float = 1.0
    softcap: float | None = None

    @property
    def changes_nothing(self) -> bool:
        return self == UNCHANGED

    def apply(self, logits: Tensor) -> Tensor:
        """Return the adjusted logits, in the order and format of the library's operations.

        Autograd keeps the result alone.
        """
        if self.changes_nothing:
            return logits
        return apply(_Adjust, logits, self)

    def compute(self, logits: Tensor) -> Tensor:
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh_().mul_(self.softcap)
        return logits

    def derivative(self, adjusted: Tensor) -> Tensor | float:
        """Return the derivative at the result `adjusted`: a number, or one for each element."""
        slope = self.factor / self.divisor
        if self.softcap is None:
            return slope
        # The derivative of tanh is 1 - tanh^2, and the result is softcap * tanh.
        squared = (adjusted / self.softcap).square_()
        return (1.0 - squared).mul_(slope)


def adjustment_of(config: PreTrainedConfig) -> LogitAdjustment:
    """Return the adjustment by the keys of Cohere's, Granite's and Gemma's configs."""
    return LogitAdjustment(
        factor=getattr(config, "logit_scale", None) or 1.0,
        divisor=getattr(config, "logits_scaling", None) or 1.0,
        softcap=getattr(config, "final_logit_softcapping", None),
    )


class _Adjust(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, adjustment: LogitAdjustment) -> Tensor:
        adjusted = adjustment.compute(logits)
        ctx.adjustment = adjustment
        ctx.save_for_backward(adjusted)
        return adjusted

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (adjusted,) = ctx.saved_tensors
        return gradients[0] * ctx.adjustment.derivative(adjusted), None


UNCHANGED = LogitAdjustment()
