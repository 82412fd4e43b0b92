"""Dropout of a stage: the places where its modules drop elements, and the microbatch's bits."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autohet.runtime.models.layers.adapters import adapter_of
from autohet.runtime.models.layers.dropout import (
    ATTENTION_DROPOUT,
    AttentionDropout,
    DropoutRows,
    StateDropout,
    column_keys,
    dropout_of,
    row_keys,
)
from autohet.runtime.models.layers.tensor_parallel import pad_sequence
from autohet.runtime.models.stages.stage_spec import StageSpec


class StageDropout:
    """Dropout of one stage, of the microbatches that `draw` names.

    rows: keys of the rows that the stage computes on now, shared with the modules that drop.
    """

    def __init__(self, spec: StageSpec) -> None:
        self._spec = spec
        self._rates = dropout_of(spec.config)
        self.rows = DropoutRows()
        self._drawn: tuple[int, Sequence[int]] | None = None

    @property
    def drops(self) -> bool:
        """True if a forward pass with gradients drops elements, of the model or its adapters."""
        if self._rates:
            return True
        adapter = adapter_of(self._spec.config)
        return adapter is not None and adapter.dropout > 0

    def draw(self, seed: int, samples: Sequence[int]) -> None:
        """Draw the dropout of the next forward pass with gradients.

        samples: positions in the run of the microbatch's rows, which decide the bits.
        """
        self._drawn = (seed, samples)

    def begin(self, length: int) -> Tensor | None:
        """Use the drawn dropout for a microbatch of sequences of this length, in tokens.

        Return the keys of its rows, int32 [b, S]; None: nothing is dropped.
        """
        keys = None
        if self._drawn is not None and torch.is_grad_enabled():
            keys = row_keys(*self._drawn, length, self._spec.device)
        self._use_keys(keys)
        return keys

    def with_keys(self, block: nn.Module, keys: Tensor | None) -> Callable[..., Any]:
        """Return a block that uses these keys of its rows whenever it runs.

        So a recomputation draws the same dropout, even if another microbatch has begun since.
        """
        if self._drawn is None:
            return block
        return partial(self._run_with_keys, block, keys)

    def _run_with_keys(
        self, block: nn.Module, keys: Tensor | None, hidden: Tensor, **arguments: Any
    ) -> Any:
        self._use_keys(keys)
        return block(hidden, **arguments)

    def _use_keys(self, keys: Tensor | None) -> None:
        own = keys
        parts = self._spec.sequence_parts
        if keys is not None and parts > 1:
            assert self._spec.tp is not None
            by_rank = pad_sequence(keys, parts).chunk(parts, dim=1)
            own = by_rank[self._spec.tp.rank]
        self.rows.keys = keys
        self.rows.own = own

    # places
    # ------------------------------------------------------------------------------

    def of_embedding(self) -> StateDropout | None:
        """Return the dropout of the embedding's output; None if it has none."""
        if not self._rates.embedding:
            return None
        return self._state_dropout(self._rates.embedding, "embedding")

    def add_to(self, blocks: Iterable[nn.Module]) -> None:
        """Let the blocks drop elements of their projections and attention weights."""
        for index, block in enumerate(blocks):
            path = self._spec.block_path(index)
            for name, rate in self._rates.residual.items():
                drop = self._state_dropout(rate, f"{path}.{name}")
                projection = block.get_submodule(name)
                projection.register_forward_hook(_after(drop))
            attention = self._spec.family.attention
            if self._rates.attention and hasattr(block, attention):
                drawn = self._attention_dropout(f"{path}.{attention}")
                setattr(block.get_submodule(attention), ATTENTION_DROPOUT, drawn)

    def _state_dropout(self, rate: float, path: str) -> StateDropout:
        width = int(self._spec.config.hidden_size)
        columns = torch.arange(width, device=self._spec.device)
        return StateDropout(rate, self.rows, column_keys(path, columns))

    def _attention_dropout(self, path: str) -> AttentionDropout:
        """Return the dropout of an attention module, over the heads of this rank."""
        num_heads = int(self._spec.config.num_attention_heads)
        share = self._spec.share
        first = num_heads * share.first // share.of
        end = num_heads * share.end // share.of
        heads = torch.arange(num_heads, device=self._spec.device)[first:end]
        return AttentionDropout(self._rates.attention, self.rows, column_keys(path, heads))


def _after(drop: StateDropout) -> Any:
    """Return a forward hook that applies a dropout to a module's output."""
    return lambda module, inputs, output: drop(output)
