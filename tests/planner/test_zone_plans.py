"""Plans over several zones: what goes between them is counted, priced and avoided.

`AUTOHET_ZONE_FLEETS=400 pytest tests/planner/test_zone_plans.py` tries as many random fleets.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from planner.answers.replan import replan
from planner.cost.model import CostModel
from planner.errors import InfeasibleError
from planner.inputs.fleet import Fleet
from planner.inputs.zones import SAME_REGION, ZoneLink, ZoneTable
from planner.plans.plan import Pipeline, Plan, Stage
from planner.search.walk.judge import zones_of
from planner.strategies import Answer, Request, plan_with
from tests.planner.cases import fleet, model, request

EAST, EAST_TOO, IRELAND = "us-east-1a", "us-east-1b", "eu-west-1a"
FLEETS = int(os.environ.get("AUTOHET_ZONE_FLEETS", "2"))


def placed(of: Fleet, zones: list[str]) -> Fleet:
    """The fleet with its nodes in these zones, one after the other."""
    nodes = (
        replace(node, node_type=replace(node.node_type, zone=zone))
        for node, zone in zip(of.nodes, zones, strict=True)
    )
    return Fleet(of.generation, tuple(nodes))


def asked(zones: list[str], batch: int = 512, usd: float = 40.0, **wishes: object) -> Request:
    """Four equal nodes of one GPU in these zones."""
    nodes = placed(fleet(("A100", 4, 1), usd=usd), zones)
    limits = {"max_transfer_share": 0.05, "microbatch_sequences": 8}
    return request(nodes, batch, model(4), **{**limits, **wishes})


def two_stages(*pipelines: tuple[str, str]) -> Plan:
    made = (
        Pipeline((Stage(0, 2, (one,)), Stage(2, 2, (other,))), 4, 2) for one, other in pipelines
    )
    return Plan("tiny", 8 * len(pipelines), 2, 128, tuple(made))


def test_hidden_states_that_change_zones_are_counted_there_and_back() -> None:
    cost = asked([EAST, EAST_TOO, EAST, EAST_TOO]).cost
    (found,) = cost.predict(two_stages(("a100-0/0", "a100-1/0"))).transfers
    assert found.zones == (EAST, EAST_TOO)
    assert found.bytes_per_step == 2 * 4 * cost.stage_formats.inside_bytes(2, cost.precision)
    assert not cost.predict(two_stages(("a100-0/0", "a100-2/0"))).transfers


def test_sums_cross_zones_as_often_as_their_rings_do() -> None:
    """Two pipelines, each in its own zone: every gradient goes over two links of its ring."""
    request_ = asked([EAST, EAST, EAST_TOO, EAST_TOO])
    plan = two_stages(("a100-0/0", "a100-1/0"), ("a100-2/0", "a100-3/0"))
    found = request_.cost.predict(plan)
    parameters = sum(layer.parameters for layer in request_.spec.blocks)
    parameters += request_.spec.embedding.parameters + request_.spec.head.parameters
    (transfer,) = found.transfers
    assert transfer.bytes_per_step == pytest.approx(2 * 4.0 * parameters)
    hourly = transfer.bytes_per_step / 1e9 * 0.02 / found.step_time_s * 3600
    assert found.transfers_usd_per_hour == pytest.approx(hourly)
    assert found.usd_per_hour == pytest.approx(4 * 40.0 + hourly)
    tokens = found.tokens_per_s * 3600 / 1e6
    assert found.usd_per_million_tokens == pytest.approx(found.usd_per_hour / tokens)
    (document,) = found.to_document()["transfers"]
    assert document["usd_per_hour"] == pytest.approx(hourly)
    assert document["gb_per_hour"] * 0.02 == pytest.approx(hourly)


def test_a_zone_away_is_slower_than_the_next_node_and_an_unknown_zone_is_not() -> None:
    plan = two_stages(("a100-0/0", "a100-1/0"))
    near, far, unknown = (
        asked([EAST, zone, EAST, EAST]).cost.predict(plan).step_time_s
        for zone in (EAST, EAST_TOO, "")
    )
    assert near == unknown
    assert far > near + SAME_REGION.latency_s


def test_clusters_that_differ_by_zones_alone_have_prices_and_plans_of_their_own() -> None:
    """Two zones: pipelines lie in one zone each, and what they sum is paid for; two continents: one
    of them trains.
    """
    one, two, ocean = (
        plan_with("autohet", asked([EAST, EAST, other, other]))
        for other in (EAST, EAST_TOO, IRELAND)
    )
    assert len({answer.prediction.usd_per_hour for answer in (one, two, ocean)}) == 3
    assert len({answer.prediction.step_time_s for answer in (one, two, ocean)}) == 3
    assert not one.prediction.transfers
    assert 0 < two.prediction.transfers_usd_per_hour <= 0.05 * 160
    assert len(ocean.plan.workers) == 2
    (idle,) = [idle for idle in ocean.idle if len(idle.workers) == 2]
    assert "zone" in idle.why
    assert ocean.plan != two.plan


def test_data_between_zones_beyond_the_share_is_refused_unless_asked_for_or_needed() -> None:
    """With cheap nodes the same sums are 27% of their price."""
    zones = [EAST, EAST, EAST_TOO, EAST_TOO]
    cheap = plan_with("autohet", asked(zones, usd=4.0))
    assert len(cheap.plan.workers) == 2
    assert not cheap.prediction.transfers
    wanted = plan_with("autohet", asked(zones, usd=4.0, max_zones=2, max_transfer_share=None))
    assert wanted.prediction.step_time_s <= cheap.prediction.step_time_s
    alone = asked([EAST, EAST_TOO, "eu-west-1a", "eu-west-1b"], usd=4.0)
    forced = plan_with("autohet", replace(alone, min_node_disjoint_holders=2))
    assert len(zones_of(alone.fleet, forced.plan)) == 2
    assert "no plan fits into fewer zones" in forced.choice


def test_max_zones_and_the_table_of_the_file_bound_what_a_plan_lies_in() -> None:
    zones = [EAST, EAST_TOO, "us-east-1c", IRELAND]
    one = plan_with("autohet", asked(zones, max_zones=1, max_transfer_share=None))
    assert len(one.plan.workers) == 1
    free = ZoneLink(10e9, 1e-5, 0.0)
    table = ZoneTable(((("eu-west-1", "us-east-1"), free),))
    wide = asked(zones)
    wide.cost.links = replace(wide.cost.links, zones=table)
    joined = replace(wide, cost=wide.cost.with_fleet(wide.fleet))
    assert IRELAND in zones_of(wide.fleet, plan_with("autohet", joined).plan)
    with pytest.raises(InfeasibleError, match="zones"):
        plan_with("autohet", asked(zones, max_zones=1, min_node_disjoint_holders=2))


def test_a_replan_keeps_to_zones_too() -> None:
    """The plan of one zone loses a node; the nodes of another continent are no way out."""
    begin = asked([EAST, EAST, IRELAND, IRELAND])
    before = plan_with("autohet", begin).plan
    gone = before.workers[0].split("/")[0]
    left = Fleet(1, tuple(node for node in begin.fleet.nodes if node.name != gone))
    after = replan(before, replace(begin, fleet=left, cost=begin.cost.with_fleet(left)))
    assert len(zones_of(left, after.answer.plan)) == 1


def random_requests(number: int, objective: str) -> Iterator[Request]:
    """Fleets of one to three types in two or three zones, one of them overseas now and then."""
    for seed in range(number):
        dice = random.Random(seed)
        types = dice.sample(["A100", "A10G", "T4"], dice.randint(1, 3))
        of = fleet(
            *((gpu, dice.randint(1, 2), dice.choice([1, 2])) for gpu in types),
            usd=dice.choice([0.5, 4.0, 40.0]),
        )
        names = [EAST, EAST_TOO, dice.choice(["us-east-1c", IRELAND, ""])]
        zones = [dice.choice(names[: dice.randint(2, 3)]) for _ in of.nodes]
        share = 0.05 if objective == "time" else None
        wishes = {
            "objective": objective,
            "max_transfer_share": share,
            "microbatch_sequences": dice.choice([2, 4]),
            "prove": False,
        }
        yield request(placed(of, zones), dice.choice([16, 64, 128]), model(4), **wishes)


def without_zones(each: Request) -> Answer:
    return plan_with("autohet", replace(each, cost=each.cost.without_zones()))


def true_usd(cost: CostModel, plan: Plan) -> float:
    found = cost.predict(plan).usd_per_million_tokens
    assert found is not None
    return found


@pytest.mark.parametrize("objective", ["time", "cost"])
def test_no_plan_is_dearer_than_without_zones_by_true_price(objective: str) -> None:
    for each in random_requests(FLEETS, objective):
        blind = without_zones(each).plan
        seen = plan_with("autohet", each)
        zones = zones_of(each.fleet, seen.plan)
        assert each.cost.links.zones.first_unconnected(zones) is None
        limit = true_usd(each.cost, blind) * (1 + 1e-9)
        assert seen.prediction.usd_per_million_tokens <= limit, each.fleet
