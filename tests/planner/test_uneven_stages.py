"""Uneven stages that `autohet` proposes: where they pay, with which shares, what is proved of them,
and where there are none.
"""

import copy
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from planner.answers.explain import explain
from planner.answers.replan import replan
from planner.cost.basis import Measurements, Workload
from planner.cost.model import CostModel
from planner.cost.parameters import OURS, CostParameters, framework_parameters
from planner.inputs.cluster import GIB
from planner.inputs.fleet import Fleet
from planner.inputs.profile import ProfileTable
from planner.plans.model_spec import ModelSpec
from planner.plans.plan import Pipeline, Plan, Stage
from planner.plans.plan_checks import check_plan
from planner.search.bounds.bound import Bound
from planner.search.memory import search_with_memory
from planner.search.problem import limits
from planner.search.problem.cost_tables import tables_of
from planner.search.problem.request import Request
from planner.search.walk.moves import Moves
from planner.strategies import plan_with
from planner.strategies.autohet_uneven import (
    is_bounded,
    search_with_uneven,
    uneven_groups,
    uneven_stages,
)
from tests.planner.cases import (
    DEMO,
    MEMORY_GIB,
    fleet,
    model,
    profile,
    request,
    with_gpus,
    with_nics,
)

pytestmark = pytest.mark.thorough


def asked(
    types: Any, batch: int, *, joined: bool = False, lost: str = "", **wishes: Any
) -> Request:
    """joined: whether nodes reach each other faster than their GPUs do. lost: a node that has three
    of its GPUs left.
    """
    of = fleet(*types, memory_gib=MEMORY_GIB | wishes.pop("memory_gib", {}))
    of = with_nics(of, dict.fromkeys(MEMORY_GIB, 4e11)) if joined else of
    return request(with_gpus(of, lost, 3), batch, wishes.pop("spec", None), **wishes)


def every_share(plan: Plan) -> Iterator[Plan]:
    """The plan with all shares that its uneven stages could have."""
    pipelines = []
    for pipeline in plan.pipelines:
        stages = [
            [stage] if not stage.tp_shares else list(_shared(stage)) for stage in pipeline.stages
        ]
        pipelines.append(
            [replace(pipeline, stages=stages) for stages in itertools.product(*stages)]
        )
    yield from (replace(plan, pipelines=chosen) for chosen in itertools.product(*pipelines))


def _shared(stage: Stage) -> Iterator[Stage]:
    for parts in (4, 8):
        for shares in itertools.product(range(1, parts), repeat=stage.tp_degree):
            if sum(shares) == parts:
                yield replace(stage, tp_shares=shares)


LOST = (("A10G", 1, 3),)
FAST_AND_SLOW = (("A100", 1, 1), ("A10G", 1, 2))
CASES = {
    "a node that lost a GPU": (LOST, 4, {}),
    "beside a whole one": (
        (("A10G", 2, 4),),
        4,
        {"lost": "a10g-1", "spec": model(24, 1024), "microbatch_sequences": 2},
    ),
    "1 fast and 2 slow": (FAST_AND_SLOW, 2, {"joined": True, "microbatch_sequences": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_an_uneven_stage_where_it_pays(name: str) -> None:
    types, batch, wishes = CASES[name]
    wanted = asked(types, batch, **wishes)
    answer, even = plan_with("autohet", wanted), search_with_memory(wanted)
    stages = uneven_stages(answer.plan)
    assert stages
    assert not uneven_stages(even.plan)
    assert answer.prediction.step_time_s * limits.MIN_SPEEDUP <= even.prediction.step_time_s
    assert answer.prediction.fits
    check_plan(answer.plan, wanted.spec.num_layers, max_tp_degree=8)
    assert Plan.from_json(answer.plan.to_json()) == answer.plan
    every = [
        wanted.cost.predict(wanted.cost.stage_choices.working_ahead(plan))
        for plan in every_share(answer.plan)
    ]
    given = [wanted.cost.predict(plan) for plan in every_share(answer.plan)]
    assert len(given) > 10
    best_s = min(each.step_time_s for each in [*every, *given] if each.fits)
    assert answer.prediction.step_time_s == pytest.approx(best_s, rel=1e-9)
    longer = even.prediction.step_time_s / answer.prediction.step_time_s - 1
    assert f"{stages[0].tp_shares[0]} to {stages[0].workers[0]}" in answer.choice
    assert f"with even stages alone the step would be {longer:.1%} longer" in answer.choice
    assert answer.choice in explain(wanted, answer).sentences()[0]


ORDINARY = (
    (DEMO, 12, {}),
    (((("A10G", 2, 4)), ("T4", 1, 4)), 16, {}),
    ((("A100", 1, 2), ("A10G", 2, 2)), 8, {}),
    ((("T4", 1, 4),), 4, {}),
    ((("A10G", 3, 1),), 4, {"joined": True}),
)


@pytest.mark.parametrize(("types", "batch", "wishes"), ORDINARY)
def test_other_fleets_are_searched_once_and_as_ever(
    types: Any, batch: int, wishes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = asked(types, batch, **wishes)
    without = search_with_memory(wanted)
    calls = []
    monkeypatch.setattr(
        "planner.strategies.autohet_uneven.search_with_memory",
        lambda *given: calls.append(given) or search_with_memory(*given),
    )
    monkeypatch.setattr("planner.strategies.autohet_uneven.draft", None)
    found = search_with_uneven(wanted)
    assert len(calls) == 1
    assert (found.plan, found.search, found.choice, found.rejected) == (
        without.plan,
        without.search,
        without.choice,
        without.rejected,
    )


def test_an_uneven_stage_that_gains_little_is_left() -> None:
    """Three pipelines of one GPU each share sixteen sequences nearly as well."""
    wanted = asked(LOST, 15, microbatch_sequences=1)
    answer = plan_with("autohet", wanted)
    assert uneven_groups(wanted)
    assert not uneven_stages(answer.plan)
    assert answer.plan == search_with_memory(wanted).plan


def test_an_uneven_stage_that_gains_less_than_is_asked_for_is_refused_and_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It gains a seventh."""
    wanted = asked(LOST, 4)
    monkeypatch.setattr(limits, "MIN_SPEEDUP", 1.16)
    answer = plan_with("autohet", wanted)
    assert not uneven_stages(answer.plan)
    (refused,) = [item for item in answer.rejected if item.what == "stages of uneven shares"]
    assert "not 16% faster than even ones" in refused.why


def test_groups_that_are_no_faster_than_a_part_of_them_are_not_looked_at() -> None:
    slow = asked(LOST, 4)
    nodes = (
        replace(n, node_type=replace(n.node_type, intra_node_bytes_per_s=1e7))
        for n in slow.fleet.nodes
    )
    of = Fleet(0, tuple(nodes))
    assert uneven_groups(slow)
    assert not uneven_groups(request(of, 4))
    assert not uneven_groups(asked(LOST, 4, max_tp_degree=2))
    assert not uneven_groups(asked(FAST_AND_SLOW, 4))


def test_shares_follow_memory_where_those_by_speed_do_not_fit() -> None:
    """With a little less memory than its share by speed takes, the A100 has less; with hardly any,
    the others have most.
    """
    stage = Stage(0, 8, ("a100-0/0", "a10g-0/0", "a10g-0/1"), tp_shares=(2, 1, 1))
    plan = Plan("tiny", 2, 2, 128, (Pipeline((stage,), 1, 2),))

    def chosen(gib: float) -> tuple[Plan, bool]:
        cost = asked(
            FAST_AND_SLOW, 2, spec=model(8, 2048), joined=True, memory_gib={"A100": gib}
        ).cost
        ready = cost.stage_choices.working_ahead(plan)
        assert all(
            cost.predict(ready).step_time_s <= cost.predict(p).step_time_s
            for p in every_share(ready)
            if cost.predict(p).fits
        )
        return ready, cost.predict(ready).fits

    quick, fits = chosen(24.0)
    assert fits
    seen = [chosen(gib) for gib in (9.0, 5.5, 4.5)]
    shares = [ready.pipelines[0].stages[0].share(0).fraction for ready, fits in seen if fits]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < quick.pipelines[0].stages[0].share(0).fraction


def with_key_values(of: ModelSpec, units: int, share: float) -> ModelSpec:
    """The model with keys and values of so many heads, and that share of a block's parameters."""
    blocks = (
        replace(b, key_value_units=units, key_value_parameters=int(share * b.parameters))
        for b in of.blocks
    )
    return replace(of, num_kv_heads=units, blocks=tuple(blocks))


def test_who_overlaps_both_key_value_heads_has_fewer_parts() -> None:
    """Of three GPUs one has some of both heads, whose keys and values it holds whole: the middle
    one, wherever the shares end.
    """
    spec = with_key_values(model(8, 1024), 2, 0.25)
    wanted = asked(LOST, 4, spec=spec, microbatch_sequences=2)
    (group,) = uneven_groups(wanted)
    assert group.shares == (3, 2, 3)
    stage = Stage(0, 8, ("a10g-0/0", "a10g-0/1", "a10g-0/2"), tp_shares=(3, 3, 2))
    plan = Plan("tiny", 4, 2, 128, (Pipeline((stage,), 2, 2),))
    most, least = (
        max(p.memory_bytes_by_worker.values())
        for p in (wanted.cost.predict(plan), wanted.cost.predict(_turned(plan)))
    )
    assert most > least
    limit = ((most + least) / 2 / GIB - 0.03 * MEMORY_GIB["A10G"]) / (
        0.97 - 0.03
    )  # margin and context are shares of it
    tight = asked(LOST, 4, spec=spec, microbatch_sequences=2, memory_gib={"A10G": limit})
    ready = tight.cost.stage_choices.working_ahead(plan)
    assert not tight.cost.predict(plan).fits
    assert tight.cost.predict(ready).fits


def _turned(plan: Plan) -> Plan:
    """With its stage's shares 3, 2, 3."""
    (pipeline,) = plan.pipelines
    return replace(
        plan,
        pipelines=(replace(pipeline, stages=(replace(pipeline.stages[0], tp_shares=(3, 2, 3)),)),),
    )


@pytest.mark.parametrize("name", [*CASES, "nodes of two"])
def test_moves_keep_uneven_stages_whole(name: str) -> None:
    more = {
        "nodes of two": (
            (("A100", 2, 2), ("A10G", 2, 2)),
            2,
            {"joined": True, "microbatch_sequences": 2},
        )
    }
    types, batch, wishes = (CASES | more)[name]
    wanted = asked(types, batch, **wishes)
    wanted = replace(wanted, uneven=uneven_groups(wanted))
    moves = Moves(tables_of(wanted), random.Random(1))
    best = plan = plan_with("autohet", replace(wanted, prove=False)).plan
    seen = 0
    for number in range(400):
        plan = best if number % 4 == 0 else plan
        drawn = moves.draw(plan)
        if drawn is not None:
            check_plan(drawn, wanted.spec.num_layers, max_tp_degree=8)
            plan = wanted.cost.stage_choices.working_ahead(drawn)
            check_plan(plan, wanted.spec.num_layers, max_tp_degree=8)
            for stage in uneven_stages(plan):
                nodes = {
                    wanted.fleet.node_of(worker).name: wanted.fleet.gpu_type(worker)
                    for worker in stage.workers
                }
                assert len(nodes) == len(set(nodes.values())), "GPUs of one type lie on one node"
                seen += 1
    assert seen > 20


def test_neighbours_of_unlike_sizes_merge_into_an_uneven_stage() -> None:
    wanted = asked(LOST, 4, microbatch_sequences=2)
    stages = (Stage(0, 5, ("a10g-0/0", "a10g-0/1")), Stage(5, 3, ("a10g-0/2",)))
    plan = Plan("tiny", 4, 2, 128, (Pipeline(stages, 2, 2),))
    moves = Moves(tables_of(replace(wanted, uneven=uneven_groups(wanted))), random.Random(0))
    drawn = [moves.draw(plan) for _ in range(200)]
    assert any(each is not None and uneven_stages(each) for each in drawn)


@pytest.mark.parametrize(
    ("types", "joined"), [(LOST, False), ((("A100", 1, 1), ("A10G", 2, 2)), True)]
)
def test_tables_have_what_the_prediction_says_of_uneven_stages(types: Any, joined: bool) -> None:
    wanted = asked(types, 4, joined=joined)
    tables = tables_of(replace(wanted, uneven=uneven_groups(wanted)))
    groups = (
        [("a10g-0/0", "a10g-0/1", "a10g-0/2")]
        if not joined
        else [("a100-0/0", "a10g-1/0"), ("a10g-1/0", "a100-0/0", "a10g-1/1")]
    )
    for workers, size in itertools.product(groups, (1, 4)):
        row = tables.row_of(workers, size)
        assert row is not None
        group = tables.kind(row).group
        assert group is not None
        stage = Stage(0, 8, tuple(sorted(workers)), tp_shares=group.shares)
        seconds = wanted.cost.stages.seconds(Pipeline((stage,), 1, size), 0)
        by_layer = float(tables.sums.time_sums[row, -1]) + tables.stage_overhead_s
        assert by_layer == pytest.approx(sum(seconds), rel=0.03 if joined else 1e-9), (
            "of unlike GPUs each layer's slowest counts"
        )
        assert by_layer >= sum(seconds) * (1 - 1e-9)
    assert not joined or tables.row_of(("a100-0/0", "a10g-0/0", "a10g-1/0"), 1) is None


@pytest.mark.parametrize(
    "types", [LOST, (("T4", 1, 3), ("A10G", 1, 1)), (("A10G", 1, 3), ("A100", 1, 2))]
)
@pytest.mark.parametrize("batch", [2, 4])
def test_the_bound_holds_for_uneven_stages_on_one_node(types: Any, batch: int) -> None:
    wanted = asked(types, batch, spec=model(4))
    answer = plan_with("autohet", wanted)
    uneven = replace(wanted, uneven=uneven_groups(wanted))
    bound_s = Bound(tables_of(uneven)).seconds()
    for plan in every_share(answer.plan):
        assert bound_s <= wanted.cost.predict(plan).step_time_s * (1 + 1e-9)
    assert is_bounded(uneven, answer.plan)
    assert not answer.search.proof.startswith("ERROR")


def test_the_bound_holds_where_a_layer_gains_nothing_from_more_gpus() -> None:
    """The head is slowest where it has fewest parts, blocks where they have most: no GPU has
    both.
    """
    slow = {("head", 4): 9.0}
    measured = (
        replace(m, forward_s=m.forward_s * slow.get((m.layer, m.tp_degree), 1.0), backward_s=None)
        for m in profile().measurements
    )
    of, parameters = asked(LOST, 4).fleet, framework_parameters(OURS, CostParameters())
    cost = CostModel(
        of, Workload(model(4), 128, "fp32"), Measurements(ProfileTable(measured)), parameters
    )
    wanted = Request(of, model(4), cost, 4, 128, max_microbatch_sequences=1)
    tables = tables_of(replace(wanted, uneven=uneven_groups(wanted)))
    workers = ("a10g-0/0", "a10g-0/1", "a10g-0/2")
    row = tables.row_of(workers, 1)
    assert row is not None
    stages = _shared(Stage(0, 4, workers, tp_shares=(3, 3, 2)))
    assert float(tables.sums.time_sums[row, -1]) <= min(
        sum(cost.stages.seconds(Pipeline((s,), 4, 1), 0)) for s in stages
    ) * (1 + 1e-9)


def test_no_bound_is_shown_where_unlike_nodes_may_share_a_stage() -> None:
    answer = plan_with("autohet", asked(FAST_AND_SLOW, 16, joined=True))
    assert (answer.search.lower_bound_s, answer.search.gap) == (None, None)
    assert "none holds for the uneven stages" in answer.search.proof


def test_a_known_plan_with_uneven_stages_is_not_held_against_the_bound() -> None:
    """No search proposes a stage over nodes that are not quite joined; a plan that was given may
    have it.
    """
    wanted = request(
        with_nics(fleet(*FAST_AND_SLOW), dict.fromkeys(MEMORY_GIB, 9e10)), 2, microbatch_sequences=2
    )
    assert not uneven_groups(wanted)
    stage = Stage(0, 8, ("a100-0/0", "a10g-0/0", "a10g-0/1"), tp_shares=(2, 1, 1))
    known = Plan("tiny", 2, 2, 128, (Pipeline((stage,), 1, 2),))
    answer = search_with_uneven(wanted, [known])
    assert uneven_stages(answer.plan)
    assert answer.search.lower_bound_s is None
    assert not answer.search.proof.startswith("ERROR")


@pytest.mark.parametrize("thorough", [False, None])
def test_a_node_that_lost_a_gpu_goes_on_with_three(thorough: bool | None) -> None:
    whole, left = (
        asked((("A10G", 2, 4),), 4, lost=lost, spec=model(24, 1024), microbatch_sequences=2)
        for lost in ("", "a10g-1")
    )
    previous = plan_with("autohet", whole).plan
    decision = replan(previous, left, thorough=thorough)
    plan = decision.answer.plan
    check_plan(plan, 24, max_tp_degree=8)
    (stage,) = uneven_stages(plan)
    assert stage.workers == ("a10g-1/0", "a10g-1/1", "a10g-1/2")
    assert "are cut into 8 parts" in decision.reason
    assert decision.answer.search.lower_bound_s is None or decision.answer.search.gap >= 0


def test_shares_are_uneven_wherever_a_runtime_allows_it_whatever_becomes_of_its_state() -> None:
    wanted = asked(LOST, 4)
    for name, groups in (("elastic", uneven_groups(wanted)), ("uneven_shares", ())):
        cost = copy.copy(wanted.cost)
        cost.parameters = replace(cost.parameters, **{name: False})
        assert uneven_groups(replace(wanted, cost=cost)) == groups


@pytest.mark.parametrize("framework", ["deepspeed", "megatron"])
def test_a_framework_that_cuts_evenly_has_no_uneven_stages(framework: str) -> None:
    wanted = asked(LOST, 4)
    assert uneven_groups(wanted)
    assert not uneven_groups(asked(LOST, 4, framework=framework))
