"""The README's pair, gpt2.yaml on aws-mixed-spot.yaml: budgets give the answer of no budget."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from autohet.driver.planning.proposals import make_planning
from autohet.runtime.job import Job
from planner.cluster import Fleet, cluster_from_yaml
from planner.errors import InfeasibleError
from planner.search.problem import Answer, Request, narrowed
from planner.strategies import plan_with
from planner.strategies.fleets import Counts, FleetSpace
from planner.strategies.pareto import pareto_front, usd_per_token

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
def unlimited() -> dict[Counts, Answer]:
    """Each fleet of the space, searched in full."""
    request = request_of(objective="time")
    space = FleetSpace(request)
    found = {}
    for counts in space.all(1000) or ():
        if sum(counts) < request.min_node_disjoint_holders:
            continue
        part = narrowed(request, space.fleet(counts))
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
    assert found.step_time_s == pytest.approx(min(steps), rel=1e-9)
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
    assert len(front) == 2
    assert len(seen) == len(set(seen))


def test_a_front_begins_with_the_fastest_plan_of_all() -> None:
    """Its own draft is refused or behind: only a full search of all nodes finds it."""
    front = plan_with("autohet", request_of(objective="pareto")).front
    fastest = min(answer.prediction.step_time_s for answer in unlimited().values())
    assert front[0].prediction.step_time_s == pytest.approx(fastest, rel=1e-9)
    assert len(front) == 2
