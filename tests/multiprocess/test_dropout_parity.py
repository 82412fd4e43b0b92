"""Dropout of models and adapters drops the same elements on any plan: losses and weights equal
those of one worker.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autohet.runtime.job import AdapterSection
from planner.plans.plan import Plan
from tests.harness.parity import (
    ASYMMETRIC,
    GPT2,
    QWEN3,
    TOLERANCE,
    TRAINING,
    check_weights,
    grid,
    plan_document,
    with_memory,
)
from tests.harness.training_case import (
    Case,
    build,
    leave,
    rebuild,
    run_case,
    show_state,
    train,
)
from tests.multiprocess.test_adapter_parity import UNEVEN
from tests.multiprocess.test_shares_parity import SEQUENCE_CUT

pytestmark = pytest.mark.multiprocess
STEPS = 5
ADAPTER = AdapterSection(rank=4, alpha=16.0, dropout=0.3)
CASES = {
    "TP and cuts across": (QWEN3, plan_document(*ASYMMETRIC["TP and cuts across"])),
    "uneven shares": (QWEN3, UNEVEN),
    "recomputed": (
        QWEN3,
        with_memory(plan_document(*ASYMMETRIC["TP 2 beside TP 1"]), "mixed", sharded=False),
    ),
    "transposed, DP, PP and TP": (GPT2, grid(2, 2, 2)),
}
DROPPING = {**GPT2, "attn_pdrop": 0.3, "resid_pdrop": 0.2, "embd_pdrop": 0.1}
IN_SEQUENCE_PARTS = plan_document(*SEQUENCE_CUT["TP 2, then 2"])
for each in IN_SEQUENCE_PARTS["pipelines"]:
    for stage in each["stages"]:
        stage["sequence_parallel"] = True
MODEL_CASES = {
    "TP and cuts across": plan_document(*ASYMMETRIC["TP and cuts across"]),
    "uneven shares": UNEVEN,
    "recomputed": CASES["recomputed"][1],
    "sequence parallel": IN_SEQUENCE_PARTS,
}
GENERATIONS = itertools.count(7000)


def run(pool: Any, case: Case) -> tuple[list[float], list[dict[str, np.ndarray]]]:
    processes, port = pool
    generation = next(GENERATIONS)
    workers = Plan.from_document(case.plan).workers
    answers = processes.map(run_case, [(case, worker, port, generation) for worker in workers])
    return [loss for loss, _ in answers[0][0]], [state for _, state in answers]


@pytest.fixture(scope="module")
def alone(pool: Any) -> Callable[[dict[str, Any]], tuple[list[float], dict[str, np.ndarray]]]:
    """One worker's losses and state of a model; dropout changes them."""
    found: dict[str, tuple[list[float], dict[str, np.ndarray]]] = {}

    def run_alone(model: dict[str, Any]) -> tuple[list[float], dict[str, np.ndarray]]:
        kind = model["model_type"]
        if kind not in found:
            case = Case(model, grid(1, 1, 1), TRAINING, STEPS, adapter=ADAPTER)
            losses, (state,) = run(pool, case)
            without, _ = run(pool, replace(case, adapter=replace(ADAPTER, dropout=0.0)))
            assert max(np.abs(np.array(without) - losses)) > 10 * TOLERANCE
            found[kind] = losses, state
        return found[kind]

    return run_alone


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "uneven shares" else pytest.mark.slow)
        for name in CASES
    ],
)
def test_dropout_is_the_same_on_any_plan(pool: Any, alone: Any, name: str) -> None:
    model, plan = CASES[name]
    case = Case(model, plan, TRAINING, STEPS, adapter=ADAPTER)
    expected, state = alone(model)
    losses, states = run(pool, case)
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
    weights = {name.removeprefix("param/"): tensor for name, tensor in state.items()}
    check_weights(case, Plan.from_document(plan), states, weights)


@pytest.fixture(scope="module")
def model_alone(pool: Any) -> tuple[list[float], dict[str, np.ndarray]]:
    """One worker's losses and state of a model with dropout, which changes both."""
    losses, (state,) = run(pool, Case(DROPPING, grid(1, 1, 1), TRAINING, STEPS))
    without, _ = run(pool, Case(GPT2, grid(1, 1, 1), TRAINING, STEPS))
    assert max(np.abs(np.array(without) - losses)) > 10 * TOLERANCE
    return losses, state


@pytest.mark.parametrize(
    "name",
    [
        "TP and cuts across",
        pytest.param("uneven shares", marks=pytest.mark.slow),
        pytest.param("recomputed", marks=pytest.mark.slow),
        "sequence parallel",
    ],
)
def test_the_models_own_dropout_is_the_same_on_any_plan(
    pool: Any, model_alone: Any, name: str
) -> None:
    case = Case(DROPPING, MODEL_CASES[name], TRAINING, STEPS)
    expected, state = model_alone
    losses, states = run(pool, case)
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
    weights = {name.removeprefix("param/"): tensor for name, tensor in state.items()}
    check_weights(case, Plan.from_document(case.plan), states, weights)


def test_a_new_generation_drops_what_an_undisturbed_run_drops(pool: Any, model_alone: Any) -> None:
    processes, port = pool
    case = Case(DROPPING, grid(1, 1, 1), TRAINING, STEPS)
    (worker,) = Plan.from_document(case.plan).workers
    seats = [(case, worker, port, next(GENERATIONS)) for _ in range(2)]
    processes.map(build, seats[:1])
    first = processes.map(train, [(case, 2)])[0]
    processes.map(rebuild, seats[1:])
    rest = processes.map(train, [(case, STEPS - 2)])[0]
    (state,) = processes.map(show_state, [()])
    processes.map(leave, [()])
    expected, undisturbed = model_alone
    assert [loss for loss, _ in (*first, *rest)] == expected
    assert all(np.array_equal(state[name], undisturbed[name]) for name in undisturbed)
