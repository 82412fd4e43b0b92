"""AdamW on fp32 masters, for parameters with weight decay and for those without, and Muon.

The arithmetic is PyTorch's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from autohet.runtime.facts.layout import STATE_KINDS, state_name
from autohet.runtime.job import TrainingSection
from autohet.runtime.models.parameter_spec import ParameterSpec, match_parameters
from autohet.runtime.step.learning_rate import learning_rate, matrix_learning_rate


def clip_factor(settings: TrainingSection, gradient_norm: float) -> float:
    """Return the factor that scales gradients to a global norm of at most `clip_norm`.

    Same rule as torch.nn.utils.clip_grad_norm_.
    """
    if settings.clip_norm is None:
        return 1.0
    return min(1.0, settings.clip_norm / (gradient_norm + 1e-6))


def parameters_without_decay(
    settings: TrainingSection, specs: Mapping[str, ParameterSpec]
) -> frozenset[str]:
    """Return the names of the parameters that `training.no_decay` exempts from weight decay.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    if settings.no_decay == "none":
        return frozenset()
    if settings.no_decay == "norms_and_biases":
        return frozenset(name for name, spec in specs.items() if spec.is_norm_or_bias)
    return match_parameters("training.no_decay", settings.no_decay, specs)


@dataclass(frozen=True)
class UpdateRule:
    """Update of step `step`, for one group of parameters.

    factor: scale of the gradients (token weighting and clipping). decays: `training.weight_decay`
    applies to the group.
    """

    settings: TrainingSection
    step: int
    factor: float
    decays: bool = True

    @torch.no_grad()
    def balance(self, bias: Tensor, held: Tensor, counts: Tensor) -> None:
        """Move a router's correction bias by the step's counts of tokens; keep them in `held`.

        No-op unless `training.router_balance` is bias.
        """
        if self.settings.router_balance == "bias":
            held.copy_(counts)
            move_bias(bias, held, self.settings.router_bias_speed)

    @torch.no_grad()
    def apply(
        self, state: Sequence[Sequence[Tensor]], gradients: Sequence[Tensor], *, fused: bool
    ) -> None:
        """Update masters and moments in place.

        state: masters, first moments, second moments, each as many tensors as `gradients`. fused:
        update by one kernel, which scales the gradients in place; else gradients stay unchanged.
        """
        masters, exp_avgs, exp_avg_sqs = map(list, state)
        device = masters[0].device
        scale: Tensor | None = None
        if fused:
            scale = torch.full((), 1.0 / self.factor, device=device)
        elif self.factor != 1.0:
            gradients = torch._foreach_mul(list(gradients), self.factor)
        # AdamW counts each tensor's steps: one element each.
        steps = torch.full((len(masters),), float(self.step), device=device if fused else "cpu")
        beta1, beta2 = self.settings.betas
        adamw(
            masters,
            list(gradients),
            exp_avgs,
            exp_avg_sqs,
            [],
            list(steps.unbind()),
            foreach=not fused,
            capturable=False,
            differentiable=False,
            fused=fused,
            grad_scale=scale,
            found_inf=None,
            has_complex=False,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=learning_rate(self.settings, self.step),
            weight_decay=self.settings.weight_decay if self.decays else 0.0,
            eps=self.settings.eps,
            maximize=False,
        )

    @torch.no_grad()
    def orthogonalize(
        self, masters: list[Tensor], gradients: list[Tensor], momenta: list[Tensor]
    ) -> None:
        """Update whole matrices and their momenta in place, by the step of `torch.optim.Muon`."""
        # Imported here, so that a torch that moves this function ends no run of AdamW.
        from torch.optim import _muon

        _muon.muon(
            masters,
            gradients,
            momenta,
            lr=matrix_learning_rate(self.settings, self.step),
            weight_decay=self.settings.weight_decay if self.decays else 0.0,
            momentum=self.settings.muon_momentum,
            nesterov=True,
            ns_coefficients=(_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C),
            ns_steps=_muon.DEFAULT_NS_STEPS,
            eps=_muon.EPS,
            adjust_lr_fn=self.settings.muon_adjust,
            has_complex=False,
        )


def move_bias(bias: Tensor, counts: Tensor, speed: float) -> None:
    """Move a router's correction bias against its load, in place.

    The bias of an expert with more tokens than the mean falls by `speed`, that of one with fewer
    rises (DeepSeek-V3 technical report, section 2.1.2). counts: tokens by expert.
    """
    exact = counts.double()
    bias.add_(torch.sign(exact.sum() - exact * len(exact)).to(bias.dtype), alpha=speed)


def update(state: Mapping[str, Tensor], gradients: Mapping[str, Tensor], rule: UpdateRule) -> None:
    """Apply a rule to the local slices in `state` (masters and moments by state name), in place.

    gradients: summed fp32 slices by parameter name. Elementwise, so that every holder of a shard
    gets the same bits.
    """
    names = sorted(gradients)
    tensors = [[state[state_name(kind, name)] for name in names] for kind in STATE_KINDS]
    rule.apply(tensors, [gradients[name] for name in names], fused=False)
