"""A front is that of every fleet searched in full, though few fleets are."""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from planner.errors import InfeasibleError
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.search.problem import limits
from planner.search.problem.request import Answer, Request, SearchReport, narrow_to
from planner.strategies import plan_with
from planner.strategies.fleets import TypeCounts
from planner.strategies.pareto import search_objective
from tests.planner.cases import fleet, request
from tests.planner.test_fleets import Cost, Prediction

KINDS = ("big", "mid", "small")
UNLIMITED_S = 1e5


class World:
    """Random speeds, prices and syncs of three types; `needs`: the least speed that trains."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.seed = seed
        self.most: TypeCounts = tuple(draw.randint(1, 5) for _ in KINDS)
        self.speed = [draw.uniform(1, 8) for _ in KINDS]
        self.usd = [draw.uniform(1, 20) for _ in KINDS]
        self.sync_s = [draw.choice([0.0, 0.05, 0.5]) for _ in KINDS]
        self.needs = draw.choice([0.0, 5.0, 15.0])
        self.slack = 1.3  # by how much a draft is slower, at most
        self.full: list[TypeCounts] = []
        self.drafted: list[TypeCounts] = []

    def step_s(self, used: Sequence[int]) -> float:
        speed = sum(n * s for n, s in zip(used, self.speed))
        sync_s = sum(s for n, s in zip(used, self.sync_s) if n)
        return 10.0 / speed + sync_s + 0.02 * sum(used)

    def price(self, used: Sequence[int]) -> float:
        return sum(n * usd for n, usd in zip(used, self.usd))

    def parts(self, most: Sequence[int]) -> list[TypeCounts]:
        every = itertools.product(*(range(n + 1) for n in most))
        speed = self.speed
        return [
            c
            for c in every
            if any(c) and sum(map(float.__mul__, map(float, c), speed)) >= self.needs
        ]

    def request(self, **more: Any) -> Request:
        nodes = []
        for name, count, usd in zip(KINDS, self.most, self.usd):
            kind = NodeType(name, "A10G", 1, 24 << 30, 32e9, 3e9, usd, max_nodes=9)
            nodes += [Node(f"{name}-{i}", kind) for i in range(count)]
        fleet: Any = Fleet(0, tuple(nodes))
        return Request(fleet, None, Cost(), 8, 128, objective="pareto", **more)  # type: ignore[arg-type]

    def __call__(self, asked: Request) -> Answer:
        """Full: the best part of the fleet. Brief: up to 30% slower, often on another part."""
        names = [node.node_type.name for node in asked.fleet.nodes]
        counts = tuple(names.count(name) for name in KINDS)
        (self.drafted if asked.brief else self.full).append(counts)
        parts = self.parts(counts)
        if not parts:
            raise InfeasibleError(f"{counts} train nothing")
        noise = random.Random(f"{self.seed}{counts}")
        factor = {part: noise.uniform(1.0, self.slack) if asked.brief else 1.0 for part in parts}
        used = min(parts, key=lambda part: (self.step_s(part) * factor[part], sum(part)))
        step_s = self.step_s(used) * factor[used]
        workers = [f"{name}-{i}/0" for name, n in zip(KINDS, used) for i in range(n)]
        plan: Any = dataclasses.make_dataclass("P", ["workers"])(workers)
        said: Any = Prediction(step_s, self.price(used))
        return Answer("fake", plan, said, SearchReport(0.0, 1, None, None))

    def front(self) -> list[tuple[float, float]]:
        """Steps and prices that no part of the whole fleet beats, by brute force."""
        every = sorted((self.step_s(part), self.price(part)) for part in self.parts(self.most))
        found: list[tuple[float, float]] = []
        for step_s, usd in every:
            if not found or usd < found[-1][1] - 1e-9:
                found.append((step_s, usd))
        return found


@pytest.mark.parametrize("seed", range(40))
def test_a_front_is_that_of_every_fleet_in_full(seed: int) -> None:
    world = World(seed)
    if not world.front():
        with pytest.raises(InfeasibleError):
            search_objective(world, world.request())
        return
    answer = search_objective(world, world.request(time_limit_s=UNLIMITED_S))
    steps_s, prices = zip(*world.front(), strict=True)
    assert [a.prediction.step_time_s for a in answer.front] == pytest.approx(steps_s)
    assert [a.prediction.usd_per_hour for a in answer.front] == pytest.approx(prices)
    assert len(world.full) == len(set(world.full))
    assert len(world.drafted) == len(set(world.drafted))


def test_few_of_many_fleets_are_searched() -> None:
    """Parts of a fleet whose best plan lies in them are not searched again."""
    searched = fleets = 0
    for seed in range(40):
        world = World(seed)
        if world.front():
            answer = search_objective(world, world.request(time_limit_s=UNLIMITED_S))
            searched += len(world.full)
            fleets += answer.search.fleets
    assert searched < fleets / 2


def test_a_fleet_whose_best_draft_leaves_nodes_idle_is_searched_without_them() -> None:
    """Where drafts say all, only fleets are searched whose best plan uses all their nodes."""
    for seed in range(20):
        world = World(seed)
        world.slack = 1.0
        if world.front():
            search_objective(world, world.request(time_limit_s=UNLIMITED_S))
            searched = [counts for counts in world.full if world.parts(counts)]
            best = [min(world.parts(counts), key=world.step_s) for counts in searched]
            assert best == searched


def test_each_point_of_a_front_is_what_its_own_nodes_get_alone() -> None:
    """Same step and dollars, to the last bit, as a search of the fleet of these nodes."""
    nodes = fleet(("A100", 2, 1), ("T4", 2, 1))
    asked = dataclasses.replace(request(nodes, 8), prove=False)
    answer = plan_with("autohet", dataclasses.replace(asked, objective="pareto"))
    assert len(answer.front) > 1
    for point in answer.front:
        mine = tuple(node for node in nodes.nodes if node.name in point.used_nodes)
        alone = plan_with("autohet", narrow_to(asked, Fleet(0, mine)))
        assert alone.step_time_s == point.step_time_s
        assert alone.prediction.usd_per_hour == point.prediction.usd_per_hour


def test_a_front_that_its_budget_cuts_says_so_and_has_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "FRONT_GPUS", 100)
    world = next(w for w in map(World, range(40)) if len(w.front()) > 6 and not w.needs)
    answer = search_objective(world, world.request(time_limit_s=1.0))
    assert f"of {answer.search.fleets} fleets were looked at" in answer.choice
    assert "the others" not in answer.choice
    assert answer.front[0].prediction.step_time_s == pytest.approx(world.front()[0][0])
    cheapest = min(step_s * usd for step_s, usd in world.front())
    found = min(a.prediction.usd_per_million_tokens or 0.0 for a in answer.front)
    assert found == pytest.approx(cheapest)


def test_a_front_that_is_known_says_what_the_others_are() -> None:
    world = next(w for w in map(World, range(40)) if len(w.front()) > 6)
    answer = search_objective(world, world.request(time_limit_s=UNLIMITED_S))
    assert "the others are parts of these" in answer.choice
