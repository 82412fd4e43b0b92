"""Who lives and what it costs, by a run's events: nodes that go with any notice, that are given
back, and whose price changes.
"""

from dataclasses import replace
from typing import Any

import pytest

from autohet.control.planning.buyer import Buyer
from autohet.control.planning.buying import Market
from autohet.control.values.observation import Notice
from autohet.driver.events.living_nodes import LivingNodes
from autohet.driver.loop.controller import Controller
from autohet.driver.report.events import fleet_over_time
from planner.inputs.cluster import Cluster
from planner.inputs.fleet import Node
from tests.driver.test_controller import KIND, make, run, trained
from tests.harness.scripted_workforce import ScriptedWorkforce

PRICED = replace(KIND, usd_per_hour=1.0, max_nodes=8)


def fleet(nodes: int = 4, **elastic: Any) -> tuple[Controller, ScriptedWorkforce]:
    controller, workforce = make(
        steps=2000, nodes=nodes, workforce=ScriptedWorkforce(PRICED), **elastic
    )
    run(controller, trained(controller, 5))
    return controller, workforce


def living(controller: Controller) -> LivingNodes:
    found = LivingNodes()
    for event in controller.events.records:
        found.take(event)
    return found


def of_kind(controller: Controller, kind: str) -> list[dict[str, Any]]:
    return [event for event in controller.events.records if event["kind"] == kind]


def go(workforce: ScriptedWorkforce, name: str) -> None:
    """The machine is gone; its processes were dismissed before."""
    del workforce.nodes[name]
    workforce.notices.pop(name, None)


def test_a_node_that_is_drained_without_a_deadline_is_paid_until_it_is_gone() -> None:
    controller, workforce = fleet()
    leaver = controller.memory.members[0].split("/")[0]
    workforce.notices[leaver] = Notice(leaver, "Ray is draining it", workforce.now)
    run(controller, lambda: leaver in workforce.released)
    assert living(controller).usd_per_hour == 4.0
    go(workforce, leaver)
    controller.tick()
    assert living(controller).usd_per_hour == 3.0
    assert [event["node"] for event in of_kind(controller, "departure")] == [leaver]
    assert of_kind(controller, "death") == []


def test_a_node_that_is_given_back_is_paid_until_it_is_gone_and_shortens_no_expected_life() -> None:
    controller, workforce = fleet(3, idle_release_s=8)
    controller.memory.buyer = Buyer(
        controller.memory.job,
        controller.memory.planning,
        Market(Cluster("aws", (PRICED,)), {}, {PRICED.name: 4}),
    )
    spare = replace(workforce.nodes["small-0"], node=Node("small-8", PRICED))
    workforce.nodes["small-8"] = spare
    controller.memory.planned_nodes |= {"small-8"}  # stays idle
    run(controller, lambda: "small-8" in workforce.released)
    assert workforce.notices["small-8"].deadline is None
    go(workforce, "small-8")
    run(controller, trained(controller, controller.memory.ledger.committed_steps + 100))
    assert living(controller).usd_per_hour == 3.0
    assert controller.memory.outlook.ends == {}, "nobody took it away"


@pytest.mark.parametrize("warned", [True, False])
def test_each_node_that_is_gone_is_told_of_once(warned: bool) -> None:
    """By its death, or else by its departure."""
    controller, workforce = fleet()
    victim = controller.memory.members[-1].split("/")[0]
    if warned:
        workforce.warn(victim, 600)
        run(controller, lambda: victim in workforce.released)
    workforce.kill(victim)
    run(controller, lambda: controller.memory.generation == 2)
    run(controller, trained(controller, controller.memory.ledger.committed_steps + 5))
    told = [name for event in of_kind(controller, "death") for name in event["gone"]]
    told += [event["node"] for event in of_kind(controller, "departure")]
    assert told == [victim]
    assert living(controller).usd_per_hour == 3.0


def test_a_process_that_dies_takes_its_node_with_it_only_where_that_is_gone() -> None:
    events = [
        {
            "time": 0.0,
            "kind": "arrival",
            "node": "a",
            "gpu_type": "T4",
            "num_gpus": 4,
            "usd_per_hour": 2.0,
        },
        {"time": 1.0, "kind": "death", "nodes": ["a"], "workers": ["a/0"], "gone": []},
        {"time": 2.0, "kind": "departure", "node": "a"},
    ]
    assert fleet_over_time(events, 0.0).gpus_by_type["T4"] == [(0.0, 0.0), (0.0, 4.0), (2.0, 0.0)]


def test_a_price_that_is_known_later_or_changes_counts_from_then_on() -> None:
    controller, workforce = fleet()
    view = workforce.nodes["small-1"]
    for price in (0.25, 0.25, 0.5):
        workforce.nodes["small-1"] = replace(
            view, node=Node("small-1", replace(PRICED, usd_per_hour=price))
        )
        controller.tick()
        assert living(controller).usd_per_hour == 3.0 + price
    assert [(e["node"], e["usd_per_hour"]) for e in of_kind(controller, "price")] == [
        ("small-1", 0.25),
        ("small-1", 0.5),
    ]
    assert fleet_over_time(controller.events.records, 0.0).usd_per_hour[-1][1] == 3.5


def test_a_notice_whose_deadline_changes_is_told_of_again() -> None:
    controller, workforce = fleet()
    workforce.warn("small-1", 600)
    controller.tick()
    workforce.warn("small-1", 60)
    controller.tick()
    controller.tick()
    told = of_kind(controller, "notice")
    assert [(event["node"], event.get("updated", False)) for event in told] == [
        ("small-1", False),
        ("small-1", True),
    ]
    assert [event["deadline_s"] for event in told] == [
        pytest.approx(600, abs=1),
        pytest.approx(60, abs=1),
    ]


def test_another_run_in_the_same_file_begins_with_nobody() -> None:
    living = LivingNodes()
    living.take(
        {
            "time": 0.0,
            "kind": "arrival",
            "node": "a",
            "gpu_type": "T4",
            "num_gpus": 4,
            "usd_per_hour": 2.0,
        }
    )
    assert living.take({"time": 9.0, "kind": "started"})
    assert living.usd_per_hour == 0.0
