"""Segments of a program's graph, between positions with few live tensors.

A model's layers are equal segments, whose solutions are found once.
"""

from dataclasses import dataclass

from planner.spmd.costs import Shares
from planner.spmd.graph import Graph, GraphNode


@dataclass(frozen=True, slots=True)
class SearchStep:
    """Step of the search: a node that is not a fused leaf.

    position: the node's position in the graph. live: tensors that live before it. kept: places in
    `live` of the tensors that live on after it.
    """

    position: int
    live: tuple[str, ...]
    kept: tuple[int, ...]


@dataclass
class Segments:
    """Segments of a graph whose steps are `places`.

    pinned: for some parameters, the only dimension along which their state may be cut.
    """

    graph: Graph
    shares: Shares
    places: list[SearchStep]
    pinned: dict[str, int]

    def starts(self) -> list[int]:
        """Return the first step of each segment, and the number of steps.

        Before each of them no more tensors are live than at least in the model's middle.
        """
        num_live = [len(place.live) for place in self.places]
        count = len(self.places)
        # the ends of a model are no layers, so they may have fewer live tensors than any layer
        first_quarter = count // 4
        last_quarter = 3 * count // 4
        fewest = min(num_live[first_quarter : last_quarter + 1])
        starts = [0]
        for step in range(1, count):
            if num_live[step] == fewest:
                starts.append(step)
        return [*starts, count]

    def names(self, first: int, last: int) -> list[str]:
        """Return the tensors that live before a segment and those that it makes.

        Their order is the same in equal segments.
        """
        low = 0
        if first:
            low = self.places[first - 1].position + 1
        high = self.places[last - 1].position + 1
        names = list(self.places[first].live)
        names += [node.name for node in self.graph.nodes[low:high]]
        return names

    def key(self, first: int, last: int) -> object:
        """Return a key that is equal for segments that differ in names alone."""
        names = self.names(first, last)
        number = {name: index for index, name in enumerate(names)}
        keys = []
        for name in number:
            node = self.graph.by_name[name]
            keys.append(self._node_key(node, number))
        return tuple(keys)

    def _node_key(self, node: GraphNode, number: dict[str, int]) -> object:
        """Return all that the search reads of a node, with tensors by their `number` here."""
        cuts = []
        for dim in self.graph.dims(node.name):
            axis = self.graph.axes[node.name, dim].name
            cuts.append((dim, self.shares.key(axis)))

        readers = []
        readers_inside = []
        for position in self.graph.consumers[node.name]:
            name = self.graph.nodes[position].name
            readers.append(name)
            if name in number:
                readers_inside.append(number[name])
        # a tensor that is read after the segment is live at its end
        ends_inside = not readers or readers[-1] in number
        inputs = [number.get(name, -1) for name in node.inputs]
        costs = (
            node.item_bytes,
            node.needs_gradient,
            node.flops,
            node.backward_flops,
            node.is_alias,
        )
        return (
            node.kind,
            node.op,
            tuple(inputs),
            node.shape,
            costs,
            repr(node.signature),
            tuple(cuts),
            tuple(readers_inside),
            ends_inside,
            self.pinned.get(node.name),
        )
