"""A model as the planner sees it: layers with parameters, FLOPs and activation widths; no weights,
no torch.
"""

import math
from dataclasses import dataclass, replace

from planner.plans.muon import Matrices
from planner.plans.plan import FINEST_TP_DEGREE, TensorShare

EXPLICIT_SCORES = 1 << 23
"""Limit on the attention scores that a worker computes at a time without a fused kernel."""


@dataclass(frozen=True, slots=True)
class ExplicitScores:
    """Attention scores that no kernel of PyTorch computes.

    A kernel of this project has them in registers. Where it cannot run, they are computed operator
    by operator, at most EXPLICIT_SCORES at a time. The backward pass computes them again.

    heads: their heads, split by tensor parallelism. operations: of the kernel's integer units for
    each score and pass over it, or of units as fast: a hash of 8 (`fused_attention._is_kept`, and a
    selection), a tanh of 8. alive_bytes: bytes of each score, and of tensors like the scores, that
    are alive together without the kernel, in fp32. forward_traffic, backward_traffic: bytes that
    operators then read and write for each score.
    """

    heads: int
    operations: float
    alive_bytes: float
    forward_traffic: float
    backward_traffic: float

    @classmethod
    def of(cls, heads: int, *, has_softcap: bool, has_dropout: bool) -> "ExplicitScores":
        """Return the scores of an attention with a soft-cap, dropout of its weights, or both."""
        alive = 13.0 + 4.0 * has_softcap + 8.0 * has_dropout
        forward = 35.0 + 25.0 * has_softcap + 125.0 * has_dropout
        operations = 8.0 * (has_softcap + has_dropout)
        return cls(heads, operations, alive, forward, forward + 65.0)


@dataclass(frozen=True, slots=True)
class KeptValues:
    """Scalars per token that autograd keeps of one block for its backward pass.

    They have the width of the compute dtype, and are split by tensor parallelism or kept on every
    rank. They are counted for everything, and for what `selective` recomputation keeps: the block's
    input, the outputs of its matrix products and of the fused attention.

    backward: gradients that are alive together at the peak of the backward pass; split.
    key_value, selective_key_value: scalars of key and value heads among `split` and
    `selective_split`.
    """

    split: float
    replicated: float
    selective_split: float
    selective_replicated: float
    backward: float = 0.0
    key_value: float = 0.0
    selective_key_value: float = 0.0


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts of a block; each rank of a tensor-parallel group holds whole ones.

    number: experts. per_token: experts that compute each token. parameters: weights of all of them.
    held: experts on one rank of an uneven group (`ModelSpec.with_share`); 0: the group is even.
    has_shared: the block has experts that every token uses beside them.
    """

    number: int
    per_token: int
    parameters: int
    held: int = 0
    has_shared: bool = False

    def on_rank(self, tp_degree: float) -> int:
        """Return the experts on the rank of `tp_degree` that holds most of them."""
        return self.held or math.ceil(self.number / tp_degree - 1e-9)

    def of_share(self, share: TensorShare) -> int:
        """Return the experts on a rank with this share."""
        first = share.first * self.number // share.of
        end = share.end * self.number // share.of
        return end - first

    def excess(self, tp_degree: float) -> float:
        """Return the weights on the fullest rank beyond a `tp_degree`-th part of all."""
        share_on_rank = self.on_rank(tp_degree) / self.number
        return self.parameters * (share_on_rank - 1.0 / tp_degree)


@dataclass(frozen=True, slots=True)
class Quantized:
    """Frozen weights of a layer that are held in fewer bits, and dequantized by each product.

    parameters: all of them, in scalars. replicated_parameters: those that every tensor-parallel
    rank holds whole. largest: the largest weight. bytes_per_parameter: codes and scales of the
    layer over these scalars.
    """

    parameters: int
    replicated_parameters: int
    largest: int
    bytes_per_parameter: float


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Block, embedding, or final norm + head, with its parameters, FLOPs and activations.

    parameters: trained scalars of the layer, on one device without tensor parallelism.
    replicated_parameters: those of them that every tensor-parallel rank holds whole (norms,
    row-parallel biases).
    matmul_parameters: weights that multiply every token once (an embedding look-up has none; a tied
    head has hidden * vocabulary).
    attention_width: heads * head size (queries x keys and scores x values cost 4 * S^2 * width
    FLOPs a sequence).
    window: tokens that a token attends to, itself included; 0: all tokens before it.
    score_share: scores between tokens of one document over those of whole rows.
    split_activation_values, replicated_activation_values: scalars per token kept for backward,
    split or not by tensor parallelism.
    attention_heads: heads whose S x S scores are kept for backward; 0 for fused attention.
    explicit_scores: attention scores that are computed without a fused kernel; None: none.
    autograd: activations that this project's runtime keeps, counted on the block's own modules
    (`autohet.runtime.models.specs.counted_values`); None: only the formula above is known.
    key_value_parameters: scalars of key and value projections, if the TP degree may exceed the
    number of key-value heads.
    key_value_units: maximum number of parts of these projections; several ranks then hold each part
    (`split_excess`). 0: they are cut like all other tensors. For one rank of an uneven group
    (`ModelSpec.with_share`) it is the inverse of the rank's share of them, and no integer.
    frozen_parameters, frozen_replicated_parameters, frozen_key_value_parameters: as those above,
    for weights that are used and not trained.
    backward_share: FLOPs of the backward pass, relative to a backward pass that computes a gradient
    for each weight.
    forward_passes: forward passes of a sequence in one step; 2 with a frozen reference beside the
    trained model.
    experts: routed experts; None: the layer is dense.
    quantized: those of the frozen parameters that are held in fewer bits; None: none.
    matrices: those of the parameters that Muon updates; None: AdamW updates all.
    """

    parameters: int
    replicated_parameters: int = 0
    matmul_parameters: int = 0
    attention_width: int = 0
    split_activation_values: float = 0.0
    replicated_activation_values: float = 0.0
    attention_heads: int = 0
    explicit_scores: ExplicitScores | None = None
    autograd: KeptValues | None = None
    key_value_parameters: int = 0
    key_value_units: float = 0
    frozen_parameters: int = 0
    frozen_replicated_parameters: int = 0
    frozen_key_value_parameters: int = 0
    backward_share: float = 1.0
    forward_passes: int = 1
    experts: Experts | None = None
    quantized: Quantized | None = None
    window: int = 0
    score_share: float = 1.0
    matrices: Matrices | None = None

    @property
    def has_experts(self) -> bool:
        """True if a token uses a part of a block's matrices alone."""
        return self.matmul_parameters < 0.9 * self.parameters

    def split_excess(self, tp_degree: float) -> float:
        """Return the share of a key or value that each worker holds beyond its `tp_degree`-th part.

        The share is relative to the whole tensor.
        """
        if not 0 < self.key_value_units < tp_degree:
            return 0.0
        return 1 / self.key_value_units - 1 / tp_degree

    def slides(self, sequence_length: int) -> bool:
        """Return True if the window is shorter than the sequences."""
        return 0 < self.window < sequence_length

    def keys_per_query(self, sequence_length: int) -> float:
        """Return twice the keys that a token attends to in the mean: S for a whole sequence."""
        keys = sequence_length * self.score_share
        if self.slides(sequence_length):
            keys = min(keys, self.window * (2.0 - self.window / sequence_length))
        return keys

    def score_flops(self, sequence_length: int) -> float:
        """Return FLOPs of the attention's two products in one sequence's forward pass.

        They are not halved by causality (`keys_per_query`).
        """
        keys = self.keys_per_query(sequence_length)
        return 4.0 * sequence_length * keys * self.attention_width

    def forward_flops(self, sequence_length: int) -> float:
        """Return FLOPs of one sequence's forward pass: 2 per weight and token, and the attention's
        two products.
        """
        return 2.0 * self.matmul_parameters * sequence_length + self.score_flops(sequence_length)

    def training_flops(self, sequence_length: int) -> float:
        """FLOPs of one sequence's forward passes and backward pass, without recomputation.

        The backward pass has twice a forward's where all weights are trained.
        """
        passes = self.forward_passes + 2.0 * self.backward_share
        return passes * self.forward_flops(sequence_length)

    def forward_flops_per_worker(self, sequence_length: int, tp_degree: float) -> float:
        """FLOPs of one sequence's forward pass on each of `tp_degree` workers."""
        key_values = self.key_value_parameters + self.frozen_key_value_parameters
        again = 2.0 * key_values * sequence_length * self.split_excess(tp_degree)
        return self.forward_flops(sequence_length) / tp_degree + again

    def parameters_per_worker(self, tp_degree: float) -> float:
        """Scalars that each of `tp_degree` workers trains."""
        cut = (self.parameters - self.replicated_parameters) / tp_degree
        excess = self.key_value_parameters * self.split_excess(tp_degree)
        if self.experts is not None and not self.frozen_parameters:
            excess += self.experts.excess(tp_degree)
        return self.replicated_parameters + cut + excess

    def frozen_per_worker(self, tp_degree: float) -> float:
        """Scalars that each of `tp_degree` workers computes with and does not train."""
        cut = (self.frozen_parameters - self.frozen_replicated_parameters) / tp_degree
        excess = self.frozen_key_value_parameters * self.split_excess(tp_degree)
        if self.experts is not None and self.frozen_parameters:
            excess += self.experts.excess(tp_degree)
        return self.frozen_replicated_parameters + cut + excess

    def quantized_per_worker(self, tp_degree: float) -> float:
        """Scalars among `frozen_per_worker` that are held in fewer bits."""
        if self.quantized is None:
            return 0.0
        replicated = self.quantized.replicated_parameters
        excess = self.frozen_key_value_parameters * self.split_excess(tp_degree)
        return replicated + (self.quantized.parameters - replicated) / tp_degree + excess

    def quantized_bytes_per_worker(self, tp_degree: float) -> float:
        """Bytes that these scalars are held in."""
        if self.quantized is None:
            return 0.0
        return self.quantized_per_worker(tp_degree) * self.quantized.bytes_per_parameter


def limit_of_parts(num_heads: int, num_experts: int, max_tp_degree: int) -> str:
    """Return what limits the number of parts of a model, as a noun: `6 experts` or `heads`.

    num_experts: 0 if all blocks are dense.
    """
    finer = 2 * max_tp_degree
    is_of_heads = num_heads % finer > 0 or finer > FINEST_TP_DEGREE
    is_of_experts = 0 < num_experts < finer and not is_of_heads
    return f"{num_experts} experts" if is_of_experts else "heads"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Model of embedding, blocks and head.

    blocks: one entry per block, 0-based. head: final norm and output projection.
    tied_embeddings: head and embedding are one tensor. `head.parameters` then counts the norm
    alone, while a last stage that is not the first holds its own copy of the tensor
    (`tied_parameters`).
    max_tp_degree: the largest power of two up to 8 that divides the attention heads, and that
    divides the key-value heads or is a multiple of them; at most the number of experts.
    has_dropout: it trains with dropout.
    frozen_format: number format in which weights are stored that are not trained; None: the one in
    which a stage computes.
    """

    name: str
    model_type: str
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    tied_embeddings: bool
    max_tp_degree: int
    embedding: LayerSpec
    blocks: tuple[LayerSpec, ...]
    head: LayerSpec
    has_dropout: bool = False
    frozen_format: str | None = None

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Embedding, blocks and head."""
        return (self.embedding, *self.blocks, self.head)

    @property
    def experts(self) -> Experts | None:
        """Routed experts of the first block that has any; None: all blocks are dense."""
        for block in self.blocks:
            if block.experts:
                return block.experts
        return None

    @property
    def uses_muon(self) -> bool:
        """True if Muon updates the matrices of blocks."""
        return any(block.matrices for block in self.blocks)

    def at_length(self, sequence_length: int) -> "ModelSpec":
        """Return the spec without windows that hold sequences of this length."""
        blocks = []
        for block in self.blocks:
            blocks.append(block if block.slides(sequence_length) else replace(block, window=0))
        return replace(self, blocks=tuple(blocks))

    @property
    def forward_passes(self) -> int:
        """`LayerSpec.forward_passes` of the blocks."""
        return self.blocks[0].forward_passes

    def with_forward_passes(self, count: int) -> "ModelSpec":
        """Return the spec with `count` forward passes of a sequence in one step."""
        blocks = [replace(block, forward_passes=count) for block in self.blocks]
        return replace(
            self,
            embedding=replace(self.embedding, forward_passes=count),
            blocks=tuple(blocks),
            head=replace(self.head, forward_passes=count),
        )

    def with_frozen_copies(self) -> "ModelSpec":
        """Return the spec with the first values of trained parameters beside them, frozen."""

        def copied(layer: LayerSpec) -> LayerSpec:
            whole = layer.replicated_parameters + layer.frozen_replicated_parameters
            return replace(
                layer,
                frozen_parameters=layer.parameters + layer.frozen_parameters,
                frozen_replicated_parameters=whole,
            )

        blocks = tuple(copied(block) for block in self.blocks)
        return replace(
            self, embedding=copied(self.embedding), blocks=blocks, head=copied(self.head)
        )

    @property
    def limit_of_parts(self) -> str:
        """What limits the number of parts (`max_tp_degree`), as a noun: `6 experts` or `heads`."""
        numbers = [block.experts.number for block in self.blocks if block.experts]
        return limit_of_parts(self.num_heads, min(numbers, default=0), self.max_tp_degree)

    @property
    def key_value_units(self) -> int:
        """Maximum number of parts of keys and values: `LayerSpec.key_value_units` of the blocks."""
        return int(self.blocks[0].key_value_units)

    def with_share(self, share: TensorShare) -> "ModelSpec":
        """Return the spec as one rank of an uneven tensor-parallel group has it.

        At TP degree `1 / share.fraction`, the rank's keys and values are those of the heads that it
        overlaps, and its experts those of its parts.
        """
        units = self.key_value_units
        shares_heads = 0 < units < share.of
        if not shares_heads and self.experts is None:
            return self
        blocks = []
        for block in self.blocks:
            if shares_heads:
                block = replace(block, key_value_units=units / len(share.units(units)))
            if block.experts is not None:
                held = replace(block.experts, held=block.experts.of_share(share))
                block = replace(block, experts=held)
            blocks.append(block)
        return replace(self, blocks=tuple(blocks))

    @property
    def parameters(self) -> int:
        """Scalars of the whole model, tied tensors once."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def tied_parameters(self) -> int:
        """Scalars of the tensor that first and last stage share, if it is trained; else 0."""
        return self._tied_scalars if self.embedding.parameters >= self._tied_scalars else 0

    @property
    def frozen_tied_parameters(self) -> int:
        """Scalars of the tensor that first and last stage share, if it is frozen; else 0."""
        is_frozen = self.embedding.frozen_parameters >= self._tied_scalars
        return self._tied_scalars if is_frozen else 0

    @property
    def _tied_scalars(self) -> int:
        return self.vocab_size * self.hidden_size if self.tied_embeddings else 0

    def tied_share(self, tp_degree: float = 1.0) -> float:
        """Part of what each of `tp_degree` workers holds of the embedding that is the head, too."""
        embedding = self.embedding
        held = embedding.parameters_per_worker(tp_degree) + embedding.frozen_per_worker(tp_degree)
        tied = self.tied_parameters + self.frozen_tied_parameters
        return tied / tp_degree / max(1.0, held)

    def training_flops(self, sequence_length: int) -> float:
        """FLOPs of forward and backward (twice the forward where all weights are trained) of one
        sequence, without recomputation.
        """
        return sum(layer.training_flops(sequence_length) for layer in self.layers)
