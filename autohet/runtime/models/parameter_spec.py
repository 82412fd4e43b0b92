"""Parameters of the whole model, and the units into which tensor parallelism cuts them."""

import difflib
import fnmatch
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from planner.errors import ConfigError
from planner.plans.plan import TensorShare

EMBEDDING = -1
HEAD = -2
WHOLE = TensorShare(0, 1, 1)
"""Share of the only worker of a stage."""

MUON = "autohet_muon"
"""Attribute of a config: `training.muon_exempt` of a job whose optimizer is Muon; absent else."""

PADDED = "padded_vocab_size"
"""Attribute of a config: rows of embedding and head with padding; absent without padding."""

STORED_ROWS = "pretrained_vocab_size"
"""Attribute of a config: rows of embedding and head in the pretrained files; absent if all are."""


def grow_vocabulary(config: PreTrainedConfig, num_tokens: int | None) -> None:
    """Give the model `num_tokens` tokens; None: no-op.

    Raises:
        ConfigError: it has more.
    """
    present = int(config.vocab_size)
    if num_tokens is None or num_tokens == present:
        return
    if num_tokens < present:
        raise ConfigError(
            f"model.vocabulary_size is {num_tokens}, but the model has {present} tokens; leave it"
            " out"
        )
    setattr(config, STORED_ROWS, present)
    config.vocab_size = num_tokens


def pad_vocabulary(config: PreTrainedConfig, multiple: int) -> None:
    """Pad the rows of embedding and head to a multiple of `multiple`.

    Sets the config's `padded_vocab_size`; its `vocab_size` stays.
    """
    rows = -(-int(config.vocab_size) // multiple) * multiple
    if rows != int(config.vocab_size):
        setattr(config, PADDED, rows)


@dataclass(frozen=True)
class ParameterSpec:
    """Spec of one parameter of the whole model.

    `cuts` are its unit boundaries along `split_dim` (see `recovery.state.layout.TensorSpec`).
    `groups` counts the parts of a packed parameter (query, key and value in one), each cut into the
    same number of units. `layer` is the block's index, EMBEDDING or HEAD. `partial_gradient`: the
    parameter is replicated, and its gradient on each rank of a tensor-parallel group is a part of
    the sum. A parameter that is not `trainable` is no training state: it has no gradient, and each
    worker reads its slices from the origin of the run's first weights.

    is_token_count: the gradient counts the tokens of each expert; the parameter is a router's
    correction bias, which these counts move and which every format computes with in fp32.
    base_format: workers hold it in this format of fewer bits (`quantized.weight`); None: as it is.
    held_dtype: dtype of a part of such a parameter, in every format; None: that to compute in.
    """

    name: str
    shape: tuple[int, ...]
    layer: int
    split_dim: int | None = None
    cuts: tuple[int, ...] = (0, 1)
    groups: int = 1
    partial_gradient: bool = False
    is_norm_or_bias: bool = False
    """True if `transformers.Trainer` exempts the parameter from weight decay."""
    trainable: bool = True
    is_token_count: bool = False
    base_format: str | None = None
    held_dtype: torch.dtype | None = None
    uses_muon: bool = False
    """True if Muon updates it: a matrix, or a stack [experts, out, in] of one for each expert."""

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype to compute in; `dtype`: that of other parameters."""
        return torch.float32 if self.is_token_count else self.held_dtype or dtype

    @property
    def num_units(self) -> int:
        return len(self.cuts) - 1

    def unit_length(self, unit: int) -> int:
        """Return the length of a unit along `split_dim`."""
        return self.cuts[unit + 1] - self.cuts[unit]


_NORM_OR_BIAS = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Pattern of `transformers.Trainer.get_decay_parameter_names`."""


def is_norm_or_bias(module: nn.Module, name: str) -> bool:
    """Return True if `transformers.Trainer` exempts this parameter from weight decay."""
    return isinstance(module, nn.LayerNorm) or bool(_NORM_OR_BIAS.search(name.lower()))


def match_parameters(key: str, patterns: Sequence[str], names: Collection[str]) -> frozenset[str]:
    """Return the parameter names that match patterns of the job's key `key`.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    matched: set[str] = set()
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            nearest = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            raise ConfigError(
                f"{key} holds {pattern!r}, which matches no parameter; the nearest is"
                f" {nearest[0]!r}, and * stands for any part of a name"
            )
        matched.update(found)
    return frozenset(matched)


def local_shape(spec: ParameterSpec, units: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the concatenation of some units."""
    if spec.split_dim is None:
        return tuple(spec.shape)
    size = sum(spec.unit_length(unit) for unit in units)
    return (*spec.shape[: spec.split_dim], size, *spec.shape[spec.split_dim + 1 :])


def local_units(spec: ParameterSpec, share: TensorShare = WHOLE) -> tuple[int, ...]:
    """Return the units of `spec` that a rank with this share holds, ascending.

    A rank holds all of a replicated parameter. A unit of a key or value projection may be on
    several consecutive ranks: each computes it for its own query heads, and their gradients are
    parts of the sum.
    """
    if spec.split_dim is None:
        return (0,)
    finest = spec.num_units // spec.groups
    # Keys and values may have fewer heads, and so fewer units, than there are parts.
    assert finest % share.of == 0 or share.of % finest == 0, (
        f"{spec.name}: {finest} units in {share.of} parts"
    )
    units: list[int] = []
    for group in range(spec.groups):
        units += [group * finest + unit for unit in share.units(finest)]
    return tuple(units)


def take_units(spec: ParameterSpec, units: Sequence[int], whole: Tensor) -> Tensor:
    """Concatenate some units of a whole tensor, in memory of its own."""
    if spec.split_dim is None:
        return whole.clone()
    parts = []
    for unit in units:
        part = whole.narrow(spec.split_dim, spec.cuts[unit], spec.unit_length(unit))
        parts.append(part)
    return torch.cat(parts, spec.split_dim).contiguous()
