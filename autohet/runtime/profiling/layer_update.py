"""Gradients and the update of a profiled stage, laid out and computed as in a run.

A run adds each microbatch's gradients to flat fp32 buffers (`parallel.gradient_sync`), and updates
flat masters and moments by one fused kernel (`state.flat_optimizer`). The profile does the same.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from autohet.runtime.job import TrainingSection
from autohet.runtime.models.stages.stage import StageModel
from autohet.runtime.parallel.buckets import pad_to_alignment
from autohet.runtime.parallel.gradient_sync import squared_norm
from autohet.runtime.state.flat_optimizer import fused_update
from autohet.runtime.state.optimizer import UpdateRule


class FlatGradients:
    """Flat fp32 gradients of a stage, into which backward passes accumulate."""

    def __init__(self, stage: StageModel) -> None:
        self._parameters = list(stage.weights.local_parameters().values())
        self.num_elements = sum(pad_to_alignment(each.numel()) for each in self._parameters)
        self.flat = torch.zeros(self.num_elements, dtype=torch.float32, device=stage.spec.device)
        self._views = parameter_views(self.flat, self._parameters)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.dtype == torch.float32:
                parameter.grad = view
            else:
                parameter.register_post_accumulate_grad_hook(_add_to(view))

    def prepare_update(self, settings: TrainingSection) -> Callable[[], None]:
        """Return a function that updates masters and moments for one step.

        It zeroes the gradients, sums their squares, runs AdamW, and renews the compute copies.
        """
        all_frozen = not self._parameters
        if all_frozen:
            return lambda: None

        masters = torch.zeros_like(self.flat)
        first_moments = torch.zeros_like(self.flat)
        second_moments = torch.zeros_like(self.flat)
        parameters = [each.detach() for each in self._parameters]
        held = parameter_views(masters, self._parameters)
        torch._foreach_copy_(held, parameters)

        # Parameters in fp32 are their masters in a run; only lower precision has copies to renew.
        copies = []
        copied_from = []
        for parameter, master in zip(parameters, held, strict=True):
            if parameter.dtype != torch.float32:
                copies.append(parameter)
                copied_from.append(master)

        @torch.no_grad()
        def update() -> None:
            self.flat.zero_()
            squared_norm([self.flat], self.flat.device)
            state = (masters, first_moments, second_moments)
            fused_update([state], [self.flat], UpdateRule(settings, 1, 1.0))
            if copies:
                torch._foreach_copy_(copies, copied_from)

        return update


def parameter_views(flat: Tensor, parameters: list[torch.nn.Parameter]) -> list[Tensor]:
    """Return the part of the flat tensor of each parameter, in its shape."""
    views = []
    offset = 0
    for parameter in parameters:
        num_elements = parameter.numel()
        part = flat[offset : offset + num_elements]
        views.append(part.view(parameter.shape))
        offset += pad_to_alignment(num_elements)
    return views


def _add_to(view: Tensor) -> Callable[[Tensor], None]:
    def accumulate(parameter: Tensor) -> None:
        assert parameter.grad is not None
        view.add_(parameter.grad)
        parameter.grad = None

    return accumulate
