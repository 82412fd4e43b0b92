"""Decoder families of `transformers`, cut into stages: the library's own modules, layer by layer.

A new family is one small file with a `FAMILY` value (see `llama.py`, `gpt2.py`) and its line below.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autohet.runtime.models import gpt2, llama, mistral, qwen2, qwen3
from autohet.runtime.models.family import (
    COMPUTE_DTYPES,
    EMBEDDING,
    HEAD,
    Family,
    ParameterSpec,
    local_shape,
    local_units,
    pad_vocabulary,
)
from autohet.runtime.models.stage import StageModel, TensorParallel, build_stage
from planner.errors import ConfigError

__all__ = [
    "COMPUTE_DTYPES",
    "EMBEDDING",
    "HEAD",
    "Family",
    "ParameterSpec",
    "StageModel",
    "TensorParallel",
    "build_stage",
    "check_keys",
    "family_of",
    "load_config",
    "local_shape",
    "local_units",
    "read_config",
    "stage_parameter_names",
    "unknown_keys",
]

FAMILIES = {
    module.FAMILY.model_type: module.FAMILY for module in (gpt2, llama, mistral, qwen2, qwen3)
}
# Keys of published config.json files that are no fields of the config classes: older spellings and
# bookkeeping.
FOREIGN_KEYS = frozenset(
    {
        "model_type",
        "rope_theta",
        "rope_scaling",
        "torch_dtype",
        "attn_implementation",
        "auto_map",
        "n_ctx",
        "task_specific_params",
    }
)
logger = logging.getLogger(__name__)


class ModelSource(Protocol):
    """The `model` section of a job: exactly one of the two is given."""

    @property
    def config(self) -> dict[str, Any] | None: ...
    @property
    def pretrained(self) -> str | None: ...
    @property
    def revision(self) -> str | None: ...


def load_config(source: ModelSource) -> PreTrainedConfig:
    """The transformers config of a job's model, dropout set to 0.

    Raises:
        ConfigError: the model type is unknown, a value is wrong, or the checkpoint cannot be read.
    """
    if source.config is not None and source.config.get("model_type") not in FAMILIES:
        raise _untrained(source.config.get("model_type"))
    config = read_config(
        source.config if source.config is not None else str(source.pretrained), source.revision
    )
    _check_architecture(config)
    changed = family_of(config).check_dropout(config)
    if changed:
        logger.info(
            "Dropout (%s) is set to 0: with it, the fleet would change the mathematics",
            ", ".join(changed),
        )
    config._attn_implementation = "sdpa"
    config.use_cache = False
    pad_vocabulary(config, getattr(source, "vocabulary_multiple", 1))
    return config


def read_config(
    source: Mapping[str, Any] | str | Path, revision: str | None = None
) -> PreTrainedConfig:
    """A transformers config of any causal language model: from a mapping with `model_type`, a
    directory, or a hub id.

    Raises:
        ConfigError: the model type is unknown, a value is wrong, or there is no config at the place
        named.
    """
    if isinstance(source, Mapping):
        return _from_mapping(dict(source))
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(source), revision=revision or "main"
        )
    except (
        OSError,
        ValueError,
        KeyError,
        StrictDataclassError,
    ) as error:  # a JSONDecodeError is a ValueError
        where = "the directory" if Path(source).is_dir() else "the hub id or directory"
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"model.pretrained: {where} '{source}' has no readable config: {why}"
        ) from None
    return config


def _from_mapping(mapping: dict[str, Any]) -> PreTrainedConfig:
    model_type = mapping.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), CONFIG_MAPPING.keys(), n=1)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else "name one such as llama, qwen3, mistral, gpt2 or opt"
        )
        raise ConfigError(
            f"model.config: model_type '{model_type}' is unknown to transformers; {hint}"
        )
    try:
        config = AutoConfig.for_model(model_type, **mapping)
    except (TypeError, ValueError, KeyError, ZeroDivisionError, StrictDataclassError) as error:
        raise ConfigError(
            f"model.config is no valid {model_type} config: {' '.join(str(error).split())}"
        ) from None
    if model_type in FAMILIES:
        check_keys(config, mapping)
    elif unknown := unknown_keys(
        config, mapping
    ):  # published files hold keys that only their own code reads
        logger.warning(
            "model.config: %s has no key %s; the default is used", model_type, ", ".join(unknown)
        )
    return config


def unknown_keys(config: PreTrainedConfig, mapping: Mapping[str, Any]) -> list[str]:
    """Keys of a mapping that are no fields of the config made from it."""
    return sorted(set(mapping) - _known_keys(config))


def check_keys(config: PreTrainedConfig, mapping: Mapping[str, Any]) -> None:
    """transformers stores a misspelt key in silence and trains with the default instead:

    ConfigError names the first.
    """
    for key in unknown_keys(config, mapping):
        close = difflib.get_close_matches(key, sorted(_known_keys(config)), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"model.config: {config.model_type} has no key '{key}'{hint}")


def _known_keys(config: PreTrainedConfig) -> set[str]:
    return (
        {field.name for field in dataclasses.fields(config)}
        | set(config.attribute_map)
        | FOREIGN_KEYS
    )


def _check_architecture(config: PreTrainedConfig) -> None:
    family_of(config)
    heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    if heads % groups:
        raise ConfigError(
            f"num_key_value_heads {groups} does not divide num_attention_heads {heads}; choose a"
            " divisor"
        )
    if hidden % heads and getattr(config, "head_dim", None) is None:
        raise ConfigError(
            f"num_attention_heads {heads} does not divide hidden_size {hidden}; choose a divisor"
        )
    if getattr(config, "add_cross_attention", False):
        raise ConfigError(
            "add_cross_attention is for encoder-decoder models; a decoder alone is trained here:"
            " set it to false"
        )


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a config; ConfigError lists the known ones."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise _untrained(config.model_type)
    return family


def _untrained(model_type: object) -> ConfigError:
    return ConfigError(
        f"model_type '{model_type}' cannot be trained; known: {', '.join(sorted(FAMILIES))}"
    )


def stage_parameter_names(config: PreTrainedConfig, first_layer: int, num_layers: int) -> list[str]:
    """Parameters of a stage: embedding with the first, final norm and head with the last; a tied
    embedding with both.
    """
    family = family_of(config)
    total = family.num_layers(config)
    is_first, is_last = first_layer == 0, first_layer + num_layers == total
    tied = f"{family.token_embedding}.weight" if family.tied_head(config) else None
    names = []
    for name, spec in family.parameter_specs(config).items():
        block = first_layer <= spec.layer < first_layer + num_layers
        if (
            block
            or (is_first and spec.layer == EMBEDDING)
            or (is_last and (spec.layer == HEAD or name == tied))
        ):
            names.append(name)
    return names
