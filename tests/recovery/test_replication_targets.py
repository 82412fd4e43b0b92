"""Who copies what to whom: everything that one node alone holds, once, to another node, spread by
bytes.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from recovery.peers.replication_targets import Peer, replication_targets
from tests.harness.state_cases import Placed, placed, placements, tensors_of

NUM_LAYERS = 4
NODES = ("n0", "n1", "n2", "n3", "n4")


def alone(case: Placed) -> dict[object, str]:
    """Shards whose holders are all on one node, found the slow way."""
    nodes: dict[object, set[str]] = {}
    for worker, shards in case.layout.shards_by_worker.items():
        for shard in shards:
            nodes.setdefault(shard, set()).add(case.node_by_worker[worker])
    return {shard: next(iter(held)) for shard, held in nodes.items() if len(held) == 1}


@given(
    placements(NUM_LAYERS),
    st.sets(st.sampled_from(NODES)),
    st.lists(st.sampled_from("ab"), min_size=5, max_size=5),
)
def test_every_sole_shard_once_on_another_node_and_the_best_one(
    case: Placed, leaving: set[str], zones: list[str]
) -> None:
    peers = {
        node: Peer(node, zone, node in leaving) for node, zone in zip(NODES, zones, strict=True)
    }
    targets = replication_targets(case.layout, case.node_by_worker, peers.values())
    seen: set[object] = set()
    for worker, of_worker in targets.items():
        home = peers[case.node_by_worker[worker]]
        for target in of_worker:
            assert target.worker == worker
            assert set(target.shards) <= case.layout.shards_by_worker[worker]
            assert not seen & set(target.shards)
            seen |= set(target.shards)
            assert set(target.peers) == set(NODES) - {home.node}
            rank = [(peers[node].leaving, peers[node].zone == home.zone) for node in target.peers]
            assert rank == sorted(rank), (
                "a node that leaves, then one of the same zone, is the last choice"
            )
    assert seen == set(alone(case))


def test_bytes_are_spread_over_peers_and_over_the_workers_that_could_push() -> None:
    case = placed(tensors_of(8), 8, [[(8, ["n0/0"])], [(8, ["n0/1"])]])
    peers = [Peer(node) for node in NODES]
    targets = replication_targets(case.layout, case.node_by_worker, peers)
    taken = dict.fromkeys(NODES[1:], 0)
    pushed = dict.fromkeys(targets, 0)
    for worker, of_worker in targets.items():
        for target in of_worker:
            num_bytes = sum(case.layout.shard_bytes(shard) for shard in target.shards)
            taken[target.peers[0]] += num_bytes
            pushed[worker] += num_bytes
    largest = max(case.layout.shard_bytes(shard) for shard in case.layout.shards)
    assert max(taken.values()) - min(taken.values()) <= largest
    assert max(pushed.values()) - min(pushed.values()) <= largest


def test_nothing_to_do_where_every_shard_is_on_two_nodes_or_where_there_is_no_other_node() -> None:
    twice = placed(tensors_of(2), 2, [[(2, ["n0/0"])], [(2, ["n1/0"])]])
    assert replication_targets(twice.layout, twice.node_by_worker, [Peer("n0"), Peer("n1")]) == {}
    same_node = placed(tensors_of(2), 2, [[(2, ["n0/0"])], [(2, ["n0/1"])]])
    assert replication_targets(same_node.layout, same_node.node_by_worker, [Peer("n0")]) == {}
    assert set(
        replication_targets(same_node.layout, same_node.node_by_worker, [Peer("n0"), Peer("n1")])
    ) == {
        "n0/0",
        "n0/1",
    }


def test_what_only_nodes_at_risk_hold_goes_to_one_that_is_not() -> None:
    twice = placed(tensors_of(2), 2, [[(2, ["n0/0"])], [(2, ["n1/0"])]])
    peers = [Peer("n0", leaving=True), Peer("n1", leaving=True), Peer("n2")]
    targets = replication_targets(twice.layout, twice.node_by_worker, peers, {"n0", "n1"})
    pushed = [
        shard for of_worker in targets.values() for target in of_worker for shard in target.shards
    ]
    assert sorted(pushed) == sorted(twice.layout.shards), "each once"
    assert {target.peers[0] for of_worker in targets.values() for target in of_worker} == {"n2"}
    assert replication_targets(twice.layout, twice.node_by_worker, peers, {"n0"}) == {}, (
        "n1 keeps it all"
    )
