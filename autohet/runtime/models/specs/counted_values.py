"""Count the values that autograd keeps of one block for its backward pass, by running the block.

A stage of one block runs on fake tensors (shapes without memory, operators chosen as on a CPU):
whole, and as each rank of a tensor-parallel group of two. Values of which each rank has a part are
split; all others are on every rank.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from autohet.runtime.models.config_keys import with_layers
from autohet.runtime.models.family import COMPUTE_DTYPES
from autohet.runtime.models.layers.adapters import ADAPTER, adapter_of
from autohet.runtime.models.layers.dropout import without_dropout
from autohet.runtime.models.layers.experts import inner_width
from autohet.runtime.models.layers.recomputation import KEPT
from autohet.runtime.models.layers.tensor_parallel import TensorParallel
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.skeleton import skeleton
from autohet.runtime.models.stages.block_audit import OwnSums
from autohet.runtime.models.stages.stage import StageModel, build_stage
from planner.plans.model_spec import KeptValues
from planner.plans.plan import TensorShare

TOKENS = 16
GATED_BACKWARD_SHARE = 2.5
PLAIN_BACKWARD_SHARE = 1.5
"""Gradients alive at the peak of a block's backward pass, per unit of its inner width.

Beside the gradient of the widest product, a gated block has those of its gate and its other half.
"""


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
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self.bytes += leaf.nbytes
        return out


@dataclass(frozen=True, eq=False)
class _Saved:
    """Tensor that autograd saves; alive as long as the node that saved it."""

    tensor: Tensor


@dataclass(frozen=True)
class _Count:
    """Scalars per token, of the compute format's width.

    everything: that autograd keeps. selective: that selective recomputation keeps.
    """

    everything: float
    selective: float


_NOTHING = _Count(0.0, 0.0)


def count_block(config: PreTrainedConfig, precision: str, layer: int = 0) -> KeptValues:
    """Count the values that autograd keeps of one of a model's blocks.

    Blocks with experts are counted in bf16, since torch has no shapes of other grouped products.
    """
    family = family_of(config)
    block = _one_block(config, layer)
    dtype = torch.bfloat16 if family.has_experts else COMPUTE_DTYPES[precision]
    finest = family.max_tp_degree(config)
    units = family.key_value_units(config)
    whole = _count(block, None, dtype)
    halves: list[_Count] = []
    if finest > 1:
        halves = [_count(block, TensorShare(rank, rank + 1, 2), dtype) for rank in range(2)]
    key_value = _NOTHING
    if units < finest:
        key_value = _key_values(block, whole, dtype)
    # With less than two units every rank has the same keys and values, and none is cut further.
    uncut = key_value if units < 2 else _NOTHING

    of_halves = [each.everything for each in halves]
    split, replicated = _parts(whole.everything, of_halves, uncut.everything)
    of_halves = [each.selective for each in halves]
    selective_split, selective_replicated = _parts(whole.selective, of_halves, uncut.selective)

    modules = skeleton(with_layers(config, [layer])).named_modules()
    is_gated = any("gate" in path for path, _ in modules)
    share = GATED_BACKWARD_SHARE if is_gated else PLAIN_BACKWARD_SHARE
    return KeptValues(
        split=split,
        replicated=replicated,
        selective_split=selective_split,
        selective_replicated=selective_replicated,
        backward=share * inner_width(block.config, block.layer),
        key_value=key_value.everything,
        selective_key_value=key_value.selective,
    )


def _key_values(block: _Block, kept: _Count, dtype: torch.dtype) -> _Count:
    """Count the values of key and value heads: those that twice as many heads add.

    `kept` are the values of the block as it is. Its key-value heads are at most half of its
    attention heads.
    """
    twice = copy.copy(block.config)
    twice.num_key_value_heads = 2 * int(block.config.num_key_value_heads)
    more = _count(replace(block, config=twice), None, dtype)
    return _Count(more.everything - kept.everything, more.selective - kept.selective)


def count_head(config: PreTrainedConfig, precision: str) -> KeptValues:
    """Count the values kept of the final norm and the projection's input; logits are separate."""
    dtype = COMPUTE_DTYPES[precision]
    block = _Block(_without_dropout(with_layers(config, [0])), 0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        stage, given = _fake_stage(block, None, dtype)
        kept = _saved_bytes(stage, lambda: stage.head(stage.norm(given)))
    scalars = kept / (TOKENS * dtype.itemsize)
    return KeptValues(0, scalars, 0, scalars)


def _parts(whole: float, halves: Sequence[float], uncut: float) -> tuple[float, float]:
    """Divide the kept values of a block into (split, replicated).

    `whole` are its values without tensor parallelism, `halves` those on each of two ranks; fewer:
    the block cannot be cut. `uncut`: values of `split` that both ranks have whole.
    """
    if len(halves) < 2:
        return whole, 0.0
    split = 2 * whole - sum(halves) + uncut
    return split, whole - split


@dataclass(frozen=True)
class _Block:
    """A block of a model, without dropout."""

    config: PreTrainedConfig
    layer: int


def _one_block(config: PreTrainedConfig, layer: int) -> _Block:
    """Return a block in a model that has it alone.

    The targets of an adapter may name layers by their numbers, so they keep the whole model.
    """
    adapter = adapter_of(config)
    if adapter is None:
        return _Block(_without_dropout(with_layers(config, [layer])), 0)
    whole = _without_dropout(config)
    setattr(whole, ADAPTER, asdict(replace(adapter, dropout=0.0)))
    return _Block(whole, layer)


def _without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    plain = copy.copy(config)
    family_of(config).take_dropout(plain)
    return without_dropout(plain)


def _fake_stage(
    block: _Block, share: TensorShare | None, dtype: torch.dtype
) -> tuple[StageModel, Tensor]:
    """Return a model of one stage, and hidden states like those of a preceding block."""
    tp = None
    if share is not None:
        tp = TensorParallel.even(OwnSums(share.first), share.first, share.of)
    layers = range(block.layer, block.layer + 1)
    stage = build_stage(block.config, layers, tp, torch.device("cpu"), dtype)
    weights: dict[str, Tensor] = {}
    for name, shape in stage.weights.local_shapes().items():
        spec = stage.spec.parameters[name]
        weights[name] = torch.empty(shape, dtype=spec.compute_dtype(dtype))
    stage.weights.load(weights)
    return stage, _fake_states(block.config, TOKENS, dtype)


def _fake_states(config: PreTrainedConfig, tokens: int, dtype: torch.dtype) -> Tensor:
    hidden = torch.empty(1, tokens, int(config.hidden_size), dtype=dtype, requires_grad=True)
    # The result of an operator, as a block's input is in a stage, and no leaf.
    return hidden * 1.0


def _count(block: _Block, share: TensorShare | None, dtype: torch.dtype) -> _Count:
    """Count what more tokens add.

    The rest does not grow with them, such as a router's weight in fp32.
    """
    counts = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        stage, _ = _fake_stage(block, share, dtype)
        for tokens in (TOKENS, 2 * TOKENS):
            stage.inputs.prepare((1, tokens))
            counts.append(_kept_bytes(stage, _fake_states(block.config, tokens, dtype)))
    scale = TOKENS * dtype.itemsize
    (everything, selective), (more, more_selective) = counts
    return _Count((more - everything) / scale, (more_selective - selective) / scale)


def _kept_bytes(stage: StageModel, given: Tensor) -> tuple[int, int]:
    """Return the bytes that autograd and selective recomputation keep of the first block."""
    everything = _saved_bytes(stage, lambda: stage.block_output(0, given))
    if stage.spec.family.changes_products(stage.spec.config):
        return everything, given.nbytes
    with _KeptProducts() as products:
        stage.block_output(0, given)
    return everything, products.bytes + given.nbytes


def _saved_bytes(stage: StageModel, run: Callable[[], Tensor]) -> int:
    """Return the bytes of the storages that autograd saves.

    Parameters and tensors that all blocks share do not count, nor does what is saved for a result
    that nobody uses, such as the scores of a router's groups.
    """
    shared = {parameter.untyped_storage()._cdata for parameter in stage.parameters()}
    shared |= {tensor.untyped_storage()._cdata for tensor in stage.inputs.tensors()}
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        kept = _Saved(tensor)
        saved.add(kept)
        return kept

    with saved_tensors_hooks(pack, lambda kept: kept.tensor):
        out = run()
    # `out` keeps the graph alive, and with it all that backward would read.
    assert out.requires_grad
    bytes_by_storage = {}
    for kept in saved:
        storage = kept.tensor.untyped_storage()
        if storage._cdata not in shared:
            bytes_by_storage[storage._cdata] = storage.nbytes()
    return sum(bytes_by_storage.values())
