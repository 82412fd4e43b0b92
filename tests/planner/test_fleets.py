"""Which fleets a search with a price looks at: the same answer as looking at all, by counts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from planner.errors import InfeasibleError
from planner.inputs.fleet import Fleet, Node, NodeBound, NodeType
from planner.search.problem import limits
from planner.search.problem.request import Answer, Request, SearchReport
from planner.strategies.fleets import FleetSpace, cheapest, fastest
from planner.strategies.pareto import search_objective, usd_per_token

SPEED = {"big": 8.0, "mid": 3.0, "small": 1.0}
PRICE = {"big": 20.0, "mid": 6.0, "small": 1.9}


@dataclasses.dataclass(frozen=True)
class Prediction:
    step_time_s: float
    usd_per_hour: float

    @property
    def usd_per_million_tokens(self) -> float:
        return self.step_time_s * self.usd_per_hour


class Cost:
    def with_fleet(self, fleet: Fleet) -> Cost:
        return self


def kind(name: str, **more: Any) -> NodeType:
    found = NodeType(name, "A10G", 1, 24 << 30, 32e9, 3e9, PRICE[name.split("-")[0]], max_nodes=9)
    return dataclasses.replace(found, **more)


def request(counts: dict[str, int], **more: Any) -> Any:
    nodes = [Node(f"{n}-{i}", kind(n)) for n, count in counts.items() for i in range(count)]
    fleet: Any = Fleet(0, tuple(nodes))
    return Request(fleet, None, Cost(), 8, 128, **more)  # type: ignore[arg-type]


class Search:
    """Work shared by speed, and a sum of gradients that grows with the nodes; `needs`: speed below
    which a fleet holds no copy of the model.
    """

    def __init__(self, sync_s: float = 0.05, needs: float = 0.0) -> None:
        self.sync_s, self.needs = sync_s, needs
        self.seen: list[Counter[str]] = []

    def __call__(self, asked: Request) -> Answer:
        counts = Counter(node.node_type.name for node in asked.fleet.nodes)
        self.seen.append(counts)
        speed = sum(SPEED[name.split("-")[0]] * count for name, count in counts.items())
        if speed < self.needs:
            raise InfeasibleError(f"speed {speed} is too little")
        step_s = 10.0 / speed + self.sync_s * (sum(counts.values()) - 1)
        usd = sum(PRICE[name.split("-")[0]] * count for name, count in counts.items())
        plan: Any = dataclasses.make_dataclass("P", ["workers"])(asked.fleet.workers)
        report = SearchReport(0.0, 1, None, None)
        return Answer("fake", plan, Prediction(step_s, usd), report)  # type: ignore[arg-type]


def by_looking_at_all(asked: Any, search: Search, value: Any) -> float:
    space = FleetSpace(asked)
    every = space.all(10**6)
    assert every is not None
    found = []
    for counts in every:
        try:
            answer = search(dataclasses.replace(asked, fleet=space.fleet(counts)))
        except InfeasibleError:
            continue
        found.append(value(answer))
    return min(found)


def step_s(answer: Answer) -> float:
    return answer.prediction.step_time_s


@pytest.mark.parametrize("sync_s", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("needs", [0.0, 5.0, 30.0])
def test_the_cheapest_fleet_is_that_of_looking_at_all(sync_s: float, needs: float) -> None:
    asked = request({"big": 4, "mid": 6, "small": 9}, objective="cost")
    search = Search(sync_s, needs)
    answer = search_objective(search, asked)
    assert usd_per_token(answer) == pytest.approx(
        by_looking_at_all(asked, Search(sync_s, needs), usd_per_token), rel=0.02
    )
    assert len(search.seen) < 5 * 7 * 10 - 1


@pytest.mark.parametrize("limit", [3.0, 11.0, 40.0])
def test_the_fastest_within_a_price_is_that_of_looking_at_all(limit: float) -> None:
    asked = request({"big": 4, "mid": 6, "small": 9}, max_usd_per_hour=limit)
    answer = search_objective(Search(0.0), asked)
    assert step_s(answer) == pytest.approx(by_looking_at_all(asked, Search(0.0), step_s), rel=0.02)
    assert answer.prediction.usd_per_hour <= limit


def test_the_files_bound_holds_for_all_nodes_together() -> None:
    """Of three types of eight, eight may exist; two of the smallest stand anyway."""
    bound = NodeBound(8, (("small", 2),))
    asked = request({"big": 8, "mid": 8, "small": 8}, bound=bound)
    search = Search(0.0)
    answer = search_objective(search, asked)
    assert all(bound.allows(counts) for counts in search.seen)
    assert Counter(w.split("-")[0] for w in answer.plan.workers) == {"big": 6, "small": 2}
    assert answer.search.fleets_searched <= answer.search.fleets
    assert f"of {answer.search.fleets} fleets were looked at" in answer.choice


def test_types_that_are_equal_but_for_their_name_are_one_machine() -> None:
    """The nodes that stand anyway first."""
    nodes = [Node(f"small-{i}", kind("small", spot=True)) for i in range(3)]
    nodes += [Node("small-floor-0", kind("small-floor"))]
    asked = dataclasses.replace(
        request({"small": 1}),
        fleet=Fleet(0, tuple(nodes)),
        bound=NodeBound(3, (("small-floor", 1),)),
    )
    space = FleetSpace(asked)
    assert space.most == (4,)
    assert [node.name for node in space.fleet((1,)).nodes] == ["small-floor-0"]


def test_no_clock_decides_and_a_cut_search_says_so() -> None:
    """A budget is a number of GPUs: on a machine that is a thousand times slower the same fleets
    are looked at.
    """
    counts = {"big": 40, "mid": 40, "small": 40}
    slow = iter(range(0, 10**9, 10**4))
    quick = search_objective(Search(0.001, 60.0), request(counts, objective="cost"))
    late = search_objective(
        Search(0.001, 60.0), request(counts, objective="cost", clock=lambda: float(next(slow)))
    )
    assert quick.plan.workers == late.plan.workers
    assert quick.search.fleets_searched == late.search.fleets_searched
    found = cheapest(
        Search(), FleetSpace(request(counts, objective="cost", time_limit_s=0.1)), usd_per_token
    )
    assert len(found.answers) <= limits.FEWEST_FLEETS + 1
    assert found.space.number() == 41**3 - 1


def test_many_machines_do_not_hang() -> None:
    """Eight types of a thousand nodes: as many combinations as nobody counts."""
    names = [f"small-{index}" for index in range(8)]
    nodes = []
    for index, name in enumerate(names):
        one = kind(name, gpu_memory_bytes=(24 + index) << 30)
        nodes += [Node(f"{name}-{i}", one) for i in range(50)]
    asked = dataclasses.replace(
        request({"small": 1}), fleet=Fleet(0, tuple(nodes)), max_usd_per_hour=50.0
    )
    found = fastest(Search(0.0), FleetSpace(asked), step_s)
    assert len(found.answers) >= 1
