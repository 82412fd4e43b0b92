"""Inputs of a stage's blocks beside the hidden states: attention masks and rotary tables."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from autohet.runtime.models.attention import MaskMaker, window_band
from autohet.runtime.models.config_keys import window_of
from autohet.runtime.models.dropout import dropout_of
from autohet.runtime.models.pieces import (
    cumulative_lengths,
    piece_mask,
    positions_of,
    uses_varlen,
)
from autohet.runtime.models.stage_spec import StageSpec

InputTables = Mapping[Any, Any]
"""Masks by window, and rotary tables by kind under "rotary"."""


class BlockInputs:
    """Maker of masks and rotary tables for the blocks of a stage.

    rotary: the library's rotary embedding, of which the stage makes its own; None: the model has
    none.
    """

    def __init__(self, spec: StageSpec, rotary: nn.Module | None) -> None:
        self._spec = spec
        self._rotary = None if rotary is None else _on_device(rotary, spec.config, spec.device)
        self._rotary_by_layer_type = rotary is not None and _takes_layer_type(rotary)
        self._windows = [window_of(spec.config, layer) for layer in spec.layers]
        self._last: tuple[Any, InputTables] = (None, {})

    def prepare(self, shape: tuple[int, int], mask: MaskMaker = window_band) -> None:
        """Make the tables for microbatches of this shape, [b, S], in advance."""
        spec = self._spec
        hidden = torch.empty(
            (*shape, int(spec.config.hidden_size)), device=spec.device, dtype=spec.dtype
        )
        self.of_shape(hidden, shape[1], mask)

    def tensors(self) -> list[Tensor]:
        """Return the masks and rotary tables that all blocks share, made for the last shape."""
        return [leaf for leaf in tree_leaves(self._last[1]) if isinstance(leaf, Tensor)]

    def of_shape(self, hidden: Tensor, length: int, mask: MaskMaker = window_band) -> InputTables:
        """Return the tables for whole sequences of `length` tokens.

        They are functions of the shape alone, so they are made once, not for every microbatch. No
        mask, where no window is shorter than the sequences: attention is plainly causal then.
        """
        key = (hidden.shape, length, hidden.dtype, hidden.device, torch.is_inference_mode_enabled())
        if self._last[0] != key:
            made: dict[Any, Any] = {
                window: mask(window, length, hidden.dtype, hidden.device)
                for window in set(self._windows)
            }
            if self._rotary is not None:
                positions = torch.arange(length, device=hidden.device).unsqueeze(0)
                made["rotary"] = self._rotary_tables(hidden, positions)
            self._last = (key, made)
        return self._last[1]

    def of_pieces(self, hidden: Tensor, begins: Tensor) -> InputTables:
        """Return the tables for a microbatch with these begins of pieces, bool [b, S]."""
        device = hidden.device
        windows = set(self._windows)
        made: dict[Any, Any]
        if self._is_fused and uses_varlen(device, hidden.dtype):
            made = dict.fromkeys(windows, cumulative_lengths(begins, device))
        else:
            made = {window: piece_mask(begins, window, device) for window in windows}
        if self._rotary is not None:
            positions = positions_of(begins).to(device, non_blocking=True)
            made["rotary"] = self._rotary_tables(hidden, positions)
        return made

    def arguments(self, index: int, tables: InputTables, isolated: bool) -> dict[str, Any]:
        """Return the arguments of block `index` beside the hidden states.

        isolated: the tables are of pieces.
        """
        window = self._windows[index]
        arguments: dict[str, Any] = {"attention_mask": tables[window]}
        if isolated and window is not None:
            arguments["piece_window"] = window
        if self._rotary is not None:
            arguments["position_embeddings"] = tables["rotary"][self._rotary_kind(index)]
        return arguments

    @property
    def _is_fused(self) -> bool:
        """True if one of torch's fused kernels computes attention."""
        family = self._spec.family
        config = self._spec.config
        is_explicit = family.attention_softcap(config) is not None or family.has_sinks
        return not is_explicit and not dropout_of(config).attention

    def _rotary_kind(self, index: int) -> str | None:
        """Return the key of block `index`'s rotary table: its layer type; None: the only table."""
        if not self._rotary_by_layer_type:
            return None
        return str(self._spec.config.layer_types[self._spec.layers[index]])

    def _rotary_tables(self, hidden: Tensor, positions: Tensor) -> dict[str | None, Any]:
        assert self._rotary is not None
        if not self._rotary_by_layer_type:
            return {None: self._rotary(hidden, position_ids=positions)}
        kinds = {self._rotary_kind(index) for index in range(len(self._spec.layers))}
        return {kind: self._rotary(hidden, positions, kind) for kind in kinds}


def _on_device(module: nn.Module, config: PreTrainedConfig, device: torch.device) -> nn.Module:
    """Create a rotary embedding on the device; it has only computed buffers."""
    with torch.device(device):
        return type(module)(config=config)


def _takes_layer_type(rotary: nn.Module) -> bool:
    """Return True if a rotary embedding has one table for each type of layers."""
    return "layer_type" in inspect.signature(rotary.forward).parameters
