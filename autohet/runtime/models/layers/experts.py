"""Mixtures of experts: each rank of a stage has experts of its own, and computes their tokens.

Without all-to-all each rank computes its experts for all tokens. Hidden states are whole on every
rank, so no token is sent: the sum that ends the block adds the experts' outputs. Every rank
computes the routing of all tokens, and weights the experts of other ranks with 0. Its gradient of
the router is therefore a part of the sum over the group. `expert_dispatch` is the other way.

The experts are the library's own modules (`transformers.integrations.moe`): stacks of matrices with
one expert for each row of dimension 0, and grouped matrix products over the tokens of each.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from autohet.runtime.models.layers.autograd import apply
from autohet.runtime.models.layers.expert_dispatch import TokenPart
from autohet.runtime.models.layers.tensor_parallel import SequenceLength, TensorParallel, leave
from planner.errors import ConfigError

EXPERTS = "moe_tp_experts"
"""The library's style of a module that holds the stacks of all experts."""
ROUTERS = ("mlp.gate", "mlp.router")
"""Paths of routers in a block, which return logits, weights and indices of the chosen experts."""
STACKS = ("gate_up_proj", "down_proj")
"""Names of the stacks in the library's modules: gate above up of each expert, and down."""
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Config keys for the number of routed experts, by family."""
SHARED_COLUMN = "shared_colwise"
SHARED_ROW = "shared_rowwise"
"""Styles of the maps of shared experts, which every token uses.

They are cut as other column and row maps. The block around them passes their input into the cut
part and sums their output, together with the routed experts'.
"""
CORRECTION_BIAS = "e_score_correction_bias"
"""Router's bias for the choice of experts, without part in their weights: a buffer in the library.

DeepSeek-V3 technical report, section 2.1.2. Routers that have it score by sigmoid.
"""


@dataclass(frozen=True)
class ExpertNames:
    """Names in checkpoint files, which hold each expert's matrices as tensors of their own.

    They are those of `transformers.conversion_mapping`. `block` replaces `mlp` in them.
    are_stacked: the files hold whole stacks, under the library's names.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    are_stacked: bool = False

    def stored_name(self, name: str) -> str:
        """Return a parameter's name in the files, which may call the block differently."""
        return name.replace(".mlp.", f".{self.block}.")

    def maps(self, stack: str) -> tuple[str, ...]:
        """Return the paths of the linear maps that a stack's experts have in files; empty: none.

        stack: its path in the model; the maps are those of expert 0, not renamed.
        """
        experts, _, name = stack.rpartition(".")
        if self.are_stacked:
            return ()
        parts = (self.down,) if name == "down_proj" else (self.gate, self.up)
        return tuple(f"{experts}.0.{part}" for part in parts)

    def matrices(self, name: str, count: int) -> list[tuple[str, ...]] | None:
        """Return the names of a stack's matrices by expert; None: the parameter is no stack.

        The matrices of one expert follow each other along their rows.
        """
        path, _, stack = name.rpartition(".")
        if self.are_stacked or stack not in STACKS or not path.endswith(".experts"):
            return None
        parts = (self.down,) if stack == "down_proj" else (self.gate, self.up)
        path = self.stored_name(path)
        names = []
        for expert in range(count):
            names.append(tuple(f"{path}.{expert}.{part}.weight" for part in parts))
        return names


def num_experts(config: PreTrainedConfig) -> int | None:
    """Return the number of routed experts of a block; None: the model is dense."""
    for key in EXPERT_COUNTS:
        given = getattr(config, key, None)
        if given:
            return int(given)
    return None


def is_dense(config: PreTrainedConfig, layer: int) -> bool:
    """Return True if a block has no experts."""
    if num_experts(config) is None:
        return True
    # DeepSeek's configs say it by the first blocks, Qwen's by a list and a step, others not at all.
    if getattr(config, "first_k_dense_replace", None) is not None:
        return layer < int(config.first_k_dense_replace)
    if getattr(config, "mlp_only_layers", None) is None:
        return False
    is_sparse = (layer + 1) % int(config.decoder_sparse_step) == 0
    return layer in config.mlp_only_layers or not is_sparse


def keep_density(config: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedConfig:
    """Return a copy of the config in which block i has experts if block `layers[i]` has.

    layers: in ascending order.
    """
    short = copy.deepcopy(config)
    dense = [new for new, old in enumerate(layers) if is_dense(config, old)]
    if getattr(config, "first_k_dense_replace", None) is not None:
        short.first_k_dense_replace = len(dense)
    elif getattr(config, "mlp_only_layers", None) is not None:
        short.mlp_only_layers = dense
        short.decoder_sparse_step = 1
    return short


def inner_width(config: PreTrainedConfig, layer: int) -> int:
    """Return the inner width of a block that a token uses, over all its experts."""
    given = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    dense = int(given or 4 * config.hidden_size)
    if is_dense(config, layer):
        return dense
    shared = int(getattr(config, "n_shared_experts", None) or 0)
    used = int(config.num_experts_per_tok) + shared
    return int(getattr(config, "moe_intermediate_size", dense)) * used


def own_correction_bias(model: nn.Module) -> None:
    """Make the routers' bias a parameter, so that it is state as all other parameters."""
    for module in model.modules():
        bias = module._buffers.get(CORRECTION_BIAS)
        if bias is not None:
            delattr(module, CORRECTION_BIAS)
            module.register_parameter(CORRECTION_BIAS, nn.Parameter(bias))


def check_experts(config: PreTrainedConfig) -> None:
    """Check the number of experts that each token uses.

    Raises:
        ConfigError: it is not from 1 to the number of experts, or more than the experts of the
        groups among which a token chooses; or the groups are no equal parts of two or more experts.
    """
    experts = num_experts(config)
    per_token = getattr(config, "num_experts_per_tok", None)
    if experts is None or per_token is None:
        return
    used = int(per_token)
    if not 1 <= used <= experts:
        raise ConfigError(
            f"num_experts_per_tok is {used}, but the model has {experts} experts; give 1 to"
            f" {experts}"
        )
    groups = int(getattr(config, "n_group", None) or 1)
    if groups > 1:
        used_groups = int(getattr(config, "topk_group", groups))
        _check_groups(experts, used, groups, used_groups)


def _check_groups(experts: int, used: int, groups: int, used_groups: int) -> None:
    """Check the groups of experts of which a token uses the best (DeepSeek-V3, section 2.1.2)."""
    if experts % groups or experts < 2 * groups:
        raise ConfigError(
            f"n_group is {groups}, but the model has {experts} experts; give a divisor with at"
            " least 2 experts in each group"
        )
    if not 1 <= used_groups <= groups:
        raise ConfigError(f"topk_group is {used_groups}, but n_group is {groups}; give 1 to it")
    reached = used_groups * (experts // groups)
    if used > reached:
        raise ConfigError(
            f"num_experts_per_tok is {used}, but the topk_group of {used_groups} groups have"
            f" {reached} experts; lower it, or raise topk_group"
        )


class _AddGradient(torch.autograd.Function):
    """Identity of `scores`; adds the gradient of `term`, a scalar, to the backward pass."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, term: Tensor) -> Tensor:
        ctx.term = term.new_ones(())
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.term


class _SetGradient(torch.autograd.Function):
    """Identity of `scores`; the gradient of `bias` is `counts`, or 0 without counts."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, bias: Tensor, counts: Tensor | None) -> Tensor:
        ctx.counts = counts
        ctx.num_experts = len(bias)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        counts = ctx.counts
        if counts is None:
            counts = gradients[0].new_zeros(ctx.num_experts, dtype=torch.float32)
        return gradients[0], counts, None


def sequence_balance(
    logits: Tensor,
    index: Tensor,
    length: int,
    *,
    is_sigmoid: bool = False,
    part: TokenPart | None = None,
) -> Tensor:
    """Return the balance loss of a router, summed over the tokens of whole sequences.

    For a sequence of T tokens it is T sum_i f_i P_i: f_i is expert i's share of the T k choices,
    times the number of experts, and P_i the mean probability of the expert. It is a function of
    each sequence alone, so microbatches and plans do not change it (DeepSeek-V3 technical report,
    section 2.1.2, equations 17 to 20, with the router's own scores).

    logits: [b T, E]; index: [b T, k], the chosen experts. is_sigmoid: scores are sigmoids, divided
    by their sum; else softmax. part: the tokens are this rank's part [b width, ...] of the
    sequences. The ranks then return parts of the loss, and sum f_i over the group.
    """
    experts = logits.shape[-1]
    if is_sigmoid:
        scores = logits.float().sigmoid()
        scores = scores / scores.sum(-1, keepdim=True)
    else:
        scores = logits.float().softmax(-1)
    if part is None:
        by_sequence = scores.unflatten(0, (-1, length))
        chosen = index.unflatten(0, (-1, length))
    else:
        by_sequence = part.real(scores)
        chosen = part.real(index)
    probabilities = by_sequence.sum(1) / length
    chosen = chosen.flatten(1)
    ones = torch.ones_like(chosen, dtype=torch.float32)
    counts = torch.zeros_like(probabilities).scatter_add_(1, chosen, ones)
    if part is not None:
        part.tp.group.all_reduce(counts)
    num_choices = index.shape[-1] * length
    shares = counts * (experts / num_choices)
    balance_sum: Tensor = length * (shares.detach() * probabilities).sum()
    return balance_sum


def balance(
    router: nn.Module,
    weight: Callable[[], float],
    length: SequenceLength,
    part: TokenPart | None = None,
) -> None:
    """Add the gradient of the weighted balance loss to what a router learns.

    weight: read at each pass; 0: none. length: of the sequences that pass. part: this rank's part
    of them, if it routes no more.
    """

    is_sigmoid = CORRECTION_BIAS in router._parameters

    def hook(_: nn.Module, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, scores, index = out
        learns = torch.is_grad_enabled() and logits.requires_grad
        if not weight() or not learns:
            return out
        term = sequence_balance(logits, index, length.tokens, is_sigmoid=is_sigmoid, part=part)
        scores = apply(_AddGradient, scores, weight() * term)
        return logits, scores, index

    router.register_forward_hook(hook)


def count_tokens(
    router: nn.Module, is_counting: Callable[[], bool], part: TokenPart | None = None
) -> None:
    """Make the number of tokens of each expert the gradient of the router's correction bias.

    Gradient sums then add the counts over microbatches and pipelines. is_counting: read at each
    pass; the gradient is 0 if it returns False. part: the part of the sequences that this rank
    routes, which may have padding. No-op for a router without the bias.
    """
    if CORRECTION_BIAS not in router._parameters:
        return

    def hook(_: nn.Module, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, scores, index = out
        bias: Any = router._parameters[CORRECTION_BIAS]
        learns = torch.is_grad_enabled() and bias.requires_grad and scores.requires_grad
        if not learns:
            return out
        counts = None
        if is_counting():
            chosen = (index if part is None else part.real(index)).flatten()
            ones = torch.ones_like(chosen, dtype=bias.dtype)
            counts = torch.zeros_like(bias, requires_grad=False).scatter_add_(0, chosen, ones)
        scores = apply(_SetGradient, scores, bias, counts)
        return logits, scores, index

    router.register_forward_hook(hook)


def use_grouped_products(config: PreTrainedConfig, dtype: torch.dtype, *, may_loop: bool) -> None:
    """Let the library compute all experts by grouped products, or one after the other.

    Grouped products need rows of a multiple of 16 bytes. may_loop: the library's loop knows ranks
    that hold some of the experts; else its modules copy the weights for each token instead.
    """
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    widths = (int(config.hidden_size), int(inner))
    if all(width * dtype.itemsize % 16 == 0 for width in widths):
        implementation = "grouped_mm"
    elif may_loop:
        implementation = "eager"
    else:
        implementation = "batched_mm"
    config._experts_implementation = implementation


def keep_own_experts(experts: nn.Module, first: int, end: int) -> None:
    """Make the library's module compute the experts from `first` to before `end` alone."""
    module: Any = experts
    module.num_experts = end - first
    # The module then takes an index of `num_experts` for an expert of another rank.
    module._is_expert_parallel = True

    def select(_: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, index, weights = args
        own = (index >= first) & (index < end)
        local = torch.where(own, index - first, end - first)
        return hidden, local, weights.masked_fill(~own, 0.0)

    def keep_graph(_: nn.Module, args: tuple[Tensor, Tensor, Tensor], out: Tensor) -> Tensor:
        """Keep the output in the graph if no token came: the other ranks wait for its gradient."""
        if out.requires_grad or not torch.is_grad_enabled():
            return out
        hidden, _index, weights = args
        unused = [each.sum() for each in experts.parameters() if each.requires_grad]
        all_inputs = hidden + weights.sum() + sum(unused)
        return out + 0.0 * all_inputs

    experts.register_forward_pre_hook(select)
    experts.register_forward_hook(keep_graph)


def leave_after(block: nn.Module, tp: TensorParallel) -> None:
    """Sum the partial outputs of a module over the group: its output, or the first of several."""

    def hook(_: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            hidden, *rest = out
            return leave(hidden.contiguous(), tp, is_product=False), *rest
        return leave(out.contiguous(), tp, is_product=False)

    block.register_forward_hook(hook)
