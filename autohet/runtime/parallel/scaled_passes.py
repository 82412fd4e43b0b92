"""Backward passes of a stage in fp16, on scaled gradients.

Gradients are scaled inside the stage alone. What crosses its borders and what is added to the fp32
sums is not scaled, so the other stages, and pipelines that compute a layer in another format, know
nothing of it. Scales are powers of two: both conversions are exact unless fp16 overflows or
underflows.
"""

import torch
from torch import Tensor


class ScaledPasses:
    """Scale of one stage's gradients, and count of its overflows in this step.

    A microbatch overflows here if a gradient that the stage computed is not finite and the gradient
    (or loss) that it was given is. The host waits for nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.factor = 1.0
        self.overflows = torch.zeros((), device=device)
        """Number of microbatches of this step that overflowed."""
        self._one = torch.ones((), device=device)
        self._own = torch.zeros((), device=device)
        self._given = torch.zeros((), device=device)

    def begin(self, factor: float) -> None:
        """Begin a step with this scale."""
        self.factor = factor
        self.overflows.zero_()
        self._own.zero_()
        self._given.zero_()

    def root_gradient(self, loss: Tensor) -> Tensor:
        """Return the gradient with which the backward pass of a loss begins."""
        self._check_given(loss.detach())
        return torch.full_like(loss, self.factor, requires_grad=False)

    def scale(self, gradient: Tensor) -> Tensor:
        """Return an fp32 gradient from the next stage, scaled, in fp16."""
        self._check_given(gradient)
        return (gradient * self.factor).to(torch.float16)

    def unscale_factor(self, gradient: Tensor) -> float:
        """Note whether a scaled gradient is finite; return the factor that removes its scale."""
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], self._own, self._one)
        return 1.0 / self.factor

    def unscale(self, gradient: Tensor) -> Tensor:
        """Return a gradient for the stage before, in fp32 and not scaled."""
        return gradient.float().mul_(self.unscale_factor(gradient))

    def end_microbatch(self) -> None:
        """Count the microbatch if it overflowed."""
        own = self._own.clamp(max=1.0)
        was_finite = 1.0 - self._given
        self.overflows += own * was_finite
        self._own.zero_()
        self._given.zero_()

    def _check_given(self, given: Tensor) -> None:
        is_finite = torch.isfinite(given).all()
        self._given.copy_(is_finite.logical_not())
