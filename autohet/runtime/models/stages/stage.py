"""A stage: contiguous blocks of a decoder, with the embedding before the first and final norm and
head after the last.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from autohet.runtime.models.layers.adapters import (
    AdaptedEmbedding,
    AdaptedLinear,
    adapter_of,
    adapters_off,
)
from autohet.runtime.models.layers.experts import use_grouped_products
from autohet.runtime.models.layers.linear_loss import (
    CutVocabulary,
    HeadFactors,
    cross_entropy_sum,
    linear_cross_entropy_sum,
)
from autohet.runtime.models.layers.loss_terms import PLAIN, AnswerLosses, LossTerms
from autohet.runtime.models.layers.moved_inputs import MovedInputs
from autohet.runtime.models.layers.pieces import answer_lengths, positions_of
from autohet.runtime.models.layers.recomputation import run_block, usable_recompute
from autohet.runtime.models.layers.tensor_parallel import (
    SequenceLength,
    TensorParallel,
    VocabularyEmbedding,
    enter,
    join_sequence,
    pad_sequence,
    split_sequence,
)
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.skeleton import skeleton
from autohet.runtime.models.stages.block_changes import (
    adapt_blocks,
    adapted_map,
    balance_routers,
    cut_blocks,
    isolate_mixers,
    quantize_blocks,
)
from autohet.runtime.models.stages.block_inputs import BlockInputs
from autohet.runtime.models.stages.stage_dropout import StageDropout
from autohet.runtime.models.stages.stage_spec import StageSpec
from autohet.runtime.models.stages.stage_weights import StageWeights
from planner.errors import ConfigError
from planner.plans.plan import Recompute


class StageModel(nn.Module):
    """Stage of a model on one worker.

    `forward` of the first stage takes token ids [b, S] int64; other stages take hidden states [b,
    S, h]. It returns hidden states [b, S, h]; the last stage returns this rank's logits [b, S,
    V_local]. Columns from `vocab_size` on pad the vocabulary, and are no predictions. With tensor
    parallelism every rank of the group calls forward, `loss_sum` and backward together. Hidden
    states at the borders are whole and equal on all ranks.

    weights: parameters, without storage until they are loaded. dropout: draws the bits of a
    microbatch. inputs: masks and rotary tables of its blocks. paths: of the stage's parts in the
    library's model, by their names here.
    """

    def __init__(self, spec: StageSpec, recompute: Recompute) -> None:
        super().__init__()
        family = spec.family
        config = spec.config
        self.spec = spec
        self.recompute = usable_recompute(family.changes_products(config), recompute)
        self._moved_inputs = MovedInputs()
        self.loss_terms = PLAIN
        self.logit_adjustment = family.logit_adjustment(config)
        self.paths: dict[str, str] = {}
        model = skeleton(config)
        if family.has_experts:
            use_grouped_products(model.config, spec.dtype, may_loop=family.loops_over_own_experts)
        self._take_modules(model)
        rotary = attention = None
        if family.rotary:
            rotary = model.get_submodule(family.rotary)
            for path, module in model.named_modules():
                if path.endswith(f".{family.attention}"):
                    attention = module
        self.inputs = BlockInputs(spec, rotary, attention)
        self.dropout = StageDropout(spec)
        self._embedding_dropout = self.dropout.of_embedding() if spec.is_first else None
        cut_blocks(self.blocks, spec)
        isolate_mixers(self.blocks, spec)
        adapt_blocks(self.blocks, spec, self.dropout.rows)
        self._adapt_ends()
        quantize_blocks(self.blocks, spec)
        self.dropout.add_to(self.blocks)
        self._length = SequenceLength() if spec.tp is None else spec.tp.length
        if family.has_experts:
            balance_routers(self.blocks, spec, lambda: self.loss_terms, self._length)
        modules = [(theirs, self.get_submodule(ours)) for ours, theirs in self.paths.items()]
        self.weights = StageWeights(spec, modules)

    def _take_modules(self, model: PreTrainedModel) -> None:
        """Take this stage's parts of the library's model."""
        spec = self.spec
        family = spec.family
        self.blocks = nn.ModuleList()
        for index in range(len(spec.layers)):
            path = spec.block_path(index)
            self.blocks.append(model.get_submodule(path))
            self.paths[f"blocks.{index}"] = path
        if spec.is_first:
            self.paths["embedding"] = family.token_embedding
            self.embedding = model.get_submodule(family.token_embedding)
            self._take_scale()
            if spec.tp is not None and spec.tp.degree > 1:
                start = spec.first_token(family.token_embedding)
                self.embedding = VocabularyEmbedding(self.embedding, spec.tp, start)
            if family.position_embedding:
                self.paths["positions"] = family.position_embedding
                self.positions = model.get_submodule(family.position_embedding)
        if spec.is_last:
            self.paths["norm"] = family.final_norm
            self.norm = model.get_submodule(family.final_norm)
            is_tied = family.tied_head(spec.config)
            self.paths["head"] = family.token_embedding if is_tied else family.head
            self.head = model.get_submodule(family.head)

    def _take_scale(self) -> None:
        """Take the factor of the embedding's output out of its table; the stage multiplies."""
        spec = self.spec
        table: Any = self.embedding
        own = getattr(table, "scalar_embed_scale", None)
        self._embedding_scale = getattr(spec.config, "embedding_multiplier", None)
        if own is not None:
            # Gemma's table rounds its factor to the compute format.
            self._embedding_scale = float(torch.tensor(own).to(spec.dtype))
            self.embedding = nn.Embedding(
                table.num_embeddings, table.embedding_dim, table.padding_idx, _weight=table.weight
            )
        if spec.family.embedding_scale is not None:
            self._embedding_scale = spec.family.embedding_scale(spec.config, spec.dtype)

    def _adapt_ends(self) -> None:
        """Add the low-rank update to embedding and head if they are targets."""
        adapter = adapter_of(self.spec.config)
        if adapter is None:
            return
        if self.spec.is_first and adapter.names(self.paths["embedding"]):
            self.embedding = AdaptedEmbedding(self.embedding, adapter.rank, adapter.scaling)
        if self.spec.is_last and adapter.names(self.paths["head"]):
            self.head = adapted_map(self.head, self.paths["head"], self.spec, self.dropout.rows)

    # blocks
    # ------------------------------------------------------------------------------

    def forward(self, x: Tensor, begins: Tensor | None = None) -> Tensor:
        """Run the stage's blocks, with the embedding in the first stage and the head in the last.

        `begins`: map of the begins of pieces that do not attend to each other, bool [b, S] on the
        host; None: each sequence is one piece.
        """
        hidden = self._through_blocks(x, begins)
        if not self.spec.is_last:
            return join_sequence(hidden, self.spec.tp)
        states = enter(self.norm(hidden), self.spec.tp)
        return self.logit_adjustment.apply(self.head(states))

    def block_output(self, index: int, hidden: Tensor, length: int | None = None) -> Tensor:
        """Return the output of block `index` of this stage for hidden states.

        length: tokens of the whole sequences, of which `hidden` has this rank's part; None: it has
        them whole.
        """
        length = hidden.shape[1] if length is None else length
        self._length.tokens = length
        tables = self.inputs.of_shape(hidden, length)
        arguments = self.inputs.arguments(index, tables, isolated=False)
        return self._run(self.blocks[index], hidden, arguments, None)

    def as_reference(self, first_weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Compute with these values of trained parameters; without any, as the base model."""
        return self.weights.replaced_by(first_weights) if first_weights else adapters_off(self)

    def _through_blocks(self, x: Tensor, begins: Tensor | None) -> Tensor:
        length = x.shape[1]
        self._length.tokens = length
        keys = self.dropout.begin(length)
        if self.spec.is_first:
            hidden: Tensor = self.embedding(x)
            if self._embedding_scale is not None:
                hidden = hidden * self._embedding_scale
            if self.spec.family.position_embedding:
                hidden = hidden + self._position_states(x, begins)
            if self._embedding_dropout is not None:
                hidden = self._embedding_dropout(hidden)
            # Recomputed blocks pass gradients on only to inputs that want them.
            if torch.is_grad_enabled() and not hidden.requires_grad:
                hidden.requires_grad_()
        else:
            hidden = split_sequence(x, self.spec.tp)
        if begins is None:
            tables = self.inputs.of_shape(hidden, length)
        else:
            tables = self.inputs.of_pieces(hidden, begins)
        self._moved_inputs.begin()
        for index, block in enumerate(self.blocks):
            arguments = self.inputs.arguments(index, tables, isolated=begins is not None)
            hidden = self._run(block, hidden, arguments, keys)
        return hidden

    def _run(
        self, block: nn.Module, hidden: Tensor, arguments: dict[str, Any], keys: Tensor | None
    ) -> Tensor:
        recompute = self.recompute if torch.is_grad_enabled() else "none"
        run = self.dropout.with_keys(block, keys)
        out: Tensor | tuple[Any, ...] = run_block(
            run, hidden, arguments, recompute, self._moved_inputs
        )
        if isinstance(out, Tensor):
            return out
        others = [type(each).__name__ for each in out[1:] if each is not None]
        if others:
            raise ConfigError(
                f"a block of {self.spec.config.model_type} has {1 + len(others)} outputs, hidden"
                f" states and {', '.join(others)}; only blocks from hidden states to hidden states"
                " can be cut into stages"
            )
        first: Tensor = out[0]
        return first

    # embedding
    # ------------------------------------------------------------------------------

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
        num_parts = self.spec.sequence_parts
        if num_parts > 1:
            assert self.spec.tp is not None
            # With the sequence cut, this rank embeds its own part alone.
            parts = pad_sequence(places, num_parts).chunk(num_parts, dim=1)
            places = parts[self.spec.tp.rank]
        of_places: Tensor = self.positions(places)
        return of_places

    # loss
    # ------------------------------------------------------------------------------

    def loss(self, x: Tensor, targets: Tensor, begins: Tensor | None = None) -> Tensor:
        """Forward and `loss_sum` of a last stage; the logits are never whole."""
        return self._loss_of(self._before_loss(x, begins), targets)

    def answer_losses(
        self, x: Tensor, targets: Tensor, begins: Tensor, tokens: Tensor | None = None
    ) -> AnswerLosses:
        """Return the cross entropy of each row's two answers.

        The answers are the row's first two pieces; the rest of it is padding. tokens: of the rows;
        with them the prompt of the first answer has its cross entropy, too.
        """
        lengths: list[int] = []
        for row in answer_lengths(begins):
            lengths += row
        states = self._before_loss(x, begins).flatten(0, 1).split(lengths)
        wanted = targets.flatten().split(lengths)
        losses = []
        counts = []
        prompts = []
        prompt_counts = []
        pieces = None if tokens is None else tokens.flatten().split(lengths)
        for place in range(len(lengths)):
            # A row's third part is its padding.
            if place % 3 == 2:
                continue
            losses.append(self._loss_of(states[place], wanted[place]))
            counts.append((wanted[place] >= 0).sum())
            if pieces is not None and place % 3 == 0:
                following = pieces[place][1:].masked_fill(wanted[place][:-1] >= 0, -100)
                prompts.append(self._loss_of(states[place][:-1], following))
                prompt_counts.append((following >= 0).sum())
        sums = torch.stack(losses).view(-1, 2)
        numbers = torch.stack(counts).view(-1, 2)
        if not prompts:
            return AnswerLosses(sums, numbers)
        return AnswerLosses(sums, numbers, torch.stack(prompts), torch.stack(prompt_counts))

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum the cross entropy over `targets` [b, S] other than -100.

        Returns an fp32 scalar, equal on every rank of the group.
        """
        return cross_entropy_sum(logits, targets, self._vocabulary(), self._terms)

    @property
    def _fuses_head(self) -> bool:
        """True if the loss is computed from hidden states, so that logits are never whole."""
        is_map = isinstance(self.head, nn.Linear | AdaptedLinear)
        return is_map and self.head.bias is None

    def _before_loss(self, x: Tensor, begins: Tensor | None) -> Tensor:
        """Return what `_loss_of` takes: normalised hidden states, or logits."""
        if not self._fuses_head:
            logits: Tensor = self(x, begins)
            return logits
        hidden = self._through_blocks(x, begins)
        return enter(self.norm(hidden), self.spec.tp)

    def _loss_of(self, states: Tensor, targets: Tensor) -> Tensor:
        if not self._fuses_head:
            return self.loss_sum(states, targets)
        weight: Any = self.head.weight
        factors = HeadFactors(states, weight)
        if isinstance(self.head, AdaptedLinear) and self.head.is_on:
            low = self.head.low(states) * self.head.scaling
            factors = HeadFactors(states, weight, low, self.head.lora_B.weight)
        return linear_cross_entropy_sum(
            factors, targets, self._vocabulary(), self._terms, self.logit_adjustment
        )

    def _vocabulary(self) -> int | CutVocabulary:
        """Return the number of tokens, or this rank's rows of the head if it has not all."""
        tp = self.spec.tp
        num_tokens = int(self.spec.config.vocab_size)
        if tp is None or tp.degree == 1:
            return num_tokens
        path = self.paths["head"]
        start = self.spec.first_token(path)
        num_rows = self.spec.parameters[f"{path}.weight"].shape[0]
        return CutVocabulary(tp.group, tp.degree, start, num_rows, num_tokens)

    @property
    def _terms(self) -> LossTerms:
        """Loss terms to use; evaluation, which has no gradient, uses cross entropy alone."""
        return self.loss_terms if torch.is_grad_enabled() else PLAIN


def build_stage(
    config: PreTrainedConfig,
    layers: range,
    tp: TensorParallel | None,
    device: torch.device,
    dtype: torch.dtype,
    recompute: Recompute = "none",
) -> StageModel:
    """Build the stage of the blocks `layers`.

    Raises:
        ConfigError: the parts of the tensor-parallel group do not divide the model's heads, or are
        more than its experts, or a stage with sequence_parallel would recompute selectively.
    """
    family = family_of(config)
    finest = family.max_tp_degree(config)
    if tp is not None and tp.cuts_sequence and recompute == "selective":
        raise ConfigError(
            "a stage with sequence_parallel cannot recompute selectively; choose none or full"
        )
    if tp is not None and finest % tp.share.of:
        what = f"TP degree {tp.degree}"
        if tp.stage.tp_shares:
            what = f"a sum of tp_shares of {tp.share.of}"
        raise ConfigError(
            f"{what} does not divide this model's {family.limit_of_parts(config)}; it can be 1 to"
            f" {finest}, a power of two"
        )
    spec = StageSpec(family, config, layers, tp, device, dtype)
    return StageModel(spec, recompute)
