"""Chat data on any plan, a worker's death in the middle, equals TRL's SFTTrainer on the same rows.

Losses and weights of 6 steps, fp32, within 2e-5 (relative; of the largest weight of the tensor).
"""

import itertools
import signal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from autohet.runtime.data import prepare_dataset
from autohet.runtime.facts.layout import layout_of_plan, tensor_specs
from autohet.runtime.job import DataSection
from planner.plans.plan import Plan
from recovery.state.slices import unit_views
from tests.harness import training_case
from tests.harness.chat_tokenizer import save_chat_tokenizer
from tests.harness.parity import (
    ADAM_EPS,
    ASYMMETRIC,
    LLAMA,
    TOLERANCE,
    check_weights,
    grid,
    plan_document,
)
from tests.harness.training_case import Case
from tests.harness.trl_reference import TrlRun, run_trl
from tests.harness.worker_pool import PoolProcess, TaskFailed, WorkerPool
from tests.runtime.data.test_chat import conversations, write_chat

pytestmark = pytest.mark.multiprocess
STEPS = 6
DEATH = 2
LENGTH = 127
MODEL = {**LLAMA, "vocab_size": 400}
TRAINING = {
    "global_batch_sequences": 8,
    "sequence_length": LENGTH,
    "steps": STEPS,
    "precision": "fp32",
    "learning_rate": 1e-3,
    "min_learning_rate_ratio": 1.0,
    "weight_decay": 0.0,
    "clip_norm": 0.5,
    "eps": ADAM_EPS,
    "betas": (0.9, 0.95),
}
GRIDS = [
    (8, 1, 1),
    (1, 1, 8),
    (2, 2, 2),
    (2, 4, 1),
    (4, 1, 2),
    (1, 2, 4),
    (3, 2, 1),
]
PLANS = {
    **{f"{dp}x{pp}x{tp}": grid(dp, pp, tp) for dp, pp, tp in GRIDS},
    **{
        name: plan_document(*ASYMMETRIC[name])
        for name in (
            "unequal depth",
            "one stage beside three",
            "unequal microbatch size",
            "TP 2, 1, 4",
            "TP and cuts across",
            "three pipelines",
        )
    },
}
IN_CI = frozenset({"TP and cuts across"})
"""Plans that hold each cut and each inequality once."""
AFTER = grid(1, 3, 2)
"""What six survivors go on with."""
GENERATIONS = itertools.count(5000)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp("chat")
    save_chat_tokenizer(root / "tokenizer")
    chats = [each for each in conversations(600, seed=1) if len(each) <= 3]
    source = write_chat(root / "chat.jsonl", chats)
    data = DataSection(
        source=str(source),
        kind="chat",
        tokenizer=str(root / "tokenizer"),
        cache=str(root / "cache"),
    )
    dataset = prepare_dataset(data, LENGTH)
    assert dataset.facts.isolated
    assert dataset.facts.num_padding_tokens > 100
    _, begins = dataset.marks(range(len(dataset)))
    assert (begins.sum(axis=1) > 2).mean() > 0.2, "many rows hold several documents"
    return Case(MODEL, grid(1, 1, 1), TRAINING, STEPS, dataset=str(dataset.path))


@pytest.fixture(scope="module")
def trl(case: Case, tmp_path_factory: pytest.TempPathFactory) -> TrlRun:
    tokenizer = save_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return run_trl(case, tokenizer, tmp_path_factory.mktemp("trl"))


def with_plan(case: Case, plan: dict[str, Any]) -> Case:
    document = {**plan, "sequence_length": LENGTH}
    return Case(case.model, document, case.training, case.steps, dataset=case.dataset)


def whole_state(case: Case, states: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    """Tensors of state from the slices that workers of the plan hold."""
    plan = Plan.from_document(case.plan)
    config = case.config()
    layout = layout_of_plan(plan, config)
    specs = tensor_specs(config)
    whole: dict[str, torch.Tensor] = {}
    for worker, state in zip(plan.workers, states, strict=True):
        units = layout.units_of(worker)
        for name, tensor in state.items():
            spec = specs[name]
            local = torch.from_numpy(tensor)
            if spec.split_dim is None:
                whole[name] = local
                continue
            target = whole.setdefault(name, torch.empty(spec.shape))
            for unit, view in unit_views(spec, units[name], local).items():
                target[spec.unit_slices(unit)] = view
    return whole


def slices_for(case: Case, worker: str, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    layout = layout_of_plan(Plan.from_document(case.plan), case.config())
    found = {}
    for name, units in layout.units_of(worker).items():
        spec = layout.tensors[name]
        parts = [whole[name][spec.unit_slices(unit)] for unit in units]
        is_whole = spec.split_dim is None
        found[name] = whole[name].clone() if is_whole else torch.cat(parts, spec.split_dim)
    return found


def train_until_death(
    pool: WorkerPool, port: int, case: Case
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train `DEATH` steps, kill the first worker in a backward pass of the next one, and interrupt
    the others. Returns losses, and the state that snapshots of step `DEATH` hold.
    """
    workers = Plan.from_document(case.plan).workers
    processes = pool.processes[: len(workers)]
    generation = next(GENERATIONS)
    pool.map(training_case.build, [(case, worker, port, generation) for worker in workers])
    answers = pool.map(training_case.train, [(case, DEATH)] * len(workers))
    states = [process.call(training_case.show_state) for process in processes]
    victim = processes[0]
    others = processes[1:]
    victim.call(training_case.hold_at, "backward", DEATH)
    victim.start(training_case.train, case, 1)
    tasks = [process.start(training_case.train, case, 1) for process in others]
    victim.call(training_case.wait_held)
    victim.send_signal(signal.SIGKILL)
    for process in others:
        process.call(training_case.interrupt)
    for process, task in zip(others, tasks, strict=True):
        with pytest.raises(TaskFailed):
            process.result(task)
        assert process.call(training_case.progress)[0] == DEATH
        process.call(training_case.leave)
    return [loss for loss, _ in answers[0]], whole_state(case, states)


def train_from(
    processes: Sequence[PoolProcess],
    port: int,
    case: Case,
    state: dict[str, torch.Tensor],
    first: int,
    steps: int,
) -> tuple[list[tuple[float, float]], list[dict[str, np.ndarray]]]:
    """Train `steps` from step `first` on, begun with this whole state, in a new generation.

    Returns losses and norms, and every worker's state at the end.
    """
    workers = Plan.from_document(case.plan).workers
    generation = next(GENERATIONS)
    tasks = [
        process.start(
            training_case.build,
            case,
            worker,
            port,
            generation,
            slices_for(case, worker, state),
            first,
        )
        for process, worker in zip(processes, workers, strict=True)
    ]
    for process, task in zip(processes, tasks, strict=True):
        process.result(task)
    tasks = [process.start(training_case.train, case, steps) for process in processes]
    results = [process.result(task) for process, task in zip(processes, tasks, strict=True)]
    return results[0], [process.call(training_case.show_state) for process in processes]


def train_through_death(
    pool: tuple[WorkerPool, int],
    before: Case,
    after: Case,
    steps: int,
    at_end: Callable[[PoolProcess], None] = lambda process: None,
) -> tuple[list[float], list[float], list[dict[str, np.ndarray]]]:
    """Train `steps`, the first `DEATH` in one plan and the others by its survivors in another.

    at_end: called with each survivor before it leaves. Returns all losses, the survivors' norms,
    and every survivor's state at the end.
    """
    processes, port = pool
    try:
        losses, state = train_until_death(processes, port, before)
        num_workers = len(Plan.from_document(after.plan).workers)
        survivors = processes.processes[1 : 1 + num_workers]
        results, final = train_from(survivors, port, after, state, DEATH, steps - DEATH)
        for process in survivors:
            at_end(process)
            process.call(training_case.leave)
    finally:
        processes.replace(0)
    return losses + [loss for loss, _ in results], [norm for _, norm in results], final


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in PLANS],
)
def test_chat_on_any_plan_equals_trl(pool: Any, case: Case, trl: TrlRun, name: str) -> None:
    after = with_plan(case, AFTER)
    losses, norms, final = train_through_death(pool, with_plan(case, PLANS[name]), after, STEPS)
    np.testing.assert_allclose(losses, trl.losses, rtol=TOLERANCE)
    check_weights(after, Plan.from_document(after.plan), final, trl.weights)
    assert max(norms) > TRAINING["clip_norm"], "clipping is not active"
