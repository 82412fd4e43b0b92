"""What autograd keeps of one block, counted on the block itself: of families for which
`autohet.runtime.kept_values` has no formula.

A stage of one block runs on fake tensors (shapes without memory, operators chosen as on a CPU), at
tensor-parallel degrees 1, 2 and up. What falls with the degree is split, the rest is on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from autohet.runtime.models import family_of
from autohet.runtime.models.family import COMPUTE_DTYPES
from autohet.runtime.models.recomputation import KEPT
from autohet.runtime.models.stage import StageModel, build_stage
from autohet.runtime.models.tensor_parallel import TensorParallel
from planner.model_spec import KeptValues

TOKENS = 16
BACKWARD_SHARE = 2.5
"""Gradients alive at the worst moment of a gated block's backward pass, by its inner width: as
counted for Llama's (`autohet.runtime.kept_values`).
"""


class _SilentGroup:
    """A tensor-parallel group whose sums leave everything as it is: shapes alone count here."""

    def all_reduce(self, tensor: Tensor) -> None: ...

    def all_reduce_max(self, tensor: Tensor) -> None: ...

    def all_gather(self, out: Tensor, part: Tensor) -> None: ...

    def reduce_scatter(self, out: Tensor, parts: Tensor) -> None: ...


class _KeptProducts(TorchDispatchMode):
    """Sums the bytes that `selective` recomputation keeps of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if function in KEPT:
            leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            self.bytes += sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        return out


@dataclass(frozen=True)
class _Count:
    """Scalars per token, of the compute format's width."""

    everything: float
    selective: float


def counted_block(config: PreTrainedConfig, precision: str) -> KeptValues:
    """What autograd keeps of the first block of a model."""
    family = family_of(config)
    short = _one_block(config)
    finest, units = family.max_tp_degree(short), family.key_value_units(short)
    dtype = COMPUTE_DTYPES[precision]
    counts = [_count(short, degree, dtype) for degree in (1, units, finest)]
    split, replicated, key_value = _parts([each.everything for each in counts], units, finest)
    selective = _parts([each.selective for each in counts], units, finest)
    inner = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    return KeptValues(
        split=split,
        replicated=replicated,
        selective_split=selective[0],
        selective_replicated=selective[1],
        backward=BACKWARD_SHARE * inner,
        key_value=key_value,
        selective_key_value=selective[2],
    )


def counted_head(config: PreTrainedConfig, precision: str) -> KeptValues:
    """Of the final norm and the projection's input; logits are counted apart."""
    short, dtype = _one_block(config), COMPUTE_DTYPES[precision]
    with FakeTensorMode(allow_non_fake_inputs=True):
        stage, given = _fake_stage(short, 1, dtype)
        kept = _saved_bytes(stage, lambda: stage.head(stage.norm(given)))
    scalars = kept / (TOKENS * dtype.itemsize)
    return KeptValues(0, scalars, 0, scalars)


def _parts(kept: Sequence[float], units: int, finest: int) -> tuple[float, float, float]:
    """Split (keys and values among it), replicated, and keys and values, of what a rank keeps at
    degree 1, at `units`, and at `finest`. Beyond `units`, keys and values are not split further; of
    one key-value head they cannot be told from what is replicated.
    """
    one, middle, last = kept
    if finest == 1:
        return one, 0.0, 0.0
    if units in (1, finest):
        split = (one - last) / (1 - 1 / finest)
        return split, one - split, 0.0
    split = (one - middle) / (1 - 1 / units)
    replicated = one - split
    # last = replicated + (split - key_value) / finest + key_value / units
    key_value = max(0.0, (last - replicated - split / finest) / (1 / units - 1 / finest))
    return split, replicated, key_value


def _one_block(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a model with the first block alone."""
    short = copy.deepcopy(config)
    for key in ("layer_types", "no_rope_layers"):
        if getattr(short, key, None):
            setattr(short, key, list(getattr(short, key))[:1])
    short.num_hidden_layers = 1
    family_of(config).check_dropout(short)
    return short


def _fake_stage(
    config: PreTrainedConfig, degree: int, dtype: torch.dtype
) -> tuple[StageModel, Tensor]:
    """The only stage of a model, and hidden states as they come from a block before."""
    tp = TensorParallel(_SilentGroup(), 0, degree) if degree > 1 else None
    stage = build_stage(config, 0, 1, tp, torch.device("cpu"), dtype)
    stage.load_parameters(
        {name: torch.empty(shape, dtype=dtype) for name, shape in stage.local_shapes().items()}
    )
    hidden = torch.empty(1, TOKENS, int(config.hidden_size), dtype=dtype, requires_grad=True)
    return stage, hidden * 1.0


def _count(config: PreTrainedConfig, degree: int, dtype: torch.dtype) -> _Count:
    with FakeTensorMode(allow_non_fake_inputs=True):
        stage, given = _fake_stage(config, degree, dtype)
        stage.prepare((1, TOKENS))
        everything = _saved_bytes(stage, lambda: stage.block_output(0, given))
        with _KeptProducts() as products:
            stage.block_output(0, given)
    scale = TOKENS * dtype.itemsize
    of_input = given.numel() * given.element_size()
    return _Count(everything / scale, (products.bytes + of_input) / scale)


def _saved_bytes(stage: StageModel, run: Callable[[], Tensor]) -> int:
    """Bytes of the storages that autograd saves, without parameters and what all blocks share."""
    shared = {parameter.untyped_storage()._cdata for parameter in stage.parameters()}
    shared |= {tensor.untyped_storage()._cdata for tensor in stage.fixed_tensors()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in shared:
            found[key] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    assert out.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())
