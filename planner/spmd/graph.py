"""Typed graph of a model's forward pass, and its axes: dimensions that are always cut alike.

A signature writes an operator like an einsum: one letter for each dimension that may be sharded,
"." for one that may not. Dimensions with one letter belong to one axis. So do dimensions that a
reshape maps onto each other, whatever their sizes: a projection's features and its heads are one
axis, whose smallest unit is a head.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from planner.errors import ConfigError
from planner.spmd.layouts import TensorLayout, sharded

MOST_UNITS = 256
Dimension = tuple[str, int]
"""A tensor's name and one of its dimensions."""
NodeKind = Literal["input", "parameter", "constant", "op"]


@dataclass(frozen=True, slots=True)
class Signature:
    """Signature of an operator, as in an einsum.

    inputs, output: one character per dimension.
    contracted: letters whose sharding makes the output partial.
    additive: inputs that are added once to such a sum (a bias).
    linear: sets of inputs that, partial together, make the output partial.
    reduced_bytes: bytes that are all-reduced inside the operator, in each direction, if a letter is
    sharded (a loss over a sharded vocabulary).
    factored: True if a weight's gradient may be computed on every rank from gathered input and
    output gradients (sufficient factor broadcasting).
    """

    inputs: tuple[str, ...]
    output: str
    contracted: str = ""
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    reduced_bytes: Mapping[str, float] = field(default_factory=dict)
    factored: bool = False

    @property
    def letters(self) -> tuple[str, ...]:
        """Each letter once, in order of appearance."""
        found = dict.fromkeys("".join((*self.inputs, self.output)))
        found.pop(".", None)
        return tuple(found)

    def letters_by_tensor(self, node: "GraphNode") -> Iterator[tuple[str, str]]:
        """Yield the name and the characters of each input of a node, then of its output."""
        yield from zip(node.inputs, self.inputs, strict=True)
        yield node.name, self.output


@dataclass(frozen=True, slots=True)
class GraphNode:
    """Tensor and the operator that makes it.

    flops: FLOPs of the forward; backward_flops: of the backward. is_alias: it is a view of its
    input, which costs nothing.
    """

    name: str
    kind: NodeKind
    op: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    item_bytes: int = 4
    needs_gradient: bool = True
    signature: Signature | None = None
    flops: float = 0.0
    backward_flops: float = 0.0
    is_alias: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    @property
    def is_launched(self) -> bool:
        """True if the node runs kernels."""
        return self.kind == "op" and not self.is_alias


@dataclass(frozen=True, slots=True)
class Axis:
    """Dimensions that are cut alike.

    name: the first (node, dimension) of them. units: number of indivisible parts that devices are
    given. is_batch: True if a dimension of an input is among them, and none of a parameter.
    """

    name: str
    units: int
    is_batch: bool


class Graph:
    """Nodes in topological order, the last one the loss: a scalar. ConfigError where it is none."""

    def __init__(
        self, nodes: Sequence[GraphNode], notes: Sequence[str] = (), most_units: int = MOST_UNITS
    ) -> None:
        self.nodes = _leaves_late(nodes)
        self.notes = tuple(notes)
        self.by_name = {node.name: node for node in self.nodes}
        self.most_units = most_units
        if self.nodes[-1].shape != ():
            raise ConfigError(
                f"the model's output '{self.nodes[-1].name}' has shape {self.nodes[-1].shape}; it"
                " must be a scalar loss"
            )

    @cached_property
    def consumers(self) -> Mapping[str, tuple[int, ...]]:
        """Positions of the nodes that read each tensor."""
        found: dict[str, tuple[int, ...]] = dict.fromkeys(self.by_name, ())
        for position, node in enumerate(self.nodes):
            for name in set(node.inputs):
                found[name] += (position,)
        return found

    @cached_property
    def axes(self) -> Mapping[Dimension, Axis]:
        """The axis of each dimension that may be cut."""
        return _axes_of(self, self.most_units)

    def dims(self, name: str) -> tuple[int, ...]:
        """Dimensions of a tensor that may be sharded."""
        node = self.by_name[name]
        return tuple(dim for dim in range(len(node.shape)) if (name, dim) in self.axes)

    def axis_along(self, name: str, layout: TensorLayout) -> str | None:
        """Return the name of the axis along which a layout cuts a tensor; None if it cuts none."""
        if layout.kind != "sharded":
            return None
        return self.axes[name, layout.dim].name

    def sharded_layouts(self, name: str) -> list[TensorLayout]:
        """Return the layouts of a tensor that cut a dimension."""
        return [sharded(dim) for dim in self.dims(name)]

    def cuts(self, name: str, dim: int) -> tuple[int, ...]:
        """Unit boundaries along a dimension, from 0 to its size."""
        size = self.by_name[name].shape[dim]
        units = self.axes[name, dim].units
        return tuple(unit * size // units for unit in range(units + 1))

    @property
    def parameters(self) -> tuple[GraphNode, ...]:
        return tuple(node for node in self.nodes if node.kind == "parameter")


def _leaves_late(nodes: Sequence[GraphNode]) -> tuple[GraphNode, ...]:
    """Move each leaf just before its first reader, so that few tensors are live at a time.

    Nodes that the last node does not need are dropped.
    """
    by_name = {node.name: node for node in nodes}
    needed = {nodes[-1].name}
    for node in reversed(nodes):
        if node.name in needed:
            needed.update(node.inputs)
    ordered: dict[str, GraphNode] = {}
    for node in nodes:
        if node.kind == "op" and node.name in needed:
            for name in node.inputs:
                ordered.setdefault(name, by_name[name])
            ordered[node.name] = node
    return tuple(ordered.values())


def _axes_of(graph: Graph, most_units: int) -> dict[Dimension, Axis]:
    """Return the axis of each dimension that may be cut.

    Dimensions with one letter in any signature are cut alike, so whole groups of them are joined.
    """
    alike: dict[Dimension, set[Dimension]] = {}
    for node in graph.nodes:
        if node.signature is None:
            continue
        first: dict[str, Dimension] = {}
        for name, letters in node.signature.letters_by_tensor(node):
            for dim, letter in enumerate(letters):
                if letter == ".":
                    continue
                key = (name, dim)
                alike.setdefault(key, {key})
                first_of_letter = first.setdefault(letter, key)
                # moving the smaller group keeps the whole of all joins near linear
                few, many = sorted((alike[key], alike[first_of_letter]), key=len)
                many |= few
                alike.update(dict.fromkeys(few, many))

    axes: dict[Dimension, Axis] = {}
    # members of a group share one set, so its identity tells groups apart
    groups = {id(keys): keys for keys in alike.values()}
    for keys in groups.values():
        axis = _axis(graph, keys, most_units)
        # an axis of one unit cannot be cut
        if axis.units > 1:
            axes.update(dict.fromkeys(keys, axis))
    return axes


def _axis(graph: Graph, keys: Collection[Dimension], most_units: int) -> Axis:
    """Return the axis of these (tensor, dimension) with its number of units.

    Dimensions of one size may have any number of units. Those of several sizes have a divisor of
    all, so that a cut falls on whole elements of each. There are at most `most_units` if training
    state is cut; data has no such limit.
    """
    kinds = set[NodeKind]()
    sizes = set[int]()
    for name, dim in keys:
        node = graph.by_name[name]
        kinds.add(node.kind)
        sizes.add(node.shape[dim])
    is_batch = "input" in kinds and "parameter" not in kinds
    units = min(sizes)
    if not is_batch:
        units = min(units, most_units)
    if len(sizes) > 1:
        common = math.gcd(*sizes)
        units = min(units, common)
        while common % units:
            units -= 1
    name, dim = min(keys)
    return Axis(f"{name}.{dim}", units, is_batch)


WHOLE = -1
"""Dimension of a parameter whose state is not cut."""


@dataclass(frozen=True)
class Decoder:
    """Graph of a decoder, and the dimensions along which its state may be cut.

    graph: sum of the losses of `ids` and `targets`.
    split_dims: dimension by parameter, WHOLE for none. They are the cuts of pipelines' tensor
    parallelism, so that state moves between plans of either kind.
    """

    graph: Graph
    split_dims: Mapping[str, int]
