"""First weights of a run, drawn by the library's own rule from (seed, layer).

`pretrained` reads first weights from a checkpoint instead.

Whole tensors come one layer at a time, so that every plan starts from the same bits and no process
holds the whole model.
"""

import hashlib
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from autohet.runtime.models.family import Family
from autohet.runtime.models.layers.adapters import initial_adapters, is_adapter
from autohet.runtime.models.parameter_spec import EMBEDDING, HEAD
from autohet.runtime.models.pretrained import with_more_rows
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.skeleton import skeleton


def initial_parameters(
    config: PreTrainedConfig, names: Collection[str], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole fp32 tensor on the CPU) for each of `names`.

    The tensor is a function of (seed, layer) alone, whatever the other names. Rows that pad a
    vocabulary are 0.
    """
    family = family_of(config)
    specs = family.parameter_specs(config)
    adapters = {name: specs[name].shape for name in sorted(names) if is_adapter(name)}
    yield from initial_adapters(adapters, seed)
    wanted = set(names) - set(adapters)
    if not wanted:
        return
    owner = skeleton(config)
    layers = {specs[name].layer for name in wanted}
    for layer in sorted(layers):
        for path in _paths_of(family, layer, family.tied_head(config)):
            for name, tensor in _draw(owner, path, seed):
                if name in wanted:
                    yield name, with_more_rows(tensor, specs[name].shape)


def _paths_of(family: Family, layer: int, tied: bool) -> list[str]:
    """Return the paths of a layer's modules: a block, or what precedes or follows all blocks."""
    if layer == EMBEDDING:
        paths = [family.token_embedding, family.position_embedding]
    elif layer == HEAD:
        paths = [family.final_norm, None if tied else family.head]
    else:
        paths = [f"{family.layers}.{layer}"]
    return [path for path in paths if path]


def _draw(owner: nn.Module, path: str, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Materialise one module of the skeleton and initialise it by the library's rule.

    Each module has a seed of its own.
    """
    module = owner.get_submodule(path).to_empty(device="cpu")
    digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        module.apply(owner._init_weights)  # type: ignore[arg-type]
    drawn = {
        f"{path}.{name}": parameter.detach().float()
        for name, parameter in module.named_parameters()
    }
    # The skeleton keeps no storage, so that one layer is in memory at a time.
    module.to_empty(device="meta")
    yield from drawn.items()
