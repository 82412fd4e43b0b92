"""Baselines of `autohet simulate`: they keep what a notice lets them keep, lose what it does not,
and pay what is stated.
"""

import math
from dataclasses import replace

import pytest

from autohet.simulate.baselines import RestartingTrainer, RestartPolicy, departures, paid_usd
from autohet.simulate.comparison import compare
from autohet.simulate.costs import Costs, PushedCopies
from autohet.simulate.dollars.price_file import read_prices
from autohet.simulate.dollars.prices import PriceHistory
from autohet.simulate.setups import Setup
from autohet.simulate.spot_trace import TraceEvent, read_trace
from planner.errors import ConfigError
from planner.inputs.cluster import cluster_from_document
from planner.inputs.fleet import Node, NodeType
from planner.plans.plan import Pipeline, Plan, Stage
from tests.harness.local_fleet import cluster_document

KIND = NodeType("small", "A10G", 1, 2**34, 1e9, 1e9, usd_per_hour=1.0, max_nodes=4)
FREE = Costs(
    detect_s=3.0,
    boot_s=0.0,
    process_start_s=10.0,
    data_s=0.0,
    communicators=0.0,
    first_step_s=0.0,
    snapshot_overhead=0.0,
)


def setup_of(nodes, upload_s=20.0):
    """A step of 10 s divided by the number of nodes."""
    names = sorted(node.name for node in nodes)
    if not names:
        return None
    plan = Plan(
        "toy", 4, 1, 16, (Pipeline((Stage(0, 4, tuple(f"{name}/0" for name in names)),), 4, 1),)
    )
    return Setup(plan, frozenset(names), 10.0 / len(names), 0.0, 5.0, upload_s, 0.0, 1e9, 100, 0.0)


def trainer_of(
    trace,
    *,
    on_notice=True,
    every_steps=None,
    end_s=1000.0,
    upload_s=20.0,
    horizon_s=1e6,
    departs_s=500.0,
):
    habits = RestartPolicy(on_notice, every_steps, horizon_s)
    trainer = RestartingTrainer(
        lambda nodes: setup_of(nodes, upload_s), habits, FREE, {"small": KIND}, departs_s
    )
    trainer.run(trace, end_s)
    return trainer


def two_nodes(*more):
    return [TraceEvent(0.0, "arrival", f"small-{i}", "small") for i in range(2)] + list(more)


NOTICE = TraceEvent(500.0, "notice", "small-1", "small", 530.0)
DEATH = TraceEvent(530.0, "death", "small-1", "small")


def test_a_notice_long_enough_for_the_checkpoint_loses_nothing():
    trainer = trainer_of(two_nodes(NOTICE, DEATH))
    assert trainer.steps_lost == 0
    assert [change["cause"] for change in trainer.changes] == ["notice"]
    left = trainer.changes[-1]
    assert left["seconds"]["restore"] == 5.0
    assert left["seconds"]["total"] == pytest.approx(
        10.0 + 5.0 + 10.0
    )  # processes, restore, first step on one node
    ready_at = trainer.spans[-1].begin_s
    assert (
        520.0 <= ready_at - 15.0 <= 530.0
    )  # it left once the step and the upload were done, within the notice


def test_a_notice_too_short_for_the_checkpoint_loses_what_was_not_written():
    trainer = trainer_of(two_nodes(NOTICE, DEATH), upload_s=100.0, every_steps=30)
    assert [change["cause"] for change in trainer.changes][-1] == "death"
    assert 0 < trainer.steps_lost <= 30 + 20  # since the newest checkpoint that had reached storage
    kept = sum(span.num_steps for span in trainer.spans[:-1])
    assert kept % 30 == 0
    assert trainer.spans[-1].first_step == kept


def test_one_that_ignores_notices_trains_on_and_goes_back():
    trainer = trainer_of(two_nodes(NOTICE, DEATH), on_notice=False, every_steps=30)
    assert trainer.steps_lost > 0
    assert trainer.changes[-1]["cause"] == "death"
    assert trainer.changes[-1]["seconds"]["detect"] == 3.0


def test_the_interval_is_youngs():
    trainer = trainer_of(two_nodes(), upload_s=0.0, departs_s=4000.0)
    setup = Setup(
        setup_of([Node("small-0", KIND)]).plan, frozenset(), 2.0, 1.0, 0.0, 0.0, 0.5, 1e10, 0, 0.0
    )
    every, step_s = trainer.checkpoint_interval(setup)
    assert every == pytest.approx(
        math.sqrt(2 * 0.5 * 4000.0) / 2.0, rel=0.05
    )  # sqrt(2 x cost x time between failures)
    assert step_s == pytest.approx(2.0 + 0.5 / every, rel=1e-3)


def test_a_larger_fleet_is_taken_only_where_the_restart_pays():
    late = TraceEvent(400.0, "arrival", "small-2", "small")
    assert trainer_of(two_nodes(late), horizon_s=1e6).spans[-1].num_gpus == 3
    assert trainer_of(two_nodes(late), horizon_s=30.0).spans[-1].num_gpus == 2


def test_nobody_there_is_waiting():
    gone = [TraceEvent(500.0, "death", f"small-{i}", "small") for i in range(2)]
    trainer = trainer_of(two_nodes(*gone))
    assert trainer.waited_s == pytest.approx(1000.0 - 503.0, abs=4.0)


def test_steps_never_exceed_the_time_that_there_was():
    trainer = trainer_of(two_nodes(NOTICE, DEATH), every_steps=10)
    ends = [span.begin_s + span.seconds for span in trainer.spans]
    begins = [span.begin_s for span in trainer.spans[1:]]
    assert all(end <= begin + 1e-9 for end, begin in zip(ends, begins, strict=False))
    assert ends[-1] <= 1000.0


def test_prices_over_time_and_caps(tmp_path):
    cluster = cluster_from_document(cluster_document())
    path = tmp_path / "prices.csv"
    path.write_text("time_s,node_type,usd_per_hour\n1800,small,3\n")
    kinds = {kind.name: kind for kind in cluster.node_types}
    prices = PriceHistory(kinds, read_prices(path, cluster).rows)
    assert prices.usd("small", 0.0, 3600.0) == pytest.approx(0.5 * 1.0 + 0.5 * 3.0)
    trace = two_nodes(TraceEvent(1800.0, "death", "small-1", "small"))
    assert paid_usd(trace, {"small": math.inf}, prices, 3600.0) == pytest.approx(0.5 * 2 + 0.5 * 3)
    assert paid_usd(trace, {"small": 1.0}, prices, 3600.0) == pytest.approx(0.5 + 1.5)
    assert departures(trace, ["small"], 3600.0) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,node_type,usd\n", "columns time, node_type, usd"),
        ("time_s,node_type,usd_per_hour\n0,huge,1\n", "node type 'huge'; the cluster has"),
        ("time_s,node_type,usd_per_hour\n0,small,nan\n", "'usd_per_hour' of row 1"),
        ("time_s,node_type,usd_per_hour\n-1,small,1\n", "'time_s' of row 1"),
    ],
)
def test_wrong_prices_are_named(tmp_path, text, message):
    path = tmp_path / "prices.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_prices(path, cluster_from_document(cluster_document()))


def result_of(policy, tokens, useful_share, usd):
    return {
        "policy": policy,
        "tokens": tokens,
        "useful_share": useful_share,
        "tokens_per_useful_s": tokens / useful_share / 1000,
        "usd_per_million_tokens": usd / tokens * 1e6,
        "changes_by_cause": {"notice": 2},
        "steps_lost": 0,
    }


def test_the_ratio_is_against_the_strongest_and_s3_only_is_not_among_them():
    ours = result_of("local_first", 1050, 0.99, 10)
    found = compare(
        ours,
        [
            result_of("s3_only", 5000, 0.9, 10),
            result_of("checkpoint_restart", 1000, 0.95, 10),
            result_of("homogeneous_elastic", 800, 0.98, 4),
        ],
    )
    assert found["best_baseline"] == "checkpoint_restart"
    assert found["tokens_ratio"] == pytest.approx(1.05)
    assert found["factors"]["useful_share"] * found["factors"][
        "tokens_per_useful_s"
    ] == pytest.approx(1.05)
    assert found["parts"] == {"recovery": pytest.approx(1.05), "plans": pytest.approx(1.25)}
    assert found["cheapest_baseline"] == "homogeneous_elastic"
    assert found["usd_per_million_tokens_ratio"] < 1
    assert "checkpoint_restart spends 5.0% of the time outside steps" in found["why"]


def test_every_number_has_a_unit_and_a_source():
    for name, entry in Costs().to_document().items():
        assert entry["unit"], name
        assert len(entry["source"]) > 10, name


def test_read_trace_is_what_the_trainers_see(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("time_s,node_type,num_nodes\n0,small,2\n500,small,1\n")
    trace = read_trace(path, cluster_from_document(cluster_document()), 30.0)
    assert trainer_of(list(trace)).steps_lost == 0


@pytest.mark.parametrize(("step_s", "cost_s"), [(1.0, 0.015), (100.0, 0.06)])
def test_a_snapshot_costs_a_share_of_a_short_step_and_of_its_copy_in_a_long_one(
    step_s: float, cost_s: float
) -> None:
    costs = replace(Costs(), snapshot_overhead=0.015, snapshot_slowdown=0.04)
    found = costs.disturbed_step_s(step_s, 0.0, 1e9, 10.0, 50, PushedCopies(snapshot_s=1.5))
    assert found - step_s == pytest.approx(cost_s)
