"""Adapters by peft itself, in one process: what every plan is held against."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from autohet.runtime.job import TrainingSection
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
    model = peft_reference_model(config, parameters)
    logits = model(tokens).logits
    loss = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    loss.backward()
    gradients = {name: tensor.grad for name, tensor in named_adapters(model)}
    return logits.detach(), loss.item(), {k: v for k, v in gradients.items() if v is not None}


def train_peft(
    config: PreTrainedConfig,
    parameters: Mapping[str, Tensor],
    training: TrainingSection,
    rows: Rows,
    steps: int,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses by step, and the adapters after the last."""
    model = peft_reference_model(config, parameters)
    losses = list(train_reference(model, training, rows, steps))
    return losses, {name: tensor.detach() for name, tensor in named_adapters(model)}
