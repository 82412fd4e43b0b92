"""A stage: contiguous blocks of a decoder, with the embedding before the first and final norm and
head after the last.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from autohet.runtime.models.adapters import (
    A_SUFFIX,
    AdaptedLinear,
    Adapter,
    AdapterDropout,
    adapter_of,
    adapters_off,
    is_linear,
)
from autohet.runtime.models.attention import MaskMaker, share_key_heads, window_band
from autohet.runtime.models.config_keys import window_of
from autohet.runtime.models.dropout import (
    ATTENTION_DROPOUT,
    AttentionDropout,
    DropoutRows,
    ModelDropout,
    StateDropout,
    column_keys,
    dropout_of,
    row_keys,
)
from autohet.runtime.models.expert_dispatch import (
    TokenPart,
    route_own_part,
    send_tokens,
    share_all_tokens,
)
from autohet.runtime.models.experts import (
    EXPERTS,
    ROUTERS,
    SHARED_COLUMN,
    SHARED_ROW,
    balance,
    count_tokens,
    keep_own_experts,
    leave_after,
    use_grouped_products,
)
from autohet.runtime.models.family import (
    COLUMN,
    ROW,
    SPLIT_NORM,
    WHOLE,
    Family,
    ParameterSpec,
    local_shape,
    local_units,
    skeleton,
    take_units,
)
from autohet.runtime.models.linear_loss import CutVocabulary, linear_cross_entropy_sum
from autohet.runtime.models.loss_terms import PLAIN, LossTerms
from autohet.runtime.models.pieces import (
    answer_lengths,
    cumulative_lengths,
    piece_mask,
    positions_of,
    uses_varlen,
)
from autohet.runtime.models.recomputation import run_block, usable_recompute
from autohet.runtime.models.tensor_parallel import (
    RowParallel,
    SequenceLength,
    SplitNorm,
    TensorParallel,
    VocabularyEmbedding,
    cross_entropy_sum,
    enter,
    join_sequence,
    padded,
    split_sequence,
)
from planner.errors import ConfigError
from planner.plan import Recompute, TensorShare


class StageModel(nn.Module):
    """Stage of a model on one worker. Parameters have no storage until `load_parameters`.

    `forward` of the first stage takes token ids [b, S] int64; other stages take hidden states [b,
    S, h]. It returns hidden states [b, S, h]; the last stage returns this rank's logits [b, S,
    V_local]. Columns from `vocab_size` on pad the vocabulary, and are no predictions. With tensor
    parallelism every rank of the group calls forward, `loss_sum` and backward together. Hidden
    states at the borders are whole and equal on all ranks.
    """

    def __init__(
        self,
        family: Family,
        config: PreTrainedConfig,
        first_layer: int,
        num_layers: int,
        tp: TensorParallel | None,
        device: torch.device,
        dtype: torch.dtype,
        recompute: Recompute,
    ) -> None:
        super().__init__()
        total = family.num_layers(config)
        self.family = family
        self.config = config
        self.tp = tp
        self._length = SequenceLength() if tp is None else tp.length
        self.recompute = usable_recompute(family.changes_products(config), recompute)
        self.share = WHOLE if tp is None else tp.share
        self.loss_terms = PLAIN
        self._dropout_rows = DropoutRows()
        self._drawn: tuple[int, Sequence[int]] | None = None
        self.device = device
        self.dtype = dtype
        self.first_layer = first_layer
        self.num_layers = num_layers
        self.is_first = first_layer == 0
        self.is_last = first_layer + num_layers == total
        self.specs: Mapping[str, ParameterSpec] = family.parameter_specs(config)
        model = skeleton(config)
        if family.has_experts:
            use_grouped_products(model.config, dtype, may_loop=family.loops_over_own_experts)
        blocks = model.get_submodule(family.layers)
        assert isinstance(blocks, nn.ModuleList)
        self.paths: dict[str, str] = {}  # our submodule -> path in the library's model
        self.blocks = nn.ModuleList()
        for index in range(first_layer, first_layer + num_layers):
            self.blocks.append(
                self._keep(
                    blocks[index], f"blocks.{index - first_layer}", f"{family.layers}.{index}"
                )
            )
        tied = family.tied_head(config)
        if self.is_first:
            table = model.get_submodule(family.token_embedding)
            if family.embedding_scale is not None:
                table = _unscaled(table)
            self.embedding = self._keep(table, "embedding", family.token_embedding)
            if family.position_embedding:
                self.positions = self._keep(
                    model.get_submodule(family.position_embedding),
                    "positions",
                    family.position_embedding,
                )
        if self.is_last:
            self.norm = self._keep(
                model.get_submodule(family.final_norm), "norm", family.final_norm
            )
            self.head = self._keep(
                model.get_submodule(family.head),
                "head",
                family.token_embedding if tied else family.head,
            )
        self.logit_adjustment = family.logit_adjustment(config)
        self.softcap = family.attention_softcap(config)
        self._fixed: tuple[Any, dict[Any, Any]] = (None, {})
        self.rotary = (
            _on_device(model.get_submodule(family.rotary), config, device)
            if family.rotary
            else None
        )
        self.rotary_by_layer_type = self.rotary is not None and _takes_layer_type(self.rotary)
        if tp is not None and tp.degree > 1:
            self._cut(tp)
        self._adapt()
        self._embedding_dropout: StateDropout | None = None
        self._set_dropout(dropout_of(self.config))
        if family.has_experts:
            self._balance_routers()

    def _keep(self, module: nn.Module, ours: str, theirs: str) -> nn.Module:
        self.paths[ours] = theirs
        return module

    def _cut(self, tp: TensorParallel) -> None:
        """Replace the modules that the plan splits by their parallel form."""
        for index, block in enumerate(self.blocks):
            path = f"{self.family.layers}.{self.first_layer + index}"
            entered: set[str] = set()
            shared: set[str] = set()
            for name, module in list(block.named_modules()):
                style = self.family.style(self.config, f"{path}.{name}")
                parent_name, _, child = name.rpartition(".")
                if style in (SHARED_COLUMN, SHARED_ROW):
                    shared.add(parent_name)
                    continue  # the block around shared experts enters and sums once
                if style in ROW:
                    setattr(block.get_submodule(parent_name), child, RowParallel(module, tp))
                elif style == EXPERTS:
                    spec = self.specs[f"{path}.{name}.{next(iter(module._parameters))}"]
                    keep_own_experts(module, *_experts_of(spec, self.share))
                    if tp.expert_owners:
                        send_tokens(module, tp, _owner_by_expert(spec, tp))
                        route_own_part(block.get_submodule(parent_name), tp)
                    else:
                        entered.add(parent_name)
                        leave_after(block.get_submodule(parent_name), tp)
                elif style == SPLIT_NORM:
                    setattr(block.get_submodule(parent_name), child, SplitNorm(module, tp))
                elif style in COLUMN:
                    entered.add(parent_name)
                    if isinstance(module, Conv1D):
                        module.nf = self._local_shape(f"{path}.{name}.weight")[-1]
            for name in shared if tp.expert_owners else ():
                share_all_tokens(block.get_submodule(name), tp)
            for name in entered:
                _enter_before(block.get_submodule(name), tp)
                _divide_split_size(block.get_submodule(name), tp.share)
                if self.family.divide_attention is not None:
                    self.family.divide_attention(block.get_submodule(name), tp.share)
                share_key_heads(
                    block.get_submodule(name), tp.share, self.family.key_value_units(self.config)
                )
        if self.is_first:
            start = self._vocabulary_start(self.paths["embedding"])
            self.embedding = VocabularyEmbedding(self.embedding, tp, start)

    def _balance_routers(self) -> None:
        """Add the balance loss of `loss_terms` to what routers learn, and count their tokens.

        The gradients of a group's ranks are summed. If every rank routes all tokens, the first rank
        alone adds them; if each routes its part of the tokens, all ranks do.
        """
        part = None
        if self.tp is not None and self.tp.expert_owners:
            part = TokenPart(self.tp)
        adds = self.tp is None or self.tp.rank == 0 or part is not None
        for block in self.blocks:
            for name, module in block.named_modules():
                if name in ROUTERS:
                    count_tokens(module, lambda: adds and self.loss_terms.counts_tokens, part)
                    if adds:
                        balance(module, self._balance_weight, self._length, part)

    def _balance_weight(self) -> float:
        return self.loss_terms.router_balance * self.loss_terms.gradient_scale

    def _adapt(self) -> None:
        """Add the low-rank update to the linear maps that have an adapter."""
        adapter = adapter_of(self.config)
        if adapter is None:
            return
        for index, block in enumerate(self.blocks):
            path = f"{self.family.layers}.{self.first_layer + index}"
            for name, module in list(block.named_modules()):
                is_map = is_linear(module) or isinstance(module, RowParallel)
                if is_map and adapter.matches(f"{path}.{name}"):
                    parent, _, child = name.rpartition(".")
                    dropout = self._adapter_dropout(f"{path}.{name}", adapter)
                    adapted = AdaptedLinear(module, adapter.rank, adapter.scaling, dropout)
                    setattr(block.get_submodule(parent), child, adapted)

    def _adapter_dropout(self, path: str, adapter: Adapter) -> AdapterDropout | None:
        """Return the dropout of a map's adapter, over this rank's columns; None if it has none."""
        if not adapter.dropout:
            return None
        spec = self.specs[f"{path}{A_SUFFIX}"]
        whole = torch.arange(spec.shape[1]).expand(spec.shape)
        columns = take_units(spec, local_units(spec, self.share), whole)[0]
        keys = column_keys(path, columns).to(self.device)
        return AdapterDropout(adapter.dropout, self._dropout_rows, keys)

    def _set_dropout(self, dropout: ModelDropout) -> None:
        """Let blocks and embedding drop elements of the microbatches that `draw_dropout` names."""
        width = torch.arange(int(self.config.hidden_size), device=self.device)
        if dropout.embedding and self.is_first:
            keys = column_keys("embedding", width)
            self._embedding_dropout = StateDropout(dropout.embedding, self._dropout_rows, keys)
        num_heads = int(self.config.num_attention_heads)
        share = self.share
        heads = torch.arange(num_heads, device=self.device)
        heads = heads[num_heads * share.first // share.of : num_heads * share.end // share.of]
        for index, block in enumerate(self.blocks):
            path = f"{self.family.layers}.{self.first_layer + index}"
            for name, rate in dropout.residual.items():
                keys = column_keys(f"{path}.{name}", width)
                drop = StateDropout(rate, self._dropout_rows, keys)
                block.get_submodule(name).register_forward_hook(_after(drop))
            if dropout.attention:
                keys = column_keys(f"{path}.{self.family.attention}", heads)
                drawn = AttentionDropout(dropout.attention, self._dropout_rows, keys)
                setattr(block.get_submodule(self.family.attention), ATTENTION_DROPOUT, drawn)

    @property
    def has_dropout(self) -> bool:
        """True if a forward pass with gradients drops elements, of the model or its adapters."""
        adapter = adapter_of(self.config)
        return bool(dropout_of(self.config)) or (adapter is not None and adapter.dropout > 0)

    def draw_dropout(self, seed: int, samples: Sequence[int]) -> None:
        """Draw the dropout of the next forward pass with gradients.

        samples: positions in the run of the microbatch's rows, which decide the bits.
        """
        self._drawn = (seed, samples)

    def _vocabulary_start(self, path: str) -> int:
        """Return the first row of the vocabulary that this rank holds."""
        spec = self.specs[f"{path}.weight"]
        return spec.cuts[local_units(spec, self.share)[0]]

    # state
    # ------------------------------------------------------------------------------

    def _slots(self) -> dict[str, list[tuple[nn.Module, str]]]:
        """Map checkpoint names to the places of the parameter in this stage.

        A tied head on one stage has two places.
        """
        slots: dict[str, list[tuple[nn.Module, str]]] = {}
        for ours, theirs in self.paths.items():
            for path, module in self.get_submodule(ours).named_modules():
                for kind in module._parameters:
                    if module._parameters[kind] is not None:
                        full = ".".join(part for part in (theirs, path, kind) if part)
                        slots.setdefault(full, []).append((module, kind))
        return slots

    def load_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Use these local slices as the stage's parameters.

        The stage computes on the given tensors themselves if they have the compute dtype and the
        device, else on copies.
        """
        slots = self._slots()
        missing = sorted(set(slots) - set(parameters))
        assert not missing, (
            f"the stage of layers {self.first_layer}+{self.num_layers} was not given {missing[:3]}"
        )
        shapes = self.local_shapes()
        for name, places in slots.items():
            given = tuple(parameters[name].shape)
            assert given == shapes[name], f"{name}: this rank holds {shapes[name]}, not {given}"
            dtype = self.specs[name].compute_dtype(self.dtype)
            parameter = nn.Parameter(
                parameters[name].detach().to(device=self.device, dtype=dtype),
                requires_grad=self.specs[name].trainable,
            )
            for module, kind in places:
                module._parameters[kind] = parameter

    @torch.no_grad()
    def renew_copies(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy these local slices again, if the stage computes on copies of them."""
        slots = self._slots()
        for name, given in parameters.items():
            module, kind = slots[name][0]
            used = module._parameters[kind]
            if used is not None and used.data_ptr() != given.data_ptr():
                used.copy_(given)

    def local_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of this rank's slices, by checkpoint name."""
        return {name: self._local_shape(name) for name in self._slots()}

    def _local_shape(self, name: str) -> tuple[int, ...]:
        return local_shape(self.specs[name], local_units(self.specs[name], self.share))

    def local_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's slices of trained parameters, by checkpoint name.

        `.grad` accumulates over microbatches.
        """
        found: dict[str, Any] = {}
        for name, places in self._slots().items():
            if self.specs[name].trainable:
                module, attribute = places[0]
                found[name] = module._parameters[attribute]
        return found

    # compute
    # ------------------------------------------------------------------------------

    def forward(self, x: Tensor, begins: Tensor | None = None) -> Tensor:
        """Run the stage's blocks, with the embedding in the first stage and the head in the last.

        `begins`: map of the begins of pieces that do not attend to each other, bool [b, S] on the
        host; None: each sequence is one piece.
        """
        hidden = self._through_blocks(x, begins)
        if not self.is_last:
            return join_sequence(hidden, self.tp)
        return self.logit_adjustment.apply(self.head(enter(self.norm(hidden), self.tp)))

    def loss(self, x: Tensor, targets: Tensor, begins: Tensor | None = None) -> Tensor:
        """Forward and `loss_sum` of a last stage; the logits are never whole."""
        return self._loss_of(self._before_loss(x, begins), targets)

    def answer_losses(self, x: Tensor, targets: Tensor, begins: Tensor) -> Tensor:
        """Return the summed cross entropy of each row's two answers, fp32 [b, 2].

        The answers are the row's first two pieces; the rest of it is padding.
        """
        lengths = [length for row in answer_lengths(begins) for length in row]
        states = self._before_loss(x, begins).flatten(0, 1).split(lengths)
        wanted = targets.flatten().split(lengths)
        answers = [index for index in range(len(lengths)) if index % 3 != 2]
        losses = [self._loss_of(states[index], wanted[index]) for index in answers]
        return torch.stack(losses).view(-1, 2)

    @property
    def _fuses_head(self) -> bool:
        """True if the loss is computed from hidden states, so that logits are never whole."""
        return isinstance(self.head, nn.Linear) and self.head.bias is None

    def _before_loss(self, x: Tensor, begins: Tensor | None) -> Tensor:
        """Return what `_loss_of` takes: normalised hidden states, or logits."""
        if not self._fuses_head:
            logits: Tensor = self(x, begins)
            return logits
        return enter(self.norm(self._through_blocks(x, begins)), self.tp)

    def _loss_of(self, states: Tensor, targets: Tensor) -> Tensor:
        if not self._fuses_head:
            return self.loss_sum(states, targets)
        weight: Any = self.head.weight
        cut = self._cut_vocabulary()
        num_tokens = int(self.config.vocab_size)
        if cut is not None:
            num_tokens = min(max(num_tokens - cut.start, 0), len(weight))
        return linear_cross_entropy_sum(
            states, weight, targets, num_tokens, self._terms, self.logit_adjustment, cut
        )

    def _cut_vocabulary(self) -> CutVocabulary | None:
        """Return this rank's rows of the head; None if it has all."""
        if self.tp is None or self.tp.degree == 1:
            return None
        path = self.paths["head"]
        num_tokens = int(self.config.vocab_size)
        start = self._vocabulary_start(path)
        num_rows = self.specs[f"{path}.weight"].shape[0]
        return CutVocabulary(self.tp.group, self.tp.degree, start, num_rows, num_tokens)

    def without_adapters(self) -> AbstractContextManager[None]:
        """Compute as the base model inside the returned context."""
        return adapters_off(self)

    @property
    def _terms(self) -> LossTerms:
        """Loss terms to use; evaluation, which has no gradient, uses cross entropy alone."""
        return self.loss_terms if torch.is_grad_enabled() else PLAIN

    def _through_blocks(self, x: Tensor, begins: Tensor | None) -> Tensor:
        self._length.tokens = x.shape[1]
        self._use_keys(self._keys_of_rows(x.shape[1]))
        hidden = self._embed(x, begins) if self.is_first else split_sequence(x, self.tp)
        isolated = begins is not None
        fixed = (
            self._fixed_by_pieces(hidden, begins)
            if isolated
            else self._fixed_by_shape(hidden, x.shape[1])
        )
        keys = self._dropout_rows.keys
        for index, block in enumerate(self.blocks):
            hidden = self._run(block, hidden, self._arguments(index, fixed, isolated), keys)
        return hidden

    def _keys_of_rows(self, length: int) -> Tensor | None:
        """Return the dropout keys of the microbatch, int32 [b, S]; None: nothing is dropped."""
        if self._drawn is None or not torch.is_grad_enabled():
            return None
        return row_keys(*self._drawn, length, self.device)

    def _use_keys(self, keys: Tensor | None) -> None:
        """Let all dropout of this stage use these keys of rows, int32 [b, S]; None: no dropout."""
        own = keys
        parts = self._sequence_parts
        if keys is not None and parts > 1:
            assert self.tp is not None
            own = padded(keys, parts).chunk(parts, dim=1)[self.tp.rank]
        self._dropout_rows.keys, self._dropout_rows.own = keys, own

    def _arguments(self, index: int, fixed: Mapping[Any, Any], isolated: bool) -> dict[str, Any]:
        """Return the arguments of block `index` beside the hidden states."""
        window = self._window(index)
        arguments: dict[str, Any] = {"attention_mask": fixed[window]}
        if isolated and window is not None:
            arguments["piece_window"] = window
        if self.rotary is not None:
            arguments["position_embeddings"] = fixed["rotary"][self._rotary_kind(index)]
        return arguments

    def block_output(self, index: int, hidden: Tensor) -> Tensor:
        """Output of block `index` of this stage for hidden states of whole sequences."""
        fixed = self._fixed_by_shape(hidden, hidden.shape[1])
        return self._run(self.blocks[index], hidden, self._arguments(index, fixed, False))

    def fixed_tensors(self) -> list[Tensor]:
        """Return the masks and rotary tables that all blocks share, made for the last shape."""
        return [leaf for leaf in tree_leaves(self._fixed[1]) if isinstance(leaf, Tensor)]

    def _embed(self, tokens: Tensor, begins: Tensor | None) -> Tensor:
        hidden = self._token_states(tokens, begins)
        # Recomputed blocks pass gradients on only to inputs that want them.
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()
        return hidden

    def _token_states(self, tokens: Tensor, begins: Tensor | None) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        if self.family.embedding_scale is not None:
            hidden = hidden * self.family.embedding_scale(self.config, self.dtype)
        if self.family.position_embedding:
            hidden = hidden + self._position_states(tokens, begins)
        return hidden if self._embedding_dropout is None else self._embedding_dropout(hidden)

    def _position_states(self, tokens: Tensor, begins: Tensor | None) -> Tensor:
        """Return the learned positions of tokens [b, S] that are added to their embedding."""
        length = tokens.shape[1]
        limit = self.positions.get_parameter("weight").shape[0]
        if length > limit:
            raise ConfigError(
                f"sequences of {length} tokens exceed the {limit} learned positions; shorten"
                " sequence_length"
            )
        if begins is None:
            places = torch.arange(length, device=tokens.device).unsqueeze(0)
        else:
            places = positions_of(begins).to(tokens.device, non_blocking=True)
        if self._sequence_parts > 1:
            assert self.tp is not None
            parts = padded(places, self._sequence_parts).chunk(self._sequence_parts, dim=1)
            places = parts[self.tp.rank]
        of_places: Tensor = self.positions(places)
        return of_places

    @property
    def _sequence_parts(self) -> int:
        """Equal parts of the sequence that the ranks have between cut parts."""
        return self.tp.degree if self.tp is not None and self.tp.cuts_sequence else 1

    def _run(
        self,
        block: nn.Module,
        hidden: Tensor,
        arguments: dict[str, Any],
        keys: Tensor | None = None,
    ) -> Tensor:
        recompute = self.recompute if torch.is_grad_enabled() else "none"
        run = block if self._drawn is None else partial(self._run_with_keys, block, keys)
        out: Tensor | tuple[Any, ...] = run_block(run, hidden, arguments, recompute)
        if isinstance(out, Tensor):
            return out
        others = [type(each).__name__ for each in out[1:] if each is not None]
        if others:
            raise ConfigError(
                f"a block of {self.config.model_type} has {1 + len(others)} outputs, hidden states"
                f" and {', '.join(others)}; only blocks from hidden states to hidden states can be"
                " cut into stages"
            )
        first: Tensor = out[0]
        return first

    def _run_with_keys(
        self, block: nn.Module, keys: Tensor | None, hidden: Tensor, **arguments: Any
    ) -> Any:
        """Run a block with these keys of its rows; a recomputation draws the same dropout."""
        self._use_keys(keys)
        return block(hidden, **arguments)

    def _window(self, index: int) -> int | None:
        """Return the sliding window of block `index`, in tokens; None: it has none."""
        return window_of(self.config, self.first_layer + index)

    def _rotary_kind(self, index: int) -> str | None:
        """Return the key of block `index`'s rotary table: its layer type; None: the only table."""
        if not self.rotary_by_layer_type:
            return None
        return str(self.config.layer_types[self.first_layer + index])

    def _rotary_tables(self, hidden: Tensor, positions: Tensor) -> dict[str | None, Any]:
        assert self.rotary is not None
        if not self.rotary_by_layer_type:
            return {None: self.rotary(hidden, position_ids=positions)}
        kinds = {self._rotary_kind(index) for index in range(self.num_layers)}
        return {kind: self.rotary(hidden, positions, kind) for kind in kinds}

    def prepare(self, shape: tuple[int, int], mask: MaskMaker = window_band) -> None:
        """Build masks and rotary tables for microbatches of this shape, [b, S], in advance."""
        hidden = torch.empty(
            (*shape, int(self.config.hidden_size)), device=self.device, dtype=self.dtype
        )
        self._fixed_by_shape(hidden, shape[1], mask)

    def _fixed_by_shape(
        self, hidden: Tensor, length: int, mask: MaskMaker = window_band
    ) -> dict[Any, Any]:
        """Masks by window and rotary tables: functions of the shape alone, so made once, not for
        every microbatch. No mask, where no window is shorter than the sequences: attention is
        plainly causal then.
        """
        key = (hidden.shape, length, hidden.dtype, hidden.device, torch.is_inference_mode_enabled())
        if self._fixed[0] != key:
            made: dict[Any, Any] = {
                window: mask(window, length, hidden.dtype, hidden.device)
                for window in {self._window(index) for index in range(self.num_layers)}
            }
            if self.rotary is not None:
                positions = torch.arange(length, device=hidden.device).unsqueeze(0)
                made["rotary"] = self._rotary_tables(hidden, positions)
            self._fixed = (key, made)
        return self._fixed[1]

    def _fixed_by_pieces(self, hidden: Tensor, begins: Tensor | None) -> dict[Any, Any]:
        """Return masks by window and rotary tables for microbatches with these pieces."""
        assert begins is not None
        windows = {self._window(index) for index in range(self.num_layers)}
        device = hidden.device
        made: dict[Any, Any]
        is_explicit = self.softcap is not None or self.family.has_sinks
        is_fused = not is_explicit and not dropout_of(self.config).attention
        if uses_varlen(device, hidden.dtype) and is_fused:
            made = dict.fromkeys(windows, cumulative_lengths(begins, device))
        else:
            made = {window: piece_mask(begins, window, device) for window in windows}
        if self.rotary is not None:
            positions = positions_of(begins).to(device, non_blocking=True)
            made["rotary"] = self._rotary_tables(hidden, positions)
        return made

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum the cross entropy over `targets` [b, S] other than -100.

        Returns an fp32 scalar, equal on every rank of the group.
        """
        start = self._vocabulary_start(self.paths["head"])
        num_tokens = int(self.config.vocab_size) - start
        return cross_entropy_sum(logits, targets, self.tp, start, num_tokens, self._terms)


def build_stage(
    config: PreTrainedConfig,
    first_layer: int,
    num_layers: int,
    tp: TensorParallel | None,
    device: torch.device,
    dtype: torch.dtype,
    recompute: Recompute = "none",
) -> StageModel:
    """Build the stage of blocks [first_layer, first_layer + num_layers).

    Raises:
        ConfigError: the parts of the tensor-parallel group do not divide the model's heads, or are
        more than its experts, or a stage with sequence_parallel would recompute selectively.
    """
    from autohet.runtime.models import family_of

    family = family_of(config)
    finest = family.max_tp_degree(config)
    if tp is not None and tp.cuts_sequence and recompute == "selective":
        raise ConfigError(
            "a stage with sequence_parallel cannot recompute selectively; choose none or full"
        )
    if tp is not None and finest % tp.share.of:
        what = (
            f"TP degree {tp.degree}"
            if tp.uneven is None
            else f"a sum of tp_shares of {tp.share.of}"
        )
        raise ConfigError(
            f"{what} does not divide this model's {family.limit_of_parts(config)}; it can be 1 to"
            f" {finest}, a power of two"
        )
    return StageModel(family, config, first_layer, num_layers, tp, device, dtype, recompute)


def _on_device(module: nn.Module, config: PreTrainedConfig, device: torch.device) -> nn.Module:
    """Create a rotary embedding on the device; it has only computed buffers."""
    with torch.device(device):
        return type(module)(config=config)


def _takes_layer_type(rotary: nn.Module) -> bool:
    """Return True if a rotary embedding has one table for each type of layers."""
    return "layer_type" in inspect.signature(rotary.forward).parameters


def _after(drop: StateDropout) -> Any:
    """Return a forward hook that applies a dropout to a module's output."""
    return lambda module, inputs, output: drop(output)


def _unscaled(table: nn.Module) -> nn.Embedding:
    """Return a plain embedding in place of one that scales its output; the stage scales instead."""
    assert isinstance(table, nn.Embedding)
    return nn.Embedding(
        table.num_embeddings, table.embedding_dim, table.padding_idx, _weight=table.weight
    )


def _experts_of(stack: ParameterSpec, share: TensorShare) -> tuple[int, int]:
    """Return the first expert of a stack that a rank holds, and the one after its last."""
    units = local_units(stack, share)
    return stack.cuts[units[0]], stack.cuts[units[-1] + 1]


def _owner_by_expert(stack: ParameterSpec, tp: TensorParallel) -> list[int]:
    """Return the rank that holds each expert of a stack."""
    owners = []
    for rank, share in enumerate(tp.expert_owners):
        first, end = _experts_of(stack, share)
        owners += [rank] * (end - first)
    return owners


def _enter_before(module: nn.Module, tp: TensorParallel) -> None:
    """Apply Megatron's f once before a module whose first linear maps are cut."""

    def hook(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (enter(args[0], tp), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"], tp)}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _divide_split_size(module: nn.Module, share: TensorShare) -> None:
    """Set the width by which GPT-2's attention splits its packed projection to the share's."""
    if hasattr(module, "split_size"):
        module.split_size = int(module.split_size) * (share.end - share.first) // share.of  # type: ignore[arg-type, assignment]
