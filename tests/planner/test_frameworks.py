"""What frameworks do differently: whom a transfer occupies, the width of gradients."""

from dataclasses import replace

import pytest

from planner.cost.basis import Measurements, Workload
from planner.cost.model import CostModel
from planner.cost.parameters import (
    FRAMEWORKS,
    OURS,
    CostParameters,
    framework_parameters,
    usual_framework,
)
from planner.errors import ConfigError
from planner.plans.plan import Pipeline, Plan, Stage
from tests.planner.cases import fleet, model, profile, request, with_nics


def _step_s(framework: str) -> float:
    """Two stages of slow links: transfers matter."""
    spec, of = model(4), fleet(("A100", 2, 1))
    parameters = framework_parameters(framework, CostParameters())
    cost = CostModel(of, Workload(spec, 128, "fp32"), Measurements(profile()), parameters)
    stages = (Stage(0, 2, ("a100-0/0",)), Stage(2, 2, ("a100-1/0",)))
    return cost.predict(Plan("tiny", 16, 2, 128, (Pipeline(stages, 8, 2),))).step_time_s


def test_waiting_senders_take_longer_and_ours_does_not_wait() -> None:
    assert framework_parameters(OURS, CostParameters()).transfers == "none"
    assert _step_s(OURS) < _step_s("megatron") < _step_s("deepspeed")


def test_other_parameters_stay() -> None:
    given = CostParameters(launch_s=1e-3, context_bytes=5.0)
    for name in FRAMEWORKS:
        found = framework_parameters(name, given)
        assert (found.launch_s, found.context_bytes) == (1e-3, 5.0)


def test_an_unknown_framework_lists_the_known() -> None:
    with pytest.raises(
        ConfigError, match=r"'alpa'; known: autohet, deepspeed, megatron, fsdp, pytorch"
    ):
        framework_parameters("alpa", CostParameters())


@pytest.mark.parametrize("framework", ["deepspeed", "megatron"])
def test_slices_cross_the_card_once(framework: str) -> None:
    """Eight ranks over one slow card: the hidden states cross it once, not eight times."""
    of = with_nics(fleet(("A10G", 2, 8)), {"A10G": 1e9 / 8})
    cost = request(of, 8, framework=framework).cost
    kind = of.nodes[0].node_type
    once_s = cost.stage_formats.inside_bytes(8, cost.precision) / (
        1e9 / 8 * cost.parameters.efficiency_inter
    )
    assert cost.boundaries.between_s(kind, kind, 8, tp_degree=8) == pytest.approx(once_s, rel=0.05)


def _data_parallel(pipelines: int) -> Plan:
    """One GPU a pipeline, all on one node."""
    stages = [(Stage(0, 4, (f"a100-0/{i}",)),) for i in range(pipelines)]
    return Plan("tiny", 8 * pipelines, 2, 128, tuple(Pipeline(s, 4, 2) for s in stages))


def _cost(framework: str, precision: str) -> CostModel:
    parameters = framework_parameters(framework, CostParameters())
    of = fleet(("A100", 1, 8))
    return CostModel(of, Workload(model(4), 128, precision), Measurements(profile()), parameters)


def test_fully_sharded_state_shrinks_with_the_pipelines() -> None:
    """Wrong: only moments are shared out, as ZeRO-1 does."""
    spec = model(4)
    parameters = sum(layer.parameters for layer in (spec.embedding, *spec.blocks, spec.head))
    used = [
        max(_cost("fsdp", "bf16").predict(_data_parallel(n)).memory_bytes_by_worker.values())
        for n in (2, 8)
    ]
    assert used[0] - used[1] == pytest.approx(16 * parameters * (1 / 2 - 1 / 8), rel=0.01)


def test_fully_sharded_gradients_are_reduced_beside_the_backward() -> None:
    """Wrong: the step ends with a gradient sum, or communication costs nothing."""
    alone, eight = (_cost("fsdp", "fp32").predict(_data_parallel(n)) for n in (1, 8))
    whole = _cost("pytorch", "fp32").predict(_data_parallel(8))
    assert eight.breakdown_s["grad_sync"] == 0.0 < whole.breakdown_s["grad_sync"]
    assert eight.breakdown_s["pipeline"] > alone.breakdown_s["pipeline"]


def test_deepspeeds_fp16_gradients_have_no_fp32_buffers() -> None:
    """Wrong: an fp32 gradient and a flat buffer beside it, as in its bf16 runs."""
    node = fleet(("A100", 1, 8)).nodes[0].node_type
    parameters = sum(
        layer.parameters for layer in (model(4).embedding, *model(4).blocks, model(4).head)
    )
    held = [
        _cost("deepspeed", dtype).layers.costs(node, 1, 1).state_bytes.sum()
        for dtype in ("fp16", "bf16")
    ]
    assert held[1] - held[0] == pytest.approx(2 * parameters, rel=1e-6)


def test_plans_without_stages_are_not_deepspeeds() -> None:
    one_each = _data_parallel(2)
    assert usual_framework([one_each]) == "pytorch"
    assert (
        usual_framework([one_each.map_stages(lambda stage: replace(stage, shard_optimizer=True))])
        == "fsdp"
    )
    stages = (Stage(0, 2, ("a100-0/0",)), Stage(2, 2, ("a100-0/1",)))
    staged = Plan("tiny", 16, 2, 128, (Pipeline(stages, 8, 2),))
    assert usual_framework([one_each, staged]) == "deepspeed"
