"""Mixtures of experts: each rank of a stage computes its own experts for all tokens.

Hidden states are whole on every rank, so no token is sent: the sum that ends the block adds the
experts' outputs. Every rank computes the routing of all tokens, and weights the experts of other
ranks with 0. Its gradient of the router is therefore a part of the sum over the group.

The experts are the library's own modules (`transformers.integrations.moe`): stacks of matrices with
one expert for each row of dimension 0, and grouped matrix products over the tokens of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from autohet.runtime.models.autograd import apply
from autohet.runtime.models.tensor_parallel import SequenceLength, TensorParallel, leave
from planner.errors import ConfigError

EXPERTS = "moe_tp_experts"
"""The library's style of a module that holds the stacks of all experts."""
ROUTER = "mlp.gate"
"""Path of the router in a block; it returns logits, weights and indices of the chosen experts."""
STACKS = ("gate_up_proj", "down_proj")
"""Names of the stacks in the library's modules: gate above up of each expert, and down."""
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Config keys for the number of routed experts, by family."""


@dataclass(frozen=True)
class ExpertNames:
    """Names in checkpoint files, which hold each expert's matrices as tensors of their own.

    They are those of `transformers.conversion_mapping`. `block` replaces `mlp` in them.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def stored(self, name: str) -> str:
        """Return a parameter's name in the files, which may call the block differently."""
        return name.replace(".mlp.", f".{self.block}.")

    def matrices(self, name: str, count: int) -> list[tuple[str, ...]] | None:
        """Return the names of a stack's matrices by expert; None: the parameter is no stack.

        The matrices of one expert follow each other along their rows.
        """
        path, _, stack = name.rpartition(".")
        if stack not in STACKS or not path.endswith(".experts"):
            return None
        parts = (self.down,) if stack == "down_proj" else (self.gate, self.up)
        path = self.stored(path)
        return [
            tuple(f"{path}.{expert}.{part}.weight" for part in parts) for expert in range(count)
        ]


def num_experts(config: PreTrainedConfig) -> int | None:
    """Return the number of routed experts of a block; None: the model is dense."""
    given = (getattr(config, key, None) for key in EXPERT_COUNTS)
    return next((int(each) for each in given if each), None)


def check_experts(config: PreTrainedConfig) -> None:
    """Check the number of experts that each token uses.

    Raises:
        ConfigError: it is not from 1 to the number of experts.
    """
    experts = num_experts(config)
    if experts is None:
        return
    used = int(config.num_experts_per_tok)
    if not 1 <= used <= experts:
        raise ConfigError(
            f"num_experts_per_tok is {used}, but the model has {experts} experts; give 1 to"
            f" {experts}"
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


def sequence_balance(logits: Tensor, index: Tensor, length: int) -> Tensor:
    """Return the balance loss of a router, summed over the tokens of whole sequences.

    For a sequence of T tokens it is T sum_i f_i P_i: f_i is expert i's share of the T k choices,
    times the number of experts, and P_i the mean probability of the expert. It is a function of
    each sequence alone, so microbatches and plans do not change it (DeepSeek-V3 technical report,
    section 2.1.2, equations 17 to 20, with softmax).

    logits: [b T, E]; index: [b T, k], the chosen experts.
    """
    experts = logits.shape[-1]
    probabilities = logits.float().softmax(-1).unflatten(0, (-1, length)).mean(1)
    chosen = index.unflatten(0, (-1, length)).flatten(1)
    counts = torch.zeros_like(probabilities).scatter_add_(
        1, chosen, torch.ones_like(chosen, dtype=torch.float32)
    )
    shares = counts * (experts / chosen.shape[1])
    balance_sum: Tensor = length * (shares.detach() * probabilities).sum()
    return balance_sum


def balance(router: nn.Module, weight: Callable[[], float], length: SequenceLength) -> None:
    """Add the gradient of the weighted balance loss to what a router learns.

    weight: read at each pass; 0: none. length: of the sequences that pass.
    """

    def hook(_: nn.Module, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, scores, index = out
        if not weight() or not (torch.is_grad_enabled() and logits.requires_grad):
            return out
        term = weight() * sequence_balance(logits, index, length.tokens)
        return logits, apply(_AddGradient, scores, term), index

    router.register_forward_hook(hook)


def use_grouped_products(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Let the library compute all experts by grouped products, or one after the other.

    Grouped products need rows of a multiple of 16 bytes.
    """
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    aligned = all(int(width) * dtype.itemsize % 16 == 0 for width in (config.hidden_size, inner))
    config._experts_implementation = "grouped_mm" if aligned else "eager"


def keep_own_experts(experts: nn.Module, first: int, end: int) -> None:
    """Make the library's module compute the experts from `first` to before `end` alone."""
    module: Any = experts
    module.num_experts = end - first
    module._is_expert_parallel = True  # an index of `num_experts` is no expert of this rank

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
        return out + 0.0 * (hidden + weights.sum() + sum(unused))

    experts.register_forward_pre_hook(select)
    experts.register_forward_hook(keep_graph)


def leave_after(block: nn.Module, tp: TensorParallel) -> None:
    """Sum the partial outputs of a module over the group."""

    def hook(_: nn.Module, args: Any, out: Tensor) -> Tensor:
        return leave(out.contiguous(), tp, is_product=False)

    block.register_forward_hook(hook)
