"""Evaluation through a plan: a plain loop's loss over the same rows, whatever the plan, and a
training that does not notice it.
"""

import itertools
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autohet.runtime.data import TokenDataset, prepare_dataset
from autohet.runtime.job import DataSection
from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.models.registry import family_of
from autohet.runtime.step.batches import EvaluationRows
from autohet.runtime.step.reference import reference_model
from planner.plans.plan import Plan
from tests.harness import training_case as case_of
from tests.harness.training_case import CPU, Case
from tests.harness.worker_pool import TaskFailed, WorkerPool, pool_and_store

pytestmark = pytest.mark.multiprocess

LAYERS = 4
BATCH = 4
LENGTH = 13
MAX_ROWS = 11
"""No TP degree divides the length: sequence-parallel stages pad it."""
LLAMA = {
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
TRAINING = {
    "global_batch_sequences": BATCH,
    "sequence_length": LENGTH,
    "steps": 10,
    "precision": "fp32",
    "learning_rate": 3e-3,
    "label_smoothing": 0.1,
}


def stage(first: int, layers: int, *workers: str, **more: Any) -> dict[str, Any]:
    return {"first_layer": first, "num_layers": layers, "workers": list(workers), **more}


def plan(*pipelines: tuple[int, int, list[dict[str, Any]]]) -> dict[str, Any]:
    """A plan of (microbatches, their size, stages)."""
    return {
        "version": 1,
        "model": "m",
        "global_batch_sequences": BATCH,
        "microbatch_sequences": 1,
        "sequence_length": LENGTH,
        "pipelines": [
            {"num_microbatches": count, "microbatch_sequences": size, "stages": stages}
            for count, size, stages in pipelines
        ],
    }


ALONE = plan((2, 2, [stage(0, 4, "a/0")]))
PLANS = {
    "one stage beside two": plan(
        (1, 1, [stage(0, 4, "a/0")]), (3, 1, [stage(0, 1, "b/0"), stage(1, 3, "c/0")])
    ),
    "TP 2 then 1, beside 1": plan(
        (3, 1, [stage(0, 3, "a/0", "a/1"), stage(3, 1, "b/0")]), (1, 1, [stage(0, 4, "c/0")])
    ),
    "sharded optimizers": plan(
        (1, 2, [stage(0, 4, "a/0", shard_optimizer=True)]),
        (
            2,
            1,
            [stage(0, 2, "b/0", shard_optimizer=True), stage(2, 2, "c/0", shard_optimizer=True)],
        ),
    ),
    "sequence parallel": plan((4, 1, [stage(0, 4, "a/0", "a/1", sequence_parallel=True)])),
    "state in host memory": plan(
        (1, 1, [stage(0, 4, "a/0", offload_optimizer=True)]), (3, 1, [stage(0, 4, "b/0")])
    ),
}
BESIDE_CI = ("sharded optimizers", "state in host memory", "sequence parallel")
"""Two of these place the optimizer's state elsewhere, which an evaluation does not read."""
GENERATIONS = itertools.count(1)
Bench = tuple[WorkerPool, int]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with pool_and_store(4) as made:
        yield made


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows with very different numbers of targets: a mean of rows' or batches' losses is wrong."""
    folder = tmp_path_factory.mktemp("rows")
    lines = [
        {"prompt": "q" * (1 + 5 * index % 17), "completion": "answer"[: 1 + index % 6]}
        for index in range(60)
    ]
    source = folder / "held_out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = DataSection(
        source=str(source),
        kind="prompt_completion",
        isolate_documents=False,
        packing="concat",
        cache=str(folder / "cache"),
    )
    return str(prepare_dataset(section, LENGTH).path)


def seat_all(bench: Bench, case: Case) -> tuple[WorkerPool, tuple[str, ...]]:
    pool, port = bench
    pool.restore()
    generation = next(GENERATIONS)
    workers = Plan.from_document(case.plan).workers
    pool.map(case_of.build, [(case, worker, port, generation) for worker in workers])
    return pool, workers


def plain_loss(case: Case, dataset: str, rows: int) -> float:
    """The library's model over the rows, one by one: all losses over all targets."""
    config = case.config()
    names = list(family_of(config).parameter_specs(config))
    model = reference_model(config, initial_parameters(config, names, case.seed))
    total = 0.0
    num_targets = 0
    data = TokenDataset(dataset)
    counts, _ = data.marks(range(rows))
    with torch.no_grad():
        for row, counted in zip(torch.from_numpy(data.rows(range(rows))), counts, strict=True):
            targets = row[1:].masked_fill(~torch.from_numpy(counted[1:]), -100)
            logits = model(row[None, :-1]).logits[0]
            total += float(F.cross_entropy(logits, targets, reduction="sum"))
            num_targets += int((targets >= 0).sum())
    return total / num_targets


@pytest.mark.parametrize(
    ("name", "back_end"),
    [
        *((name, "gloo") for name in PLANS if name not in BESIDE_CI),
        *(pytest.param(name, "gloo", marks=pytest.mark.slow) for name in BESIDE_CI),
        ("one stage beside two", "deferred"),  # messages between stages, in stream order
        pytest.param("sequence parallel", "deferred", marks=pytest.mark.slow),  # and within one
    ],
)
def test_the_loss_is_a_plain_loops_and_training_does_not_notice(
    bench: Bench, dataset: str, name: str, back_end: str
) -> None:
    """The rows fill no whole number of global batches."""
    case = Case(LLAMA, PLANS[name], TRAINING, 2, back_end=back_end)
    pool, workers = seat_all(bench, case)
    answers = pool.map(case_of.evaluate, [(case, dataset, MAX_ROWS)] * len(workers))
    loss, tokens, sequences = answers[0]
    assert answers == [answers[0]] * len(workers)
    assert loss == pytest.approx(plain_loss(case, dataset, MAX_ROWS), rel=2e-5)
    assert (tokens > MAX_ROWS, sequences) == (True, MAX_ROWS)
    evaluated = pool.map(case_of.train_evaluating, [(case, dataset, 2)] * len(workers))
    assert len(set(evaluated[0])) == 3, "the state that is evaluated is not the newest one"
    assert evaluated == [evaluated[0]] * len(workers)
    found = pool.map(case_of.show_state, [()] * len(workers))

    seat_all(bench, case)
    pool.map(case_of.train, [(case, 2)] * len(workers))
    wanted = pool.map(case_of.show_state, [()] * len(workers))
    for mine, other in zip(found, wanted, strict=True):
        for key in other:
            assert mine[key].tobytes() == other[key].tobytes(), key


def test_a_death_wakes_all_and_another_plan_evaluates_the_same(bench: Bench, dataset: str) -> None:
    case = Case(LLAMA, PLANS["one stage beside two"], TRAINING, 2)
    pool, workers = seat_all(bench, case)
    pool.map(case_of.train, [(case, 1)] * len(workers))
    wanted = pool.map(case_of.evaluate, [(case, dataset)] * len(workers))[0]
    victim = pool.processes[2]
    survivors = pool.processes[:2]
    victim.call(case_of.hold_at, "evaluate", 1)
    tasks = [each.start(case_of.evaluate, case, dataset) for each in survivors]
    victim.start(case_of.evaluate, case, dataset)
    victim.call(case_of.wait_held)
    victim.send_signal(signal.SIGKILL)
    survivors[0].call(case_of.interrupt)
    for process, task in zip(survivors, tasks, strict=True):
        with pytest.raises(TaskFailed):
            process.result(task)
    assert survivors[0].call(case_of.progress)[:2] == (1, None)
    alone = Case(LLAMA, ALONE, TRAINING, 2)
    survivors[0].call(case_of.rebuild, alone, "a/0", bench[1], next(GENERATIONS))
    found = survivors[0].call(case_of.evaluate, alone, dataset)
    assert found == (pytest.approx(wanted[0], rel=2e-5), *wanted[1:])


def test_one_that_is_to_stop_ends_the_evaluation_for_all(bench: Bench, dataset: str) -> None:
    case = Case(LLAMA, PLANS["one stage beside two"], TRAINING, 2)
    pool, workers = seat_all(bench, case)
    pool.processes[1].call(case_of.ask_to_stop)
    given_up = pool.map(case_of.evaluation_is_given_up, [(case, dataset)] * len(workers))
    assert given_up == [True] * len(workers)


def test_rows_come_once_in_their_order_and_missing_ones_count_nothing(dataset: str) -> None:
    data = TokenDataset(dataset)
    rows = EvaluationRows(data, BATCH, CPU, MAX_ROWS)
    assert (rows.num_batches, [rows.num_in_batch(index) for index in range(3)]) == (3, [4, 4, 3])
    parts = [rows.batch(index, range(BATCH)) for index in range(rows.num_batches)]
    tokens = torch.cat([part[0] for part in parts])
    assert torch.equal(tokens[:MAX_ROWS], torch.from_numpy(data.rows(range(MAX_ROWS)))[:, :-1])
    assert bool((parts[-1][1][3:] == -100).all())
    assert EvaluationRows(data, BATCH, CPU).num_rows == len(data)
