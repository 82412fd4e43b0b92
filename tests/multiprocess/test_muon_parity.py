"""Muon on any plan, and over a death: losses and weights of `torch.optim.Muon` and AdamW in one
process.

Torch's iteration runs in fp32 here. In bf16 the last bit of a gradient, which the order of a sum
decides, turns the rounding of some elements, and an update moves by about a hundredth of itself: no
tolerance would tell that from a small error.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.plans.plan import Plan
from tests.harness import training_case
from tests.harness.parity import (
    ASYMMETRIC,
    GENERATIONS,
    GPT2,
    LLAMA,
    MIXTURES,
    STEPS,
    TOLERANCE,
    TRAINING,
    _hashable,
    check,
    check_weights,
    grid,
    plan_document,
    reference,
    with_stages,
)
from tests.harness.training_case import Case, muon_in_fp32
from tests.harness.worker_pool import TaskFailed
from tests.multiprocess.test_chat_parity import DEATH, train_through_death
from tests.multiprocess.test_experts_parity import EXPERT_PLANS

pytestmark = pytest.mark.multiprocess

MUON = {**TRAINING, "optimizer": "muon", "muon_learning_rate": 4e-3}
ROUTERS_BY_ADAMW = {
    **MUON,
    "muon_adjust": "original",
    "muon_momentum": 0.9,
    "muon_exempt": ("*.mlp.gate.weight",),
    "no_decay": ("*norm*", "*.o_proj.weight"),
}
CASES = {
    "uneven": (LLAMA, EXPERT_PLANS["uneven beside TP 1, 2"], MUON, "deferred"),
    "in, out": (GPT2, plan_document(*ASYMMETRIC["TP 4 beside TP 2"]), MUON, "gloo"),
    "one pipeline": (LLAMA, grid(1, 2, 4), MUON, "gloo"),
    "experts": (
        MIXTURES["qwen3_moe"],
        EXPERT_PLANS["all-to-all beside a sum"],
        ROUTERS_BY_ADAMW,
        "gloo",
    ),
    "experts' biases": (
        MIXTURES["gpt_oss"],
        with_stages(plan_document(*ASYMMETRIC["TP and cuts across"]), shard_optimizer=True),
        MUON,
        "gloo",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_muon_on_any_plan_equals_torch(pool: Any, name: str) -> None:
    """Ranks that orthogonalized their slices alone, or a stack as one matrix, would be off by as
    much as a whole update; so would one of AdamW's parameters under Muon.
    """
    model, document, training, back_end = CASES[name]
    with muon_in_fp32():
        check(pool, Case(model, document, training, STEPS, back_end=back_end))


def test_muon_that_loses_a_worker_equals_torch(pool: Any) -> None:
    """Momenta are restored at the owners of another plan."""
    steps = DEATH + 2
    settings = {**MUON, "steps": steps}
    before = Case(LLAMA, plan_document(*ASYMMETRIC["TP and cuts across"]), settings, steps)
    after = replace(before, plan=grid(1, 3, 2))
    losses, _, final = train_through_death(pool, before, after, steps)
    with muon_in_fp32():
        expected, weights = reference(_hashable(LLAMA), _hashable(settings), steps)
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
    check_weights(after, Plan.from_document(after.plan), final, weights)


def test_muon_rolls_forward_alone(pool: Any) -> None:
    """An owner that never saw its vote's result updates whole matrices without its peers."""
    processes, port = pool
    case = Case(LLAMA, plan_document(*ASYMMETRIC["TP 2 beside TP 1"]), MUON, STEPS)
    plan = Plan.from_document(case.plan)
    seats = processes.processes[: len(plan.workers)]
    generation = next(GENERATIONS)
    processes.map(training_case.build, [(case, each, port, generation) for each in plan.workers])
    processes.map(training_case.train, [(case, STEPS - 1)] * len(seats))
    first, *others = seats
    first.call(training_case.lose_vote_at, STEPS - 1)
    tasks = [seat.start(training_case.train, case, 1) for seat in seats]
    for other, task in zip(others, tasks[1:], strict=True):
        other.result(task)
    with pytest.raises(TaskFailed, match="PeerLost"):
        first.result(tasks[0])
    _, vote = others[0].call(training_case.progress)[2]
    states = [other.call(training_case.show_state) for other in others]
    for other in others:
        other.call(training_case.leave)
    assert first.call(training_case.roll_forward, vote) == STEPS
    states.insert(0, first.call(training_case.show_state))
    first.call(training_case.leave)
    with muon_in_fp32():
        _, weights = reference(_hashable(LLAMA), _hashable(MUON), STEPS)
    check_weights(case, plan, states, weights)
