"""Seconds that mixtures of experts take beyond their FLOPs: tiles, weights, unequal loads.

Grouped matrix products pad the tokens of each expert to whole tiles of TILE_ROWS rows (tile
quantization: NVIDIA, "Matrix Multiplication Background User's Guide", section 2.2). They read the
weights of every expert, however few tokens come to it. In a tensor-parallel group each rank has
experts of its own, and the group waits for the rank with most tokens.
"""

import math
from collections.abc import Sequence
from statistics import fmean, pstdev

from planner.plans.model_spec import Experts

TILE_ROWS = 128
"""Rows of a tile of the grouped products of cuBLAS and CUTLASS in 16-bit formats."""
USUAL_LOAD_SPREAD = 0.3
"""Standard deviation of the experts' loads over their mean, where it was not measured.

A balance loss leaves a largest load of 1.72 times the mean among 64 experts (Wang et al. 2024,
"Auxiliary-Loss-Free Load Balancing", table 2): 0.72 / 2.4, the expected largest of 64 normal
values. With correction biases it is 1.04 times.
"""
LARGEST_OF_NORMAL = (0.0, 0.0, 0.564, 0.846, 1.029, 1.163, 1.267, 1.352, 1.424)
"""Expected largest of 0 to 8 standard normal values (David and Nagaraja, "Order Statistics")."""


def largest_rank_loads(num_experts: int, spread: float, degrees: Sequence[int]) -> list[float]:
    """Return the tokens of the rank with most over the mean, in even groups of these sizes."""
    experts = Experts(num_experts, 1, 0)
    found = []
    for degree in degrees:
        held = experts.on_rank(degree)
        found.append(imbalance(experts, held, 1.0 / degree, degree, spread))
    return found


def load_spread(loads: list[float]) -> float:
    """Return the standard deviation of the experts' loads over their mean."""
    return pstdev(loads) / fmean(loads)


def padded_share(experts: Experts, tokens: int) -> float:
    """Return the rows that grouped products compute over the rows that hold tokens.

    The last tile of an expert is half full in the mean, and an expert has one tile at least.
    """
    rows = tokens * experts.per_token / experts.number
    return max(TILE_ROWS, rows + TILE_ROWS / 2) / rows


def imbalance(experts: Experts, held: int, fraction: float, ranks: int, spread: float) -> float:
    """Return the tokens of a rank's experts over `fraction` of all, when the largest rank counts.

    held: experts on the rank. fraction: its share of what the group of `ranks` cuts. spread: as
    `load_spread`. The load of `held` of the experts has a relative standard deviation of
    spread * sqrt((1 - held / number) / held).
    """
    deviation = spread * math.sqrt((1.0 - held / experts.number) / held)
    most_ranks = len(LARGEST_OF_NORMAL) - 1
    largest = LARGEST_OF_NORMAL[min(ranks, most_ranks)]
    even_load = held / (experts.number * fraction)
    return even_load * (1.0 + largest * deviation)
