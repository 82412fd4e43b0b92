"""Sequence parallelism as the planner's last resort: what fits by it alone is planned with it."""

from dataclasses import replace
from typing import Any

import pytest

from planner.cost.basis import Measurements, Workload
from planner.cost.model import CostModel
from planner.cost.parameters import OURS, CostParameters, framework_parameters
from planner.errors import InfeasibleError
from planner.plans.model_spec import KeptValues
from planner.plans.plan import Pipeline, Plan, Stage
from planner.search.problem.request import Request
from planner.strategies import plan_with
from tests.planner.cases import fleet, model, profile

WIDTH, LAYERS, LENGTH = 256, 4, 128
OWN = replace(framework_parameters(OURS, CostParameters()), context_bytes=0.0, context_share=0.0)


def request(mib: float, parameters: CostParameters = OWN) -> Request:
    """Two GPUs of a node; most of what a block keeps lies whole on each rank."""
    plain = model(LAYERS, WIDTH, vocab=500)
    kept = KeptValues(20 * WIDTH, 200 * WIDTH, 20 * WIDTH, 100 * WIDTH)
    spec = replace(plain, blocks=(replace(plain.blocks[0], autograd=kept),) * LAYERS)
    of = fleet(("A100", 1, 2), memory_gib={"A100": mib / 1024})
    cost = CostModel(of, Workload(spec, LENGTH, "fp32"), Measurements(profile()), parameters)
    wishes: dict[str, Any] = {"max_stages": 1, "max_tp_degree": 2}
    return Request(of, spec, cost, 8, LENGTH, microbatch_sequences=8, **wishes)


def needed_mib(*, cut: bool) -> float:
    asked = request(1 << 20)
    workers = asked.fleet.workers
    stage = Stage(0, LAYERS, tuple(workers), sequence_parallel=cut)
    plan = Plan("m", 8, 8, LENGTH, (Pipeline((stage,), 1, 8),))
    return max(asked.cost.memory_of.by_worker(plan).values()) / 2**20


def test_what_fits_only_with_cut_sequences_is_planned_so() -> None:
    whole, cut = needed_mib(cut=False), needed_mib(cut=True)
    assert cut < 0.8 * whole
    between = (whole + cut) / 2 / (1.0 - OWN.memory_margin)
    answer = plan_with("autohet", request(between))
    assert all(stage.sequence_parallel for each in answer.plan.pipelines for stage in each.stages)
    assert "cut the sequence" in answer.choice
    used = answer.prediction.memory_bytes_by_worker
    assert max(used.values()) == pytest.approx(cut * 2**20, rel=0.01)
    assert request(between).cost.predict(answer.plan).memory_bytes_by_worker == used


def test_where_whole_sequences_fit_they_stay_whole() -> None:
    roomy = 2.0 * needed_mib(cut=False)
    answer = plan_with("autohet", request(roomy))
    assert not any(
        stage.sequence_parallel for each in answer.plan.pipelines for stage in each.stages
    )


def test_what_does_not_fit_either_is_refused_as_before() -> None:
    with pytest.raises(InfeasibleError):
        plan_with("autohet", request(0.5 * needed_mib(cut=True)))
    between = (needed_mib(cut=False) + needed_mib(cut=True)) / 2 / (1.0 - OWN.memory_margin)
    theirs = replace(OWN, may_cut_sequence=False)
    with pytest.raises(InfeasibleError):
        plan_with("autohet", request(between, theirs))
