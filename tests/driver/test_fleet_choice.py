"""The fleet to pay for at given prices, against a look at every fleet that may be had."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autohet.control.planning.buyer import LOOK_S, SURPLUS_S, Buyer
from autohet.control.planning.buying import FAILURES, REFUSED_S, Market
from autohet.control.planning.fleet_choice import Offer, Terms, choose_fleet
from autohet.control.values.actions import AskForNodes, GiveBack
from autohet.control.values.observation import Launches, NodeView, Observation
from planner.errors import InfeasibleError
from planner.inputs.cluster import Cluster
from planner.inputs.fleet import Node, NodeType
from planner.strategies.speeds import FleetSpeed, FleetSpeeds
from tests.harness.fake_job import fake_job

KIND = NodeType("", "A10G", 1, 2**34, 1e9, 1e9)
NAMES = ("big", "small", "floor")
"""`floor` is the machine of `small` on demand."""
SPEED = {"big": 3.0, "small": 1.0, "floor": 1.0}
SPEEDS = FleetSpeeds(
    (("big",), ("small", "floor")),
    tuple(
        FleetSpeed((big, small), 6.0 / (3.0 * big + small))
        for big, small in itertools.product(range(3), range(5))
        if big + small
    ),
)


def terms_at(
    prices: Mapping[str, float | None],
    standing: Mapping[str, int] | None = None,
    most: Mapping[str, int] | None = None,
    **wishes: object,
) -> Terms:
    kinds = tuple(
        replace(KIND, name=name, usd_per_hour=prices[name], spot=name != "floor", max_nodes=2)
        for name in NAMES
    )
    market = Market(Cluster("", kinds), {name: (standing or {}).get(name, 0) for name in NAMES}, {})
    return Terms(market, most=most or {}, **wishes)  # type: ignore[arg-type]


prices = st.fixed_dictionaries({name: st.integers(0, 40).map(lambda n: n / 10) for name in NAMES})
numbers = st.fixed_dictionaries({name: st.integers(0, 2) for name in NAMES})


@settings(max_examples=300, derandomize=True)
@given(prices, numbers, st.sampled_from(["time", "cost"]), st.integers(1, 80))
def test_the_choice_is_the_best_of_all_fleets(
    usd: dict[str, float], most: dict[str, int], objective: str, tenths: int
) -> None:
    """Wrong: one of two markets of a machine alone, a bound without equals, a refused type."""
    bound = tenths / 10
    best = None
    for counts in itertools.product(*(range(most[name] + 1) for name in NAMES)):
        fleet = dict(zip(NAMES, counts, strict=True))
        price = sum(usd[name] * number for name, number in fleet.items())
        pace = sum(SPEED[name] * number for name, number in fleet.items())
        if pace and price <= bound + 1e-9:
            step_s = 6.0 / pace
            value = (price * step_s, step_s) if objective == "cost" else (step_s, price)
            best = value if best is None else min(best, value)
    terms = terms_at(usd, most=most, objective=objective, bound=bound)
    if best is None:
        with pytest.raises(InfeasibleError, match=f"for at most {bound:.2f} "):
            choose_fleet(SPEEDS, terms, None, 0.0)
        return
    found = choose_fleet(SPEEDS, terms, None, 0.0)
    price = sum(usd[name] * number for name, number in found.counts.items())
    assert found.usd_per_hour == pytest.approx(price)
    first = price * found.step_s if objective == "cost" else found.step_s
    assert first == pytest.approx(best[0])


def chosen(terms: Terms, present: Mapping[str, int], kept_usd: float = 0.0) -> Mapping[str, int]:
    return choose_fleet(SPEEDS, terms, terms.offer(SPEEDS, present), kept_usd).counts


def test_a_fleet_is_left_for_a_cheaper_one_only_if_that_earns_the_move() -> None:
    """Wrong: a job that follows each cent, or one that never leaves what it has."""
    cheaper = terms_at({"big": 3.0, "small": 0.97, "floor": 9.0}, objective="cost")
    assert chosen(cheaper, {"big": 1}) == {"big": 1}
    assert chosen(replace(cheaper, move_s=1.0, horizon_s=1e6), {"big": 1}) == {"small": 2}
    half = terms_at({"big": 3.0, "small": 0.5, "floor": 9.0}, objective="cost")
    assert chosen(half, {"big": 1}) == {"small": 2}
    assert chosen(replace(half, horizon_s=60.0, move_s=61.0), {"big": 1}) == {"big": 1}


def test_what_is_beyond_the_bound_is_left_whatever_the_move_costs() -> None:
    dear = terms_at({"big": 9.0, "small": 2.0, "floor": 9.0}, bound=4.0, move_s=1e6)
    assert chosen(dear, {"big": 1}, 9.0) == {"small": 2}


def test_a_job_that_has_to_stand_for_a_move_wants_more_for_it() -> None:
    """Both fleets together are beyond the bound, so the present one goes before the new comes."""
    usd = {"big": 3.0, "small": 0.9, "floor": 9.0}
    free = terms_at(usd, objective="cost", horizon_s=1e5)
    assert chosen(free, {"big": 1}, 3.0) == {"small": 2}
    assert chosen(replace(free, bound=3.1), {"big": 1}, 3.0) == {"big": 1}
    assert chosen(replace(free, bound=5.0), {"big": 1}, 3.0) == {"small": 2}


def test_what_trains_is_not_given_up_for_nodes_that_were_refused() -> None:
    """Wrong: a running fleet that goes each time a refused type is tried again."""
    usd = {"big": 2.0, "small": 0.9, "floor": 9.0}
    terms = terms_at(usd, bound=4.2, horizon_s=1e5)
    assert chosen(terms, {"small": 1}, 0.9) == {"big": 2}
    doubtful = replace(terms, doubtful=frozenset({"big"}))
    assert chosen(doubtful, {"small": 1}, 0.9) == {"big": 1, "small": 2}


def test_nodes_that_stand_are_paid_for_and_used() -> None:
    usd = {"big": 4.0, "small": 0.1, "floor": 2.0}
    terms = terms_at(usd, standing={"floor": 1}, objective="cost", bound=2.0)
    found = choose_fleet(SPEEDS, terms, None, 0.0)
    assert found == Offer({"floor": 1}, 6.0, 2.0)
    unpriced = terms_at({"big": None, "small": 1.0, "floor": 2.0})
    assert "big" not in choose_fleet(SPEEDS, unpriced, None, 0.0).counts, "its price may be any"


# A buyer that follows prices
# ------------------------------------------------------------------------------


class Answered:
    """Stands in for the planner: its answer is the known step times, at the second look."""

    move_s = 5.0
    horizon_s = 1e5

    def __init__(self) -> None:
        self.looks = 0

    def consider(self, work: object, question: object) -> Answered:
        return self

    def result(self) -> FleetSpeeds | None:
        self.looks += 1
        return SPEEDS if self.looks > 1 else None


class Cloud:
    """A buyer, and a cloud that starts what it asks for; what it gives back is gone at once."""

    def __init__(self, prices: Mapping[str, float], first: Mapping[str, int], **wishes: object):
        terms = terms_at(prices)
        self.prices = dict(prices)
        self.kinds = {kind.name: kind for kind in terms.market.cluster.node_types}
        self.kinds["own"] = replace(KIND, name="own")
        market = replace(terms.market, counts=first)
        job = fake_job(parallelism={"min_pipelines": 1, **wishes})
        self.buyer = Buyer(job, Answered(), market)  # type: ignore[arg-type]
        self.alive = [f"{kind}-{index}" for kind, count in first.items() for index in range(count)]
        self.asked: Mapping[str, int] = first
        self.said: list[str] = []
        self.returned: list[str] = []
        self.failed: dict[str, int] = {}
        self.now = 0.0

    def look(self, *used: str, times: int = 1) -> None:
        for _ in range(times):
            self.now += LOOK_S
            nodes = {}
            for name in self.alive:
                kind = name.rpartition("-")[0]
                priced = replace(self.kinds[kind], usd_per_hour=self.prices[kind])
                nodes[name] = NodeView(Node(name, priced), 0.0)
            seen = Observation(
                self.now, nodes, prices=self.prices, launches=Launches(dict(self.failed))
            )
            workers = [f"{name}/0" for name in used if name in self.alive]
            actions, said = self.buyer.decide(seen, workers, training=bool(workers))
            self.said += said
            for action in actions:
                if isinstance(action, AskForNodes):
                    self.asked = action.counts
                else:
                    assert isinstance(action, GiveBack)
                    self.returned.append(action.node)
                    self.alive.remove(action.node)

    def start(self, *names: str) -> None:
        self.alive += names


def test_nodes_beyond_the_bound_go_at_once_and_others_come() -> None:
    """Wrong: a bound that is looked at when prices become known, and never again."""
    cloud = Cloud({"big": 1.0, "small": 0.5, "floor": 9.0}, {"big": 2}, max_usd_per_hour=3.0)
    cloud.look("big-0", "big-1", times=3)
    assert (cloud.returned, cloud.said) == ([], [])
    cloud.prices["big"] = 8.0
    cloud.look("big-0", "big-1", times=3)
    assert sorted(cloud.returned) == ["big-0", "big-1"]
    assert cloud.asked == {"small": 2}
    assert "the price of big has changed" in cloud.said[0]
    cloud.start("small-0", "small-1")
    cloud.look("small-0", "small-1", times=100)
    cloud.prices["big"] = 1.0
    cloud.look("small-0", "small-1", times=2)
    assert cloud.asked == {"big": 2, "small": 2}, "the faster ones again, as soon as they may be"


def test_a_cheaper_fleet_comes_before_the_dearer_one_goes() -> None:
    cloud = Cloud({"big": 1.0, "small": 0.5, "floor": 9.0}, {"big": 1}, objective="cost")
    cloud.look("big-0", times=2)
    cloud.prices["small"] = 0.0
    cloud.look("big-0", times=3)
    assert cloud.asked == {"big": 1, "small": 2}
    assert cloud.returned == [], "it trains until the others have come"
    cloud.start("small-0", "small-1")
    cloud.look("small-0", "small-1")
    assert cloud.returned == ["big-0"], "not after minutes of being idle"
    cloud.look("small-0", "small-1")
    assert cloud.asked == {"small": 2}


def test_what_is_replaced_goes_although_it_trains_on() -> None:
    cloud = Cloud({"big": 1.0, "small": 0.5, "floor": 9.0}, {"big": 1}, objective="cost")
    cloud.prices["small"] = 0.0
    cloud.look("big-0", times=3)
    cloud.prices["own"] = 7.0
    cloud.start("small-0", "small-1", "own-0")
    everything = ("big-0", "small-0", "small-1", "own-0")
    cloud.look(*everything, times=round(SURPLUS_S / LOOK_S) + 2)
    assert cloud.returned == ["big-0"], "somebody's own node is not the buyer's to give back"


def test_where_nothing_is_within_the_bound_nothing_is_paid_for() -> None:
    cloud = Cloud({"big": 1.0, "small": 0.5, "floor": 9.0}, {"big": 2}, max_usd_per_hour=2.0)
    cloud.prices = dict.fromkeys(NAMES, 5.0)
    cloud.look("big-0", "big-1", times=3)
    assert cloud.alive == []
    assert not any(cloud.asked.values())
    assert "for at most 2.00 $/h" in cloud.said[0]
    cloud.prices["small"] = 1.9
    cloud.look()
    assert cloud.asked == {"small": 1}


def test_a_refused_type_gives_way_and_is_taken_once_it_can_be_had_again() -> None:
    cloud = Cloud({"big": 1.0, "small": 0.5, "floor": 9.0}, {"big": 1}, objective="cost")
    cloud.look(times=2)
    cloud.alive = []
    cloud.failed = {"big": FAILURES}
    cloud.look(times=2)
    assert cloud.asked == {"small": 2}
    assert "no big can be had" in cloud.said[-1]
    cloud.failed |= {"small": FAILURES}
    cloud.look(times=2)
    assert cloud.asked == {"floor": 2}
    cloud.look(times=round(REFUSED_S / LOOK_S) + 2)
    assert cloud.asked == {"big": 2}
