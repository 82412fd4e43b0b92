"""Who copies what to whom: everything that one node alone holds, once, to another node, spread by
bytes.
"""

from hypothesis import given
from hypothesis import strategies as st

from recovery.peers.replication_targets import (
    Peer,
    ZoneChoice,
    is_near,
    replication_targets,
)
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
    st.lists(st.sampled_from(["a", "b", ""]), min_size=5, max_size=5),
    st.sampled_from(["same", "any", "other"]),
)
def test_every_sole_shard_once_on_another_node_and_the_best_one(
    case: Placed, leaving: set[str], zones: list[str], wanted: ZoneChoice
) -> None:
    peers = {
        node: Peer(node, zone, node in leaving) for node, zone in zip(NODES, zones, strict=True)
    }
    targets = replication_targets(case.layout, case.node_by_worker, peers.values(), zones=wanted)
    seen: set[object] = set()
    for worker, of_worker in targets.items():
        home = peers[case.node_by_worker[worker]]
        for target in of_worker:
            assert target.worker == worker
            assert set(target.shards) <= case.layout.shards_by_worker[worker]
            assert not seen & set(target.shards)
            seen |= set(target.shards)
            near = {node for node in NODES if is_near(peers[node].zone, home.zone)}
            others = set(NODES) - {home.node}
            may_cost = wanted != "same" and target.peers[0] not in near
            assert set(target.peers) == (others if may_cost else others & near)
            rank = [
                (peers[node].leaving, (node in near) == (wanted == "other"))
                for node in target.peers
            ]
            assert rank == sorted(rank), (
                "a node that leaves, then one of the zone that is not wanted, is the last choice"
            )
            best = min(
                (peers[node].leaving, (node in near) == (wanted == "other"))
                for node in (others & near if wanted == "same" else others)
            )
            assert rank[0] == best
    homes = {shard: peers[node] for shard, node in alone(case).items()}
    assert seen == {
        shard
        for shard, home in homes.items()
        if wanted != "same"
        or any(is_near(peer.zone, home.zone) for peer in peers.values() if peer.node != home.node)
    }


def test_no_copy_goes_where_no_link_leads() -> None:
    case = placed(tensors_of(2), 2, [[(2, ["n0/0"])]])
    peers = [Peer("n0", "us-east-1a"), Peer("n1", "eu-west-1a"), Peer("n2", "us-east-1b")]
    targets = replication_targets(
        case.layout, case.node_by_worker, peers, connects=lambda a, b: a[:2] == b[:2]
    )
    assert {target.peers for mine in targets.values() for target in mine} == {("n2",)}


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
