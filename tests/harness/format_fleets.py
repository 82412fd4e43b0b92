"""Random fleets with T4 and V100 among newer GPUs, and jobs in bf16 on them."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autohet.driver.loop.planning import make_planning
from autohet.runtime.job import Job
from autohet.runtime.step.precision import without_incapable_nodes
from planner.errors import ConfigError, InfeasibleError
from planner.inputs.cluster import Cluster, cluster_from_document
from planner.strategies import Answer, plan_with

NEWER = ("g5.xlarge", "g6.xlarge", "g5.12xlarge", "g6.12xlarge", "g6e.xlarge", "p4d.24xlarge")
OLDER = ("g4dn.xlarge", "g4dn.12xlarge", "p3.2xlarge", "p3.8xlarge")
MOST_GPUS = 24
# (layers, width) of Llama-like models of 0.1 to 7 billion parameters
SIZES = ((12, 768), (24, 1024), (16, 2048), (24, 2048), (28, 3072), (32, 4096))


def random_cases(number: int, seed: int = 0) -> Iterator[tuple[Job, Cluster]]:
    """Yield jobs and clusters; formats of the jobs are under `auto`.

    Each cluster has one or two types without bf16, and up to two others.
    """
    for index in range(number):
        rng = random.Random(seed * 1_000_003 + index)
        older = rng.sample(OLDER, rng.choice([1, 1, 2]))
        newer = rng.sample(NEWER, rng.choice([0, 1, 1, 2]))
        yield _job(rng), _cluster(rng, [*newer, *older])


def _job(rng: random.Random) -> Job:
    layers, width = rng.choice(SIZES)
    config = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": width * 11 // 4,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "vocab_size": 32000,
    }
    training = {
        "global_batch_sequences": rng.choice([16, 32, 64, 128]),
        "sequence_length": rng.choice([512, 1024, 2048]),
    }
    parallelism = {"compute_formats": "auto"}
    document = {"model": {"config": config}, "training": training, "parallelism": parallelism}
    return Job.from_document({"name": "random", **document})


def _cluster(rng: random.Random, types: list[str]) -> Cluster:
    left = MOST_GPUS
    kinds = dict[str, Any]()
    for name in types:
        gpus = 8 if name.startswith("p4d") else 4 if name.endswith(("12xlarge", "8xlarge")) else 1
        count = rng.randint(1, max(1, min(4, left // gpus)))
        left -= count * gpus
        kinds[name.replace(".", "-")] = {
            "node_config": {"InstanceType": name},
            "max_workers": count,
        }
    document = {"cluster_name": "random", "max_workers": 64, "available_node_types": kinds}
    return cluster_from_document(document)


def planned(job: Job, cluster: Cluster, formats: str) -> Answer | None:
    """Return the plan of a job under `compute_formats: auto` or `off`; None if there is none."""
    asked = replace(job, parallelism=replace(job.parallelism, compute_formats=formats))
    try:
        fleet = without_incapable_nodes(cluster, asked).fleet()
    except ConfigError:
        return None
    planning = make_planning(asked)
    request = planning.request(fleet, planning.make_cost(fleet))
    try:
        return plan_with("autohet", replace(request, prove=False, spmd=False))
    except InfeasibleError:
        return None
