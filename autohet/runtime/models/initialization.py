"""Where a run's first weights come from: drawn by the library's own rule from (seed, layer), or
read from a checkpoint.

Both give whole tensors one layer (or one tensor) at a time, so that every plan starts from the same
bits and nobody holds the whole model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

from autohet.runtime.models import family_of
from autohet.runtime.models.family import EMBEDDING, HEAD, skeleton
from planner.errors import ConfigError


def initial_parameters(
    config: PreTrainedConfig, names: Collection[str], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole fp32 tensor on the CPU) of each of `names`; a function of (seed, layer) alone,
    whatever else is asked for. Rows that pad a vocabulary are 0.
    """
    family, wanted = family_of(config), set(names)
    specs = family.parameter_specs(config)
    owner = skeleton(config)
    parts = {layer: f"{family.layers}.{layer}" for layer in range(family.num_layers(config))}
    for layer in sorted({specs[name].layer for name in wanted}):
        paths = (
            [parts[layer]] if layer >= 0 else _outer_paths(family, layer, family.tied_head(config))
        )
        for path in paths:
            drawn = ((name, tensor) for name, tensor in _draw(owner, path, seed) if name in wanted)
            yield from ((name, _padded(tensor, specs[name].shape)) for name, tensor in drawn)


def _padded(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """With rows of zeros, where the shape has more of them."""
    more = shape[0] - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])]) if more else tensor


def _outer_paths(family: object, layer: int, tied: bool) -> list[str]:
    paths = {
        EMBEDDING: [family.token_embedding, family.position_embedding],  # type: ignore[attr-defined]
        HEAD: [family.final_norm, None if tied else family.head],  # type: ignore[attr-defined]
    }[layer]
    return [path for path in paths if path]


def _draw(owner: nn.Module, path: str, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Materialise one module of the skeleton and initialise it by the library's rule, under a seed
    of its own.
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
    module.to_empty(device="meta")  # the skeleton keeps no storage: one layer in memory at a time
    yield from drawn.items()


def pretrained_parameters(
    path: str, config: PreTrainedConfig, names: Collection[str], revision: str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole fp32 tensor) of each of `names`, read from a Hugging Face checkpoint's
    safetensors files, one tensor at a time.

    Raises:
        ConfigError: the checkpoint or a tensor is missing, or a shape is not the config's.
    """
    family = family_of(config)
    specs = family.parameter_specs(config)
    files = _files_by_tensor(path, revision)
    for name in sorted(names):
        stored = name if name in files else name.removeprefix(family.base + ".")
        if stored not in files:
            raise ConfigError(f"checkpoint '{path}' has no tensor {name}")
        with _open(files[stored]) as reader:
            tensor = reader.get_tensor(stored)
        shape = specs[name].shape
        if name in family.vocabulary_parameters():
            shape = (int(config.vocab_size), *shape[1:])
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{name} in '{path}' has shape {tuple(tensor.shape)}, but the config says {shape}"
            )
        yield name, _padded(tensor.float(), specs[name].shape)


def _open(file: str) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{file} is no readable safetensors file ({error}); fetch it again"
        ) from None


def _files_by_tensor(path: str, revision: str | None) -> dict[str, str]:
    """Tensor name -> safetensors file."""
    index = _find(path, "model.safetensors.index.json", revision)
    if index is not None:
        entries: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
        found = {file: _find(path, file, revision) for file in set(entries.values())}
        lacking = [file for file, where in found.items() if where is None]
        if lacking:
            raise ConfigError(
                f"checkpoint '{path}' lacks {sorted(lacking)[0]}, which its index names"
            )
        return {tensor: str(found[file]) for tensor, file in entries.items()}
    single = _find(path, "model.safetensors", revision)
    if single is None:
        raise ConfigError(
            f"checkpoint '{path}' has no model.safetensors; convert it to safetensors first"
        )
    with _open(single) as reader:
        return dict.fromkeys(reader.keys(), single)


def _find(path: str, file: str, revision: str | None) -> str | None:
    try:
        return cached_file(
            path, file, revision=revision, _raise_exceptions_for_missing_entries=False
        )
    except OSError as error:
        raise ConfigError(
            f"model.pretrained '{path}' cannot be read: {str(error).splitlines()[0]}"
        ) from None
