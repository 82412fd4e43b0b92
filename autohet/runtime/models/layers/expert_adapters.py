"""Low-rank adapters of routed experts and routers, as peft's `target_parameters` trains them.

A stack [E, out, in] has A [E, rank, in] and B [E, out, rank], cut by experts as the stack is. Each
token goes through the factors of its own experts, so no updated copy of a stack is made.
"""

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from autohet.runtime.models.layers.experts import STACKS

IMPLEMENTATION = "autohet_adapters"
"""Experts implementation of the library's configs: grouped products with low-rank updates."""
_ALIGNMENT = 16
"""Bytes of which the rows of grouped products are multiples."""


class LowRank(nn.Module):
    """Factors of a low-rank update, of the right shapes once the stage's slices are loaded."""

    def __init__(self, scaling: float) -> None:
        super().__init__()
        self.scaling = scaling
        self.is_on = True
        self.lora_A = nn.Linear(1, 1, bias=False, device="meta")
        self.lora_B = nn.Linear(1, 1, bias=False, device="meta")

    def update(self) -> Tensor:
        """Return s B A."""
        product: Tensor = self.lora_B.weight @ self.lora_A.weight
        return product * self.scaling


def adapt_stack(experts: nn.Module, stack: str, scaling: float) -> None:
    """Add a low-rank update to the products with a stack of the library's module of experts.

    The factors have the names of a submodule with the stack's own name.
    """
    # Attributes are looked up among parameters first, so the name still gives the stack.
    experts._modules[stack] = LowRank(scaling)
    config: Any = experts.config
    config._experts_implementation = IMPLEMENTATION


def adapt_router(router: nn.Module, scaling: float) -> None:
    """Let a router compute with its weight and a low-rank update."""
    factors = LowRank(scaling)
    parameters: Any = router._parameters
    router.lora_A, router.lora_B = factors.lora_A, factors.lora_B
    # No submodule, so that the factors have one name.
    router.__dict__["low_rank"] = factors

    def before(_: nn.Module, args: Any) -> None:
        if factors.is_on:
            router.__dict__["weight"] = parameters["weight"] + factors.update()

    def after(_: nn.Module, args: Any, out: Any) -> None:
        router.__dict__.pop("weight", None)

    router.register_forward_pre_hook(before)
    router.register_forward_hook(after, always_call=True)


def low_rank_updates(model: nn.Module) -> list[LowRank]:
    """Return the updates of all stacks and routers."""
    found: list[LowRank] = []
    for module in model.modules():
        if isinstance(module, LowRank):
            found.append(module)
        elif "low_rank" in module.__dict__:
            found.append(module.__dict__["low_rank"])
    return found


def _grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows [S, n] of each expert by its matrix [n, m].

    ends: int32 [E], the end of each expert's rows. Later rows of the product are undefined.
    """
    widths = (*matrices.shape[1:], rows.shape[1])
    if all(width * rows.element_size() % _ALIGNMENT == 0 for width in widths):
        return F.grouped_mm(rows, matrices, offs=ends)
    product: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, matrices, ends)
    return product


class _OwnRows:
    """Rows of the tokens that this rank's experts compute, sorted by expert.

    ids: int64 [S], sorted; an id of `num_experts` is that of another rank's expert.
    """

    def __init__(self, experts: Any, ids: Tensor) -> None:
        self._experts = experts
        self._others = (ids >= experts.num_experts).unsqueeze(-1)
        self._ids = ids.clamp(max=experts.num_experts - 1)
        numbers = torch.arange(experts.num_experts, device=ids.device)
        self._ends = torch.searchsorted(ids, numbers, right=True).to(torch.int32)

    def without_others(self, rows: Tensor) -> Tensor:
        """Return rows that are 0 where another rank's expert computes, also in the gradient."""
        if not self._experts._is_expert_parallel:
            return rows
        return rows.masked_fill(self._others, 0.0)

    def product(self, rows: Tensor, stack: str) -> Tensor:
        """Return the products of rows with the matrices of their experts, updated and biased."""
        experts = self._experts
        matrices: Tensor = experts._parameters[stack]
        inward = matrices if experts.is_transposed else matrices.transpose(1, 2)
        out = _grouped(rows, inward, self._ends)
        factors = experts._modules.get(stack)
        if factors is not None and factors.is_on:
            low = _grouped(rows, factors.lora_A.weight.transpose(1, 2), self._ends)
            update = _grouped(low, factors.lora_B.weight.transpose(1, 2), self._ends)
            out = out + update * factors.scaling
        if experts.has_bias:
            out = out + experts._parameters[f"{stack}_bias"][self._ids]
        return self.without_others(out)


def compute_experts(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute the experts of all tokens, with the low-rank updates of their stacks.

    hidden: [N, h]. index, weights: [N, k], the experts of each token and their weights; an index of
    `num_experts` is another rank's expert.
    """
    ids, order = torch.sort(index.reshape(-1))
    own = _OwnRows(experts, ids)
    tokens = order // index.shape[-1]
    rows = own.without_others(hidden[tokens])
    gate_up, down = STACKS
    inner = experts._apply_gate(own.product(rows, gate_up))
    out = own.product(inner, down) * weights.reshape(-1)[order].unsqueeze(-1)
    # In the order of tokens, so that the sum over a token's experts has one order.
    by_token = torch.empty_like(out).index_copy(0, order, out)
    total: Tensor = by_token.view(*index.shape, -1).sum(1)
    return total.to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, compute_experts)


# peft's names and shapes
# ----------------------------------------------------------------------------------


def is_stack(path: str) -> bool:
    """Return True if a weight's path is that of a stack of experts."""
    experts, _, stack = path.rpartition(".")
    return stack in STACKS and experts.endswith(".experts")


def peft_names(names: Collection[str]) -> dict[str, str]:
    """Return the names in peft's files of an adapter's parameters, by their own names.

    peft wraps the experts once for each adapted stack, the gate's and up's inside.
    """
    gate_up, down = STACKS
    found: dict[str, str] = {}
    for name in names:
        path, lora, factor = name.partition(".lora_")
        experts, _, stack = path.rpartition(".")
        if lora and is_stack(path):
            is_inner = stack == gate_up and f"{experts}.{down}{lora}{factor}" in names
            path = f"{experts}.base_layer" if is_inner else experts
        found[name] = path + lora + factor
    return found


def in_peft_layout(factor: Tensor, is_output: bool) -> Tensor:
    """Return a factor as peft stores it: of a stack, A [E rank, in] and B [out, rank E].

    is_output: the factor is a B.
    """
    if factor.dim() != 3:
        return factor
    return factor.permute(1, 2, 0).flatten(1) if is_output else factor.flatten(0, 1)


def from_peft_layout(factor: Tensor, is_output: bool, num_experts: int) -> Tensor:
    """Return a stack's factor that `in_peft_layout` has written."""
    if is_output:
        by_expert: Tensor = factor.unflatten(1, (-1, num_experts))
        return by_expert.permute(2, 0, 1)
    rows: Tensor = factor.unflatten(0, (num_experts, -1))
    return rows
