"""Steps that the catalogue predicts for this runtime, whose blocks are compiled, beside steps that
were measured.
"""

from dataclasses import replace
from typing import Any

import pytest

from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import DataSection, Job, ModelSection
from planner.cost.parameters import OURS, framework_parameters
from planner.cost.prediction import Prediction
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.plans.plan import Plan
from scripts.benchmarks.gpu.part import SIZES, Machine, sized_job

MEASURED_S = {"auto": 0.747, False: 1.071}
"""Steps of 1 B on an H200: scripts/benchmarks/results/gpu-h200.json."""
MEASURED_BY_FORMAT_S = {"bf16": 0.752, "fp16": 0.806, "fp8": 0.658}
MEASURED_OFFLOADED_UPDATE_S = 0.460
SHAPE = SIZES["1B"]
GPT2 = {"model_type": "gpt2", "n_embd": 2048, "n_layer": 16, "n_head": 16, "n_positions": 2048}


def job_of(compile_blocks: Any = "auto", **sections: Any) -> Job:
    job = replace(sized_job(Machine("cuda"), "1B"), **sections)
    return replace(job, training=replace(job.training, compile_blocks=compile_blocks))


def plan_of(workers: int, recompute: str = "none", **fields: Any) -> Plan:
    stage = {
        "first_layer": 0,
        "num_layers": SHAPE["layers"],
        "workers": [f"here/{rank}" for rank in range(workers)],
        "recompute": recompute,
        **fields,
    }
    pipeline = {"num_microbatches": SHAPE["batch"] // SHAPE["microbatch"], "stages": [stage]}
    return Plan.from_document(
        {
            "version": 1,
            "model": "sized",
            "global_batch_sequences": SHAPE["batch"],
            "microbatch_sequences": SHAPE["microbatch"],
            "sequence_length": 2048,
            "pipelines": [pipeline],
        }
    )


def predict(job: Job, plan: Plan, framework: str = OURS) -> Prediction:
    kind = NodeType("here", "H200", len(plan.workers), 140 << 30, 4.5e11, 1e11, host_cores=16)
    inputs = planning_inputs(job)
    parameters = framework_parameters(framework, inputs.parameters)
    fleet = Fleet(0, (Node("here", kind),))
    return inputs.cost_model(fleet, parameters=parameters).predict(plan)


def predicted_s(job: Job, plan: Plan, framework: str = OURS) -> float:
    return predict(job, plan, framework).step_time_s


@pytest.mark.parametrize("compile_blocks", MEASURED_S)
def test_a_step_on_an_h200_is_predicted_without_a_profile(compile_blocks: Any) -> None:
    found = predicted_s(job_of(compile_blocks), plan_of(1))
    assert found == pytest.approx(MEASURED_S[compile_blocks], rel=0.08)


@pytest.mark.parametrize("compute", MEASURED_BY_FORMAT_S)
def test_formats_that_were_not_measured_are_predicted(compute: str) -> None:
    found = predicted_s(job_of(), plan_of(1, compute=compute))
    assert found == pytest.approx(MEASURED_BY_FORMAT_S[compute], rel=0.08)


def test_an_update_in_host_memory_is_predicted_by_the_nodes_cores_and_link() -> None:
    """Four cores and PCIe 4.0 would take 1.9 s."""
    found = predict(job_of(), plan_of(1).with_offloading())
    assert found.breakdown_s["optimizer"] == pytest.approx(MEASURED_OFFLOADED_UPDATE_S, rel=0.08)


def test_stages_that_are_not_compiled_take_the_time_of_eager_ones() -> None:
    plan = plan_of(1, "selective")
    compiled, eager = (predicted_s(job_of(wish), plan) for wish in ("auto", False))
    assert compiled == eager


ISOLATED = DataSection(source="builtin:python-stdlib", isolate_documents=True)


@pytest.mark.parametrize(
    ("sections", "workers", "is_compiled"),
    [
        ({"model": ModelSection(config=GPT2)}, 1, False),
        ({"data": ISOLATED}, 1, True),
        ({}, 2, True),
    ],
    ids=["dropout", "isolated documents", "TP 2"],
)
def test_compiled_blocks_are_predicted_to_be_faster(
    sections: dict[str, Any], workers: int, is_compiled: bool
) -> None:
    compiled, eager = (
        predicted_s(job_of(wish, **sections), plan_of(workers)) for wish in ("auto", False)
    )
    assert (compiled < 0.95 * eager) is is_compiled


def test_other_frameworks_compile_as_they_did() -> None:
    for framework in ("megatron", "pytorch"):
        times = [predicted_s(job_of(wish), plan_of(1), framework) for wish in ("auto", False)]
        assert times[0] == times[1]
