"""How a tensor lies over the ranks, and the instructions that turn one layout into another, each with its gradient dual.

Zhang et al., "HAP: SPMD DNN training on heterogeneous GPU clusters with automated program synthesis", EuroSys'24. The gradient of a
replicated tensor is partial and the other way round, that of a sharded one is sharded alike; so each instruction has one fixed
backward, and a program for the forward pass is one for both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["replicated", "sharded", "partial", "factored"]


class Layout(NamedTuple):
    """replicated: every rank has the whole. sharded: concatenated on `dim`, the parts give it. partial: summed, they give it. factored:
    replicated, with the whole gradient on every rank (a weight whose gradient is computed from gathered factors)."""

    kind: Kind
    dim: int = -1

    @property
    def dual(self) -> "Layout":
        """Of the gradient, as backward hands it on."""
        return {"replicated": PARTIAL, "partial": REPLICATED, "factored": REPLICATED}.get(self.kind, self)

    def __str__(self) -> str:
        return f"sharded({self.dim})" if self.kind == "sharded" else self.kind


REPLICATED, PARTIAL, FACTORED = Layout("replicated"), Layout("partial"), Layout("factored")


def sharded(dim: int) -> Layout:
    """Parts along a dimension, perhaps uneven, perhaps empty."""
    return Layout("sharded", dim)


@dataclass(frozen=True, slots=True)
class Conversion:
    """What an instruction between layouts sends in forward, and its dual in backward; None: nothing."""

    forward: str | None
    backward: str | None
    variants: tuple[str, ...] = ("",)


CONVERSIONS: Mapping[str, Conversion] = {
    "all_gather": Conversion("all_gather", "reduce_scatter", ("padded", "grouped")),
    "reduce_scatter": Conversion("reduce_scatter", "all_gather", ("padded", "grouped")),
    "all_reduce": Conversion("all_reduce", "all_reduce"),
    "all_to_all": Conversion("all_to_all", "all_to_all"),
    "slice": Conversion(None, None),
    "mask": Conversion(None, None),
}
"""padded: one collective of parts as large as the largest. grouped: one broadcast, or reduction, for each rank's own part. mask: the
first rank alone keeps its copy, the others have zeros."""

_BY_KINDS: Mapping[tuple[Kind, Kind], str] = {
    ("sharded", "replicated"): "all_gather",
    ("partial", "sharded"): "reduce_scatter",
    ("partial", "replicated"): "all_reduce",
    ("sharded", "sharded"): "all_to_all",
    ("replicated", "sharded"): "slice",
    ("replicated", "partial"): "mask",
}


def conversion_between(source: Layout, target: Layout) -> str | None:
    """The one instruction from `source` to `target`; None where there is none, or they are the same."""
    return None if source == target else _BY_KINDS.get((source.kind, target.kind))
