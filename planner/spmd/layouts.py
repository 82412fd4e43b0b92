"""Layouts of a tensor over the ranks, and the instructions that convert between them.

Each instruction has a gradient dual (Zhang et al., "HAP: SPMD DNN training on heterogeneous GPU
clusters with automated program synthesis", EuroSys'24). The gradient of a replicated tensor is
partial and vice versa; that of a sharded tensor is sharded alike. So each instruction has one fixed
backward, and a program for the forward pass is one for both.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

LayoutKind = Literal["replicated", "sharded", "partial", "factored"]


class TensorLayout(NamedTuple):
    """Layout of a tensor over the ranks.

    replicated: every rank has the whole. sharded: the parts, concatenated on `dim`, give the
    tensor. partial: the sum over the ranks gives it. factored: replicated, with the whole gradient
    on every rank (a weight whose gradient is computed from gathered factors).
    """

    kind: LayoutKind
    dim: int = -1

    @property
    def dual(self) -> "TensorLayout":
        """Layout of the gradient, as backward passes it on."""
        if self.kind == "replicated":
            return PARTIAL
        if self.kind == "sharded":
            return self
        return REPLICATED

    def __str__(self) -> str:
        return f"sharded({self.dim})" if self.kind == "sharded" else self.kind


REPLICATED = TensorLayout("replicated")
PARTIAL = TensorLayout("partial")
FACTORED = TensorLayout("factored")


def sharded(dim: int) -> TensorLayout:
    """Parts along a dimension, perhaps uneven, perhaps empty."""
    return TensorLayout("sharded", dim)


CONVERSIONS: Mapping[str, tuple[str, ...]] = {
    "all_gather": ("padded", "grouped"),
    "reduce_scatter": ("padded", "grouped"),
    "all_reduce": ("",),
    "all_to_all": ("",),
    "slice": ("",),
    "mask": ("",),
}
"""Instructions between layouts and their variants. padded: one collective of parts as large as the
largest. grouped: one broadcast, or reduction, for each rank's own part. mask: the first rank alone
keeps its copy, the others have zeros.
"""
SILENT = frozenset({"slice", "mask"})
"""Instructions that send nothing; nor do their duals."""

_BY_KINDS: Mapping[tuple[LayoutKind, LayoutKind], str] = {
    ("sharded", "replicated"): "all_gather",
    ("partial", "sharded"): "reduce_scatter",
    ("partial", "replicated"): "all_reduce",
    ("sharded", "sharded"): "all_to_all",
    ("replicated", "sharded"): "slice",
    ("replicated", "partial"): "mask",
}


def conversion_between(source: TensorLayout, target: TensorLayout) -> str | None:
    """Return the one instruction from `source` to `target`.

    None if there is none, or if they are the same.
    """
    if source == target:
        return None
    return _BY_KINDS.get((source.kind, target.kind))


def dual_of(source: TensorLayout, target: TensorLayout) -> str | None:
    """Return the backward instruction of a conversion from `source` to `target`.

    None for a slice, whose dual fills up with zeros.
    """
    return conversion_between(target.dual, source.dual)
