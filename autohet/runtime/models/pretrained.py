"""Reader of the weights of a Hugging Face checkpoint, with the rules of `transformers`.

The rules cover names, tied heads and scales of fp8 weights. Every tensor in the files is used,
known to be computed, logged, or refused.
"""

import functools
import hashlib
import json
import logging
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.hub import cached_file

from autohet.runtime.models.family import Family
from autohet.runtime.models.layers.experts import num_experts
from autohet.runtime.models.parameter_spec import STORED_ROWS
from planner.errors import ConfigError
from planner.inputs.documents import Document, Json

logger = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
COMPUTED = re.compile(
    r"(\.rotary_emb\.inv_freq|\.attn\.bias|\.attn\.masked_bias|\.crossattention\.bias)$"
)
"""Pattern of buffers that older releases stored and that the library's modules compute."""
SCALES = re.compile(
    r"[._](scale|scales|scale_inv|SCB|absmax|quant_map|quant_state\.[\w.]+|qweight|qzeros|g_idx"
    r"|weight_packed|weight_shape|weight_format|zero_point|zeros|amax)$"
)
"""Pattern of tensors of quantized weights that are no parameters."""
FP8_SCALE = "_scale_inv"
"""Suffix of the tensor of scales beside an fp8 weight (transformers, finegrained_fp8)."""
SizeRange = tuple[int, int]
"""Least and greatest number of rows or columns of a block."""
BlockSizes = tuple[SizeRange, SizeRange]
ANY_SIZE: SizeRange = (1, sys.maxsize)
AXES = ("rows", "columns")
FP8_BESIDE = re.compile(r"\.(activation_scale|input_scale|activation_scale_inv)$")
"""Pattern of activation scales beside fp8 weights; dequantized weights need none."""
SAMPLED_BYTES = 4096
"""Bytes per tensor that identify the weights; reading all bytes would take minutes."""
READ_ROWS = 8192
"""Rows of two tensors that are compared at a time."""


def settle_weights(
    source: str, config: PreTrainedConfig, family: Family, revision: str | None = None
) -> None:
    """Make `config` describe the weights of `source`.

    If the config ties the head to the embedding, but the files hold a different head, untie it, as
    the library does.

    Raises:
        ConfigError: the weights are quantized in a way that cannot be undone here; or, in a
        directory, a tensor is missing or cannot be used.
    """
    _check_quantization(source, getattr(config, "quantization_config", None))
    local = Path(source).is_dir()
    if not local and not family.tied_head(config):
        # A hub's files are fetched by the workers that read them.
        return
    files = _files_by_tensor(source, revision, required=False)
    if not files:
        return
    if family.tied_head(config) and _head_differs(source, config, family, files):
        config.tie_word_embeddings = False
        _warn_once(
            f"model.pretrained '{source}': tie_word_embeddings is true, but {family.head}.weight"
            " differs from the embedding; they are trained as two tensors, as transformers does"
        )
    if local:
        _check_names(source, config, family, files)


def pretrained_parameters(
    path: str,
    config: PreTrainedConfig,
    family: Family,
    names: Collection[str],
    revision: str | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole fp32 tensor) for each of `names`, one tensor at a time.

    They are read from a Hugging Face checkpoint's safetensors files. Rows that pad a vocabulary are
    0.

    Raises:
        ConfigError: the checkpoint or a tensor is missing, or a shape is not the config's.
    """
    specs = family.parameter_specs(config)
    files = _files_by_tensor(path, revision)
    _check_names(path, config, family, files, only=names)
    block = _block_sizes(path, revision, files)
    for name in sorted(names):
        sources = _sources(name, config, family, files)
        tensor = _read_joined(path, sources, files, block)
        shape = specs[name].shape
        is_of_tokens = name in family.vocabulary_parameters()
        if is_of_tokens:
            shape = (int(getattr(config, STORED_ROWS, config.vocab_size)), *shape[1:])
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{name} in '{path}' has shape {tuple(tensor.shape)}, but the config says {shape}"
            )
        if is_of_tokens:
            # As transformers' resize_token_embeddings, without its noise of 1e-9 of the covariance.
            new = tensor.mean(0).expand(int(config.vocab_size) - len(tensor), -1)
            tensor = torch.cat([tensor, new])
        yield name, with_more_rows(tensor, specs[name].shape)


def with_more_rows(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Append rows of zeros to a tensor if the shape has more rows."""
    more = shape[0] - tensor.shape[0]
    if not more:
        return tensor
    padding = tensor.new_zeros(more, *tensor.shape[1:])
    return torch.cat([tensor, padding])


# names
# ----------------------------------------------------------------------------------


Sources = Sequence[tuple[str, ...]]
"""Names in the files of one parameter: one tensor, or the matrices of each expert of a stack."""


TEXT_PARTS = ("language_model.", "model.language_model.", "text_model.", "model.text_model.")
"""Prefixes of the text part's tensors in files of multimodal models, by architecture and release.

They precede the text model's own names, or those without the prefix of its base.
"""
BLOCKS = "_blocks"
BLOCK_SCALES = "_scales"
"""Suffixes of a stack of experts in MXFP4 (gpt-oss): pairs of 4-bit values, and their exponents."""


def _placements(family: Family) -> Iterator[tuple[str, str]]:
    """Yield (prefix of a parameter's name that files may lack, prefix that they may add)."""
    for added in ("", *TEXT_PARTS):
        for lacked in ("", f"{family.base}."):
            yield lacked, added


def text_prefix(family: Family, files: Collection[str]) -> str:
    """Return the prefix of the text part in a multimodal model's files; empty for a text model."""
    embedding = f"{family.token_embedding}.weight"
    for lacked, added in _placements(family):
        if added + embedding.removeprefix(lacked) in files:
            return added
    return ""


def _sources(
    name: str, config: PreTrainedConfig, family: Family, files: Mapping[str, str]
) -> Sources:
    """Return the names of a parameter in the files, or its own name if the files lack it.

    A checkpoint of the decoder alone omits the prefix of its base, one of a multimodal model adds
    the text part's, and a tied embedding may be stored as the head. Experts are stored one by one,
    as a stack, or as a stack in MXFP4.
    """
    names = [name]
    if family.tied_head(config) and name == f"{family.token_embedding}.weight":
        names.append(f"{family.head}.weight")
    experts = None
    if family.expert_names is not None:
        names.append(family.expert_names.stored_name(name))
        experts = family.expert_names.matrices(name, num_experts(config) or 0)
    for lacked, added in _placements(family):
        for each in names:
            candidate = added + each.removeprefix(lacked)
            for stored in (candidate, f"{candidate}{BLOCKS}"):
                if stored in files:
                    return ((stored,),)
        if experts and added + experts[0][0].removeprefix(lacked) in files:
            placed = []
            for matrices in experts:
                placed.append(tuple(added + each.removeprefix(lacked) for each in matrices))
            return placed
    if experts is not None:
        return experts
    return ((name,),)


def _check_names(
    source: str,
    config: PreTrainedConfig,
    family: Family,
    files: Mapping[str, str],
    only: Collection[str] | None = None,
) -> None:
    """Check that every parameter has a tensor; log the tensors that are neither used nor computed.

    `only`: check no other parameters.

    Raises:
        ConfigError: a tensor is missing, or part of quantized weights.
    """
    used: set[str] = set()
    missing: set[str] = set()
    wanted = None if only is None else set(only)
    for name in family.parameter_specs(config):
        is_wanted = wanted is None or name in wanted
        for tensors in _sources(name, config, family, files):
            used.update(tensors)
            if is_wanted:
                missing.update(tensor for tensor in tensors if tensor not in files)
    if missing:
        raise ConfigError(f"checkpoint '{source}' has no tensor {min(missing)}")

    used |= {f"{name}{FP8_SCALE}" for name in used}
    used |= {_block_scales(name) for name in used if name.endswith(BLOCKS)}
    # A tied head may be stored beside the embedding that is read for both.
    prefix = text_prefix(family, files)
    used |= {f"{family.head}.weight", f"{prefix}{family.head}.weight"}
    unused = []
    for tensor in sorted(set(files) - used):
        # Other parts of a multimodal model were announced with its config.
        if not tensor.startswith(prefix):
            continue
        if not COMPUTED.search(f".{tensor}") and not FP8_BESIDE.search(tensor):
            unused.append(tensor)

    # Layers past the last one (multi-token prediction) are not read, whatever their format.
    num_layers = family.num_layers(config)
    scales = []
    for tensor in unused:
        if SCALES.search(tensor) and family.layer_of(tensor) < num_layers:
            scales.append(tensor)
    if scales:
        raise ConfigError(
            f"checkpoint '{source}' holds {scales[0]}, a part of quantized weights that would be"
            f" read without it; {DEQUANTIZE_FIRST}"
        )
    if unused:
        shown = ", ".join(unused[:3])
        if len(unused) > 3:
            shown += ", ..."
        _warn_once(
            f"checkpoint '{source}': {len(unused)} tensors are no parameters of this"
            f" {config.model_type} and are not used, as in transformers: {shown}"
        )


def _head_differs(
    source: str, config: PreTrainedConfig, family: Family, files: Mapping[str, str]
) -> bool:
    """Return True if the files hold both a head and an embedding, and they differ."""
    head, embedding = f"{family.head}.weight", f"{family.token_embedding}.weight"
    stored: list[str] = []
    for name in (head, embedding):
        for lacked, added in _placements(family):
            candidate = added + name.removeprefix(lacked)
            if candidate in files:
                stored.append(candidate)
                break
    if len(stored) < 2:
        return False
    head, embedding = stored
    with _open(files[head]) as heads, _open(files[embedding]) as embeddings:
        one = heads.get_slice(head)
        other = embeddings.get_slice(embedding)
        rows = one.get_shape()[0]
        if one.get_shape() != other.get_shape():
            raise ConfigError(
                f"checkpoint '{source}': {head} has shape {tuple(one.get_shape())}, but the"
                f" embedding has {tuple(other.get_shape())}; they cannot be tied"
            )
        for first in range(0, rows, READ_ROWS):
            part = slice(first, first + READ_ROWS)
            if not torch.equal(one[part], other[part]):
                return True
        return False


@functools.lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


# quantized weights
# ----------------------------------------------------------------------------------

DEQUANTIZE_FIRST = (
    "dequantize it with transformers (from_pretrained, dequantize, save_pretrained) and name that"
    " directory, or name the original model"
)


def _check_quantization(source: str, quantization: Any) -> None:
    """Check that the weights are plain, or quantized in a way that is undone on reading.

    Raises:
        ConfigError: they are quantized in another way.
    """
    if not quantization:
        return
    document = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    method = document.get("quant_method")
    if method not in ("fp8", "mxfp4"):
        raise ConfigError(
            f"model.pretrained '{source}' is quantized by {method or 'an unnamed method'}"
            f" (quantization_config); {DEQUANTIZE_FIRST}. fp8 with weight_scale_inv and"
            " MXFP4 of gpt-oss can be read"
        )


def _quantization_of(path: str, revision: str | None) -> Document:
    """Return `quantization_config` of a checkpoint's config file; empty without one."""
    file = _find(path, CONFIG_FILE, revision)
    document = {} if file is None else json.loads(Path(file).read_text())
    return quantization_of(document)


def quantization_of(document: Json) -> Document:
    """Return the quantization settings of a model or of its text part; empty without any."""
    inner = document.get("text_config") or {}
    return document.get("quantization_config") or inner.get("quantization_config") or {}


def _block_scales(stored: str) -> str:
    return stored.removesuffix(BLOCKS) + BLOCK_SCALES


def _block_sizes(path: str, revision: str | None, files: Mapping[str, str]) -> BlockSizes:
    """Return the possible rows and columns per scale of fp8 weights.

    Without a size in the config they are those that all shapes in the files leave.
    """
    given = _quantization_of(path, revision).get("weight_block_size")
    if given:
        rows, columns = int(given[0]), int(given[1])
        return (rows, rows), (columns, columns)
    found = ANY_SIZE, ANY_SIZE
    for name, file in files.items():
        scale_name = f"{name}{FP8_SCALE}"
        if scale_name not in files:
            continue
        with _open(file) as reader, _open(files[scale_name]) as scale_reader:
            shape = reader.get_slice(name).get_shape()
            grid = scale_reader.get_slice(scale_name).get_shape()
        if len(shape) == len(grid) == 2 and grid != [1, 1]:
            by_axis = [_sizes_by_count(*each) for each in zip(shape, grid, strict=True)]
            found = _common(found[0], by_axis[0]), _common(found[1], by_axis[1])
    return found


def _sizes_by_count(length: int, count: int) -> SizeRange:
    """Return the block sizes that cut `length` into `count` blocks; the last may be smaller."""
    if count == 1:
        return length, ANY_SIZE[1]
    return -(-length // count), -(-length // (count - 1)) - 1


def _common(one: SizeRange, other: SizeRange) -> SizeRange:
    return max(one[0], other[0]), min(one[1], other[1])


def _read_joined(
    path: str, sources: Sources, files: Mapping[str, str], block: BlockSizes
) -> Tensor:
    """Read a whole parameter in fp32; the experts of a stack one after the other."""
    if len(sources) == 1 and len(sources[0]) == 1:
        return _read(path, sources[0][0], files, block)
    stack: Tensor | None = None
    for expert, names in enumerate(sources):
        parts = [_read(path, name, files, block) for name in names]
        matrices = torch.cat(parts)
        if stack is None:
            stack = matrices.new_empty(len(sources), *matrices.shape)
        if matrices.shape != stack.shape[1:]:
            raise ConfigError(
                f"{names[0]} in '{path}' has shape {tuple(matrices.shape)}, but the first expert"
                f" has {tuple(stack.shape[1:])}; fetch it again"
            )
        stack[expert] = matrices
    assert stack is not None
    return stack


def _read(path: str, stored: str, files: Mapping[str, str], block: BlockSizes) -> Tensor:
    """Read a whole tensor in fp32, dequantized."""
    with _open(files[stored]) as reader:
        tensor = reader.get_tensor(stored)
    if stored.endswith(BLOCKS):
        with _open(files[_block_scales(stored)]) as reader:
            exponents = reader.get_tensor(_block_scales(stored))
        return convert_moe_packed_tensors(tensor, exponents, dtype=torch.float32)
    scale_name = f"{stored}{FP8_SCALE}"
    if scale_name in files:
        with _open(files[scale_name]) as reader:
            scales = reader.get_tensor(scale_name)
        return _dequantize(path, stored, tensor, scales, block)
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise ConfigError(
            f"{stored} in '{path}' is {str(tensor.dtype).removeprefix('torch.')} without scales;"
            f" {DEQUANTIZE_FIRST}"
        )
    plain: Tensor = tensor.float()
    return plain


def _dequantize(
    path: str, stored: str, tensor: Tensor, scales: Tensor, block: BlockSizes
) -> Tensor:
    """Multiply `tensor` [m, n] by its scales, one for each block.

    uint8 scales are exponents (E8M0).

    Raises:
        ConfigError: the scales fit no block size, or several, which give other weights.
    """
    factors = scales.float()
    if scales.dtype == torch.uint8:
        factors = (factors - 127).exp2()
    weight = tensor.float()
    if factors.numel() == 1:
        return weight * factors.reshape(())
    shape, grid = tuple(weight.shape), tuple(factors.shape)
    what = f"{stored} in '{path}' has shape {shape} and scales of shape {grid}"
    if len(shape) != 2 or len(grid) != 2:
        raise ConfigError(f"{what}, not a matrix with a scale for each block; {DEQUANTIZE_FIRST}")
    by_element = factors
    for axis in (0, 1):
        own = _sizes_by_count(shape[axis], grid[axis])
        least, most = _common(own, block[axis])
        if least > most:
            sizes = block[0][0], block[1][0]
            raise ConfigError(f"{what}, which do not fit blocks of {sizes}; {DEQUANTIZE_FIRST}")
        if grid[axis] > 1 and least < most:
            raise ConfigError(
                f"{what}, which fit blocks of {least} to {most} {AXES[axis]}, and the checkpoint's"
                f" {CONFIG_FILE} has no quantization_config; put it back, with weight_block_size,"
                f" or {DEQUANTIZE_FIRST}"
            )
        # Blocks at the lower and the right border may be smaller.
        size = min(least, shape[axis])
        by_element = by_element.repeat_interleave(size, axis).narrow(axis, 0, shape[axis])
    return weight * by_element


def weights_identity(source: str, revision: str | None = None) -> str | None:
    """Return an identity of pretrained weights; None: the weights are not on this machine.

    It distinguishes weights of equal shapes. For a directory it is a digest of each tensor's first
    bytes, for a hub id its commit.
    """
    if not Path(source).is_dir():
        # The hub's cache has a directory for each commit.
        config = _find(source, CONFIG_FILE, revision)
        commit = re.search(r"snapshots/([0-9a-f]+)/", config or "")
        if commit:
            return f"{source}@{commit[1]}"
        return f"{source}@{revision or 'main'}"
    files = _files_by_tensor(source, revision, required=False)
    if not files:
        return None
    digest = hashlib.sha256()
    for file in sorted(set(files.values()), key=lambda each: Path(each).name):
        with open(file, "rb") as stored:
            # A safetensors file: the header's size in 8 bytes, the header, then the data.
            size = int.from_bytes(stored.read(8), "little")
            header = json.loads(stored.read(size))
            for name in sorted(set(header) - {"__metadata__"}):
                tensor = header[name]
                digest.update(f"{name}:{tensor['shape']}".encode())
                start, end = tensor["data_offsets"]
                stored.seek(8 + size + start)
                digest.update(stored.read(min(end - start, SAMPLED_BYTES)))
    return f"sha256:{digest.hexdigest()[:32]}"


# files
# ----------------------------------------------------------------------------------


def _open(file: str) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        with suppress(OSError), open(file, "rb") as content:
            if content.read(40).startswith(b"version https://git-lfs.github.com/spec/"):
                raise ConfigError(
                    f"{file} is a pointer of Git LFS, without its content; run `git lfs pull` in"
                    " its clone"
                ) from None
        raise ConfigError(
            f"{file} is no readable safetensors file ({error}); fetch it again"
        ) from None


def _files_by_tensor(path: str, revision: str | None, *, required: bool = True) -> dict[str, str]:
    """Map tensor names to safetensors files; empty if there are none and none is required."""
    # The single file comes before the index, as in transformers.
    single = _find(path, SINGLE_FILE, revision)
    if single is not None:
        with _open(single) as reader:
            return dict.fromkeys(reader.keys(), single)
    index = _find(path, INDEX_FILE, revision)
    if index is not None:
        entries = _weight_map(Path(index))
        found: dict[str, str] = {}
        for file in sorted(set(entries.values())):
            where = _find(path, file, revision)
            if where is None:
                raise ConfigError(f"checkpoint '{path}' lacks {file}, which its index names")
            found[file] = where
        return {tensor: found[file] for tensor, file in entries.items()}
    if required:
        raise ConfigError(
            f"checkpoint '{path}' has no model.safetensors; convert it to safetensors first"
        )
    return {}


def _weight_map(index: Path) -> dict[str, str]:
    """Map tensor names to the names of files beside the index.

    Raises:
        ConfigError: the index is damaged, or names something other than files beside it.
    """
    try:
        entries = json.loads(index.read_text())["weight_map"]
        pairs = [(str(tensor), Path(file)) for tensor, file in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{index} is no index of safetensors files ({type(error).__name__}: {error}); fetch it"
            " again"
        ) from None
    for tensor, file in pairs:
        if file.is_absolute() or ".." in file.parts:
            raise ConfigError(f"{index} names {file} for {tensor}, a file outside its directory")
    return {tensor: str(file) for tensor, file in pairs}


def _find(path: str, file: str, revision: str | None) -> str | None:
    try:
        return cached_file(
            path, file, revision=revision, _raise_exceptions_for_missing_entries=False
        )
    except OSError as error:
        raise ConfigError(
            f"model.pretrained '{path}' cannot be read: {str(error).splitlines()[0]}"
        ) from None
