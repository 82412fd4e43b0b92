"""Count the values that autograd keeps of one block, by running the block.

Used for families without a formula in `autohet.runtime.kept_values`.

A stage of one block runs on fake tensors (shapes without memory, operators chosen as on a CPU), at
tensor-parallel degrees 1, 2 and up. Values whose number falls with the degree are split; all others
are on every rank.
"""

from __future__ import annotations

import weakref
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
from autohet.runtime.models.config_keys import with_layers
from autohet.runtime.models.dropout import set_dropout
from autohet.runtime.models.experts import inner_width
from autohet.runtime.models.family import COMPUTE_DTYPES
from autohet.runtime.models.recomputation import KEPT
from autohet.runtime.models.stage import StageModel, build_stage
from autohet.runtime.models.tensor_parallel import TensorParallel
from planner.model_spec import KeptValues

TOKENS = 16
BACKWARD_SHARE = 2.5
"""Gradients alive at the peak of a gated block's backward pass, per unit of its inner width.

The number is that counted for Llama (`autohet.runtime.kept_values`).
"""


class _SilentGroup:
    """Tensor-parallel group whose operations are no-ops, since only shapes count here."""

    def all_reduce(self, tensor: Tensor) -> None: ...

    def all_reduce_max(self, tensor: Tensor) -> None: ...

    def all_gather(self, out: Tensor, part: Tensor) -> None: ...

    def reduce_scatter(self, out: Tensor, parts: Tensor) -> None: ...

    def all_to_all(
        self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None: ...

    def exchange_counts(self, counts: Tensor) -> tuple[list[int], list[int]]:
        raise NotImplementedError("fake tensors have no counts")


class _KeptProducts(TorchDispatchMode):
    """Counter of the bytes that `selective` recomputation keeps of a forward pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if function in KEPT:
            leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            self.bytes += sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        return out


@dataclass(frozen=True, eq=False)
class _Saved:
    """Tensor that autograd saves; alive as long as the node that saved it."""

    tensor: Tensor


@dataclass(frozen=True)
class _Count:
    """Scalars per token, of the compute format's width."""

    everything: float
    selective: float


def counted_block(config: PreTrainedConfig, precision: str, layer: int = 0) -> KeptValues:
    """Count the values that autograd keeps of one of a model's blocks.

    Blocks with experts are counted in bf16, since torch has no shapes of other grouped products.
    """
    family = family_of(config)
    short = _one_block(config, layer)
    finest, units = family.max_tp_degree(short), family.key_value_units(short)
    dtype = torch.bfloat16 if family.has_experts else COMPUTE_DTYPES[precision]
    counts = [_count(short, degree, dtype) for degree in (1, units, finest)]
    split, replicated, key_value = _parts([each.everything for each in counts], units, finest)
    selective = _parts([each.selective for each in counts], units, finest)
    inner = inner_width(short, 0)
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
    """Count the values kept of the final norm and the projection's input; logits are separate."""
    short, dtype = _one_block(config, 0), COMPUTE_DTYPES[precision]
    with FakeTensorMode(allow_non_fake_inputs=True):
        stage, given = _fake_stage(short, 1, dtype)
        kept = _saved_bytes(stage, lambda: stage.head(stage.norm(given)))
    scalars = kept / (TOKENS * dtype.itemsize)
    return KeptValues(0, scalars, 0, scalars)


def _parts(kept: Sequence[float], units: int, finest: int) -> tuple[float, float, float]:
    """Divide the kept values of a rank into (split, replicated, keys and values).

    `kept` are the values at degree 1, at `units`, and at `finest`. `split` includes keys and
    values. Beyond `units`, keys and values are not split further. With one key-value head they
    cannot be distinguished from replicated values.
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


def _one_block(config: PreTrainedConfig, layer: int) -> PreTrainedConfig:
    """Return the config of a model that has this block alone."""
    short = with_layers(config, [layer])
    set_dropout(short, family_of(config).take_dropout(short))
    return short


def _fake_stage(
    config: PreTrainedConfig, degree: int, dtype: torch.dtype
) -> tuple[StageModel, Tensor]:
    """Return a model of one stage, and hidden states like those of a preceding block."""
    tp = TensorParallel(_SilentGroup(), 0, degree) if degree > 1 else None
    stage = build_stage(config, 0, 1, tp, torch.device("cpu"), dtype)
    specs = stage.specs
    stage.load_parameters(
        {
            name: torch.empty(shape, dtype=specs[name].compute_dtype(dtype))
            for name, shape in stage.local_shapes().items()
        }
    )
    return stage, _fake_states(config, TOKENS, dtype)


def _fake_states(config: PreTrainedConfig, tokens: int, dtype: torch.dtype) -> Tensor:
    hidden = torch.empty(1, tokens, int(config.hidden_size), dtype=dtype, requires_grad=True)
    return hidden * 1.0


def _count(config: PreTrainedConfig, degree: int, dtype: torch.dtype) -> _Count:
    """Count what more tokens add.

    The rest does not grow with them, such as a router's weight in fp32.
    """
    counts = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        stage, _ = _fake_stage(config, degree, dtype)
        for tokens in (TOKENS, 2 * TOKENS):
            stage.prepare((1, tokens))
            counts.append(_kept_bytes(stage, _fake_states(config, tokens, dtype)))
    scale = TOKENS * dtype.itemsize
    (everything, selective), (more, more_selective) = counts
    return _Count((more - everything) / scale, (more_selective - selective) / scale)


def _kept_bytes(stage: StageModel, given: Tensor) -> tuple[int, int]:
    """Return the bytes that autograd and selective recomputation keep of the first block."""
    everything = _saved_bytes(stage, lambda: stage.block_output(0, given))
    input_bytes = given.numel() * given.element_size()
    if stage.family.changes_products(stage.config):
        return everything, input_bytes
    with _KeptProducts() as products:
        stage.block_output(0, given)
    return everything, products.bytes + input_bytes


def _saved_bytes(stage: StageModel, run: Callable[[], Tensor]) -> int:
    """Return the bytes of the storages that autograd saves.

    Parameters and tensors that all blocks share do not count, nor does what is saved for a result
    that nobody uses, such as the scores of a router's groups.
    """
    shared = {parameter.untyped_storage()._cdata for parameter in stage.parameters()}
    shared |= {tensor.untyped_storage()._cdata for tensor in stage.fixed_tensors()}
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        kept = _Saved(tensor)
        saved.add(kept)
        return kept

    with saved_tensors_hooks(pack, lambda kept: kept.tensor):
        out = run()
    assert out.requires_grad
    bytes_by_storage = {}
    for kept in saved:
        storage = kept.tensor.untyped_storage()
        if storage._cdata not in shared:
            bytes_by_storage[storage._cdata] = storage.nbytes()
    return sum(bytes_by_storage.values())
