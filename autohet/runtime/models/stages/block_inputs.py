"""Inputs of a stage's blocks beside the hidden states: masks, rotary tables, positions."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from autohet.runtime.models.config_keys import RECURRENT, is_recurrent, window_of
from autohet.runtime.models.layers.attention import MaskMaker, window_band
from autohet.runtime.models.layers.pieces import (
    cumulative_lengths,
    piece_mask,
    positions_of,
)
from autohet.runtime.models.stages.stage_spec import StageSpec

InputTables = Mapping[Any, Any]
"""Masks by window, rotary tables by kind under "rotary", and int64 [b or 1, S] "positions"."""


class BlockInputs:
    """Maker of masks and rotary tables for the blocks of a stage.

    rotary: the library's rotary embedding, of which the stage makes its own; None: the model has
    none. attention: an attention module beside it, which may take positions.
    """

    def __init__(
        self, spec: StageSpec, rotary: nn.Module | None, attention: nn.Module | None
    ) -> None:
        self._spec = spec
        self._takes_positions = attention is not None and _takes(attention, "position_ids")
        self._rotary = None if rotary is None else _on_device(rotary, spec.config, spec.device)
        self._rotary_by_layer_type = rotary is not None and _takes(rotary, "layer_type")
        self._windows: list[int | str | None] = []
        """What tells the masks of blocks apart: the window, or RECURRENT."""
        for layer in spec.layers:
            kind = RECURRENT if is_recurrent(spec.config, layer) else None
            self._windows.append(kind or window_of(spec.config, layer))
        self._key: object = None
        """What the last tables were made for."""
        self._tables: InputTables = {}

    def prepare(self, shape: tuple[int, int], mask: MaskMaker = window_band) -> None:
        """Make the tables for microbatches of this shape, [b, S], in advance."""
        spec = self._spec
        batch, length = shape
        size = (batch, length, int(spec.config.hidden_size))
        hidden = torch.empty(size, device=spec.device, dtype=spec.dtype)
        self.of_shape(hidden, length, mask)

    def tensors(self) -> list[Tensor]:
        """Return the masks and rotary tables that all blocks share, made for the last shape."""
        return [leaf for leaf in tree_leaves(self._tables) if isinstance(leaf, Tensor)]

    def of_shape(self, hidden: Tensor, length: int, mask: MaskMaker = window_band) -> InputTables:
        """Return the tables for whole sequences of `length` tokens.

        They are functions of the shape alone, so they are made once, not for every microbatch. No
        mask, where no window is shorter than the sequences: attention is plainly causal then.
        """
        # Autograd refuses tensors that were made in inference mode.
        is_inference = torch.is_inference_mode_enabled()
        key = (hidden.shape, length, hidden.dtype, hidden.device, is_inference)
        if self._key == key:
            return self._tables
        made: dict[Any, Any] = {}
        for window in set(self._windows):
            made[window] = None
            if not isinstance(window, str):
                made[window] = mask(window, length, hidden.dtype, hidden.device)
        if self._rotary is not None:
            positions = torch.arange(length, device=hidden.device).unsqueeze(0)
            made["positions"] = positions
            made["rotary"] = self._rotary_tables(hidden, positions)
        self._key = key
        self._tables = made
        return made

    def of_pieces(self, hidden: Tensor, begins: Tensor) -> InputTables:
        """Return the tables for a microbatch with these begins of pieces, bool [b, S]."""
        device = hidden.device
        windows = {each for each in self._windows if not isinstance(each, str)}
        made: dict[Any, Any]
        if device.type == "cuda":
            made = dict.fromkeys(windows, cumulative_lengths(begins, device))
        else:
            made = {window: piece_mask(begins, window, device) for window in windows}
        made[RECURRENT] = begins
        if self._rotary is not None:
            positions = positions_of(begins).to(device, non_blocking=True)
            made["positions"] = positions
            made["rotary"] = self._rotary_tables(hidden, positions)
        return made

    def arguments(self, index: int, tables: InputTables, isolated: bool) -> dict[str, Any]:
        """Return the arguments of block `index` beside the hidden states.

        isolated: the tables are of pieces.
        """
        window = self._windows[index]
        arguments: dict[str, Any] = {"attention_mask": tables[window]}
        if isolated and isinstance(window, int):
            arguments["piece_window"] = window
        if self._rotary is not None:
            arguments["position_embeddings"] = tables["rotary"][self._rotary_kind(index)]
        if self._takes_positions:
            arguments["position_ids"] = tables["positions"]
        return arguments

    def _rotary_kind(self, index: int) -> str | None:
        """Return the key of block `index`'s rotary table: its layer type; None: the only table."""
        if not self._rotary_by_layer_type:
            return None
        layer = self._spec.layers[index]
        return str(self._spec.config.layer_types[layer])

    def _rotary_tables(self, hidden: Tensor, positions: Tensor) -> dict[str | None, Any]:
        assert self._rotary is not None
        if not self._rotary_by_layer_type:
            return {None: self._rotary(hidden, position_ids=positions)}
        tables: dict[str | None, Any] = {}
        for index in range(len(self._spec.layers)):
            kind = self._rotary_kind(index)
            if kind not in tables:
                tables[kind] = self._rotary(hidden, positions, kind)
        return tables


def _on_device(module: nn.Module, config: PreTrainedConfig, device: torch.device) -> nn.Module:
    """Create a rotary embedding on the device; it has only computed buffers."""
    with torch.device(device):
        return type(module)(config=config)


def _takes(module: nn.Module, argument: str) -> bool:
    """Return True if a module names an argument of its forward pass, and not among others alone."""
    return argument in inspect.signature(module.forward).parameters
