"""Check that a model is a sequence of blocks that can be cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedConfig

from autohet.runtime.models.layers.experts import EXPERTS
from planner.errors import ConfigError

if TYPE_CHECKING:
    from autohet.runtime.models.family import Family

EXPERT_NAMES = ("experts", "router", "moe", "block_sparse_moe")


def check_decoder(family: Family, config: PreTrainedConfig, model: nn.Module) -> None:
    """Check that the model is a sequence of blocks between embedding and head.

    Raises:
        ConfigError: it is an encoder, has experts that the family does not know, shares weights
        between blocks, lacks a part that the family names, or has parameters outside of all parts.
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"model_type '{kind}' is an encoder-decoder; a decoder alone is trained")
    paths = [family.layers, family.token_embedding, family.final_norm, family.head]
    for optional in (family.position_embedding, family.rotary):
        if optional:
            paths.append(optional)
    parts = dict(model.named_modules(remove_duplicate=False))
    for path in paths:
        if path not in parts:
            raise ConfigError(
                f"model_type '{kind}' has no module {path}; give the family the path of that part"
            )
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        part = _part_of(family, paths, name)
        if part is None:
            raise ConfigError(
                f"model_type '{kind}' has {name} outside of its blocks, embedding, norm and head;"
                " no stage would hold it"
            )
        is_in_block = part.startswith(f"{family.layers}.")
        if is_in_block:
            _check_dense(family, config, name, parameter)
        # Embedding and head may share a tensor, which the stages of both then hold.
        owner = owners.setdefault(id(parameter), part)
        is_of_block = is_in_block or owner.startswith(f"{family.layers}.")
        if owner != part and is_of_block:
            raise ConfigError(
                f"model_type '{kind}' shares {name} between {owner} and {part}; blocks that share"
                " weights cannot be cut into stages"
            )


def _part_of(family: Family, paths: Sequence[str], name: str) -> str | None:
    """Return the block or other part that a parameter belongs to; None: it belongs to none."""
    prefix = f"{family.layers}."
    if name.startswith(prefix):
        index, _, _ = name.removeprefix(prefix).partition(".")
        return f"{prefix}{index}"
    for path in paths:
        if name.startswith(f"{path}."):
            return path
    return None


def _check_dense(
    family: Family, config: PreTrainedConfig, name: str, parameter: nn.Parameter
) -> None:
    kind = config.model_type
    module_path, _, _ = name.rpartition(".")
    if family.style(config, module_path) == EXPERTS:
        return
    names_experts = not set(EXPERT_NAMES).isdisjoint(name.split("."))
    if names_experts and not family.has_experts:
        raise ConfigError(
            f"model_type '{kind}' is a mixture of experts ({name}) whose routing this version does"
            " not know; choose one whose routing it knows, such as mixtral, or a dense decoder"
        )
    if parameter.dim() > 2:
        raise ConfigError(
            f"model_type '{kind}' has {name} of shape {tuple(parameter.shape)}; blocks of matrices"
            " and vectors alone are trained"
        )
