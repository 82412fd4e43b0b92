"""The order in which a Pareto search visits its fleets: a limit on its time must not cut off one
end of the range.
"""

import pytest

from planner.inputs.fleet import Fleet, Node, NodeType
from planner.strategies.fasop import fleets_up_to
from planner.strategies.pareto import spread

KINDS = [NodeType(name, "A10G", 1, 24 << 30, 32e9, 3e9) for name in "abc"]


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_every_fleet_once_and_the_whole_first(most):
    whole = Fleet(0, tuple(Node(f"{kind.name}-{i}", kind) for kind in KINDS for i in range(most)))
    fleets = list(fleets_up_to(whole))
    visited = spread(fleets)
    assert visited[0] == whole
    assert sorted(map(id, visited)) == sorted(map(id, fleets))


def test_any_first_tenth_lies_all_over_the_range():
    whole = Fleet(0, tuple(Node(f"{kind.name}-{i}", kind) for kind in KINDS for i in range(4)))
    fleets = list(fleets_up_to(whole))
    place = {id(fleet): index / len(fleets) for index, fleet in enumerate(fleets)}
    first = sorted(place[id(fleet)] for fleet in spread(fleets)[: len(fleets) // 10])
    gaps = [b - a for a, b in zip([0.0, *first], [*first, 1.0], strict=True)]
    assert max(gaps) < 0.25


def test_one_node_of_each_type_is_among_the_fleets_however_thin_they_are():
    """The least dollars a token are often those of a single node, whose GPUs no card joins."""
    whole = Fleet(0, tuple(Node(f"{kind.name}-{i}", kind) for kind in KINDS for i in range(8)))
    fleets = list(fleets_up_to(whole, 20))
    assert {(f"{kind.name}-0",) for kind in KINDS} <= {
        tuple(node.name for node in fleet.nodes) for fleet in fleets
    }
    assert len({fleet.nodes for fleet in fleets}) == len(fleets)
