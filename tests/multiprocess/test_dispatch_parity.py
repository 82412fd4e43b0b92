"""All-to-all beside everything else that a job may ask for: losses and weights are those of a sum,
and of one worker.

Losses of 3 steps within 2e-5, weights within 2e-5 of the largest of the tensor, in fp32.
"""

import copy
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autohet.runtime.data import prepare_dataset
from autohet.runtime.job import AdapterSection, DataSection
from planner.plans.plan import Plan
from tests.harness import training_case
from tests.harness.chat_tokenizer import save_chat_tokenizer
from tests.harness.parity import (
    MIXTURES,
    TOLERANCE,
    TRAINING,
    check_weights,
    grid,
    pipeline,
    plan_document,
)
from tests.harness.training_case import Case
from tests.multiprocess.test_chat_parity import whole_state
from tests.multiprocess.test_formats_parity import in_formats
from tests.multiprocess.test_formats_parity import run as run_in_formats
from tests.multiprocess.test_preference_parity import SETTINGS, write_preferences

pytestmark = pytest.mark.multiprocess
STEPS = 3
GENERATIONS = itertools.count(11000)
DEEPSEEK = MIXTURES["deepseek_v3"]
QWEN3 = MIXTURES["qwen3_moe"]
ADAPTER = AdapterSection(rank=4, alpha=16.0)
DROPPING = replace(ADAPTER, dropout=0.3, targets=("kv_b_proj", "o_proj"))
"""Experts are adapted without dropout."""
VOCABULARY = 400
"""Of the tests' chat tokenizer."""
ROWS_LENGTH = 31
"""No TP degree divides it: parts of the sequence have padding."""
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any], AdapterSection | None]] = {
    "adapters": (DEEPSEEK, {}, ADAPTER),
    "adapters of qwen3": (QWEN3, {}, ADAPTER),
    "dropout of adapters": (DEEPSEEK, {}, DROPPING),
    "dropout of the model": ({**QWEN3, "attention_dropout": 0.3}, {}, None),
    "dropout of both": ({**DEEPSEEK, "attention_dropout": 0.3}, {}, DROPPING),
    "balance of sequences": (DEEPSEEK, {"router_balance": "sequence"}, None),
    "balance by biases": (DEEPSEEK, {"router_balance": "bias", "router_bias_speed": 0.01}, None),
    "balance of sequences, adapters": (QWEN3, {"router_balance": "sequence"}, ADAPTER),
    "z loss and smoothing": (QWEN3, {"z_loss": 1e-2, "label_smoothing": 0.1}, None),
}
IN_CI = frozenset({"dropout of both"})


def sending(document: dict[str, Any]) -> dict[str, Any]:
    """The plan with all-to-all in all stages of several workers, every other one sequence
    parallel.
    """
    found = copy.deepcopy(document)
    stages = [stage for each in found["pipelines"] for stage in each["stages"]]
    for number, stage in enumerate(stage for stage in stages if len(stage["workers"]) > 1):
        stage["expert_dispatch"] = "all_to_all"
        if number % 2:
            stage["sequence_parallel"] = True
    return found


PLAN = plan_document(
    pipeline((2, (2, 1, 1)), (2, 2), microbatches=5), pipeline((4, 2), microbatches=3)
)
"""Uneven shares, two ranks in sequence parts, two that are not."""


def train(pool: Any, case: Case) -> tuple[list[float], list[dict[str, np.ndarray]]]:
    processes, port = pool
    generation = next(GENERATIONS)
    workers = Plan.from_document(case.plan).workers
    orders = [(case, worker, port, generation) for worker in workers]
    answers = processes.map(training_case.run_case, orders)
    return [loss for loss, _ in answers[0][0]], [state for _, state in answers]


def check_ways(pool: Any, case: Case) -> None:
    """Compare a sum and all-to-all with one worker."""
    length = case.training["sequence_length"]
    alone = {**grid(1, 1, 1), "sequence_length": length}
    case = replace(case, plan=alone)
    expected, states = train(pool, case)
    weights = {
        name.removeprefix("param/"): tensor.numpy()
        for name, tensor in whole_state(case, states).items()
        if name.startswith("param/")
    }
    for document in (PLAN, sending(PLAN)):
        cut = replace(case, plan={**document, "sequence_length": length})
        losses, found = train(pool, cut)
        np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
        check_weights(cut, Plan.from_document(cut.plan), found, weights)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in IN_CI else pytest.mark.slow) for n in JOBS]
)
def test_a_job_gives_what_one_worker_gives(pool: Any, name: str) -> None:
    """Wrong: a rank drops what belongs to other rows than its own, or a frozen stack of experts
    without tokens ends the graph.
    """
    model, training, adapter = JOBS[name]
    check_ways(pool, Case(model, PLAN, {**TRAINING, **training}, STEPS, adapter=adapter))


def documents(path: Path, length: int) -> str:
    """A data set whose rows hold several documents, which do not attend to each other."""
    lines = [
        {"prompt": "q" * (1 + 5 * index % 17), "completion": "answer"[: 1 + index % 6]}
        for index in range(150)
    ]
    source = path / "pairs.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = DataSection(source=str(source), kind="prompt_completion", cache=str(path / "cache"))
    prepared = prepare_dataset(section, length)
    assert prepared.facts.isolated
    _, begins = prepared.marks(range(len(prepared)))
    assert (begins.sum(axis=1) > 1).mean() > 0.5
    return str(prepared.path)


@pytest.mark.slow  # what only rows of documents change is proved by test_pieces
def test_packed_documents_are_evaluated_and_trained_as_by_one_worker(
    pool: Any, tmp_path: Path
) -> None:
    """The rows of an evaluation fill no whole number of global batches."""
    processes, port = pool
    rows = documents(tmp_path, ROWS_LENGTH)
    training = {**TRAINING, "sequence_length": ROWS_LENGTH, "router_balance": "sequence"}
    model = {**DEEPSEEK, "vocab_size": 260}
    case = Case(model, PLAN, training, 2, dataset=rows)
    found = []
    for document in (grid(1, 1, 1), PLAN, sending(PLAN)):
        cut = replace(case, plan={**document, "sequence_length": ROWS_LENGTH})
        workers = Plan.from_document(cut.plan).workers
        generation = next(GENERATIONS)
        processes.map(training_case.build, [(cut, each, port, generation) for each in workers])
        answers = processes.map(training_case.train_evaluating, [(cut, rows, 2)] * len(workers))
        processes.map(training_case.leave, [()] * len(workers))
        assert answers == [answers[0]] * len(workers)
        found.append(answers[0])
    assert len(set(found[0])) == 3
    np.testing.assert_allclose(found[1], found[0], rtol=TOLERANCE)
    np.testing.assert_allclose(found[2], found[0], rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral"])
def test_preferences_are_learnt_as_by_one_worker(pool: Any, tmp_path: Path, name: str) -> None:
    """The reference's passes, without adapters and gradients, dispatch tokens, too."""
    save_chat_tokenizer(tmp_path / "tokenizer")
    data = DataSection(
        source=write_preferences(tmp_path / "pairs.jsonl", 100),
        kind="preference",
        tokenizer=str(tmp_path / "tokenizer"),
        cache=str(tmp_path / "cache"),
    )
    rows = str(prepare_dataset(data, SETTINGS["sequence_length"]).path)
    model = {**MIXTURES[name], "vocab_size": VOCABULARY}
    check_ways(pool, Case(model, PLAN, SETTINGS, STEPS, dataset=rows, adapter=ADAPTER))


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["whole", "adapters"])
@pytest.mark.parametrize("formats", [("fp16",), ("fp16", None)])
def test_stages_in_fp16_follow_a_sum(
    pool: Any, formats: tuple[str | None, ...], adapter: AdapterSection | None
) -> None:
    """Within what fp16 itself rounds; biases of routers count tokens, whatever the scale."""
    training = {**TRAINING, "precision": "bf16", "router_balance": "bias"}
    if adapter is not None:
        training = {**TRAINING, "precision": "bf16"}
    case = Case(DEEPSEEK, in_formats(PLAN, *formats), training, STEPS, adapter=adapter)
    by_sum, states = run_in_formats(pool, case)
    found, others = run_in_formats(pool, replace(case, plan=sending(case.plan)))
    assert all(applied for _, _, applied in found)
    assert [each[1] for each in found] == [each[1] for each in by_sum], "another scale"
    tolerance = 1e-3 if formats == ("fp16",) else 1e-2
    losses = [[loss for loss, _, _ in each] for each in (found, by_sum)]
    np.testing.assert_allclose(*losses, rtol=tolerance)
    assert sum(map(len, states)) == sum(map(len, others))
