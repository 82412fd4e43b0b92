"""Export of an adapter's checkpoint as peft's own files, or merged with its base."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from autohet.runtime.job import ModelSection
from autohet.runtime.job.identity import PRETRAINED
from autohet.runtime.models.adapter_files import PEFT_PREFIX
from autohet.runtime.models.family import COMPUTE_DTYPES
from autohet.runtime.models.layers.adapters import (
    A_SUFFIX,
    B_SUFFIX,
    EMBEDDING_A,
    EMBEDDING_B,
    Adapter,
    adapter_of,
    is_adapter,
    module_of,
    peft_targets,
    shortest_targets,
    whole_number,
)
from autohet.runtime.models.layers.expert_adapters import in_peft_layout, peft_names
from autohet.runtime.models.pretrained import weights_identity
from autohet.runtime.models.quantized.weight import quantized_values
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.skeleton import skeleton
from autohet.runtime.state.frozen import first_weights
from planner.errors import ConfigError
from recovery.checkpoint.manifest import Manifest
from recovery.state.layout import TensorSpec

ReadParameter = Callable[[str], Tensor]
"""Function from a parameter's name to its whole tensor in the checkpoint."""


@dataclass(frozen=True)
class ExportedWeights:
    """Weights to export: specs by the exported names, and a reader of the whole tensors."""

    specs: Mapping[str, TensorSpec]
    read: Callable[[Sequence[str]], Iterator[Tensor]]
    """Reader that yields the tensors of given names in order; tensors of a base are fp32."""


def _require_adapter(manifest: Manifest) -> Adapter:
    """Return the adapter of a checkpoint.

    Raises:
        ConfigError: the checkpoint is of a whole model.
    """
    adapter = adapter_of(manifest.model_config)
    if adapter is None:
        raise ConfigError(
            f"the checkpoint of step {manifest.step} is of a whole model, so there is nothing to"
            " merge; leave --merge out"
        )
    return adapter


def peft_weights(
    manifest: Manifest, specs: Mapping[str, TensorSpec], read: ReadParameter
) -> ExportedWeights:
    """Return the adapter's matrices and saved modules under peft's names.

    specs: the checkpoint's parameters.
    """
    family = family_of(_config_of(manifest))
    embedding = f"{family.token_embedding}.weight"
    in_base = _names_in_base(manifest)
    own_names = {
        f"{PEFT_PREFIX}{in_base(stored)}": name for name, stored in peft_names(specs).items()
    }
    if _saves_tied(manifest):
        # peft stores what is tied under both names.
        own_names[f"{PEFT_PREFIX}{family.head}.weight"] = embedding
    renamed: dict[str, TensorSpec] = {}
    for name in sorted(own_names):
        spec = specs[own_names[name]]
        shape = _as_stored(name, torch.empty(spec.shape, device="meta")).shape
        renamed[name] = TensorSpec(name, tuple(shape), spec.dtype)

    def tensors(names: Sequence[str]) -> Iterator[Tensor]:
        return (_as_stored(name, read(own_names[name])).contiguous() for name in names)

    return ExportedWeights(renamed, tensors)


def _as_stored(name: str, tensor: Tensor) -> Tensor:
    """Return a matrix or a saved module's parameter as peft stores it."""
    return in_peft_layout(tensor, name.endswith(B_SUFFIX)) if is_adapter(name) else tensor


def _names_in_base(manifest: Manifest) -> Callable[[str], str]:
    """Return the function from a name or path in the text model to that in a multimodal base."""
    text_path = _require_adapter(manifest).text_path
    inner = f"{family_of(_config_of(manifest)).base}."

    def in_base(name: str) -> str:
        if text_path and name.startswith(inner):
            return f"{text_path}.{name.removeprefix(inner)}"
        return name

    return in_base


def _saves_tied(manifest: Manifest) -> bool:
    """Return True if the adapter trains an embedding that is tied to the head."""
    config = _config_of(manifest)
    family = family_of(config)
    embedding = f"{family.token_embedding}.weight"
    return family.tied_head(config) and _require_adapter(manifest).saves(embedding)


def peft_config(manifest: Manifest) -> dict[str, Any]:
    """Return the content of peft's adapter_config.json."""
    adapter = _require_adapter(manifest)
    config = _config_of(manifest)
    model = skeleton(config)
    keys = peft_targets(family_of(config).adapter_ranks(adapter, model), model, adapter)
    modules = keys["target_modules"]
    is_transposed = bool(modules) and isinstance(model.get_submodule(modules[0]), Conv1D)
    keys["target_modules"] = shortest_targets(modules, model)
    saved = list(adapter.modules_to_save)
    if adapter.text_path:
        # Last components would match maps of the other parts, too.
        in_base = _names_in_base(manifest)
        keys["target_modules"] = [in_base(each) for each in modules]
        if "target_parameters" in keys:
            keys["target_parameters"] = [in_base(each) for each in keys["target_parameters"]]
        ends = tuple(saved)
        named = [path for path, _ in model.named_modules() if saved and path.endswith(ends)]
        saved = [in_base(each) for each in named]

    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "revision": adapter.revision,
        "r": adapter.rank,
        "lora_alpha": whole_number(adapter.alpha),
        "use_rslora": adapter.rslora,
        **keys,
        "fan_in_fan_out": is_transposed,
        # With `target_parameters` peft refuses dropout, which inference has not.
        "lora_dropout": 0.0 if "target_parameters" in keys else adapter.dropout,
        "bias": "none",
        "modules_to_save": saved or None,
        # Without it peft would give a tied head the embedding's frozen weights.
        **({"ensure_weight_tying": True} if _saves_tied(manifest) else {}),
        "inference_mode": True,
    }


def merge_weights(manifest: Manifest, read: ReadParameter, base: str | None) -> ExportedWeights:
    """Return the base's weights with the adapter's updates added.

    base: place of the base, if it differs from the run's.

    Memory: the whole tensors of one call of `read`.

    Raises:
        ConfigError: the base is not the run's, or cannot be read.
    """
    adapter = _require_adapter(manifest)
    config = _config_of(manifest)
    section = _base_of(manifest, adapter, base)
    family = family_of(config)
    specs = family.parameter_specs(config)
    vocabulary = family.vocabulary_parameters()
    shapes = {}
    for name, spec in sorted(specs.items()):
        if is_adapter(name):
            continue
        shapes[name] = spec.shape
        if name in vocabulary:
            # Without the rows that pad the vocabulary.
            shapes[name] = (int(config.vocab_size), *spec.shape[1:])
    held_dtype = COMPUTE_DTYPES[str(manifest.scalars.get("training.precision") or "fp32")]
    model = skeleton(config)
    ranks = family.adapter_ranks(adapter, model)

    def update_of(path: str) -> Tensor:
        module = module_of(path, model)
        if isinstance(module, nn.Embedding):
            rows = read(f"{path}{EMBEDDING_B}") @ read(f"{path}{EMBEDDING_A}")
            return adapter.scaling * rows.T
        product = read(f"{path}{B_SUFFIX}") @ read(f"{path}{A_SUFFIX}")
        update = adapter.scaling_of(ranks[path]) * product
        is_transposed = getattr(module, "is_transposed", isinstance(module, Conv1D))
        return update.mT if is_transposed else update

    def tensors(names: Sequence[str]) -> Iterator[Tensor]:
        seed = int(manifest.scalars.get("training.seed") or 0)
        frozen = [name for name in names if not specs[name].trainable]
        whole = dict(first_weights(section, config, frozen, seed))
        for name in names:
            path = name.removesuffix(".weight")
            tensor = read(name) if specs[name].trainable else whole.pop(name)
            tensor = tensor[: shapes[name][0]]
            if specs[name].base_format is not None:
                # As transformers' `dequantize` and peft's `merge_and_unload`.
                tensor = quantized_values(specs[name], tensor.to(held_dtype)).float()
            if path in ranks:
                tensor = tensor + update_of(path)
            yield tensor

    exported = {name: TensorSpec(name, shape, "float32") for name, shape in shapes.items()}
    return ExportedWeights(exported, tensors)


def _base_of(manifest: Manifest, adapter: Adapter, base: str | None) -> ModelSection:
    """Return the model section that names the source of the base's weights."""
    source = base or adapter.base
    if source is None:
        return ModelSection(config={"model_type": manifest.model_config["model_type"]})
    revision = adapter.revision if base is None else None
    known = manifest.scalars.get(PRETRAINED)
    found = weights_identity(source, revision)
    if found is None:
        raise ConfigError(f"the adapter's base '{source}' has no weights here; name it by --base")
    is_digest = str(known).startswith("sha256:") and found.startswith("sha256:")
    if is_digest and known != found:
        raise ConfigError(
            f"'{source}' is not the base of this adapter: its weights are {found}, those of the run"
            f" were {known}; name the right one by --base"
        )
    return ModelSection(pretrained=source, revision=revision)


def _config_of(manifest: Manifest) -> PreTrainedConfig:
    """Return the model's config from the checkpoint's manifest."""
    document = copy.deepcopy(dict(manifest.model_config))
    model_type = document.pop("model_type")
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **document)
    return config
