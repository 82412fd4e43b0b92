"""Gradients and the update of a profiled stage, laid out and computed as in a run.

A run adds each microbatch's gradients to flat fp32 buffers (`parallel.gradient_sync`), and updates
flat masters and moments by one fused kernel (`state.flat_optimizer`). The profile does the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autohet.runtime.job import TrainingSection
from autohet.runtime.models import StageModel
from autohet.runtime.parallel.buckets import aligned
from autohet.runtime.parallel.gradient_sync import squared_norm
from autohet.runtime.state.flat_optimizer import fused_update
from autohet.runtime.state.optimizer import UpdateRule


class FlatGradients:
    """Flat fp32 gradients of a stage, into which backward passes accumulate."""

    def __init__(self, stage: StageModel) -> None:
        self._parameters = list(stage.weights.local_parameters().values())
        self.num_elements = sum(aligned(each.numel()) for each in self._parameters)
        self.flat = torch.zeros(self.num_elements, dtype=torch.float32, device=stage.spec.device)
        self._views = _views(self.flat, self._parameters)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.dtype == torch.float32:
                parameter.grad = view
            else:
                parameter.register_post_accumulate_grad_hook(_add_to(view))

    def prepare_update(self, settings: TrainingSection) -> Callable[[], None]:
        """Return a function that updates masters and moments for one step.

        It zeroes the gradients, sums their squares, runs AdamW, and renews the compute copies.
        """
        if not self._parameters:  # all frozen
            return lambda: None
        masters = torch.zeros_like(self.flat)
        moments = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        parameters = [each.detach() for each in self._parameters]
        held = _views(masters, self._parameters)
        torch._foreach_copy_(held, parameters)
        pairs = zip(parameters, held, strict=True)
        copies = [(copy, master) for copy, master in pairs if copy.dtype != torch.float32]

        @torch.no_grad()
        def update() -> None:
            self.flat.zero_()
            squared_norm([self.flat], self.flat.device)
            fused_update([(masters, *moments)], [self.flat], UpdateRule(settings, 1, 1.0))
            if copies:
                torch._foreach_copy_([copy for copy, _ in copies], [each for _, each in copies])

        return update


def _views(flat: Tensor, parameters: list[torch.nn.Parameter]) -> list[Tensor]:
    """Return the part of the flat tensor of each parameter, in its shape."""
    views = []
    offset = 0
    for parameter in parameters:
        views.append(flat[offset : offset + parameter.numel()].view(parameter.shape))
        offset += aligned(parameter.numel())
    return views


def _add_to(view: Tensor) -> Callable[[Tensor], None]:
    def accumulated(parameter: Tensor) -> None:
        assert parameter.grad is not None
        view.add_(parameter.grad)
        parameter.grad = None

    return accumulated
