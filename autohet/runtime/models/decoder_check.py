"""Check that a model is a sequence of blocks that can be cut into stages."""

from collections.abc import Collection, Sequence

from torch import nn
from transformers import PreTrainedConfig

from planner.errors import ConfigError

EXPERT_NAMES = ("experts", "router", "moe", "block_sparse_moe")


def check_decoder(
    config: PreTrainedConfig,
    model: nn.Module,
    layers: str,
    other_parts: Sequence[str],
    expert_stacks: Collection[str] | None,
) -> None:
    """Check that the model is a sequence of blocks between embedding and head.

    layers, other_parts: paths of the list of blocks, and of all other parts. expert_stacks: paths
    of the modules that hold the experts of blocks; None: the family knows no experts.

    Raises:
        ConfigError: it is an encoder, has experts that the family does not know, shares weights
        between blocks, lacks a part that the family names, or has parameters outside of all parts.
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"model_type '{kind}' is an encoder-decoder; a decoder alone is trained")
    paths = [layers, *other_parts]
    parts = dict(model.named_modules(remove_duplicate=False))
    for path in paths:
        if path not in parts:
            raise ConfigError(
                f"model_type '{kind}' has no module {path}; give the family the path of that part"
            )
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        part = _part_of(paths, name)
        if part is None:
            raise ConfigError(
                f"model_type '{kind}' has {name} outside of its blocks, embedding, norm and head;"
                " no stage would hold it"
            )
        is_in_block = part.startswith(f"{layers}.")
        if is_in_block:
            _check_dense(kind, expert_stacks, name, parameter)
        # Embedding and head may share a tensor, which the stages of both then hold.
        owner = owners.setdefault(id(parameter), part)
        is_of_block = is_in_block or owner.startswith(f"{layers}.")
        if owner != part and is_of_block:
            raise ConfigError(
                f"model_type '{kind}' shares {name} between {owner} and {part}; blocks that share"
                " weights cannot be cut into stages"
            )


def _part_of(paths: Sequence[str], name: str) -> str | None:
    """Return the block or other part that a parameter belongs to; None: it belongs to none.

    paths: that of the list of blocks, then those of all other parts.
    """
    prefix = f"{paths[0]}."
    if name.startswith(prefix):
        index, _, _ = name.removeprefix(prefix).partition(".")
        return f"{prefix}{index}"
    for path in paths:
        if name.startswith(f"{path}."):
            return path
    return None


def _check_dense(
    kind: str, expert_stacks: Collection[str] | None, name: str, parameter: nn.Parameter
) -> None:
    module_path, _, _ = name.rpartition(".")
    if expert_stacks is not None and module_path in expert_stacks:
        return
    names_experts = not set(EXPERT_NAMES).isdisjoint(name.split("."))
    if names_experts and expert_stacks is None:
        raise ConfigError(
            f"model_type '{kind}' is a mixture of experts ({name}) whose routing this version does"
            " not know; choose one whose routing it knows, such as mixtral, or a dense decoder"
        )
    is_depthwise = parameter.dim() == 3 and parameter.shape[1] == 1
    if parameter.dim() > 2 and not is_depthwise:
        raise ConfigError(
            f"model_type '{kind}' has {name} of shape {tuple(parameter.shape)}; blocks of matrices"
            " and vectors alone are trained"
        )
