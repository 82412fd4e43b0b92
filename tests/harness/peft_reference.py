"""Adapters by peft itself, in one process: what every plan is held against."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from autohet.runtime.job import TrainingSection
from autohet.runtime.models.layers.adapters import B_SUFFIX
from autohet.runtime.models.layers.expert_adapters import from_peft_layout
from autohet.runtime.models.quantized.weight import quantized_values
from autohet.runtime.models.registry import family_of
from autohet.runtime.step.reference import (
    Rows,
    named_adapters,
    peft_reference_model,
    train_reference,
)


def peft_gradients(
    config: PreTrainedConfig, parameters: Mapping[str, Tensor], tokens: Tensor, targets: Tensor
) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Logits, loss sum and gradients of the adapters."""
    model = peft_reference_model(config, with_base(config, parameters))
    logits = model(tokens).logits
    loss = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    loss.backward()
    gradients = {}
    for name, tensor in named_adapters(model):
        if tensor.grad is not None:
            gradients[name] = _own_layout(name, tensor.grad, parameters)
    return logits.detach(), loss.item(), gradients


def with_base(config: PreTrainedConfig, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters with the values of a quantized base, as `dequantize()` of transformers."""
    found = dict(parameters)
    for name, spec in family_of(config).parameter_specs(config).items():
        if spec.base_format is not None:
            found[name] = quantized_values(spec, parameters[name])
    return found


def _own_layout(name: str, tensor: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    if tensor.shape == parameters[name].shape or parameters[name].dim() != 3:
        return tensor
    return from_peft_layout(tensor, name.endswith(B_SUFFIX), len(parameters[name]))


def train_peft(
    config: PreTrainedConfig,
    parameters: Mapping[str, Tensor],
    training: TrainingSection,
    rows: Rows,
    steps: int,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses by step, and the adapters after the last."""
    model = peft_reference_model(config, with_base(config, parameters))
    losses = list(train_reference(model, training, rows, steps))
    trained = {}
    for name, tensor in named_adapters(model):
        trained[name] = _own_layout(name, tensor.detach(), parameters)
    return losses, trained
