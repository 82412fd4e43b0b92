"""Work of a microbatch whose rows hold several documents, against that of average rows: attention
costs the squares of the documents' lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedConfig

from autohet.runtime.models import family_of
from planner.model_spec import ModelSpec


@dataclass(frozen=True)
class LengthWork:
    """`attention_ratio`: FLOPs of a block's attention over a whole row, by those of its matrix
    products. `mean_share`: mean of the squared lengths of a row's documents, by that of the row.
    """

    attention_ratio: float
    mean_share: float

    def relative(self, begins: Tensor) -> float:
        """Work of rows whose documents begin so, bool [b, S], against average rows'."""
        own = squared_share(begins)
        return (1 + self.attention_ratio * own) / (1 + self.attention_ratio * self.mean_share)


def squared_share(begins: Tensor) -> float:
    """Sum of squared lengths of the pieces of rows [b, S], by that of whole rows."""
    begins = begins.clone()
    begins[:, 0] = True
    starts = begins.flatten().nonzero().flatten()
    ends = starts.roll(-1)
    ends[-1] = begins.numel()
    rows, length = begins.shape
    return float(((ends - starts) ** 2).sum()) / (rows * length**2)


def length_work(
    config: PreTrainedConfig, sequence_length: int, mean_squared_length: float
) -> LengthWork:
    """For the blocks of a model; of the first one's matrices."""
    family = family_of(config)
    first = f"{family.layers}.0."
    products = sum(
        math.prod(spec.shape)
        for name, spec in family.parameter_specs(config).items()
        if name.startswith(first) and len(spec.shape) == 2
    )
    heads = int(config.num_attention_heads)
    head_size = getattr(config, "head_dim", None) or int(config.hidden_size) // heads
    ratio = 2.0 * sequence_length * heads * head_size / max(1, products)
    return LengthWork(ratio, mean_squared_length / sequence_length**2)


def with_lengths(spec: ModelSpec, sequence_length: int, mean_squared_length: float) -> ModelSpec:
    """The model as the planner sees it, its attention over documents of these lengths."""
    share = mean_squared_length / sequence_length**2
    blocks = tuple(
        replace(block, attention_width=max(1, round(block.attention_width * share)))
        for block in spec.blocks
    )
    return replace(spec, blocks=blocks)
