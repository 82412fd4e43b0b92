"""Steps that the catalogue predicts for this runtime, whose blocks are compiled where no tensor
parallelism cuts them, beside steps that were measured.
"""

from dataclasses import replace
from typing import Any

import pytest

from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import DataSection, Job, ModelSection
from planner.cost.parameters import OURS, framework_parameters
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.plans.plan import Plan
from scripts.benchmarks.gpu.part import SIZES, Machine, sized_job

MEASURED_S = {"auto": 0.747, False: 1.071}
"""Steps of 1 B on an H200: scripts/benchmarks/results/gpu-h200.json."""
MEASURED_BY_FORMAT_S = {"bf16": 0.752, "fp16": 0.806, "fp8": 0.658}
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


def predicted_s(job: Job, plan: Plan, framework: str = OURS) -> float:
    kind = NodeType("here", "H200", len(plan.workers), 140 << 30, 4.5e11, 1e11)
    inputs = planning_inputs(job)
    parameters = framework_parameters(framework, inputs.parameters)
    fleet = Fleet(0, (Node("here", kind),))
    return inputs.cost_model(fleet, parameters=parameters).predict(plan).step_time_s


@pytest.mark.parametrize("compile_blocks", MEASURED_S)
def test_a_step_on_an_h200_is_predicted_without_a_profile(compile_blocks: Any) -> None:
    found = predicted_s(job_of(compile_blocks), plan_of(1))
    assert found == pytest.approx(MEASURED_S[compile_blocks], rel=0.08)


@pytest.mark.parametrize("compute", MEASURED_BY_FORMAT_S)
def test_formats_that_were_not_measured_are_predicted(compute: str) -> None:
    found = predicted_s(job_of(), plan_of(1, compute=compute))
    assert found == pytest.approx(MEASURED_BY_FORMAT_S[compute], rel=0.08)


@pytest.mark.parametrize("plan", [plan_of(2), plan_of(1, "selective")], ids=["TP 2", "selective"])
def test_stages_that_are_not_compiled_take_the_time_of_eager_ones(plan: Plan) -> None:
    compiled, eager = (predicted_s(job_of(wish), plan) for wish in ("auto", False))
    assert compiled == eager


@pytest.mark.parametrize(
    "eager",
    [
        job_of(model=ModelSection(config=GPT2)),
        job_of(data=DataSection(source="builtin:python-stdlib", isolate_documents=True)),
    ],
    ids=["dropout", "isolated documents"],
)
def test_jobs_whose_blocks_are_not_compiled_are_predicted_so(eager: Job) -> None:
    never = replace(eager, training=replace(eager.training, compile_blocks=False))
    assert predicted_s(eager, plan_of(1)) == predicted_s(never, plan_of(1))


def test_other_frameworks_compile_as_they_did() -> None:
    for framework in ("megatron", "pytorch"):
        times = [predicted_s(job_of(wish), plan_of(1), framework) for wish in ("auto", False)]
        assert times[0] == times[1]
