"""Training with sequence-parallel stages, all workers in threads: the losses of whole sequences."""

import threading
from typing import Any

import pytest
from torch.distributed import HashStore

from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.groups import GenerationGroups, GroupTimeouts
from autohet.runtime.step.generation import TrainingSetup, WorkerGeneration
from autohet.runtime.step.trainer import StageTrainer
from planner.plans.plan import Plan
from tests.harness.selection import first_two
from tests.harness.training_case import BACK_ENDS, CPU, Case, local_state, rows_of

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
TRAINING = {
    "global_batch_sequences": 4,
    "sequence_length": 16,
    "steps": 10,
    "precision": "fp32",
    "learning_rate": 0.01,
}
STEPS = 2
PLANS: dict[str, list[list[tuple[int, int, list[str]]]]] = {
    "TP 2": [[(0, 4, ["a", "b"])]],
    "TP 2, then 1, beside 1": [[(0, 2, ["a", "b"]), (2, 2, ["c"])], [(0, 4, ["d"])]],
    "TP 1, then 2": [[(0, 1, ["a"]), (1, 3, ["b", "c"])]],
    "TP 4, 16 tokens": [[(0, 4, ["a", "b", "c", "d"])]],
    "uneven": [[(0, 4, ["a", "b", "c"])]],
}


def document(name: str, *, cut: bool) -> dict[str, Any]:
    pipelines = PLANS[name]
    return {
        "version": 1,
        "model": "m",
        "global_batch_sequences": 4,
        "microbatch_sequences": 1,
        "sequence_length": 16,
        "pipelines": [
            {
                "num_microbatches": 4 // len(pipelines),
                "stages": [
                    {
                        "first_layer": first,
                        "num_layers": count,
                        "workers": workers,
                        "sequence_parallel": cut,
                        **({"tp_shares": [2, 1, 1]} if name == "uneven" else {}),
                    }
                    for first, count, workers in stages
                ],
            }
            for stages in pipelines
        ],
    }


def losses_of(case: Case) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step, the same at every worker."""
    plan, config, store = Plan.from_document(case.plan), case.config(), HashStore()
    layout = layout_of_plan(plan, config)
    # Drawing weights seeds the process's generator: not in threads.
    states = {me: local_state(case, layout, me) for me in plan.workers}
    found: dict[str, list[tuple[float, float]]] = {}

    def work(me: str) -> None:
        groups = GenerationGroups(
            store, 1, me, CPU, GroupTimeouts(60.0, 60.0), BACK_ENDS[case.back_end]
        )
        groups.meet(plan.workers)
        setup = TrainingSetup(config, case.section(), CPU)
        generation = WorkerGeneration(plan, me, groups, states[me])
        trainer, rows = StageTrainer(setup, generation), rows_of(case)
        results = [trainer.train_step(rows) for _ in range(STEPS)]
        found[me] = [(result.loss, result.gradient_norm) for result in results]

    threads = [threading.Thread(target=work, args=(me,), daemon=True) for me in plan.workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert set(found) == set(plan.workers)
    first = found[plan.workers[0]]
    assert all(each == first for each in found.values())
    return first


@pytest.mark.parametrize("name", first_two(PLANS))
def test_losses_and_norms_are_those_of_whole_sequences(name: str) -> None:
    cut, whole = (
        losses_of(Case(MODEL, document(name, cut=each), TRAINING, STEPS)) for each in (True, False)
    )
    for ours, theirs in zip(cut, whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
