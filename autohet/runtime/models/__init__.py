"""Decoder families of `transformers`, cut into stages: the library's own modules, layer by layer.

A new family is one small file with a `FAMILY` value (see `llama.py`, `gpt2.py`) and its line below.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

from transformers import AutoConfig, PreTrainedConfig

from autohet.runtime.models import gpt2, llama, mistral, qwen2, qwen3
from autohet.runtime.models.family import EMBEDDING, HEAD, Family, ParameterSpec, local_units
from autohet.runtime.models.stage import StageModel, TensorParallel, build_stage
from planner.errors import ConfigError

__all__ = [
    "EMBEDDING", "HEAD", "Family", "ParameterSpec", "StageModel", "TensorParallel", "build_stage", "family_of", "load_config",
    "local_units", "stage_parameter_names",
]  # fmt: skip

FAMILIES = {module.FAMILY.model_type: module.FAMILY for module in (gpt2, llama, mistral, qwen2, qwen3)}
logger = logging.getLogger(__name__)


class ModelSource(Protocol):
    """The `model` section of a job: exactly one of the two is given."""

    config: dict[str, Any] | None
    pretrained: str | None
    revision: str | None


def load_config(source: ModelSource) -> PreTrainedConfig:
    """The transformers config of a job's model, dropout set to 0.

    Raises:
        ConfigError: the model type is unknown, a value is wrong, or the checkpoint cannot be read.
    """
    if source.config is not None:
        config = _from_mapping(dict(source.config))
    else:
        config = _from_checkpoint(str(source.pretrained), source.revision)
    changed = family_of(config).check_dropout(config)
    if changed:
        logger.info("Dropout (%s) is set to 0: with it, the fleet would change the mathematics", ", ".join(changed))
    config._attn_implementation = "sdpa"
    config.use_cache = False
    return config


def _from_mapping(mapping: dict[str, Any]) -> PreTrainedConfig:
    model_type = mapping.pop("model_type", None)
    if model_type not in FAMILIES:
        raise ConfigError(f"model_type '{model_type}' cannot be trained; known: {', '.join(sorted(FAMILIES))}")
    try:
        return AutoConfig.for_model(model_type, **mapping)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"model.config is no valid {model_type} config: {error}") from None


def _from_checkpoint(path: str, revision: str | None) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, revision=revision or "main")
    except (OSError, ValueError) as error:
        where = "the directory" if Path(path).is_dir() else "the hub id or directory"
        raise ConfigError(f"model.pretrained: {where} '{path}' has no readable config: {str(error).splitlines()[0]}") from None


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a config; ConfigError lists the known ones."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ConfigError(f"model_type '{config.model_type}' cannot be trained; known: {', '.join(sorted(FAMILIES))}")
    return family


def stage_parameter_names(config: PreTrainedConfig, first_layer: int, num_layers: int) -> list[str]:
    """Parameters of a stage: embedding with the first, final norm and head with the last; a tied embedding with both."""
    family = family_of(config)
    total = family.num_layers(config)
    is_first, is_last = first_layer == 0, first_layer + num_layers == total
    tied = f"{family.token_embedding}.weight" if family.tied_head(config) else None
    names = []
    for name, spec in family.parameter_specs(config).items():
        block = first_layer <= spec.layer < first_layer + num_layers
        if block or (is_first and spec.layer == EMBEDDING) or (is_last and (spec.layer == HEAD or name == tied)):
            names.append(name)
    return names
