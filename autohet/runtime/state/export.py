"""Export of a committed checkpoint as a Hugging Face checkpoint.

It consists of config.json, sharded safetensors (streamed), and the run's tokenizer and generation
config. Memory: one output tensor and the read-ahead, never the model. Files are written under
temporary names and renamed, the index last. Of a mixture of experts, the memory is one stack.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from autohet.runtime.models.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE
from autohet.runtime.models.layers.adapters import adapter_of
from autohet.runtime.models.layers.experts import CORRECTION_BIAS
from autohet.runtime.models.parameter_spec import PADDED
from autohet.runtime.models.registry import FAMILIES
from autohet.runtime.state.export_adapter import (
    ExportedWeights,
    merge_weights,
    peft_config,
    peft_weights,
)
from autohet.runtime.state.export_config import config_to_export, default_generation_config
from autohet.runtime.state.export_experts import split_experts
from autohet.runtime.state.model_files import (
    GENERATION_CONFIG,
    MORE_TEMPLATES,
    SCALAR,
    read_model_files,
)
from planner.errors import ConfigError
from recovery.checkpoint.manifest import Manifest
from recovery.checkpoint.read import empty_tensor, read_shards
from recovery.state.layout import TensorSpec
from recovery.state.slices import TORCH_DTYPES
from recovery.storage.protocol import Storage
from recovery.storage.tensor_payload import tensor_bytes

PARAMETER_KIND = "param/"
MAX_SHARD_BYTES = 2 << 30
READ_AHEAD_BYTES = 128 << 20
EXPORT_DTYPES: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Names of dtypes in the safetensors header (huggingface/safetensors, README, Format)."""
INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class ExportSummary:
    """Summary of a written export."""

    step: int
    directory: str
    dtype: str
    num_tensors: int
    num_bytes: int
    files: tuple[str, ...]
    """Files of weights."""
    model_files: tuple[str, ...] = ()
    """Files beside the weights: tokenizer and generation config."""


@dataclass(frozen=True)
class ExportOptions:
    """Form of exported weights.

    merge: the checkpoint of an adapter becomes a whole model, from the base that the run read, or
    from `base`; else it becomes a directory that peft loads.
    """

    dtype: str = "float32"
    max_shard_bytes: int = MAX_SHARD_BYTES
    merge: bool = False
    base: str | None = None


PLAIN_EXPORT = ExportOptions()


def export_checkpoint(
    storage: Storage,
    manifest: Manifest,
    directory: str | Path,
    options: ExportOptions = PLAIN_EXPORT,
    progress: Callable[[int, int], None] | None = None,
) -> ExportSummary:
    """Write the weights so that `AutoModelForCausalLM.from_pretrained(directory)` loads them.

    A tied output embedding is no tensor of the state and is not exported; from_pretrained ties it
    again. `progress(done_bytes, total_bytes)` counts output bytes.

    Raises:
        ConfigError: the dtype cannot be exported, the directory is not empty, or there are no
        parameters or no config. CheckpointCorrupt, StorageError: the checkpoint cannot be read; no
        index or single file is left behind.
    """
    folder = Path(directory)
    dtype = options.dtype
    specs: Mapping[str, TensorSpec] = _parameter_specs(manifest)
    _check_request(folder, manifest, specs, dtype)
    is_peft = adapter_of(manifest.model_config) is not None and not options.merge
    weights = _weights(storage, manifest, specs, options)
    family = FAMILIES.get(str(manifest.model_config["model_type"]))
    if family is not None and family.expert_names is not None and not is_peft:
        weights = split_experts(weights, family.expert_names)
    specs = weights.specs

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the export directory {folder}: {error.strerror}; name another"
        ) from None
    if is_peft:
        files = {ADAPTER_FILE: list(specs)}
    else:
        files = _plan_files(specs, dtype, options.max_shard_bytes)
    total = _write_weights(folder, files, weights, dtype, progress)

    if is_peft:
        _write_json(folder / ADAPTER_CONFIG, peft_config(manifest))
    else:
        _write_json(folder / "config.json", config_to_export(manifest.model_config, dtype))
    beside = _write_model_files(storage, manifest, folder)
    # The index last: without it nothing loads the other files.
    if len(files) > 1:
        file_by_name = {}
        for file_name, names in files.items():
            for name in names:
                file_by_name[name] = file_name
        _write_json(
            folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": file_by_name}
        )

    return ExportSummary(
        step=manifest.step,
        directory=str(folder),
        dtype=dtype,
        num_tensors=len(specs),
        num_bytes=total,
        files=tuple(files),
        model_files=beside,
    )


def _write_weights(
    folder: Path,
    files: Mapping[str, list[str]],
    weights: ExportedWeights,
    dtype: str,
    progress: Callable[[int, int], None] | None,
) -> int:
    """Write the files of weights; return the bytes of all tensors."""
    specs = weights.specs
    total = sum(_export_bytes(name, spec, dtype) for name, spec in specs.items())
    done = 0
    for file_name, names in files.items():
        with _atomic_file(folder / file_name) as temporary, temporary.open("wb") as output:
            output.write(_header({name: specs[name] for name in names}, dtype))
            for name, full in zip(names, weights.read(names), strict=True):
                exported = full.to(TORCH_DTYPES[_export_dtype(name, dtype)])
                output.write(tensor_bytes(exported.contiguous()))
                done += _export_bytes(name, specs[name], dtype)
                if progress:
                    progress(done, total)
            # Durable before the rename that makes it visible.
            output.flush()
            os.fsync(output.fileno())
    return total


def _weights(
    storage: Storage,
    manifest: Manifest,
    specs: Mapping[str, TensorSpec],
    options: ExportOptions,
) -> ExportedWeights:
    """Return the weights to export.

    specs: the checkpoint's parameters, without rows that pad the vocabulary.
    """

    def read(name: str, dtype: str = options.dtype) -> torch.Tensor:
        spec = manifest.specs[f"{PARAMETER_KIND}{name}"]
        whole = empty_tensor(spec.shape, TORCH_DTYPES[_export_dtype(name, dtype)], storage.uri)
        for shard, unit in read_shards(
            storage, manifest, spec.shards, max_memory_bytes=READ_AHEAD_BYTES
        ):
            whole[spec.unit_slices(shard.unit)].copy_(unit)
        return whole[tuple(slice(size) for size in specs[name].shape)]

    if options.merge:
        return merge_weights(manifest, lambda name: read(name, "float32"), options.base)
    if adapter_of(manifest.model_config) is not None:
        return peft_weights(manifest, specs, read)
    return ExportedWeights(specs, lambda names: map(read, names))


def _write_model_files(storage: Storage, manifest: Manifest, folder: Path) -> tuple[str, ...]:
    """Write the run's tokenizer and generation config; return the names of the files."""
    prefix = manifest.scalars.get(SCALAR)
    contents = read_model_files(storage, str(prefix)) if prefix else {}
    for name, content in contents.items():
        place = folder
        if name.startswith(f"{MORE_TEMPLATES}/"):
            place = folder / MORE_TEMPLATES
            place.mkdir(exist_ok=True)
        with _atomic_file(place / Path(name).name) as temporary:
            temporary.write_bytes(content)
    if GENERATION_CONFIG not in contents:
        _write_json(folder / GENERATION_CONFIG, default_generation_config(manifest.model_config))
    return tuple(sorted({*contents, GENERATION_CONFIG}))


def _parameter_specs(manifest: Manifest) -> dict[str, TensorSpec]:
    """Return the specs of the whole parameters by their Hugging Face names, sorted.

    They exclude the rows that pad the vocabulary.
    """
    states = [name for name in manifest.specs if name.startswith(PARAMETER_KIND)]
    names = sorted(name.removeprefix(PARAMETER_KIND) for name in states)
    family = FAMILIES.get(str(manifest.model_config.get("model_type")))
    padded: Mapping[str, int] = {}
    if family and PADDED in manifest.model_config:
        padded = family.token_dims()

    specs = {}
    for name in names:
        spec = manifest.specs[f"{PARAMETER_KIND}{name}"]
        shape = list(spec.shape)
        if name in padded:
            shape[padded[name]] = int(manifest.model_config["vocab_size"])
        specs[name] = TensorSpec(spec.name, tuple(shape), spec.dtype)
    return specs


def _check_request(
    folder: Path, manifest: Manifest, specs: Mapping[str, TensorSpec], dtype: str
) -> None:
    if dtype not in EXPORT_DTYPES:
        raise ConfigError(
            f"cannot export as dtype {dtype!r}: use one of {', '.join(EXPORT_DTYPES)}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"export directory {folder} is not an empty directory: name a new one")
    if not specs:
        raise ConfigError(
            f"the checkpoint of step {manifest.step} holds no parameters (tensors named"
            f" {PARAMETER_KIND}*)"
        )
    if "model_type" not in manifest.model_config:
        raise ConfigError(
            f"the checkpoint of step {manifest.step} carries no model config with a model_type to"
            " export"
        )


def _export_dtype(name: str, dtype: str) -> str:
    """Return the dtype of an exported tensor: routers' correction biases stay in fp32.

    The library, too, keeps them in fp32 in models of any dtype.
    """
    if name.endswith(CORRECTION_BIAS):
        return "float32"
    return dtype


def _export_bytes(name: str, spec: TensorSpec, dtype: str) -> int:
    num_elements = spec.num_bytes // spec.item_bytes
    return num_elements * TORCH_DTYPES[_export_dtype(name, dtype)].itemsize


def _plan_files(
    specs: Mapping[str, TensorSpec], dtype: str, max_shard_bytes: int
) -> dict[str, list[str]]:
    """Assign tensors to files, in order and up to `max_shard_bytes` each; at least one per file."""
    groups: list[list[str]] = []
    filled = 0
    for name, spec in specs.items():
        size = _export_bytes(name, spec, dtype)
        if not groups or filled + size > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size

    if len(groups) == 1:
        return {_SINGLE_NAME: groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": names
        for number, names in enumerate(groups, 1)
    }


def _header(specs: Mapping[str, TensorSpec], dtype: str) -> bytes:
    """Return a safetensors header: its length (u64), then JSON.

    The JSON is padded so that the tensors begin at a multiple of 8 bytes.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, spec in specs.items():
        end = position + _export_bytes(name, spec, dtype)
        entries[name] = {
            "dtype": EXPORT_DTYPES[_export_dtype(name, dtype)],
            "shape": list(spec.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@contextmanager
def _atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary name to write to.

    The file is renamed to `path` if the block succeeds, and removed if it fails.
    """
    temporary = path.with_name(f".{path.name}.writing")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_json(path: Path, document: Mapping[str, object]) -> None:
    with _atomic_file(path) as temporary:
        temporary.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
