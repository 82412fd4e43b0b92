"""Costs and searches of fleets whose GPU types compute in several formats."""

from dataclasses import replace

import numpy as np
import pytest

from planner.cost.basis import Measurements, Workload
from planner.cost.model import CostModel
from planner.cost.parameters import OURS, CostParameters, framework_parameters
from planner.errors import InfeasibleError
from planner.inputs.profile import ProfileTable
from planner.plans.plan import Pipeline, Plan, Stage, TensorShare
from planner.strategies import Request, plan_with
from planner.strategies.formats import search_formats
from tests.planner.cases import fleet, model, profile

LENGTH = 128
FLEET = (("A100", 2, 2), ("T4", 2, 2))
SMALL = (("A100", 1, 2), ("T4", 1, 2))


def table(**slower_in_fp16):
    """Profile in bf16 and fp16; fp16 takes the given times as long, 1 if not given."""
    rows = []
    plain = profile()
    for key in plain.keys:
        factor = slower_in_fp16.get(key.gpu_type, 1.0)
        for by_size in plain.layers(key).values():
            for row in by_size.values():
                rows.append(replace(row, dtype="bf16"))
                forward_s, backward_s = row.forward_s * factor, row.backward_s * factor
                rows.append(replace(row, dtype="fp16", forward_s=forward_s, backward_s=backward_s))
    return ProfileTable(rows)


def cost(formats=None, of=FLEET, precision="bf16", times=None, **changes):
    parameters = framework_parameters(OURS, CostParameters())
    return CostModel(
        fleet(*of),
        Workload(model(), LENGTH, precision, formats=formats or {}),
        Measurements(times or table(T4=0.25)),
        replace(parameters, **changes),
    )


def request(formats=None, of=FLEET, **wishes):
    made = cost(formats, of)
    few = {"microbatch_sequences": 2, "max_tp_degree": 1, "prove": False, "brief": True}
    return Request(made.fleet, made.spec, made, 8, LENGTH, **few, **wishes)


def chain(*stages):
    return Plan("tiny", 8, 2, LENGTH, (Pipeline(stages, 4, 2),))


T4 = Stage(0, 3, ("t4-0/0",))
A100 = Stage(3, 5, ("a100-0/0",))


def test_each_stage_takes_the_time_of_its_own_format():
    """T4 in fp16 takes a quarter of its time in bf16; A100 keeps its own."""
    mixed, bf16, fp16 = cost({"T4": "fp16"}), cost(), cost(precision="fp16")
    pipeline = chain(T4, A100).pipelines[0]
    assert mixed.stages.seconds(pipeline, 0) == fp16.stages.seconds(pipeline, 0)
    assert mixed.stages.seconds(pipeline, 1) == bf16.stages.seconds(pipeline, 1)
    assert mixed.stages.seconds(pipeline, 0)[0] < 0.5 * bf16.stages.seconds(pipeline, 0)[0]
    (t4,) = [kind for kind in mixed.fleet.node_types if kind.gpu_type == "T4"]
    np.testing.assert_array_equal(
        mixed.layers.costs(t4, 1, 2).forward_s, fp16.layers.costs(t4, 1, 2).forward_s
    )


def test_a_stage_that_names_its_format_takes_that_times_whatever_its_type_does():
    named = chain(replace(T4, compute="fp16"), A100).pipelines[0]
    for formats in (None, {"T4": "fp16"}):
        assert cost(formats).stages.seconds(named, 0) == cost(precision="fp16").stages.seconds(
            named, 0
        )
    other = chain(replace(T4, compute="bf16"), A100).pipelines[0]
    assert cost({"T4": "fp16"}).stages.seconds(other, 0) == cost().stages.seconds(other, 0)


def test_masters_moments_and_sums_stay_and_borders_of_fp16_carry_fp32():
    """Wrong: an fp16 stage has other state, or its borders carry 2 bytes a value."""
    plan = chain(T4, A100)
    mixed, plain = cost({"T4": "fp16"}), cost()
    more = {
        worker: mixed.memory_of.by_worker(plan)[worker] - plain.memory_of.by_worker(plan)[worker]
        for worker in plan.workers
    }
    values = 2 * LENGTH * model().hidden_size
    messages = mixed.parameters.border_messages
    assert more == {worker: 2 * messages * values for worker in plan.workers}
    t4, a100 = (mixed.fleet.node_of(w).node_type for w in plan.workers)
    wide = mixed.boundaries.between_s(t4, a100, 8) - mixed.links.latency(False)
    narrow = plain.boundaries.between_s(t4, a100, 8) - plain.links.latency(False)
    assert wide == pytest.approx(2 * narrow)
    assert mixed.boundaries.between_s(t4, t4, 8) == mixed.boundaries.between_s(t4, a100, 8)
    assert mixed.boundaries.between_s(a100, a100, 8) == plain.boundaries.between_s(a100, a100, 8)


def test_borders_of_a_plan_are_as_wide_in_its_pipelines():
    plan = chain(T4, A100)
    both = [
        each.steps.pipeline_times(plan, plan.pipelines[0])
        for each in (cost({"T4": "fp16"}), cost())
    ]
    latency_s = cost().links.latency(False)
    mixed_s, plain_s = ([*t.send_forward_s, *t.send_backward_s] for t in both)
    for mixed, plain in zip(mixed_s, plain_s, strict=True):
        assert mixed - latency_s == pytest.approx(2 * (plain - latency_s))


def test_other_frameworks_keep_the_borders_of_fp16_narrow():
    parameters = framework_parameters("megatron", CostParameters())
    made = CostModel(
        fleet(*FLEET), Workload(model(), LENGTH, "fp16"), Measurements(table()), parameters
    )
    assert made.stage_formats.border_bytes(1, "fp16", "fp16") == LENGTH * model().hidden_size * 2


def test_a_stage_of_two_types_computes_in_what_both_have():
    mixed = cost({"T4": "fp16"})
    stage = Stage(0, 8, ("a100-0/0", "a100-0/1", "t4-0/0"), tp_shares=(2, 1, 1))
    (pipeline,) = mixed.stage_choices.with_formats(chain(stage)).pipelines
    assert pipeline.stages[0].compute == "fp16"
    assert mixed.stage_formats.in_use(chain(stage)) == {"A100": ["fp16"], "T4": ["fp16"]}


def test_plans_are_run_with_the_formats_of_their_workers():
    """Wrong: a stage that moved to other GPUs keeps the format of those it had."""
    mixed = cost({"T4": "fp16"})
    stale = chain(replace(T4, workers=("a100-1/0",), compute="fp16"), A100)
    assert [s.compute for s in mixed.stage_choices.working_ahead(stale).pipelines[0].stages] == [
        None,
        None,
    ]
    ran = mixed.stage_choices.working_ahead(chain(T4, A100))
    assert [s.compute for s in ran.pipelines[0].stages] == ["fp16", None]
    assert [s.compute for s in cost().stage_choices.working_ahead(ran).pipelines[0].stages] == [
        "fp16",
        None,
    ]


@pytest.mark.parametrize("strategy", ["autohet", "metis", "fasop", "megatron", "varuna"])
def test_every_strategy_says_the_formats_of_its_stages(strategy):
    answer = plan_with(strategy, request({"T4": "fp16"}, of=(("T4", 1, 2),)))
    stages = [stage for pipeline in answer.plan.pipelines for stage in pipeline.stages]
    assert {stage.compute for stage in stages} == {"fp16"}
    assert answer.prediction.plan == answer.plan
    assert cost({"T4": "fp16"}).predict(answer.plan).step_time_s == pytest.approx(
        answer.prediction.step_time_s
    )


def test_programs_use_no_types_of_other_formats():
    with pytest.raises(InfeasibleError, match="no GPU type of the fleet computes in bf16"):
        plan_with("hap", request({"T4": "fp16"}, of=(("T4", 2, 2),)))


def test_a_fleet_with_older_types_is_no_slower_and_the_plan_says_what_they_gain():
    """The other types are searched alone, too."""
    without = plan_with("autohet", request(of=(("A100", 1, 2),)))
    answer = plan_with("autohet", request({"T4": "fp16"}, of=SMALL))
    assert answer.prediction.step_time_s < 0.95 * without.prediction.step_time_s
    assert answer.without_formats.step_time_s == pytest.approx(without.prediction.step_time_s)
    assert "T4 in fp16: " in answer.choice
    assert f"without {without.prediction.step_time_s:.4g} s a step" in answer.choice


@pytest.mark.parametrize(
    "slower",
    [
        lambda: plan_with("megatron", request({"T4": "fp16"}, of=(("T4", 1, 2),))),
        # It leaves the T4s idle, and is slower all the same.
        lambda: plan_with("megatron", request(of=(("A100", 1, 1),))),
    ],
)
def test_a_plan_of_the_part_is_taken_where_the_search_of_all_found_a_slower_one(slower):
    """The search is a heuristic: a larger fleet may get a worse plan."""
    asked = request({"T4": "fp16"}, of=SMALL)
    good = plan_with("megatron", request(of=(("A100", 1, 2),)))
    slow = slower()

    def search(of):
        return slow if len(of.fleet.nodes) == 2 else good

    answer = search_formats(search, asked)
    assert answer.plan == good.plan
    assert {w for idle in answer.idle for w in idle.workers} >= {"t4-0/0", "t4-0/1"}
    assert any("T4 in fp16" in each.what for each in answer.rejected)


# ---- fp8 ----


def large(formats=None, times=None):
    """Blocks wide enough that products take most of their time; nothing of them is measured."""
    kind = replace(fleet(("A100", 1, 2)).nodes[0].node_type, gpu_type="H100-80")
    of = fleet(("A100", 1, 2))
    of = replace(of, nodes=tuple(replace(node, node_type=kind) for node in of.nodes))
    return CostModel(
        of,
        Workload(model(width=8192), 4096, "bf16", formats=formats or {}),
        Measurements(times or ProfileTable([])),
        framework_parameters(OURS, CostParameters()),
    )


def test_fp8_speeds_up_products_of_blocks_alone():
    fast, plain = (
        large({"H100-80": compute}).layer_times.times("H100-80", compute, 1, 4, "none")
        for compute in ("fp8", "bf16")
    )
    ratio = plain.forward_s[1:-1] / fast.forward_s[1:-1]
    assert np.all((ratio > 1.1) & (ratio < 2.0))
    np.testing.assert_array_equal(fast.forward_s[[0, -1]], plain.forward_s[[0, -1]])
    assert any("(fp8)" in note for note in fast.estimated)


def test_fp8_keeps_the_memory_of_bf16():
    plan = Plan("tiny", 1, 1, 4096, (Pipeline((Stage(0, 8, ("a100-0/0",)),), 1, 1),))
    fast, plain = large({"H100-80": "fp8"}), large()
    assert fast.memory_of.by_worker(plan) == plain.memory_of.by_worker(plan)
    assert fast.layer_times.rates(plan)["H100-80"]["precision"] == "fp8"


def test_shares_of_uneven_stages_are_costed_in_the_stage_format():
    mixed = cost({"T4": "fp16"})
    share = TensorShare(0, 1, 4)
    (t4,) = [kind for kind in mixed.fleet.node_types if kind.gpu_type == "T4"]
    found = mixed.layers.costs(t4, 2, 1, share).forward_s
    expected = cost(precision="fp16").layers.costs(t4, 2, 1, share).forward_s
    np.testing.assert_array_equal(found, expected)
