"""Prices that move while a job trains: the bound is held, and the cheapest fleet followed."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from autohet.control.job_state import Training, Waiting
from autohet.control.planning.orders import OrderBuilder
from autohet.driver.events.event_log import EventLog
from autohet.driver.loop.controller import Controller
from autohet.driver.loop.planning import make_planning
from autohet.runtime.facts.layout import layout_builder
from autohet.runtime.models.config import load_config
from tests.driver.test_controller import KIND, run, trained
from tests.harness.fake_job import fake_job
from tests.harness.scripted_workforce import ScriptedWorkforce


def fleet_of(prices: Mapping[str, float], **wishes: Any) -> tuple[Controller, ScriptedWorkforce]:
    """Return a controller of a job on one node for each price, whose name begins with its type."""
    job = fake_job(
        steps=100_000,
        elastic={"step_timeout_s": 30, "debounce_s": 0.2},
        parallelism={"min_pipelines": 1, **wishes},
    )
    workforce = ScriptedWorkforce(KIND)
    for name in prices:
        workforce.join(name)
    controller = Controller(
        job,
        workforce,
        make_planning(job),
        OrderBuilder(job, layout_builder(load_config(job.model, job.training))),
        EventLog(None),
    )
    set_prices(workforce, prices)
    return controller, workforce


def set_prices(workforce: ScriptedWorkforce, prices: Mapping[str, float | None]) -> None:
    for name, usd in prices.items():
        view = workforce.nodes[name]
        kind = replace(view.node.node_type, usd_per_hour=usd)
        workforce.nodes[name] = replace(view, node=replace(view.node, node_type=kind))


def members_when(controller: Controller, done: Callable[[set[str]], bool]) -> set[str]:
    """Tick until the job trains on nodes for which `done` holds; return these nodes."""

    def nodes() -> set[str]:
        return {worker.split("/")[0] for worker in controller.memory.members}

    run(controller, lambda: isinstance(controller.state, Training) and done(nodes()))
    return nodes()


def price_changes(controller: Controller) -> list[Any]:
    return [each for each in controller.memory.ledger.changes if each.cause == "price"]


def test_a_price_above_the_bound_moves_the_job_to_nodes_within_it() -> None:
    """Wrong: a bound that only the first plan, an arrival or a death looks at."""
    controller, workforce = fleet_of({"a": 0.8, "b": 0.8, "c": 0.5}, max_usd_per_hour=3.0)
    run(controller, trained(controller, 5))
    assert members_when(controller, lambda nodes: len(nodes) == 3) == {"a", "b", "c"}
    set_prices(workforce, {"a": 8.0, "b": 8.0})
    assert members_when(controller, lambda nodes: len(nodes) < 3) == {"c"}
    run(controller, lambda: bool(price_changes(controller)))
    (change,) = price_changes(controller)
    assert change.steps_lost == 0
    assert "cost 8 $/h instead of 0.8 $/h" in change.reason


def test_where_no_nodes_are_within_the_bound_a_checkpoint_is_made_until_prices_fall() -> None:
    controller, workforce = fleet_of({"a": 1.0, "b": 1.0}, max_usd_per_hour=3.0)
    run(controller, trained(controller, 5))
    set_prices(workforce, {"a": 9.0, "b": 9.0})
    run(controller, lambda: isinstance(controller.state, Waiting))
    assert workforce.commits == [controller.memory.ledger.committed_steps]
    set_prices(workforce, {"a": 2.0})
    assert members_when(controller, bool) == {"a"}


def test_a_job_for_the_cheapest_tokens_follows_the_cheap_nodes() -> None:
    """Wrong: replans that look at time alone, which use every node."""
    controller, workforce = fleet_of({"a": 0.2, "b": 9.0}, objective="cost")
    run(controller, trained(controller, 5))
    assert members_when(controller, bool) == {"a"}
    set_prices(workforce, {"a": 9.0, "b": 0.2})
    assert members_when(controller, lambda nodes: "a" not in nodes) == {"b"}
    set_prices(workforce, {"a": 0.0})
    assert "a" in members_when(controller, lambda nodes: nodes != {"b"}), "one that became free"


@pytest.mark.parametrize(
    ("wishes", "prices"),
    [
        ({"objective": "cost"}, {"a": 1.0, "b": 1.005}),
        ({"objective": "time"}, {"a": 50.0, "b": 50.0}),
        ({"max_usd_per_hour": 3.0}, {"a": 1.0, "b": 1.009}),
    ],
)
def test_a_price_that_changes_nothing_starts_no_search(
    wishes: dict[str, Any], prices: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, workforce = fleet_of({"a": 1.0, "b": 1.0}, **wishes)
    run(controller, trained(controller, 5))
    searches = Mock(wraps=controller.memory.planning.search)
    monkeypatch.setattr(controller.memory.planning, "search", searches)
    set_prices(workforce, prices)
    run(controller, trained(controller, 60))
    searches.assert_not_called()
