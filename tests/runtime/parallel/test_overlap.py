"""Plans whose gradient sums may overlap with the backward pass on groups in stream order."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import HashStore

from autohet.runtime.generation import TrainingSetup, WorkerGeneration
from autohet.runtime.groups import GenerationGroups
from autohet.runtime.layout import layout_of_plan
from autohet.runtime.parallel.overlap import sums_have_one_order
from autohet.runtime.trainer import StageTrainer
from planner.plan import Pipeline, Plan, Stage
from tests.harness.deferred_group import DeferredGroup
from tests.harness.tiny_models import tiny_config
from tests.harness.training_case import CPU, Case, local_state, rows_of


def plan(*pipelines: list[tuple[int, int, list[str]]]) -> Plan:
    stages = [
        Pipeline(tuple(Stage(first, count, tuple(workers)) for first, count, workers in each), 1, 1)
        for each in pipelines
    ]
    return Plan("m", len(stages), 1, 8, tuple(stages))


@pytest.mark.parametrize(
    ("drawn", "tied", "expected"),
    [
        (plan([(0, 4, ["a"])], [(0, 4, ["b"])]), False, True),
        (plan([(0, 4, ["a"])], [(0, 4, ["b"])]), True, True),
        (plan([(0, 1, ["a"]), (1, 3, ["b"])], [(0, 1, ["c"]), (1, 3, ["d"])]), False, True),
        (plan([(0, 1, ["a"]), (1, 3, ["b"])], [(0, 1, ["c"]), (1, 3, ["d"])]), True, False),
        (plan([(0, 1, ["a"]), (1, 3, ["b"])], [(0, 2, ["c"]), (2, 2, ["d"])]), False, False),
        (plan([(0, 1, ["a"]), (1, 3, ["b"])], [(0, 4, ["c"])]), False, False),
        (plan([(0, 4, ["a", "b"])], [(0, 4, ["c", "d"])]), False, False),
    ],
)
def test_where_the_order_is_one(drawn: Plan, tied: bool, expected: bool) -> None:
    config = tiny_config("llama", tie_word_embeddings=tied, num_hidden_layers=4)
    assert sums_have_one_order(drawn, config) is expected


def test_a_trainer_in_stream_order_overlaps_where_it_may() -> None:
    """A data-parallel run is else slower than DDP by its all-reduce."""
    document: dict[str, Any] = plan([(0, 2, ["w"])]).to_document()
    model = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 32,
    }
    training = {"global_batch_sequences": 1, "sequence_length": 8, "precision": "fp32"}
    case = Case(model, document, training, 1)
    config, drawn = case.config(), Plan.from_document(document)
    groups = GenerationGroups(HashStore(), 1, "w", CPU, 5.0, 5.0, DeferredGroup)
    state = local_state(case, layout_of_plan(drawn, config), "w")
    setup = TrainingSetup(config, case.section(), CPU)
    trainer = StageTrainer(setup, WorkerGeneration(drawn, "w", groups, state))
    started: list[int] = []
    start = trainer._sync._start
    trainer._sync._start = lambda number: (started.append(number), start(number))[1]  # type: ignore[func-returns-value, method-assign]
    finish = trainer._sync.finish

    def finished() -> Any:
        assert started, "no sum had started when the passes ended"
        return finish()

    trainer._sync.finish = finished  # type: ignore[method-assign]
    trainer.train_step(rows_of(case))
