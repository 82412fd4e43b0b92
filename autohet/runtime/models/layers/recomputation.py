"""Activation recomputation: the values that a block keeps for its backward pass.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".

* `none`: all values that autograd saves.
* `full`: the block's input alone; the whole forward pass runs again, with its tensor-parallel sums.
* `offload`: as `full`, and the input lies in host memory between the passes (`moved_inputs`).
* `selective`: the block's input, and the outputs of its matrix products and of the fused attention,
  which take nearly all of its FLOPs. Norms, rotary embeddings, activations, residual sums and the
  operations of an unfused attention on its S x S scores are cheap, and run again. The choice is by
  operator (`torch.utils.checkpoint`'s contexts), not by module, so no family needs a list of its
  own. The sum of a row-parallel product replaces the product in memory, and is kept with it:
  recomputation needs no communication.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operator
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autohet.runtime.models.layers.moved_inputs import MovedInputs
from planner.plans.plan import Recompute

KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._grouped_mm.default,
        torch.ops.aten._scaled_mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops.torch_attn._varlen_attn.default,
    }
)
"""Operators whose outputs `selective` keeps.

Batched products are not among them, since they are the scores of an unfused attention.
"""

_HERE = threading.local()


def usable_recompute(changes_products: bool, recompute: Recompute) -> Recompute:
    """Return `recompute`, or `full` instead of `selective` if modules change products in place.

    changes_products: `Family.changes_products` of the config. Gradients need the values from before
    the change, which `selective` would not keep.
    """
    if recompute == "selective" and changes_products:
        return "full"
    return recompute


def is_replaying() -> bool:
    """Return True if this thread runs a block's forward pass again with its products kept.

    Sums over these matrix products are kept, too.
    """
    return getattr(_HERE, "replaying", False)


class _Replay:
    """Context of a selective recomputation, which marks that the kept outputs are whole sums."""

    def __init__(self, kept: AbstractContextManager[Any]) -> None:
        self._kept = kept

    def __enter__(self) -> None:
        self._kept.__enter__()
        _HERE.replaying = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _HERE.replaying = False
        self._kept.__exit__(kind, error, traceback)


def _policy(_: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    if operator in KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    caching, cached = create_selective_checkpoint_contexts(_policy)
    return caching, _Replay(cached)


def run_block(
    block: Callable[..., Any],
    hidden: Tensor,
    arguments: dict[str, Any],
    recompute: Recompute,
    inputs: MovedInputs,
) -> Any:
    """Run a block, keeping the values that `recompute` selects between forward and backward.

    inputs: of the stage, for `offload`.
    """
    if recompute == "none" or not torch.is_grad_enabled():
        return block(hidden, **arguments)
    again = functools.partial(
        checkpoint, block, hidden, use_reentrant=False, preserve_rng_state=False, **arguments
    )
    if recompute == "full":
        return again()
    if recompute == "offload":
        with inputs.moving():
            return again()
    return again(context_fn=_contexts)
