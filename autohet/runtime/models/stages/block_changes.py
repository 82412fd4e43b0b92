"""Changes of the library's blocks in a stage: parallel forms, adapters, and what routers learn."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from autohet.runtime.models.config_keys import is_recurrent
from autohet.runtime.models.family import COLUMN, ROW, SPLIT_NORM, WHOLE_MIXER
from autohet.runtime.models.layers.adapters import (
    A_SUFFIX,
    AdaptedLinear,
    Adapter,
    AdapterDropout,
    adapter_of,
)
from autohet.runtime.models.layers.attention import share_key_heads
from autohet.runtime.models.layers.dropout import DropoutRows, column_keys
from autohet.runtime.models.layers.expert_adapters import adapt_router, adapt_stack
from autohet.runtime.models.layers.expert_dispatch import (
    TokenPart,
    route_own_part,
    send_tokens,
    share_all_tokens,
)
from autohet.runtime.models.layers.experts import (
    EXPERTS,
    ROUTERS,
    SHARED_COLUMN,
    SHARED_ROW,
    STACKS,
    balance,
    count_tokens,
    keep_own_experts,
    leave_after,
)
from autohet.runtime.models.layers.loss_terms import LossTerms
from autohet.runtime.models.layers.pieces import compute_pieces_alone
from autohet.runtime.models.layers.tensor_parallel import (
    RowParallel,
    SequenceLength,
    SplitNorm,
    TensorParallel,
    enter,
    gather_sequence,
    own_part_alone,
)
from autohet.runtime.models.parameter_spec import (
    ParameterSpec,
    local_shape,
    local_units,
    take_units,
)
from autohet.runtime.models.quantized.weight import QuantizedWeight, use_quantized
from autohet.runtime.models.stages.stage_spec import StageSpec
from planner.plans.plan import TensorShare

# tensor parallelism
# ----------------------------------------------------------------------------------


def cut_blocks(blocks: Iterable[nn.Module], spec: StageSpec) -> None:
    """Replace the modules of the blocks that the plan splits by their parallel form."""
    if spec.tp is None or spec.tp.degree == 1:
        return
    for index, block in enumerate(blocks):
        _cut_block(block, spec.block_path(index), spec, spec.tp)


def _cut_block(block: nn.Module, path: str, spec: StageSpec, tp: TensorParallel) -> None:
    entered: set[str] = set()
    shared: set[str] = set()
    for name, module in list(block.named_modules()):
        style = spec.family.style(spec.config, f"{path}.{name}")
        parent_name, _, child = name.rpartition(".")
        if style in (SHARED_COLUMN, SHARED_ROW):
            # The block around shared experts enters and sums once, for them and the routed ones.
            shared.add(parent_name)
        elif style in ROW:
            setattr(block.get_submodule(parent_name), child, RowParallel(module, tp))
        elif style == EXPERTS:
            # All stacks have the same experts, so the first says which of them are here.
            first_stack = next(iter(module._parameters))
            stack = spec.parameters[f"{path}.{name}.{first_stack}"]
            _cut_experts(module, block.get_submodule(parent_name), stack, tp)
            if not tp.sends_tokens:
                entered.add(parent_name)
        elif style == SPLIT_NORM:
            setattr(block.get_submodule(parent_name), child, SplitNorm(module, tp))
        elif style in COLUMN:
            entered.add(parent_name)
            if isinstance(module, Conv1D):
                # Its forward pass reads the number of its outputs.
                weight = f"{path}.{name}.weight"
                shape = local_shape(spec.parameters[weight], spec.units(weight))
                module.nf = shape[-1]
    if tp.sends_tokens:
        for name in shared:
            share_all_tokens(block.get_submodule(name), tp)
    for name in entered:
        _cut_columns(block.get_submodule(name), spec, tp)


def _cut_experts(
    module: nn.Module, around: nn.Module, stack: ParameterSpec, tp: TensorParallel
) -> None:
    """Keep this rank's experts; the module around them routes tokens to them, or sums over ranks.

    stack: a parameter of all experts.
    """
    first, end = _experts_of(stack, tp.share)
    keep_own_experts(module, first, end)
    if tp.sends_tokens:
        send_tokens(module, tp, _owner_by_expert(stack, tp))
        route_own_part(around, tp)
    else:
        leave_after(around, tp)


def _cut_columns(module: nn.Module, spec: StageSpec, tp: TensorParallel) -> None:
    """Let a module whose first linear maps are cut compute with this rank's columns."""
    _enter_before(module, tp)
    _divide_split_size(module, tp.share)
    if spec.family.divide_attention is not None:
        spec.family.divide_attention(module, tp.share)
    share_key_heads(module, tp.share, spec.family.key_value_units(spec.config))


def _experts_of(stack: ParameterSpec, share: TensorShare) -> tuple[int, int]:
    """Return the first expert of a stack that a rank holds, and the one after its last."""
    units = local_units(stack, share)
    first = stack.cuts[units[0]]
    end = stack.cuts[units[-1] + 1]
    return first, end


def _owner_by_expert(stack: ParameterSpec, tp: TensorParallel) -> list[int]:
    """Return the rank that holds each expert of a stack."""
    owners = []
    for rank in range(tp.degree):
        first, end = _experts_of(stack, tp.stage.share(rank))
        owners += [rank] * (end - first)
    return owners


def _enter_before(module: nn.Module, tp: TensorParallel) -> None:
    """Apply Megatron's f once before a module whose first linear maps are cut."""

    def hook(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            hidden, *rest = args
            return (enter(hidden, tp), *rest), kwargs
        hidden = enter(kwargs["hidden_states"], tp)
        return args, {**kwargs, "hidden_states": hidden}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _divide_split_size(module: nn.Module, share: TensorShare) -> None:
    """Set the width by which GPT-2's attention splits its packed projection to the share's."""
    if hasattr(module, "split_size"):
        num_parts = share.end - share.first
        own_size = int(module.split_size) * num_parts // share.of  # type: ignore[arg-type]
        module.split_size = own_size  # type: ignore[assignment]


# whole mixers
# ----------------------------------------------------------------------------------


def isolate_mixers(blocks: Iterable[nn.Module], spec: StageSpec) -> None:
    """Let recurrent blocks compute each piece alone, and whole mixers see the whole sequence."""
    for index, block in enumerate(blocks):
        for name, module in block.named_children():
            path = f"{spec.block_path(index)}.{name}"
            if spec.family.style(spec.config, path) != WHOLE_MIXER:
                continue
            if is_recurrent(spec.config, spec.layers[index]):
                compute_pieces_alone(module)
            if spec.tp is not None and spec.tp.cuts_sequence:
                _gather_around(module, spec.tp)


def _gather_around(mixer: nn.Module, tp: TensorParallel) -> None:
    """Give a module the whole sequence, and take this rank's part of its output."""

    def join(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            hidden, *rest = args
            return (gather_sequence(hidden, tp), *rest), kwargs
        return args, {**kwargs, "hidden_states": gather_sequence(kwargs["hidden_states"], tp)}

    def split(_: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            return own_part_alone(out[0], tp), *out[1:]
        return own_part_alone(out, tp)

    mixer.register_forward_pre_hook(join, with_kwargs=True)
    mixer.register_forward_hook(split)


# adapters
# ----------------------------------------------------------------------------------


def adapt_blocks(blocks: Iterable[nn.Module], spec: StageSpec, rows: DropoutRows) -> None:
    """Add the low-rank update to the linear maps, routers and experts that have an adapter.

    rows: keys of the stage's present rows, for the dropout of adapters.
    """
    adapter = adapter_of(spec.config)
    if adapter is None:
        return
    for index, block in enumerate(blocks):
        # A list, since the loop replaces modules of the block that it walks.
        for name, module in list(block.named_modules()):
            path = f"{spec.block_path(index)}.{name}"
            for stack in STACKS:
                low = spec.parameters.get(f"{path}.{stack}{A_SUFFIX}")
                if low is not None:
                    adapt_stack(module, stack, adapter.scaling_of(low.shape[1]))
            if f"{path}{A_SUFFIX}" not in spec.parameters:
                continue
            if name in ROUTERS:
                adapt_router(module, adapter.scaling)
            else:
                parent, _, child = name.rpartition(".")
                adapted = adapted_map(module, path, spec, rows)
                setattr(block.get_submodule(parent), child, adapted)


def quantize_blocks(blocks: Iterable[nn.Module], spec: StageSpec) -> None:
    """Let the linear maps that a quantized base has compute with these."""
    for index, block in enumerate(blocks):
        for name, module in list(block.named_modules()):
            weight = f"{spec.block_path(index)}.{name}.weight"
            whole = spec.parameters.get(weight)
            if whole is not None and whole.base_format:
                use_quantized(module, QuantizedWeight(whole, spec.units(weight), spec.device))


def adapted_map(module: nn.Module, path: str, spec: StageSpec, rows: DropoutRows) -> AdaptedLinear:
    """Return the linear map at `path` with the low-rank update of the config's adapter."""
    adapter = adapter_of(spec.config)
    assert adapter is not None
    dropout = _adapter_dropout(path, adapter, spec, rows)
    return AdaptedLinear(module, adapter.rank, adapter.scaling, dropout)


def _adapter_dropout(
    path: str, adapter: Adapter, spec: StageSpec, rows: DropoutRows
) -> AdapterDropout | None:
    """Return the dropout of a map's adapter, over this rank's columns; None if it has none."""
    if not adapter.dropout:
        return None
    # A is cut as the map's input: its own units are cut from a matrix of column numbers.
    low = spec.parameters[f"{path}{A_SUFFIX}"]
    numbers = torch.arange(low.shape[1]).expand(low.shape)
    columns = take_units(low, local_units(low, spec.share), numbers)[0]
    keys = column_keys(path, columns).to(spec.device)
    return AdapterDropout(adapter.dropout, rows, keys)


# routers
# ----------------------------------------------------------------------------------


def balance_routers(
    blocks: Iterable[nn.Module],
    spec: StageSpec,
    terms: Callable[[], LossTerms],
    length: SequenceLength,
) -> None:
    """Add the balance loss of the present `terms` to what routers learn, and count their tokens.

    The gradients of a group's ranks are summed. If every rank routes all tokens, the first rank
    alone adds them; if each routes its part of the tokens, all ranks do.
    """
    tp = spec.tp
    part = TokenPart(tp) if tp is not None and tp.sends_tokens else None
    adds = tp is None or tp.rank == 0 or part is not None

    def weight() -> float:
        now = terms()
        return now.router_balance * now.gradient_scale

    for block in blocks:
        for name, module in block.named_modules():
            if name in ROUTERS:
                count_tokens(module, lambda: adds and terms().counts_tokens, part)
                if adds:
                    balance(module, weight, length, part)
