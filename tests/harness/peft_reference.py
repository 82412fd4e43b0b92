"""Adapters by peft itself, in one process: what every plan is held against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from autohet.runtime.job import TrainingSection
from autohet.runtime.models import adapter_of, family_of
from autohet.runtime.models.adapters import is_adapter, target_paths
from autohet.runtime.models.family import skeleton
from autohet.runtime.reference import Rows, reference_model, train_reference

PREFIX, DEFAULT = "base_model.model.", ".default.weight"


def peft_model(config: PreTrainedConfig, parameters: Mapping[str, Tensor]) -> Any:
    """peft's model with these parameters, named as the runtime names them."""
    base = {name: tensor for name, tensor in parameters.items() if not is_adapter(name)}
    model = reference_model(config, iter(base.items()))
    adapted = get_peft_model(model, lora_config(config, model))
    with torch.no_grad():
        for name, tensor in named_adapters(adapted):
            tensor.copy_(parameters[name])
    return adapted


def lora_config(config: PreTrainedConfig, model: Any) -> LoraConfig:
    """The config's adapter in peft's words."""
    adapter = adapter_of(config)
    assert adapter is not None
    paths = target_paths(adapter, family_of(config), skeleton(config))
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=paths,
        use_rslora=adapter.rslora,
        fan_in_fan_out=isinstance(model.get_submodule(paths[0]), Conv1D),
        lora_dropout=0.0,
    )


def named_adapters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(name as the runtime has it, parameter) of what peft trains."""
    for name, tensor in model.named_parameters():
        if tensor.requires_grad:
            yield name.removeprefix(PREFIX).removesuffix(DEFAULT) + ".weight", tensor


def peft_gradients(
    config: PreTrainedConfig, parameters: Mapping[str, Tensor], tokens: Tensor, targets: Tensor
) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Logits, loss sum and gradients of the adapters."""
    model = peft_model(config, parameters)
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
    model = peft_model(config, parameters)
    losses = list(train_reference(model, training, rows, steps))
    return losses, {name: tensor.detach() for name, tensor in named_adapters(model)}
