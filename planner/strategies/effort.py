"""How much a search may look at."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Effort:
    """The defaults suit a fleet of any size on one core.

    columns: mixes of kinds listed. exact: of them made exact, a pick. packed: pipelines in an integer program, of
    integer_program_nodes nodes. orders: of node types in a pipeline. levels: limits on what a stage holds, of each TP degree.
    candidates: packings of pipelines looked at. sets: of few pipelines. tries: changes in each walk from a plan of a small fleet, times
    its GPUs. bounded: whether to prove a bound. fewer: whether to search without the slowest node type as well.
    """

    columns: int = 120_000
    exact: int = 1500
    packed: int = 100
    orders: int = 6
    levels: int = 4
    candidates: int = 4
    sets: int = 40
    integer_program_nodes: int = 150
    tries: int = 2400
    bounded: bool = True
    fewer: bool = True
