"""Families of this process by model type, and the names of their stages' parameters."""

import importlib
import math
import sys
from pathlib import Path

from transformers import PreTrainedConfig

from autohet.runtime.models.families import BUILT_IN
from autohet.runtime.models.family import Family
from autohet.runtime.models.parameter_spec import EMBEDDING, HEAD, ParameterSpec
from autohet.runtime.models.quantized.weight import held_as
from planner.errors import ConfigError

FAMILIES = dict(BUILT_IN)
"""Families of this process by model type: the built-in ones, and that of `model.family`."""
LINKED_LAYERS = ("gemma3n", "gemma4")
"""Beginnings of model types whose layers need more of each other than hidden states."""


def import_family(name: str, model_type: str) -> Family:
    module_name, _, attribute = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        family = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(
            f"model.family '{name}' cannot be imported from {here}: {error}; give"
            " my_package.my_model:FAMILY of a module in the job's working directory"
        ) from error
    if not isinstance(family, Family):
        raise ConfigError(
            f"model.family '{name}' is a {type(family).__name__}, but must be a Family of"
            " autohet.runtime.models"
        )
    if family.model_type != model_type:
        raise ConfigError(
            f"model.family '{name}' is for model_type '{family.model_type}', but the model is a"
            f" '{model_type}'"
        )
    return family


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a config.

    Raises:
        ConfigError: the model type is unknown; the message lists the known ones.
    """
    family: Family | None = FAMILIES.get(config.model_type)
    if family is None:
        raise untrained_error(config.model_type)
    return family


def used_keys(model_type: str) -> frozenset[str]:
    """Return the keys that decide the mathematics of a model type; empty: they are not known."""
    family = FAMILIES.get(model_type)
    return frozenset() if family is None else family.config_keys


def untrained_error(model_type: object) -> ConfigError:
    if str(model_type).startswith(LINKED_LAYERS):
        return ConfigError(
            f"model_type '{model_type}' cannot be trained: a stage passes on hidden states alone,"
            " while these layers have token embeddings of their own, share keys and values, or"
            " differ in shape; take Gemma 3, or another family of docs/guides/own_model.md"
        )
    return ConfigError(
        f"model_type '{model_type}' cannot be trained; known: {', '.join(sorted(FAMILIES))}. Give"
        " model.family: auto for another decoder of transformers, or your own family"
    )


def describe_trained(config: PreTrainedConfig) -> str:
    """Describe how many parameters are trained, as peft's `print_trainable_parameters` does."""
    specs = family_of(config).parameter_specs(config).values()
    total = sum(math.prod(spec.shape) for spec in specs)
    trained = sum(math.prod(spec.shape) for spec in specs if spec.trainable)
    return f"{trained:,} of {total:,} parameters ({trained / total:.4%})"


def held_specs(config: PreTrainedConfig) -> dict[str, ParameterSpec]:
    """Return the specs of all that workers hold, by name: of quantized parameters, the parts."""
    found = {}
    for spec in family_of(config).parameter_specs(config).values():
        found.update({part.name: part for part in held_as(spec)})
    return found


def stage_parameter_names(config: PreTrainedConfig, first_layer: int, num_layers: int) -> list[str]:
    """Return the names of a stage's parameters.

    The first stage has the embedding, the last the final norm and the head; both have a tied
    embedding.
    """
    family = family_of(config)
    total = family.num_layers(config)
    is_first = first_layer == 0
    is_last = first_layer + num_layers == total
    tied = f"{family.token_embedding}.weight" if family.tied_head(config) else None
    names = []
    for name, spec in family.parameter_specs(config).items():
        in_blocks = first_layer <= spec.layer < first_layer + num_layers
        before_blocks = is_first and spec.layer == EMBEDDING
        after_blocks = is_last and (spec.layer == HEAD or name == tied)
        if in_blocks or before_blocks or after_blocks:
            names.append(name)
    return names
