"""Graph of a model of many blocks, from the graph of a model with one block of each kind."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from planner.spmd.graph import Graph, GraphNode
from planner.spmd.operators import next_name


class _Border(NamedTuple):
    """The one operator's output that a block reads, and the one of it that others read."""

    entry: str
    result: str


@dataclass(frozen=True)
class ShortModel:
    """Graph of a model with one block of each kind.

    block_of: block of each operator that is inside one. prefix: start of the names of all blocks'
    parameters, which the number of the block follows.
    """

    graph: Graph
    block_of: Mapping[str, int]
    prefix: str

    def with_blocks(self, kinds: Sequence[int], most_units: int) -> Graph | None:
        """Return the graph of a model that has a block of each of `kinds`, in their order.

        None: the blocks of the short model are no chain of hidden states.
        """
        borders: dict[int, _Border] = {}
        for block in set(self.block_of.values()):
            border = self._border(block)
            if border is None:
                return None
            borders[block] = border

        operators = [node for node in self.graph.nodes if node.kind == "op"]
        first = 0
        while operators[first].name not in self.block_of:
            first += 1

        grown = _Grown(self.graph)
        names: dict[str, str] = {}
        for node in operators[:first]:
            grown.append(node, names, "", "")

        # The hidden states: what each block reads of the one before it.
        state = names[borders[0].entry]
        for number, kind in enumerate(kinds):
            border = borders[kind]
            inside = {border.entry: state}
            for node in operators:
                if self.block_of.get(node.name) == kind:
                    grown.append(node, inside, f"{self.prefix}{kind}.", f"{self.prefix}{number}.")
            state = inside[border.result]

        last_block = max(borders)
        names[borders[last_block].result] = state
        for node in operators[first:]:
            if node.name not in self.block_of:
                grown.append(node, names, "", "")
        return Graph(list(grown.nodes.values()), self.graph.notes, most_units)

    def _border(self, block: int) -> _Border | None:
        """Return the border of a block; None: it reads or gives more than one tensor."""
        inside = {name for name, number in self.block_of.items() if number == block}
        entries: set[str] = set()
        results: set[str] = set()
        for node in self.graph.nodes:
            for name in node.inputs:
                # Weights and constants cross no border: each block has its own, or all share one.
                if self.graph.by_name[name].kind != "op":
                    continue
                if node.name in inside and name not in inside:
                    entries.add(name)
                if node.name not in inside and name in inside:
                    results.add(name)
        if len(entries) != 1 or len(results) != 1:
            return None
        return _Border(entries.pop(), results.pop())


@dataclass
class _Grown:
    """Nodes of the graph that is made. short: the graph that its nodes are copies of."""

    short: Graph
    nodes: dict[str, GraphNode] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def append(self, node: GraphNode, names: dict[str, str], old: str, new: str) -> None:
        """Append a copy of an operator, and of the leaves that it reads first.

        names: names of copies by those of operators, and receives this one's. old, new: starts of
        parameters' names in the short model and in this one.
        """
        inputs = []
        for name in node.inputs:
            read = self.short.by_name[name]
            if read.kind != "op":
                if name.startswith(old):
                    name = new + name.removeprefix(old)
                self.nodes.setdefault(name, replace(read, name=name))
            inputs.append(names.get(name, name))
        names[node.name] = next_name(node.op, self.counts)
        copied = replace(node, name=names[node.name], inputs=tuple(inputs))
        self.nodes[copied.name] = copied
