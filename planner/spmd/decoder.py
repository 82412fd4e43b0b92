"""Graph of a decoder as SPMD programs are planned over it, whoever derives it."""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.spmd.graph import Graph

WHOLE = -1


@dataclass(frozen=True)
class Decoder:
    """Graph of a decoder, and the dimensions along which its state may be cut.

    graph: sum of the losses of `ids` and `targets`.
    split_dims: dimension by parameter, WHOLE for none. They are the cuts of pipelines' tensor
    parallelism, so that state moves between plans of either kind.
    """

    graph: Graph
    split_dims: Mapping[str, int]
