"""What is asked of the autoscaler while a job runs: another type where one is refused, a spare for
a node at risk, no idle nodes.
"""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import yaml

from autohet.control.planning.buyer import LOOK_S, Buyer
from autohet.control.planning.buying import (
    FAILURES,
    REFUSED_S,
    IdleNodes,
    Refusals,
    best_counts,
    releasable,
    usd_per_hour,
)
from autohet.control.values.actions import AskForNodes, GiveBack
from autohet.control.values.observation import Launches, NodeView, Notice, Observation
from autohet.driver.loop.planning import make_planning
from autohet.driver.ray.requests.launches import newest_cause
from autohet.driver.ray.requests.scaling import fleet_request
from planner.inputs.cluster import Cluster, cluster_from_document
from planner.inputs.fleet import Node
from tests.driver.test_scaling import AWS, shortest_job

REASON = (
    "2026-11-24 10:00:03 INFO Failed to launch 1 nodes of type p4d: An error occurred"
    " (InsufficientInstanceCapacity) when calling the RunInstances operation (reached max retries:"
    " 0): We currently do not have sufficient p4d.24xlarge capacity\n"
)


@pytest.fixture
def aws() -> tuple[dict[str, Any], Cluster]:
    with open(AWS) as file:
        document = yaml.safe_load(file)
    return document, cluster_from_document(document)


def seen_of(
    cluster: Cluster, now: float, risks: tuple[str, ...] = (), **counts: int
) -> Observation:
    kinds = {kind.name: kind for kind in cluster.node_types}
    names = {
        f"{kind}-{index}": kinds[kind] for kind, count in counts.items() for index in range(count)
    }
    nodes = {name: NodeView(Node(name, kind), 0.0) for name, kind in names.items()}
    return Observation(
        now, nodes, risks={name: Notice(name, "rebalance", now, risk=True) for name in risks}
    )


class World:
    """A buyer, what it asked for, said and gave back, and a cloud that refuses."""

    def __init__(
        self,
        aws: tuple[dict[str, Any], Cluster],
        counts: dict[str, int] | None = None,
        **sections: Any,
    ) -> None:
        document, self.cluster = aws
        self.failed: dict[str, int] = {}
        self.released: list[str] = []
        self.said: list[str] = []
        job = shortest_job(**sections)
        planning = make_planning(job)
        best = {} if counts else best_counts(planning, self.cluster, {})
        market = fleet_request(job, self.cluster, document, None, best).market
        self.counts = dict(counts or market.counts)
        self.prices: dict[str, float] = {}
        self.launches: Launches | None = None
        """What is known of launches; None: `failed`, and nothing else."""
        self.busy: dict[str, str] = {}
        self.buyer = Buyer(job, planning, replace(market, counts=self.counts))

    def look(
        self, now: float, members: tuple[str, ...] = (), risks: tuple[str, ...] = (), **counts: int
    ) -> None:
        seen = replace(
            seen_of(self.cluster, now, risks, **counts),
            launches=self.launches or Launches(self.failed, newest_cause(REASON)),
            prices=self.prices,
            busy=self.busy,
        )
        actions, said = self.buyer.decide(seen, members, training=bool(members))
        self.said += said
        for action in actions:
            if isinstance(action, AskForNodes):
                self.counts = dict(action.counts)
            else:
                assert isinstance(action, GiveBack)
                kind = action.node.rpartition("-")[0]
                assert self.counts.get(kind, 0) < counts[kind], (
                    "asked for fewer before it goes, or it would be replaced"
                )
                self.released.append(action.node)


def test_a_type_that_is_refused_gives_way_to_the_next_best_plan(
    aws: tuple[dict[str, Any], Cluster],
) -> None:
    world = World(few(aws[0], p4d=1, g6e=1, g5=1))
    first = max(name for name, count in world.counts.items() if count and name != "g5-floor")
    world.look(0.0)
    world.failed = {first: FAILURES - 1}
    world.look(5.0)
    assert world.said == []
    world.failed = {first: FAILURES}
    world.look(10.0)
    assert world.counts.get(first, 0) == 0
    assert sum(world.counts.values()) >= 1
    assert world.said[-1].startswith("Deciding to ask for ")
    assert (
        f"no {first} can be had: EC2 has no capacity (InsufficientInstanceCapacity"
        in world.said[-1]
    )
    world.look(10.0 + REFUSED_S)
    assert world.counts[first] >= 1, "tried again"


def test_nodes_that_no_plan_uses_are_given_back_and_not_replaced(
    aws: tuple[dict[str, Any], Cluster],
) -> None:
    """SIMULATED: two g6e and the floor; one of them trains.

    Ten minutes later nothing idles that was bought.
    """
    world = World(aws, {"g6e": 2, "g5-floor": 1})
    members = tuple(f"g6e-0/{index}" for index in range(4))
    idle_s = 0.0
    for now in range(0, 3600, 5):
        here = {"g6e": 1 if world.released else 2, "g5-floor": 1}
        idle_s += 5.0 * (here["g6e"] - 1)
        world.look(float(now), members, **here)
    assert world.released == ["g6e-1"], "the floor stands whatever anybody wants"
    assert world.counts["g6e"] == 1
    assert idle_s <= 310
    assert "Deciding to give g6e-1 back, since no plan has used it for 5 minutes" in world.said


def test_a_spare_comes_for_a_node_at_risk_that_trains_within_the_bound(
    aws: tuple[dict[str, Any], Cluster],
) -> None:
    world = World(aws, {"g6e": 1})
    world.look(0.0, ("g6e-0/0",), ("g6e-0",), g6e=1)
    assert world.counts == {"g6e": 2}
    world.look(LOOK_S, ("g6e-0/0",), (), g6e=1)
    assert world.counts == {"g6e": 1}, "the risk is over"
    world.look(2 * LOOK_S, (), ("g6e-0",), g6e=1)
    assert world.counts == {"g6e": 1}, "what idles needs no spare"
    bounded = World(aws, {"g6e": 1}, parallelism={"max_usd_per_hour": 15.0})
    bounded.look(0.0, ("g6e-0/0",), ("g6e-0",), g6e=1)
    assert bounded.counts == {"g6e": 1}, "a second one would cost more than the job may"


def test_a_spare_leaves_room_in_the_bound_for_what_stands_anyway(
    aws: tuple[dict[str, Any], Cluster],
) -> None:
    """Two g6e alone are within it, and with the floor's node they are not."""
    _, cluster = aws
    pair, floor = usd_per_hour({"g6e": 2}, cluster), usd_per_hour({"g5-floor": 1}, cluster)
    assert floor > 0
    for bound, spares in ((pair + 0.5 * floor, 1), (pair + floor, 2)):
        world = World(aws, {"g6e": 1}, parallelism={"max_usd_per_hour": bound})
        world.look(0.0, ("g6e-0/0",), ("g6e-0",), g6e=1, **{"g5-floor": 1})
        assert world.counts == {"g6e": spares}, bound


def few(document: dict[str, Any], **most: int) -> tuple[dict[str, Any], Cluster]:
    """A cluster with at most so many nodes of a type: few fleets are searched under a bound."""
    found = deepcopy(document)
    for name, number in most.items():
        found["available_node_types"][name]["max_workers"] = number
    return found, cluster_from_document(found)


def test_live_spot_prices_count_within_the_bound(aws: tuple[dict[str, Any], Cluster]) -> None:
    """For a spare, and for the plan: at 30% of the price on demand there is room for a larger
    one.
    """
    bound = usd_per_hour({"g6e": 2, "g5-floor": 1}, aws[1])
    one_type = few(aws[0], p4d=0, g6e=2, g5=0)
    dear = World(one_type, {"g6e": 1}, parallelism={"max_usd_per_hour": bound})
    dear.prices = {"g6e": 12.0}
    dear.look(0.0, ("g6e-0/0",), ("g6e-0",), g6e=1)
    assert dear.counts == {"g6e": 1}, "a spare is dearer than the catalogue says"
    world = World(few(aws[0], p4d=1, g6e=1, g5=1), parallelism={"max_usd_per_hour": 12.0})
    before = dict(world.counts)
    world.look(0.0)
    assert (world.counts, world.said) == (before, [])
    world.prices = {
        kind.name: 0.3 * (kind.usd_per_hour or 0.0)
        for kind in world.cluster.node_types
        if kind.spot
    }
    world.look(5.0)
    assert usd_per_hour(before, world.cluster) < usd_per_hour(world.counts, world.cluster)
    assert "has changed" in world.said[-1]
    world.look(10.0)
    assert len(world.said) == 1


def test_a_job_that_names_its_nodes_hears_what_is_refused_and_asks_for_them_still(
    aws: tuple[dict[str, Any], Cluster],
) -> None:
    world = World(aws, {"p4d": 1}, elastic={"request_nodes": {"p4d": 1}, "idle_release_s": 10})
    world.look(0.0, g6e=1)
    world.failed = {"p4d": FAILURES}
    for now in range(5, 100, 5):
        world.look(float(now), ("g5-floor-0/0",), g6e=1, **{"g5-floor": 1})
    assert world.counts == {"p4d": 1}
    assert world.released == []
    (said,) = world.said
    assert "no p4d can be had: EC2 has no capacity" in said
    assert "elastic.request_nodes names them" in said


def test_a_refused_type_that_no_plan_uses_is_told_too(aws: tuple[dict[str, Any], Cluster]) -> None:
    world = World(few(aws[0], p4d=1, g6e=1, g5=1))
    before = dict(world.counts)
    unused = min(kind.name for kind in world.cluster.node_types if not before.get(kind.name))
    world.look(0.0)
    world.failed = {unused: FAILURES}
    world.look(5.0)
    assert world.counts == before
    (said,) = world.said
    assert said.startswith(
        f"Deciding to ask for the same nodes still, since no {unused} can be had: EC2 has no"
        " capacity"
    )


def test_failures_of_before_the_job_and_before_a_node_came_do_not_count() -> None:
    refusals = Refusals()
    assert refusals.look({"p4d": 40}, {}, 0.0) == frozenset()
    assert refusals.look({"p4d": 40 + FAILURES - 1}, {}, 5.0) == frozenset()
    assert refusals.look({"p4d": 40 + FAILURES}, {"p4d": 1}, 10.0) == frozenset(), "one has come"
    assert refusals.look({"p4d": 40 + 2 * FAILURES}, {"p4d": 1}, 15.0) == {"p4d"}
    assert refusals.look({"p4d": 40 + 2 * FAILURES}, {"p4d": 1}, 15.0 + REFUSED_S) == frozenset()


def test_idle_counts_only_while_the_job_trains(aws: tuple[dict[str, Any], Cluster]) -> None:
    _, cluster = aws
    idle = IdleNodes(100.0)
    assert idle.look(seen_of(cluster, 0.0, g5=1), (), training=True) == ()
    assert idle.look(seen_of(cluster, 99.0, g5=1), (), training=False) == ()
    assert idle.look(seen_of(cluster, 150.0, g5=1), (), training=True) == ()
    assert idle.look(seen_of(cluster, 250.0, g5=1), (), training=True) == ("g5-0",)
    assert releasable(["g5-0"], seen_of(cluster, 0.0, g5=1), {"g5": 1}) == ()


def test_changes_neither_count_as_idle_nor_begin_it_anew(
    aws: tuple[dict[str, Any], Cluster],
) -> None:
    """A fleet that changes every minute gives back what no plan uses all the same."""
    _, cluster = aws
    idle, released = IdleNodes(100.0), 0.0
    for now in range(0, 400, 5):
        training = now % 60 < 40
        if not released and idle.look(seen_of(cluster, float(now), g5=1), (), training=training):
            released = float(now)
    assert released == 150.0, "35 s between the first and the last look of each minute's training"
    idle.look(seen_of(cluster, 400.0, g5=1), ("g5-0",), training=False)
    assert idle.look(seen_of(cluster, 405.0, g5=1), (), training=True) == (), "a plan has used it"


def test_the_bound_is_the_whole_fleets(aws: tuple[dict[str, Any], Cluster]) -> None:
    """Nodes that stand anyway are paid from it, though the best plan uses others."""
    _, cluster = aws
    job = shortest_job(parallelism={"max_usd_per_hour": 12.0})
    planning = make_planning(job)
    alone = best_counts(planning, cluster, {})
    assert usd_per_hour(alone, cluster) <= 12.0
    standing = {"g5-floor": 1, "g6e": 0}
    counts = best_counts(planning, cluster, standing)
    together = {
        name: max(counts.get(name, 0), standing.get(name, 0)) for name in {*counts, *standing}
    }
    assert usd_per_hour(together, cluster) <= 12.0


def test_a_refusal_is_told_in_one_sentence() -> None:
    assert newest_cause("nothing") == ""
    assert newest_cause(REASON).startswith(
        "EC2 has no capacity (InsufficientInstanceCapacity: We currently do not have"
    )
    other = (
        "An error occurred (UnauthorizedOperation) when calling the RunInstances operation: You are"
        " not authorized"
    )
    assert (
        newest_cause(REASON + other)
        == "the head's role does not allow it (UnauthorizedOperation: You are not authorized)"
    )
    never_used_spot = other.replace(
        "UnauthorizedOperation", "AuthFailure.ServiceLinkedRoleCreationNotPermitted"
    )
    assert newest_cause(never_used_spot).startswith(
        "the account has no role for spot instances yet, which scripts/aws/prepare makes"
        " (AuthFailure.Service"
    )
