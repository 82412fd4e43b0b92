"""Ways of tokens to experts: what each costs, which is chosen, and what is refused."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from planner.cost.basis import Measurements, Workload
from planner.cost.layers.expert_dispatch import reach
from planner.cost.layers.layer_costs import MemoryChoices
from planner.cost.model import CostModel
from planner.cost.parameters import CostParameters
from planner.errors import ConfigError
from planner.inputs.fleet import Fleet
from planner.plans.model_spec import Experts, ModelSpec
from planner.plans.plan import Pipeline, Plan, Stage
from planner.strategies import Request, plan_with
from planner.strategies.autohet_uneven import check_like_gpus
from planner.strategies.dispatch import dispatch_reason
from tests.planner.cases import GIB, fleet, inside, model, profile, with_nics

FEW, MANY, LENGTH = Experts(64, 1, 1 << 20), Experts(64, 32, 1 << 20), 4096
"""Experts of which a token uses one, and of which it uses half: these are on every rank."""
SLOW_NODE = inside(fleet(("A100", 1, 4)), 1e9)
APART = with_nics(fleet(("A100", 4, 1)), {"A100": 1e8})
WORKERS = tuple(f"a100-{index}/0" for index in range(4))


def spec_of(experts: Experts | None) -> ModelSpec:
    spec = model(4, 1024)
    block = replace(spec.blocks[0], experts=experts)
    if experts is not None:
        block = replace(block, parameters=2 * block.parameters)
    return replace(spec, blocks=(block,) * 4)


def cost_of(
    experts: Experts | None, way: str = "auto", of: Fleet = APART, *, may_cut: bool = False
) -> CostModel:
    return CostModel(
        of,
        Workload(spec_of(experts), LENGTH, "fp32"),
        Measurements(profile(sequence_length=LENGTH)),
        CostParameters(may_cut_sequence=may_cut),
        choices=MemoryChoices(expert_dispatch=way),
    )


def plan_of(*, is_cut: bool = False, way: str | None = None) -> Plan:
    stage = Stage(0, 4, WORKERS, sequence_parallel=is_cut, expert_dispatch=way)  # type: ignore[arg-type]
    return Plan("tiny", 4, 1, LENGTH, (Pipeline((stage,), 4, 1),))


def ways(plan: Plan) -> set[str | None]:
    return {stage.expert_dispatch for stage in plan.stages}


def test_the_reach_of_a_rank_is_that_of_random_choices() -> None:
    draw, experts = random.Random(0), Experts(16, 3, 1)
    hits = sum(min(draw.sample(range(16), 3)) < 4 for _ in range(20000))
    assert reach(experts, 4) == pytest.approx(hits / 20000, abs=0.01)
    assert reach(experts, 16) == 1.0


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(
    ("experts", "expected"),
    [(FEW, "all_to_all"), (MANY, None), (replace(FEW, has_shared=True), None)],
)
def test_the_faster_way_is_chosen(experts: Experts, expected: str | None, is_cut: bool) -> None:
    """Tokens that every rank needs, or shared experts, leave nothing to save."""
    cost = cost_of(experts)
    chosen = cost.stage_choices.with_dispatch(plan_of(is_cut=is_cut))
    assert ways(chosen) == {expected}
    seconds = {
        way: cost.predict(plan_of(is_cut=is_cut, way=way)).step_time_s
        for way in (None, "sum", "all_to_all")
    }
    assert seconds[None] == seconds["sum"]
    assert cost.predict(chosen).step_time_s == min(seconds.values())
    assert seconds["sum"] != seconds["all_to_all"]


def test_bytes_over_slow_links_decide_the_seconds() -> None:
    """Of a block: two exchanges of rows and half an all-reduce instead of a whole one."""
    even = replace(FEW, number=4)
    cost = cost_of(even)
    hidden = LENGTH * 1024 * 4
    nic = 1e8 * cost.parameters.efficiency_inter
    group = cost.dispatch.group_of(plan_of().stages[0], 1, recomputes=False)
    forward, backward = cost.dispatch.added_s(even, group)
    load = cost.dispatch.received_shares(even, group)
    assert load == [pytest.approx(load[0])] * 4
    rows = load[0] * hidden / 4 * (2 + 8 / 4096)
    expected = (3 * rows - 3 / 4 * hidden) / (nic * cost.parameters.all_reduce_efficiency)
    assert forward == pytest.approx(expected, rel=0.01)
    assert backward == pytest.approx(forward, rel=0.01)


def test_a_recomputed_block_sends_its_tokens_again() -> None:
    cost, stage = cost_of(FEW), plan_of().stages[0]
    once, again = (
        cost.dispatch.added_s(FEW, cost.dispatch.group_of(stage, 1, recomputes=each))
        for each in (False, True)
    )
    assert again == (once[0], pytest.approx(once[0] + once[1]))


def cuts(plan: Plan) -> list[bool]:
    return [stage.sequence_parallel for stage in plan.stages]


def test_a_stage_whose_ranks_have_their_parts_saves_the_gather() -> None:
    """So it is sequence parallel with all-to-all, and whole again with a sum."""
    whole, cut = cost_of(FEW), cost_of(FEW, may_cut=True)
    plan = cut.stage_choices.with_dispatch(plan_of())
    assert (ways(plan), cuts(plan)) == ({"all_to_all"}, [True])
    assert cut.stage_choices.with_dispatch(plan) == plan
    assert (
        cut.predict(plan).step_time_s
        < whole.predict(whole.stage_choices.with_dispatch(plan_of())).step_time_s
    )
    back = cost_of(MANY, may_cut=True).stage_choices.with_dispatch(plan)
    assert (ways(back), cuts(back)) == ({None}, [False])
    kept = cost_of(MANY, may_cut=True).stage_choices.with_dispatch(plan_of(is_cut=True))
    assert (ways(kept), cuts(kept)) == ({None}, [True])


def test_a_stage_that_recomputes_selectively_stays_whole() -> None:
    plan = plan_of()
    stage = replace(plan.stages[0], recompute="selective")
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(stage,)),))
    chosen = cost_of(FEW, may_cut=True).stage_choices.with_dispatch(plan)
    assert (ways(chosen), cuts(chosen)) == ({"all_to_all"}, [False])


@pytest.mark.parametrize("may_cut", [False, True])
@pytest.mark.parametrize("of", [SLOW_NODE, APART], ids=["one node", "four nodes"])
@pytest.mark.parametrize("way", ["auto", "all_to_all"])
def test_no_stage_is_faster_than_the_layers_of_the_bound(
    way: str, of: Fleet, may_cut: bool
) -> None:
    """A search's lower bound adds up layers with the way that a plan may choose."""
    for experts in (FEW, MANY):
        cost = cost_of(experts, way, of, may_cut=may_cut)
        workers = tuple(of.workers)
        plan = plan_of()
        stage = replace(plan.stages[0], workers=workers)
        pipeline = cost.stage_choices.with_dispatch(
            replace(plan, pipelines=(replace(plan.pipelines[0], stages=(stage,)),))
        ).pipelines[0]
        layers = cost.layers.costs(of.nodes[0].node_type, 4, 1)
        least = float((layers.forward_s + layers.backward_s).sum())
        assert least <= sum(cost.stages.seconds(pipeline, 0)) * (1 + 1e-9)
        if way == "auto":
            by_sum = cost_of(experts, "sum", of).layers.costs(of.nodes[0].node_type, 4, 1)
            assert np.all(
                layers.forward_s + layers.backward_s <= by_sum.forward_s + by_sum.backward_s
            )


def test_memory_has_the_rows_that_are_sent_and_received() -> None:
    cost = cost_of(MANY)
    more = [
        cost.predict(plan_of(way=way)).memory_bytes_by_worker[WORKERS[0]]
        for way in ("all_to_all", None)
    ]
    hidden = LENGTH * 1024 * 4
    assert more[0] - more[1] == pytest.approx(4 * hidden, rel=0.01), "all tokens, four times"


def of_memory(num_bytes: int, of: Fleet = APART) -> Fleet:
    """The fleet with so much memory on each GPU."""
    nodes = (
        replace(node, node_type=replace(node.node_type, gpu_memory_bytes=num_bytes))
        for node in of.nodes
    )
    return Fleet(0, tuple(nodes))


def test_a_way_that_does_not_fit_is_not_chosen() -> None:
    cost = cost_of(FEW)
    assert ways(cost.stage_choices.with_dispatch(plan_of())) == {"all_to_all"}
    below, above = 0, GIB
    while above - below > GIB // 1000:
        middle = (below + above) // 2
        fits = cost_of(FEW, of=of_memory(middle)).predict(plan_of()).fits
        below, above = (below, middle) if fits else (middle, above)
    tight = cost_of(FEW, of=of_memory(above))
    chosen = tight.stage_choices.with_dispatch(plan_of())
    assert ways(chosen) == {None}
    assert "all-to-all would not fit the memory" in dispatch_reason(tight, chosen)


def test_the_job_may_name_the_way() -> None:
    assert ways(cost_of(FEW, "sum").stage_choices.with_dispatch(plan_of())) == {None}
    forced = cost_of(MANY, "all_to_all")
    assert ways(forced.stage_choices.with_dispatch(plan_of())) == {"all_to_all"}
    assert "as the job asks" in dispatch_reason(forced, plan_of(way="all_to_all"))


def test_a_search_chooses_and_says_why() -> None:
    stage = Stage(0, 4, SLOW_NODE.workers, expert_dispatch="all_to_all")
    on_all = Plan("tiny", 4, 1, LENGTH, (Pipeline((stage,), 4, 1),))
    needed = max(cost_of(FEW, of=SLOW_NODE).memory_of.by_worker(on_all).values())
    # fewer GPUs do not hold the model in one stage
    tight = of_memory(int(1.15 * needed), SLOW_NODE)
    answers = {}
    for way in ("auto", "sum"):
        cost = cost_of(FEW, way, tight)
        request = Request(tight, cost.spec, cost, 4, LENGTH, max_stages=1)
        answers[way] = plan_with("autohet", request)
    assert ways(answers["auto"].plan) == {"all_to_all"}
    assert ways(answers["sum"].plan) == {None}
    found = {way: answer.prediction.step_time_s for way, answer in answers.items()}
    assert found["auto"] < found["sum"]
    assert "by all-to-all in 1 of 1 stages with a choice (a sum would take up to" in (
        answers["auto"].choice
    )
    assert any("all-to-all" in note for note in answers["auto"].prediction.estimated)
    assert "all-to-all" not in answers["sum"].choice


def test_a_plan_keeps_its_way_as_text_and_reads_as_before_without() -> None:
    for way in (None, "sum", "all_to_all"):
        plan = plan_of(way=way)
        assert Plan.from_json(plan.to_json()) == plan
    assert "expert_dispatch" not in plan_of().to_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"expert_dispatch": "each"},
            "'expert_dispatch' of stage 0 of pipeline 0 is 'each'; expected one of sum, all_to_all",
        ),
        ({"expert_dispatch": "sum", "spmd": {}}, "has 'expert_dispatch' and 'spmd'"),
    ],
)
def test_what_no_stage_can_do_is_refused(changes: dict[str, object], message: str) -> None:
    document = json.loads(plan_of().to_json())
    document["pipelines"][0]["stages"][0] |= changes
    with pytest.raises(ConfigError, match=message):
        Plan.from_document(document)


def test_all_to_all_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="stage 0 of pipeline 0 is all_to_all, but none of its"):
        cost_of(None).predict(plan_of(way="all_to_all"))


def test_unlike_gpus_may_share_a_stage_whose_tokens_one_rank_routes() -> None:
    of = fleet(("A100", 2, 1), ("A10G", 2, 1))
    workers = ("a100-0/0", "a100-1/0", "a10g-0/0", "a10g-1/0")
    for way in (None, "all_to_all"):
        plan = plan_of(way=way)
        stage = replace(plan.stages[0], workers=workers)
        mixed = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(stage,)),))
        if way is None:
            with pytest.raises(ConfigError, match="or expert_dispatch: all_to_all"):
                check_like_gpus(mixed, of, spec_of(FEW))
        else:
            check_like_gpus(mixed, of, spec_of(FEW))
