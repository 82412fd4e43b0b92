"""Files of an adapter (`model.adapter.from`) that `peft` or another run has written.

A job goes on with it: rank, scale and targets are the files', and its matrices are the first ones.
"""

import functools
import hashlib
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from autohet.runtime.job import AdapterSection
from autohet.runtime.models.family import Family
from autohet.runtime.models.layers.adapters import (
    A_SUFFIX,
    B_SUFFIX,
    EMBEDDING_A,
    FUSED_RANKS,
    Adapter,
    is_adapter,
    is_saved,
    shortest_targets,
)
from autohet.runtime.models.layers.expert_adapters import from_peft_layout, is_stack, peft_names
from autohet.runtime.models.pretrained import TEXT_PARTS
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.skeleton import skeleton
from planner.errors import ConfigError
from planner.inputs.documents import Json, read_mapping
from recovery.errors import RecoveryError
from recovery.storage.open import open_storage

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PEFT_PREFIX = "base_model.model."
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "trainable_token_indices": ([], {}),
    "layer_replication": ([],),
    "alora_invocation_tokens": ([],),
    # All others (PiSSA, OLoRA) change the base as peft loads the adapter.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
}
"""Values of peft's settings with which an adapter is a plain one; null and an absent key are, too.
"""


def is_adapter_alone(source: str) -> bool:
    """Return True if a directory has an adapter and no model's weights."""
    folder = Path(source)
    return (folder / ADAPTER_CONFIG).is_file() and not any(folder.glob("model*.safetensors*"))


def adapter_base(source: str, revision: str | None) -> str | None:
    """Return the name of the base of the adapter at a directory or hub id; None: it holds none."""
    try:
        file = cached_file(
            source,
            ADAPTER_CONFIG,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        if file is None:
            return None
        document = json.loads(Path(file).read_text())
    except (OSError, ValueError):
        return None
    return str(document.get("base_model_name_or_path") or "a model that it does not name")


def take_stored(section: AdapterSection, config: PreTrainedConfig) -> AdapterSection:
    """Return the section with the stored adapter's rank, scale and targets; no-op without one.

    Raises:
        ConfigError: the files cannot be read, are of another kind of adapter or another model, or
        are not what the section says.
    """
    if section.from_ is None:
        return section
    source = section.from_
    document = _read_settings(source)
    family = family_of(config)
    model = skeleton(config)
    saved = _saved_modules(document, family)
    paths = []
    of_experts: list[str] = []
    for name in sorted(_stored_names(source, config, document)):
        path = name.removesuffix(A_SUFFIX).removesuffix(EMBEDDING_A)
        if path == name:
            continue
        if not is_stack(path):
            paths.append(path)
        elif document.get("rank_pattern") and family.expert_names is not None:
            of_experts += family.expert_names.maps(path)
        else:
            of_experts.append(path)
    ends_differ = family.tied_head(config) and not document.get("ensure_weight_tying")
    if ends_differ and is_saved(f"{family.token_embedding}.weight", saved):
        raise ConfigError(
            f"model.adapter.from: the adapter '{source}' trains {', '.join(saved)} of a model whose"
            " head is tied, without ensure_weight_tying; merge it into its base with peft, and"
            " train that"
        )
    found = replace(
        section,
        rank=int(document["r"]),
        alpha=float(document["lora_alpha"]),
        rslora=bool(document.get("use_rslora")),
        modules_to_save=saved,
        targets=(*shortest_targets(paths, model), *of_experts),
    )
    for key in ("rank", "alpha", "rslora", "modules_to_save"):
        given = getattr(section, key)
        if isinstance(given, tuple):
            given = tuple(sorted(given))
        if given not in (None, ()) and given != getattr(found, key):
            raise ConfigError(
                f"model.adapter.{key} is {given}, but the adapter '{source}' has"
                f" {getattr(found, key)}; leave the key out"
            )
    _check_targets(section, found, family, model)
    return found


def stored_matrices(
    source: str, config: PreTrainedConfig, names: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole fp32 tensor) of a stored adapter's matrices and saved modules.

    Raises:
        ConfigError: a tensor is missing, or its shape is not the model's.
    """
    family = family_of(config)
    specs = family.parameter_specs(config)
    stored = _stored_names(source, config, _read_settings(source))
    dims = family.token_dims()
    with safe_open(_files_of(source) / ADAPTER_FILE, framework="pt") as reader:
        for name in sorted(names):
            if name not in stored:
                raise ConfigError(f"model.adapter.from: '{source}' has no tensor {name}")
            tensor: Tensor = reader.get_tensor(stored[name])
            shape = list(specs[name].shape)
            if is_adapter(name) and len(shape) == 3:
                tensor = from_peft_layout(tensor, name.endswith(B_SUFFIX), shape[0])
            if name in dims:
                # Without the rows that pad the vocabulary.
                shape[dims[name]] = int(config.vocab_size)
            if list(tensor.shape) != shape:
                raise ConfigError(
                    f"model.adapter.from: {name} of '{source}' has shape {tuple(tensor.shape)}, but"
                    f" this model's is {tuple(shape)}; name the adapter's own base"
                )
            whole = torch.zeros(specs[name].shape)
            whole[tuple(slice(size) for size in shape)] = tensor.float()
            yield name, whole


def stored_digest(source: str) -> str:
    """Return the SHA-256 of a stored adapter's tensors."""
    with (_files_of(source) / ADAPTER_FILE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _saved_modules(document: Json, family: Family) -> tuple[str, ...]:
    """Return the names of saved modules; peft adds the path of a tied one to its name."""
    given = document.get("modules_to_save") or ()
    names = sorted({_text_name(str(each), family) for each in given}, key=len)
    kept: list[str] = []
    for name in names:
        if not name.endswith(tuple(kept)):
            kept.append(name)
    return tuple(sorted(kept))


def _check_targets(
    section: AdapterSection, found: AdapterSection, family: Family, model: PreTrainedModel
) -> None:
    """Raise ConfigError unless the stored targets are linear maps, and those that the job names."""
    stored = family.adapter_ranks(_as_adapter(found), model)
    if section.targets is None:
        return
    named = family.adapter_ranks(_as_adapter(replace(found, targets=section.targets)), model)
    differing = sorted({path for path, _ in named.items() ^ stored.items()})
    if differing:
        who = "the job" if differing[0] in named else "the adapter"
        raise ConfigError(
            f"model.adapter.targets and those of '{section.from_}' differ: {who} alone adapts"
            f" {differing[0]}; leave the key out"
        )


def _as_adapter(section: AdapterSection) -> Adapter:
    assert section.rank is not None
    assert section.alpha is not None
    assert section.targets is not None
    return Adapter(section.kind, section.rank, section.alpha, section.targets, rslora=False)


def _read_settings(source: str) -> Json:
    """Return the content of adapter_config.json; raise ConfigError if it is no plain LoRA."""
    file = _files_of(source) / ADAPTER_CONFIG
    try:
        document = read_mapping(json.loads(file.read_text()), ADAPTER_CONFIG)
        is_lora = document.get("peft_type") in (None, "LORA")
        if is_lora and (int(document["r"]) < 1 or float(document["lora_alpha"]) <= 0):
            raise ValueError("r and lora_alpha must be positive")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"model.adapter.from: '{source}' has no readable {ADAPTER_CONFIG}"
            f" ({type(error).__name__}: {error})"
        ) from None
    # An adapter of another type, which has none of these settings, is refused by its type.
    plain_values = dict(PLAIN)
    if is_lora and not _has_plain_ranks(document):
        plain_values |= {"rank_pattern": ({},), "alpha_pattern": ({},)}
    for key, plain in plain_values.items():
        value = document.get(key)
        if value is not None and value not in plain:
            raise ConfigError(
                f"model.adapter.from: the adapter '{source}' has {key}: {json.dumps(value)}, which"
                " cannot be trained here; merge it into its base with peft, and train that"
            )
    return document


def _has_plain_ranks(document: Json) -> bool:
    """Return True if all maps have one rank and alpha, or experts' gate and up have twice those.

    Gate and up are one stack.
    """
    wider = {FUSED_RANKS: 2 * document["r"]}, {FUSED_RANKS: 2 * document["lora_alpha"]}
    patterns = document.get("rank_pattern") or {}, document.get("alpha_pattern") or {}
    return patterns in (({}, {}), wider)


def _stored_names(source: str, config: PreTrainedConfig, document: Json) -> dict[str, str]:
    """Return the names in the file of each tensor, by the parameter's name in the text model.

    document: peft's settings.
    """
    family = family_of(config)
    saved = _saved_modules(document, family)
    of_experts = _factors_of_stacks(skeleton(config), document)
    file = _files_of(source) / ADAPTER_FILE
    try:
        with safe_open(file, framework="pt") as reader:
            stored = list(reader.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"model.adapter.from: '{source}' has no readable {ADAPTER_FILE} ({error})"
        ) from None
    found = {}
    for name in stored:
        own = _text_name(name.removeprefix(PEFT_PREFIX), family)
        own = of_experts.get(own, own)
        # peft stores the frozen weights of an adapted embedding, too.
        if own.endswith(".base_layer.weight"):
            continue
        is_tied_head = bool(saved) and own == f"{family.head}.weight"
        if not is_adapter(own) and not is_saved(own, saved) and not is_tied_head:
            raise ConfigError(
                f"model.adapter.from: '{source}' holds {name}, which is no matrix of a linear map's"
                " adapter; merge it into its base with peft, and train that"
            )
        found[own] = name
    head, embedding = f"{family.head}.weight", f"{family.token_embedding}.weight"
    if embedding in found and not is_saved(head, saved):
        # Of a tied head, which peft stores under both names.
        found.pop(head, None)
    return found


def _factors_of_stacks(model: PreTrainedModel, document: Json) -> dict[str, str]:
    """Return the own names of the factors of adapted stacks, by their names in peft's files."""
    targets = tuple(f".{each}" for each in document.get("target_parameters") or ())
    own: list[str] = []
    for path, _ in model.named_parameters():
        if is_stack(path) and f".{path}".endswith(targets):
            own += (f"{path}{A_SUFFIX}", f"{path}{B_SUFFIX}")
    return {stored: name for name, stored in peft_names(own).items()}


def _text_name(name: str, family: Family) -> str:
    """Return a parameter's name in the text model, without the prefix of a multimodal one."""
    for part in TEXT_PARTS:
        if name.startswith(part):
            rest = name.removeprefix(part).removeprefix(f"{family.base}.")
            return f"{family.base}.{rest}"
    return name


@functools.cache
def _files_of(source: str) -> Path:
    """Return the directory of an adapter's files, which are fetched once per process."""
    if "://" in source:
        return _copy_of(source)
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or source.startswith("."):
        raise ConfigError(f"model.adapter.from: there is no directory '{source}'")
    name, _, revision = source.partition("@")
    try:
        for file in (ADAPTER_FILE, ADAPTER_CONFIG):
            found = cached_file(name, file, revision=revision or None)
    except OSError as error:
        raise ConfigError(
            f"model.adapter.from '{source}' is no directory, and no adapter of a hub:"
            f" {str(error).splitlines()[0]}"
        ) from None
    return Path(str(found)).parent


_copies: list[tempfile.TemporaryDirectory[str]] = []
"""Copies of adapters in buckets, removed when the process ends."""


def _copy_of(uri: str) -> Path:
    """Copy an adapter out of a bucket."""
    copy = tempfile.TemporaryDirectory(prefix="autohet-adapter-")
    try:
        with closing(open_storage(uri.rstrip("/"))) as storage:
            for file in (ADAPTER_CONFIG, ADAPTER_FILE):
                Path(copy.name, file).write_bytes(storage.get(file))
    except RecoveryError as error:
        raise ConfigError(f"model.adapter.from '{uri}' cannot be read: {error}") from None
    _copies.append(copy)
    return Path(copy.name)
