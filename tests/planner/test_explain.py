"""Explanations and robustness where the right answer is known by construction."""

from dataclasses import replace

import pytest

from planner.answers.explain import explain
from planner.answers.robustness import robustness
from planner.cost.model import CostModel
from planner.inputs.fleet import Fleet
from planner.plans.plan import Pipeline, Plan, Stage
from planner.search.memory import search_with_memory
from planner.search.problem import limits
from planner.search.problem.request import Request
from tests.planner.cases import fleet, with_nics
from tests.planner.test_memory_choices import request, small

FAST = {"A100": 1e13, "T4": 1e13}


def asked(of: Fleet, **wishes: object) -> Request:
    return request(of, 6, batch=12, prove=False, **wishes)  # type: ignore[arg-type]


def test_where_all_work_alone_speed_binds_and_one_more_earns_its_share() -> None:
    """Two nodes that hardly communicate, six sequences each; three would have four each."""
    wanted = asked(with_nics(fleet(("A100", 2, 1)), FAST))
    told = explain(wanted, search_with_memory(wanted))
    (place,), (more,) = told.places, told.one_more
    assert place.limit == "speed"
    assert place.gains["speed"] == pytest.approx(0.1, rel=0.02)
    assert place.gains["link"] < 0.005
    assert place.gains["memory"] < 0.005
    assert more.gained_tokens_per_s / more.tokens_per_s == pytest.approx(1 / 3, abs=0.02)
    assert more.more_usd_per_million_tokens == pytest.approx(
        0.0, abs=0.03 * (more.usd_per_million_tokens or 0)
    )
    assert "its speed binds" in told.sentences()[0]
    assert told.sentences()[1].startswith("One more a100: +")


def test_a_slow_network_binds_where_state_must_lie_twice() -> None:
    wanted = asked(with_nics(fleet(("A100", 2, 1)), {"A100": 1e8}), min_node_disjoint_holders=2)
    (place,) = explain(wanted, search_with_memory(wanted)).places
    assert place.limit == "link"
    assert place.gains["link"] > place.gains["speed"]


def test_memory_binds_where_a_pipeline_has_to_be_as_deep_as_the_fleet() -> None:
    """Neither node holds the model, so one pipeline fills and drains over both; with twice the
    memory each would work alone.
    """
    wanted = request(with_nics(small(("A100", 2, 1), mib=130), FAST), 6, batch=4, prove=False)
    answer = search_with_memory(wanted)
    assert len(answer.plan.pipelines) == 1
    (place,) = explain(wanted, answer).places
    assert place.limit == "memory"


def test_the_next_best_place_costs_what_the_plan_without_it_takes() -> None:
    """Each node is a pipeline of its own: a slow one can only be left out, and the others then do
    its sequences.
    """
    wanted = asked(with_nics(fleet(("A100", 1, 1), ("T4", 1, 1)), FAST), max_stages=1)
    answer = search_with_memory(wanted)
    assert len(answer.plan.pipelines) == 2
    slow = next(place for place in explain(wanted, answer).places if place.node_type == "t4")
    (fast,) = (p for p in answer.plan.pipelines if p.workers == ("a100-0/0",))
    number = 12 // fast.microbatch_sequences
    alone = replace(
        answer.plan, pipelines=(replace(fast, num_microbatches=number, most_in_flight=()),)
    )
    expected = wanted.cost.predict(alone).step_time_s / answer.prediction.step_time_s - 1
    assert slow.next_best == "left idle"
    assert slow.next_best_slower == pytest.approx(expected)
    assert "in 1 of 2 pipelines (1 of them its own)" in slow.sentence()


# ---- robustness ----


def alone(worker: str) -> Plan:
    return Plan("tiny", 12, 2, 128, (Pipeline((Stage(0, 6, (worker,)),), 6, 2),))


def cost() -> CostModel:
    return asked(fleet(("A100", 1, 1), ("T4", 1, 1))).cost


def test_one_worker_varies_as_its_layers_do() -> None:
    found, step_s = (
        robustness(cost(), alone("a100-0/0"), [], draws=30),
        cost().predict(alone("a100-0/0")).step_time_s,
    )
    assert found.draws == 30
    assert 0.95 * step_s <= min(found.step_time_s) < 0.97 * step_s
    assert 1.03 * step_s < max(found.step_time_s) <= 1.05 * step_s
    assert set(found.loss) == {0.0}
    assert "(30 draws, seed 0)" in found.sentence()
    assert found.to_document()["loss"] is None


def test_the_loss_is_against_the_quickest_candidate_of_each_draw() -> None:
    """An A100 is four times as quick as a T4: more than any draw makes good."""
    found = robustness(cost(), alone("t4-0/0"), [alone("a100-0/0")], draws=10)
    assert all(2.5 < loss < 3.6 for loss in found.loss)
    back = robustness(cost(), alone("a100-0/0"), [alone("t4-0/0")], draws=10)
    assert set(back.loss) == {0.0}
    assert robustness(cost(), alone("t4-0/0"), [alone("a100-0/0")], draws=10) == found


def test_without_doubt_a_plan_is_as_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LAYERS_OFF", 0.0)
    monkeypatch.setattr(limits, "LINKS_OFF", 0.0)
    plan = Plan(
        "tiny",
        12,
        2,
        128,
        (Pipeline((Stage(0, 4, ("a100-0/0",)), Stage(4, 2, ("t4-0/0",))), 6, 2),),
    )
    found = robustness(cost(), plan, [], draws=2)
    assert set(found.step_time_s) == {cost().predict(plan).step_time_s}


def test_links_vary_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LAYERS_OFF", 0.0)
    both = tuple(Pipeline((Stage(0, 6, (worker,)),), 3, 2) for worker in ("a100-0/0", "t4-0/0"))
    found = robustness(cost(), Plan("tiny", 12, 2, 128, both), [], draws=5)
    assert len(set(found.step_time_s)) == 5
