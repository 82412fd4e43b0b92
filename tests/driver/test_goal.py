"""Deadlines and budgets: the fleet that is bought, the end before the budget, quotes."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from autohet.cli.main import main
from autohet.cli.quote import answer
from autohet.control.planning.buying import Market
from autohet.control.planning.fleet_choice import Terms
from autohet.control.planning.goal import Goal, GoalChooser, GoalTerms, Left
from autohet.control.values.observation import Launches, StartingNode, StartState
from autohet.driver.checkpoints.spending import (
    LONGEST_GAP_S,
    SPENDING,
    Spending,
    read_spending,
    store_spending,
)
from autohet.driver.job.goals import check_budget, deadline_s
from autohet.driver.loop.value_codec import decode, encode
from autohet.driver.sources.spot_prices import USUAL_S
from autohet.runtime.job import Job
from autohet.runtime.job.elastic import ElasticSection, time_of
from autohet.simulate.dollars.price_file import RecordedPrices
from autohet.simulate.dollars.prices import PriceHistory
from autohet.simulate.quote import QuoteMarket as Histories
from autohet.simulate.quote import likelihood, median_and_bounds, run_draw
from autohet.simulate.simulation import Scenario, TraceSimulation
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster, cluster_from_document
from planner.inputs.fleet import NodeType
from planner.strategies.speeds import FleetSpeed, FleetSpeeds
from recovery.storage.open import open_storage
from tests.driver.test_simulation import job_document
from tests.harness.local_fleet import cluster_document

HOUR = 3600.0


def kind(name: str, usd: float | None, *, spot: bool) -> NodeType:
    return NodeType(name, "V100", 1, 2**34, 1e9, 1e9, usd_per_hour=usd, max_nodes=4, spot=spot)


SPOT = kind("spot", 1.0, spot=True)
STEADY = kind("od", 3.0, spot=False)
SPEEDS = FleetSpeeds(
    (("spot", "od"),), tuple(FleetSpeed((n,), s) for n, s in ((1, 4.0), (2, 2.2), (4, 1.5)))
)
"""Of one machine in two markets: twice the nodes are less than twice as fast."""


def terms_of(*kinds: NodeType, most: dict[str, int] | None = None) -> Terms:
    cluster = Cluster("c", kinds)
    return Terms(Market(cluster, {}, {}), most=most or {})


def chosen(
    left: Left, terms: Terms, present: dict[str, int] | None = None
) -> tuple[dict[str, int] | None, bool]:
    offer = None if present is None else terms.offer(SPEEDS, present)
    found = GoalChooser(SPEEDS, terms, left, offer, 0.0).choose()
    return None if found.offer is None else dict(found.offer.counts), found.waits


def left(steps: float, hours: float = math.inf, usd: float = math.inf, share: float = 0.9) -> Left:
    usual_prices = {"spot": 1.0}
    return Left(0.0, steps, hours * HOUR, usd, {False: share, True: 0.95}, 0.0, usual_prices)


BOTH = terms_of(SPOT, STEADY)
NONE_LEFT = terms_of(SPOT, STEADY, most={"spot": 0})


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ((left(1000, 10), BOTH), ({"spot": 1}, False)),
        ((left(1000, 0.53), BOTH), ({"od": 4}, False)),
        ((left(1000, 2.0, share=0.4), BOTH), ({"spot": 2}, False)),
        ((left(1000, 10), NONE_LEFT), ({"spot": 1}, True)),
        ((left(1000, 1.25), NONE_LEFT), ({"od": 1}, False)),
        ((left(1000, 0.4), NONE_LEFT), ({"od": 4}, False)),
        ((left(1000, math.inf, 1.2), BOTH), ({"spot": 1}, False)),
        ((left(1000, math.inf, 9.0), BOTH), ({"spot": 4}, False)),
        ((left(1000, 10, 2.0), NONE_LEFT), ({"spot": 1}, True)),
        ((left(1000, 1.3, 2.0), NONE_LEFT), ({"spot": 1}, True)),
        ((left(1000, math.inf, 0.2), BOTH), ({"spot": 1}, False)),
    ],
    ids=[
        "slack: the cheapest",
        "no slack for a loss of spot nodes: secure ones",
        "spot nodes that deliver little: more of them",
        "none to be had, and slack: wait for the usual",
        "none to be had, no slack: the cheapest secure one",
        "late: the fastest secure one",
        "a budget alone, small: what it pays for",
        "a budget alone, ample: the fastest",
        "a budget that on-demand nodes would break: wait",
        "the same without slack: a budget goes before a deadline",
        "a budget too small for any: the most steps for it",
    ],
)
def test_the_fleet_follows_slack_and_budget(what: Any, wanted: Any) -> None:
    """Wrong: the fastest always, the cheapest always, on-demand nodes whenever spot has a gap."""
    assert chosen(*what) == wanted


def test_a_price_far_beyond_the_usual_is_waited_out_while_there_is_slack() -> None:
    """Wrong: a job that starts in a jump takes its price for the usual one."""
    dear = terms_of(replace(SPOT, usd_per_hour=2.9), STEADY)
    assert chosen(left(1000, 10), dear) == (None, True)
    assert chosen(left(1000, 1.25), dear)[0] is not None
    unknown = replace(left(1000, 10), usual_prices={})
    assert chosen(unknown, dear) == ({"spot": 1}, False)


def beside_one_steady(hours: float, most: dict[str, int]) -> Any:
    """Choose while one on-demand node trains, to which four spot nodes may come."""
    speeds = replace(SPEEDS, speeds=(*SPEEDS.speeds, FleetSpeed((5,), 1.4)))
    terms = terms_of(SPOT, STEADY, most=most)
    present = terms.offer(speeds, {"od": 1})
    return GoalChooser(speeds, terms, left(1000, hours, share=0.3), present, 3.0).choose()


def test_spot_nodes_that_can_be_had_join_the_safety_net() -> None:
    """Wrong: a fleet is late since its spot nodes are away at times, whatever its others make."""
    found = beside_one_steady(1.2, {})
    assert found.offer.counts == {"spot": 4, "od": 1}
    assert found.sure is None


def test_spot_nodes_that_would_make_steps_cheaper_stay_requested() -> None:
    """Wrong: the next try is ten minutes later; or one node more is needed than trains."""
    found = beside_one_steady(1.2, {"spot": 0})
    assert found.offer.counts == {"spot": 4, "od": 1}
    assert found.sure.counts == {"od": 1}
    assert not found.waits


def test_a_draw_knows_the_prices_of_the_days_before_it() -> None:
    rows = [(hour * HOUR, "spot", 3.0 if 40 <= hour < 44 else 1.0) for hour in range(240)]
    kinds = {"spot": SPOT}
    market = Histories(kinds, [], 120.0, RecordedPrices(rows, {}))
    for number in range(5):
        _, found = market.draw(number, 8 * HOUR)
        history = PriceHistory(kinds, found.rows)
        assert min(at for at, _, _ in found.rows) == -USUAL_S
        assert [history.usual("spot", at) for at in (0.0, 8 * HOUR)] == [1.0, 1.0]


def seen_at(now: float, usd: float, starting: int = 0) -> Any:
    node = SimpleNamespace(node_type=replace(SPOT, usd_per_hour=usd))
    nodes = [
        StartingNode(f"spot-{n}", "spot", StartState.STARTING, 0.0) for n in range(1, 1 + starting)
    ]
    launches = Launches({}, starting=tuple(nodes))
    return SimpleNamespace(
        now=now, nodes={"spot-0": node}, launches=launches, prices={}, usual_prices={}
    )


def test_dollars_count_from_the_start_of_a_machine_at_the_price_of_the_time() -> None:
    goal = Goal(GoalTerms(None, 10.0, spent_usd=4.0))
    goal.count(seen_at(0.0, 1.0, starting=2), 0, None, {"spot": 1.0})
    goal.count(seen_at(HOUR, 3.0), 0, None, {"spot": 1.0})
    assert goal.spent_usd == pytest.approx(7.0)
    assert goal.lasts_s(120.0) > 0.0
    goal.count(seen_at(1.95 * HOUR, 3.0), 0, None, {"spot": 1.0})
    assert goal.spent_usd == pytest.approx(9.85)
    assert goal.lasts_s(121.0) <= 0.0, "the rest pays for the last checkpoint"


def test_a_goal_is_recorded_for_a_replay() -> None:
    terms = GoalTerms(1234.5, 40.0, 3.25)
    assert decode(json.loads(json.dumps(encode(terms)))) == terms


def test_a_restarted_driver_knows_what_was_spent(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    assert read_spending(storage) is None
    store_spending(storage, Spending(100.0, 1000.0, 5.0, 6.0))
    found = read_spending(storage)
    assert found is not None
    assert found.started == 100.0
    assert found.usd_until(1060.0) == pytest.approx(5.1)
    assert found.usd_until(1e6) == pytest.approx(5.0 + 6.0 * LONGEST_GAP_S / HOUR)
    storage.put(SPENDING, b"{")
    assert read_spending(storage) is None


def test_times_and_bad_input_are_one_sentence() -> None:
    assert time_of("1d12h", 100.0, "x") == 100.0 + 36 * HOUR
    assert time_of("1970-01-01T02:00:00+01:00", 0.0, "x") == HOUR
    document = job_document()
    document["training"]["steps"] = 1000
    job = Job.from_document(document)
    late = replace(job, elastic=ElasticSection(deadline="2020-01-01T00:00:00Z"))
    with pytest.raises(ConfigError, match=r"the deadline 2020-01-01T00:00:00Z was .* h ago"):
        deadline_s(late, 1.7e9)
    assert deadline_s(late, 1.7e9, started=1.0e9) is not None, (
        "a run that goes on is late, no error"
    )
    poor = replace(job, elastic=ElasticSection(budget_usd=0.001))
    with pytest.raises(ConfigError, match=r"no price is known of spot; .*usd-per-hour"):
        check_budget(poor, Cluster("c", (replace(SPOT, usd_per_hour=None),)), None)
    cheapest = BOTH.offer(SPEEDS, {"spot": 1})
    with pytest.raises(ConfigError, match=r"budget is 0.00 USD, but .* steps cost .* \(1 spot\)"):
        check_budget(poor, BOTH.market.cluster, cheapest)
    for wrong in ({"deadline": "soon"}, {"budget_usd": 0.0}):
        with pytest.raises(ConfigError, match="elastic"):
            ElasticSection(**wrong)
    with pytest.raises(ConfigError, match="request_nodes"):
        ElasticSection(budget_usd=1.0, request_nodes={"small": 1})


def test_bounds_of_a_quote_hold_another_draw_in_nine_of_ten() -> None:
    found = median_and_bounds([float(value) for value in range(1, 200)])
    assert found == {"median": 100.0, "low": 9.0, "high": 191.0}
    assert median_and_bounds([]) is None
    assert likelihood(200, 200) >= 0.99 > likelihood(198, 200)


# simulated runs
# ------------------------------------------------------------------------------


def documents(tmp_path: Path, **elastic: Any) -> tuple[Path, Path]:
    """Spot nodes `small`, and `big` on demand at four times their price."""
    cluster = cluster_document()
    types = cluster["available_node_types"]
    del types["pair"]
    for name, usd, spot in (("small", "0.5", "true"), ("big", "2.0", "false")):
        labels = {"autohet.io/usd-per-hour": usd, "autohet.io/spot": spot}
        types[name]["labels"] = types[name].get("labels", {}) | labels
        types[name]["max_workers"] = 2
    job = job_document(search_time_limit_s=0.3)
    job["training"]["steps"] = 3000
    job["elastic"] = job.get("elastic", {}) | {"min_workers": 1} | elastic
    paths = tmp_path / "job.yaml", tmp_path / "cluster.yaml"
    for path, document in zip(paths, (job, cluster), strict=True):
        path.write_text(yaml.safe_dump(document))
    return paths


def simulation_of(tmp_path: Path, hours: float | None, usd: float | None) -> TraceSimulation:
    deadline = None if hours is None else f"{hours}h"
    job, cluster = documents(tmp_path, deadline=deadline, budget_usd=usd)
    scenario = Scenario(
        Job.from_yaml(job), cluster_from_document(yaml.safe_load(cluster.read_text())), (), 1.0
    )
    seconds = None if hours is None else hours * HOUR
    return TraceSimulation(scenario, goal=GoalTerms(seconds, usd))


def histories(simulation: TraceSimulation, counts: dict[tuple[float, str], int]) -> Histories:
    return Histories(simulation.scenario.kinds, [(counts, 2 * HOUR)], 120.0, RecordedPrices())


def test_a_deadline_is_kept_and_spot_nodes_are_used_while_they_are_there(tmp_path: Path) -> None:
    """Wrong: on-demand nodes from the start, or spot nodes for ever though there are none."""
    simulation = simulation_of(tmp_path, 2.0, None)
    simulation.require_plan()
    simulation.scenario = replace(simulation.scenario, end_s=3 * HOUR)
    usd = []
    for counts in ({(0.0, "small"): 2}, {(0.0, "small"): 0}):
        events, prices = histories(simulation, counts).draw(0, 3 * HOUR)
        draw = run_draw(simulation.along(events, prices))
        assert draw.is_trained
        assert draw.hours <= 2.0
        usd.append(draw.usd)
    assert usd[0] < 0.9 * usd[1]


def test_the_budget_ends_a_job_with_a_checkpoint_before_it_is_passed(tmp_path: Path) -> None:
    simulation = simulation_of(tmp_path, None, 0.2)
    simulation.scenario = replace(simulation.scenario, end_s=3 * HOUR)
    events, prices = histories(simulation, {(0.0, "small"): 2}).draw(0, 3 * HOUR)
    along = simulation.along(events, prices)
    controller, workforce, _ = along.replay(events)
    ended = controller.ended
    assert ended is not None
    assert not ended.ok
    assert ended.reason.startswith("stopped by its budget: 0.1")
    assert 0.15 < workforce.machines.bill.usd <= 0.2 * 1.01
    ledger = controller.memory.ledger
    assert 0 < ledger.committed_steps < 3000
    assert ledger.checkpoints.step == ledger.committed_steps
    goal = controller.summary()["goal"]
    assert goal["spent_usd"] == pytest.approx(workforce.machines.bill.usd, rel=0.02)


def test_the_command_quotes_and_says_what_it_assumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two draws leave nothing to another process, whose start takes longer than they do.
    monkeypatch.setattr(
        "autohet.simulate.quote.run_in_background", lambda work, draws: lambda: work(draws)
    )
    job, cluster = documents(tmp_path)
    command = ["quote", "--job", str(job), "--cluster", str(cluster)]
    assert main(command) == 2
    assert "give --by or --usd" in capsys.readouterr().err
    assert main([*command, "--by", "3h", "--draws", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["draws"] == 2
    assert 0.5 < found["probability"] < 1.0
    assert found["usd"]["low"] <= found["usd"]["median"] <= found["usd"]["high"]
    assumed = " ".join(found["assumptions"])
    assert "No trace tells of small" in assumed
    assert "pass --trace" in assumed
    assert "Price of small: constant" in assumed
    assert "pass --prices" in assumed
    assert "within 3.0 h with probability" in answer(found)


def test_the_table_of_a_quote_fits_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    from autohet.cli.quote import show

    fleet = {"nodes": {"a-long-node-type-name": 12, "another-one": 3}, "hours": 12345.6}
    document = {
        "job": "j",
        "steps": 3_000_000,
        "by_hours": 12.0,
        "budget_usd": 40.0,
        "draws": 200,
        "probability": 0.98,
        "usd": {"median": 1e5, "low": 9e4, "high": 2e5},
        "hours": None,
        "fleets": [{**fleet, "usd": 123456.7, "usd_per_hour": 1234.5}] * 2,
        "reasons": ["3 of 200 draws are late."],
        "assumptions": ["None."],
    }
    show(document)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines if "│" in line or "─" in line or "12345" in line)
    assert "a-long-node-type-name" in "\n".join(lines)
