"""The README's pair, gpt2.yaml on aws-mixed-spot.yaml: budgets give the answer of no budget."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from autohet.driver.loop.planning import make_planning
from autohet.runtime.job import Job
from planner.errors import InfeasibleError
from planner.inputs.cluster import cluster_from_yaml
from planner.inputs.fleet import Fleet
from planner.search.problem import limits
from planner.search.problem.request import Answer, Request, narrow_to
from planner.strategies import plan_with
from planner.strategies.fleets import FleetSpace, TypeCounts
from planner.strategies.pareto import drop_dominated, pareto_front, usd_per_token

pytestmark = pytest.mark.thorough

NODES = {"g6e": 1, "g5": 2}


def request_of(**changes: Any) -> Request:
    """The job on a part of the file's fleet that can be searched in full in seconds."""
    job = Job.from_yaml("cluster_configs/jobs/gpt2.yaml")
    cluster = cluster_from_yaml("cluster_configs/aws-mixed-spot.yaml")
    planning = make_planning(job, zones=cluster.zones)
    kept = [
        node
        for node in cluster.fleet().nodes
        if int(node.name.rpartition("-")[2]) < NODES.get(node.node_type.name, 0)
    ]
    fleet = Fleet(0, tuple(kept))
    return replace(planning.request(fleet, planning.make_cost(fleet)), **changes)


@cache
def unlimited() -> dict[TypeCounts, Answer]:
    """Each fleet of the space, searched in full."""
    request = request_of(objective="time")
    space = FleetSpace(request)
    found = {}
    for counts in space.all(1000) or ():
        if sum(counts) < request.min_node_disjoint_holders:
            continue
        part = narrow_to(request, space.fleet(counts))
        try:
            found[counts] = plan_with("autohet", replace(part, prove=False))
        except InfeasibleError:
            continue
    assert len(found) >= 2
    return found


def test_the_cheapest_is_that_of_every_fleet_in_full() -> None:
    answer = plan_with("autohet", request_of(objective="cost"))
    least = min(map(usd_per_token, unlimited().values()))
    assert usd_per_token(answer) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("limit", [3.0, 14.0])
def test_the_fastest_within_a_price_is_that_of_every_fleet_in_full(limit: float) -> None:
    asked = request_of(objective="time", max_usd_per_hour=limit)
    space = FleetSpace(asked)
    steps = [
        answer.prediction.step_time_s
        for counts, answer in unlimited().items()
        if space.allows(counts)
    ]
    found = plan_with("autohet", asked).prediction
    assert found.step_time_s <= min(steps) * limits.PLAIN
    assert found.usd_per_hour is not None
    assert found.usd_per_hour <= limit


def test_a_front_asks_for_no_fleet_twice() -> None:
    """Its comparisons by step and by token look at the same fleets."""
    asked = request_of(objective="pareto")
    seen: list[tuple[frozenset[str], bool]] = []

    def search(part: Request) -> Answer:
        seen.append((frozenset(node.name for node in part.fleet.nodes), part.brief))
        return plan_with("autohet", part)

    front, _ = pareto_front(search, asked)
    assert len(front) >= 2
    assert len(seen) == len(set(seen))


def test_a_front_is_that_of_every_fleet_in_full() -> None:
    """Each plan that no other fleet's beats is met, within what a walk's luck decides."""
    front = plan_with("autohet", request_of(objective="pareto")).front
    for wanted in drop_dominated(list(unlimited().values())):
        step_s, usd = wanted.prediction.step_time_s, wanted.prediction.usd_per_hour
        assert usd is not None
        met = [a for a in front if (a.prediction.usd_per_hour or 0.0) <= usd + 1e-9]
        assert min(a.prediction.step_time_s for a in met) <= step_s * limits.PLAIN
