"""On the exact model a plan changes nothing at all: losses, norms and weights are bit-equal to one
worker's.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from autohet.runtime.facts.layout import layout_of_plan, tensor_specs
from planner.plans.plan import Plan
from tests.harness.toy_model import TOY_CONFIG
from tests.harness.training_case import Case, run_case
from tests.harness.worker_pool import WorkerPool

pytestmark = pytest.mark.multiprocess
TRAINING = {
    "global_batch_sequences": 9,
    "sequence_length": 6,
    "steps": 20,
    "precision": "fp32",
    "learning_rate": 5e-2,
    "warmup_steps": 2,
    "clip_norm": 0.5,
}
STEPS = 4
GENERATIONS = itertools.count()


def plan(*pipelines: tuple[int, list[tuple[int, int]]], sharded: bool = False) -> dict[str, Any]:
    """Pipelines of (microbatches of one sequence, [(layers, TP degree)]); `sharded`: the optimizer
    state of all layers.
    """
    number = 0
    documents = []
    for microbatches, shape in pipelines:
        first = 0
        stages = []
        for layers, degree in shape:
            workers = [f"w/{number + rank}" for rank in range(degree)]
            number += degree
            stages.append(
                {
                    "first_layer": first,
                    "num_layers": layers,
                    "workers": workers,
                    "shard_optimizer": sharded,
                }
            )
            first += layers
        documents.append({"num_microbatches": microbatches, "stages": stages})
    common = {
        "version": 1,
        "model": "m",
        "global_batch_sequences": 9,
        "microbatch_sequences": 1,
        "sequence_length": 6,
    }
    return {**common, "pipelines": documents}


PLANS = {
    "TP 4": plan((9, [(4, 4)])),
    "three deep": plan((9, [(1, 1), (2, 1), (1, 1)])),
    "three pipelines cut differently": plan(
        (2, [(4, 1)]), (3, [(1, 1), (3, 2)]), (4, [(2, 2), (2, 1)])
    ),
    "three pipelines, sharded": plan(
        (2, [(4, 1)]), (3, [(1, 1), (3, 2)]), (4, [(2, 2), (2, 1)]), sharded=True
    ),
    "TP 4 beside TP 2 and 1": plan((5, [(3, 4), (1, 2)]), (4, [(4, 1)])),
}


@pytest.mark.parametrize(
    ("tied", "back_end"),
    [
        (True, "gloo"),
        pytest.param(False, "deferred", marks=pytest.mark.slow),
        pytest.param(True, "deferred", marks=pytest.mark.slow),
        pytest.param(False, "gloo", marks=pytest.mark.slow),
    ],
)
def test_every_plan_is_bit_equal_to_one_worker(
    pool: tuple[WorkerPool, int], tied: bool, back_end: str
) -> None:
    processes, port = pool
    model = {**TOY_CONFIG, "tie_word_embeddings": tied}
    alone = Case(model, plan((9, [(4, 1)])), TRAINING, STEPS)
    ((wanted, whole),) = processes.map(run_case, [(alone, "w/0", port, next(GENERATIONS))])
    specs = tensor_specs(alone.config())
    assert len({loss for loss, _ in wanted}) == STEPS, (
        "the model does not learn: its losses stand still"
    )
    for name, document in PLANS.items():
        case = Case(model, document, TRAINING, STEPS, back_end=back_end)
        workers = Plan.from_document(document).workers
        generation = next(GENERATIONS)
        answers = processes.map(run_case, [(case, worker, port, generation) for worker in workers])
        layout = layout_of_plan(Plan.from_document(document), case.config())
        for worker, (results, state) in zip(workers, answers, strict=True):
            assert results == wanted, f"{name}: losses or norms of {worker}"
            for tensor, units in layout.units_of(worker).items():
                spec = specs[tensor]
                pieces = [whole[tensor][spec.unit_slices(unit)] for unit in units]
                expected = (
                    whole[tensor]
                    if spec.split_dim is None
                    else np.concatenate(pieces, spec.split_dim)
                )
                assert torch.equal(torch.from_numpy(state[tensor]), torch.from_numpy(expected)), (
                    f"{name}: {tensor} of {worker}"
                )
