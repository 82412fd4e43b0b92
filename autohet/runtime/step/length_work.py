"""Work of a microbatch whose rows hold several documents, relative to that of average rows.

The cost of attention is proportional to the sum of the squared lengths of the documents.
"""

import math
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedConfig

from autohet.runtime.models.registry import family_of
from planner.plans.model_spec import ModelSpec


@dataclass(frozen=True)
class LengthWork:
    """Work of a block as a function of document lengths.

    `attention_ratio`: FLOPs of a block's attention over a whole row, divided by those of its matrix
    products. `mean_share`: mean squared length of a row's documents, divided by the square of the
    row's length.
    """

    attention_ratio: float
    mean_share: float

    def relative(self, begins: Tensor) -> float:
        """Return the work of rows relative to average rows.

        begins: starts of documents, bool [b, S].
        """
        own = 1 + self.attention_ratio * squared_share(begins)
        average = 1 + self.attention_ratio * self.mean_share
        return own / average


def squared_share(begins: Tensor) -> float:
    """Return the sum of squared lengths of the pieces of rows [b, S] over that of whole rows."""
    # A row's first token begins a piece, even if the piece goes on from the row before.
    begins = begins.clone()
    begins[:, 0] = True
    starts = begins.flatten().nonzero().flatten()
    ends = starts.roll(-1)
    ends[-1] = begins.numel()
    lengths = ends - starts
    rows, length = begins.shape
    squares = float((lengths**2).sum())
    return squares / (rows * length**2)


def length_work(
    config: PreTrainedConfig, sequence_length: int, mean_squared_length: float
) -> LengthWork:
    """Return the work function of a model's blocks, from the matrices of its first block."""
    family = family_of(config)
    products = 0
    for spec in family.parameter_specs(config).values():
        if spec.layer == 0 and len(spec.shape) == 2:
            products += math.prod(spec.shape)
    heads = int(config.num_attention_heads)
    head_size = getattr(config, "head_dim", None) or int(config.hidden_size) // heads
    ratio = 2.0 * sequence_length * heads * head_size / max(1, products)
    return LengthWork(ratio, mean_squared_length / sequence_length**2)


def with_lengths(spec: ModelSpec, sequence_length: int, mean_squared_length: float) -> ModelSpec:
    """Return the planner's model spec with attention over documents of these lengths."""
    share = mean_squared_length / sequence_length**2
    blocks = tuple(replace(block, score_share=share) for block in spec.blocks)
    return replace(spec, blocks=blocks)
