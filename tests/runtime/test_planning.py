"""What a job's own cost model counts of a GPU's memory."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from autohet.bench.step.sides import WORKER, one_worker_plan
from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import Job, TrainingSection
from planner.cost.parameters import CostParameters
from planner.errors import ConfigError
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.search.problem.request import Request
from planner.strategies import plan_with

GIB = 1 << 30


def cost_on(memory_bytes: int) -> tuple[Any, Job]:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 512,
    }
    training = {"global_batch_sequences": 4, "sequence_length": 64, "precision": "bf16"}
    job = Job.from_document({"name": "m", "model": {"config": config}, "training": training})
    kind = NodeType("here", "H200", 1, memory_bytes, 1e11, 1e9)
    fleet = Fleet(0, (Node("here", kind),))
    return planning_inputs(job).cost_model(fleet), job


@pytest.mark.parametrize("memory_bytes", [24 * GIB, 140 * GIB])
def test_what_is_left_free_is_a_limit_and_no_prediction(memory_bytes: int) -> None:
    """Measured on an H200 with 0.3 billion parameters: 15.0 GB of a predicted 19.9 GB, of which
    4.5 GB were 3% of the device.
    """
    cost, job = cost_on(memory_bytes)
    prediction = cost.predict(one_worker_plan(job))
    assert prediction.memory_bytes_by_worker[WORKER] < 1.1 * GIB
    defaults = CostParameters()
    usable = 1.0 - defaults.memory_margin - defaults.context_share
    assert prediction.memory_limit_bytes_by_worker[WORKER] == int(usable * memory_bytes)


def test_muon_has_one_moment_and_seconds_of_its_iteration() -> None:
    """Wrong: a second moment in device or host memory, an iteration for nothing, or plans whose
    matrices have an owner and whose stages say that state is not shared out.
    """
    found = {}
    for optimizer in ("adamw", "muon"):
        _, job = cost_on(GIB)
        training = {**asdict(job.training), "optimizer": optimizer}
        job = replace(job, training=TrainingSection(**training))
        kind = NodeType("here", "H200", 1, 140 * GIB, 1e11, 1e9, host_memory_bytes=64 * GIB)
        elastic = replace(CostParameters(), elastic=True)
        fleet = Fleet(0, (Node("here", kind), Node("there", kind)))
        inputs = planning_inputs(job)
        cost = inputs.cost_model(fleet, parameters=elastic)
        request = Request(fleet, inputs.spec, cost, 4096, 64)
        prediction = cost.predict(one_worker_plan(job))
        host_bytes = cost.memory_of.host_memory(one_worker_plan(job), inputs.kept)[0].state_bytes
        found[optimizer] = prediction, host_bytes, plan_with("autohet", request)
    num_matrices = 2 * (4 * 64 * 64 + 3 * 64 * 176)
    (adamw, adamw_host, _), (muon, muon_host, answer) = found.values()
    saved = adamw.memory_bytes_by_worker[WORKER] - muon.memory_bytes_by_worker[WORKER]
    assert saved == 4 * num_matrices
    assert adamw_host - muon_host == 4 * num_matrices
    assert muon.breakdown_s["optimizer"] > adamw.breakdown_s["optimizer"]
    assert len(answer.plan.pipelines) == 2
    assert all(stage.shard_optimizer for stage in answer.plan.stages)


DENSE = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
MIXTURE = {
    **DENSE,
    "model_type": "mixtral",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
}


def job_of(config: dict[str, Any], way: str) -> Job:
    training = {"global_batch_sequences": 4, "sequence_length": 64, "precision": "bf16"}
    document = {
        "name": "m",
        "model": {"config": config},
        "training": training,
        "parallelism": {"expert_dispatch": way},
    }
    return Job.from_document(document)


@pytest.mark.parametrize("way", ["auto", "sum", "all_to_all"])
def test_the_cost_model_has_the_way_that_the_job_names(way: str) -> None:
    inputs = planning_inputs(job_of(MIXTURE, way))
    kind = NodeType("here", "H200", 2, 140 * GIB, 1e11, 1e9)
    cost = inputs.cost_model(Fleet(0, (Node("here", kind),)))
    assert cost.choices.expert_dispatch == way
    assert inputs.spec.experts is not None
    assert not inputs.spec.experts.has_shared


@pytest.mark.parametrize(
    ("config", "way", "message"),
    [
        (DENSE, "all_to_all", "expert_dispatch is all_to_all, but the model has no routed experts"),
        (MIXTURE, "each", "expert_dispatch"),
    ],
)
def test_a_way_without_experts_and_an_unknown_one_are_refused(
    config: dict[str, Any], way: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        planning_inputs(job_of(config, way))
