"""Adapters on any plan, also with a worker's death in the middle, equal peft with
torch.optim.AdamW in one process.

Losses and adapters of 6 steps, 3 on one plan, in fp32, within 2e-5 (relative; of the largest
weight of the tensor). Frozen weights keep their bits over all fleets.
"""

import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autohet.runtime.job import AdapterSection
from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.models.registry import family_of
from planner.plans.plan import Plan
from tests.harness import training_case
from tests.harness.parity import (
    ASYMMETRIC,
    GPT2,
    LLAMA,
    QWEN3,
    TOLERANCE,
    TRAINING,
    check_weights,
    grid,
    pipeline,
    plan_document,
    with_memory,
)
from tests.harness.peft_reference import train_peft
from tests.harness.training_case import Case, rows_of
from tests.multiprocess.test_chat_parity import (
    DEATH,
    STEPS,
    train_from,
    train_until_death,
    whole_state,
)

pytestmark = pytest.mark.multiprocess
SETTINGS = {**TRAINING, "steps": STEPS, "clip_norm": 0.05}
ALL = AdapterSection(rank=4, alpha=16.0)
SOME = AdapterSection(rank=3, alpha=6.0, targets=("k_proj", "v_proj", "down_proj"), rslora=True)
SAVED = AdapterSection(
    rank=4, alpha=16.0, targets="q_proj", modules_to_save=("embed_tokens", "lm_head", "norm")
)
SAVED_TIED = AdapterSection(
    rank=4, alpha=16.0, targets="down_proj", modules_to_save=("embed_tokens",)
)
ENDS = AdapterSection(rank=4, alpha=16.0, targets=("v_proj", "embed_tokens", "lm_head"))
FOUR_BITS = replace(ENDS, targets=("v_proj", "down_proj", "embed_tokens", "lm_head"), base="nf4")
UNEVEN = plan_document(
    pipeline((1, (2, 1, 1)), (3, 1), microbatches=5), pipeline((4, 2), microbatches=3)
)
CASES = {
    "TP and cuts across": (QWEN3, ALL, plan_document(*ASYMMETRIC["TP and cuts across"])),
    "uneven shares": (QWEN3, SOME, UNEVEN),
    "TP 2 beside TP 1, recomputed": (
        LLAMA,
        ALL,
        with_memory(plan_document(*ASYMMETRIC["TP 2 beside TP 1"]), "mixed", sharded=False),
    ),
    "packed and transposed": (GPT2, ALL, plan_document(*ASYMMETRIC["three pipelines"])),
    "sharded optimizers": (
        QWEN3,
        SOME,
        with_memory(plan_document(*ASYMMETRIC["TP and cuts across"]), "none", sharded=True),
    ),
}
CASES |= {
    "saved ends": (LLAMA, SAVED, plan_document(*ASYMMETRIC["TP and cuts across"])),
    "a saved tied embedding": (QWEN3, SAVED_TIED, UNEVEN),
    "updates of the ends": (LLAMA, ENDS, plan_document(*ASYMMETRIC["TP 2 beside TP 1"])),
}
BESIDE_A_DEATH = frozenset(
    {
        "TP and cuts across",
        "TP 2 beside TP 1, recomputed",
        "saved ends",
        "sharded optimizers",
        "updates of the ends",
    }
)
"""Cases whose model and cuts are in the first fleet of those that lose a worker."""
WIDE = {**LLAMA, "hidden_size": 192, "intermediate_size": 1024}
"""Blocks of four bits are cut in the attention's output, and whole in all other maps."""
FLEETS = (plan_document(*ASYMMETRIC["TP and cuts across"]), grid(1, 3, 2), grid(2, 1, 1))
"""What eight processes begin with, six survivors of a death go on with, and two of them."""
SECOND_FLEET_STEPS = 2
ON_ONE_PLAN_STEPS = 3
"""The first moves the half of an adapter that begins at zero, the second the other half."""
GENERATIONS = itertools.count(1000)


def case_of(
    model: dict[str, Any], adapter: AdapterSection, plan: dict[str, Any], steps: int = STEPS
) -> Case:
    return Case(model, plan, SETTINGS, steps, adapter=adapter)


@functools.cache
def _reference(model: tuple[tuple[str, Any], ...], adapter: AdapterSection, steps: int) -> Any:
    case = case_of(dict(model), adapter, grid(1, 1, 1))
    config = case.config()
    names = list(family_of(config).parameter_specs(config))
    drawn = dict(initial_parameters(config, names, case.seed))
    losses, adapters = train_peft(config, drawn, case.section(), rows_of(case), steps)
    return losses, {name: tensor.numpy() for name, tensor in adapters.items()}


def reference(case: Case) -> tuple[list[float], dict[str, np.ndarray]]:
    assert case.adapter is not None
    found: tuple[list[float], dict[str, np.ndarray]] = _reference(
        tuple(sorted(case.model.items(), key=str)), case.adapter, case.steps
    )
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=pytest.mark.slow if each in BESIDE_A_DEATH else ())
        for each in CASES
    ],
)
def test_adapters_on_any_plan_equal_peft(pool: Any, name: str) -> None:
    processes, port = pool
    case = case_of(*CASES[name], ON_ONE_PLAN_STEPS)
    plan = Plan.from_document(case.plan)
    generation = next(GENERATIONS)
    orders = [(case, worker, port, generation) for worker in plan.workers]
    answers = processes.map(training_case.run_case, orders)
    losses, adapters = reference(case)
    results = answers[0][0]
    np.testing.assert_allclose([loss for loss, _ in results], losses, rtol=TOLERANCE)
    assert max(norm for _, norm in results) > SETTINGS["clip_norm"], "clipping is not active"
    check_weights(case, plan, [state for _, state in answers], adapters)


@pytest.mark.parametrize(
    ("model", "adapter", "total"),
    [
        pytest.param(QWEN3, ALL, STEPS, id="maps"),
        pytest.param(QWEN3, ALL, 100, id="maps for long", marks=pytest.mark.slow),
        pytest.param(LLAMA, SAVED, STEPS, id="saved ends"),
        pytest.param(WIDE, FOUR_BITS, STEPS, id="updates of the ends, a base in four bits"),
    ],
)
def test_adapters_that_lose_a_worker_equal_peft_and_frozen_bits_stay(
    pool: Any, model: dict[str, Any], adapter: AdapterSection, total: int
) -> None:
    """Three fleets, one after a death in a backward pass; survivors keep their frozen weights and
    read from their origin what else they need.
    """
    processes, port = pool
    before, after, last = (case_of(model, adapter, plan, total) for plan in FLEETS)
    try:
        losses, state = train_until_death(processes, port, before)
        survivors = processes.processes[1:]
        third = DEATH + SECOND_FLEET_STEPS
        for case, first, steps in (
            (after, DEATH, SECOND_FLEET_STEPS),
            (last, third, total - third),
        ):
            workers = Plan.from_document(case.plan).workers
            seats = survivors[: len(workers)]
            results, states = train_from(seats, port, case, state, first, steps)
            losses += [loss for loss, _ in results]
            state = whole_state(case, states)
            for seat in seats:
                assert seat.call(training_case.check_frozen, case) > 0
                seat.call(training_case.leave)
    finally:
        processes.replace(0)
    expected, adapters = reference(before)
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
    check_weights(last, Plan.from_document(last.plan), states, adapters)


@pytest.mark.parametrize("compute", [pytest.param(None, marks=pytest.mark.slow), "fp16"])
def test_a_flipped_bit_of_a_frozen_weight_is_found_and_repaired(
    pool: Any, compute: str | None
) -> None:
    """Wrong: frozen weights are not compared, the step with the bad bit is kept, or of two holders
    the good one takes the bad bits; in fp16, the stage's copy keeps the bad bit.
    """
    processes, port = pool
    plan = plan_document(*ASYMMETRIC["TP 2 beside TP 1"])
    for each in plan["pipelines"]:
        for stage in each["stages"] if compute else ():
            stage["compute"] = compute
    settings = {**SETTINGS, "replica_check_steps": 1}
    case = Case(LLAMA, plan, settings, 6, adapter=ALL)
    workers = Plan.from_document(plan).workers
    weight = "model.layers.0.self_attn.q_proj.weight"
    runs = []
    processes.map(training_case.forget_frozen, [()] * len(workers))  # of other models
    for flips in (False, True):
        generation = next(GENERATIONS)
        processes.map(training_case.build, [(case, each, port, generation) for each in workers])
        steps = processes.map(training_case.train_and_tell, [(case, 2)] * len(workers))[0]
        if flips:
            processes.processes[0].call(training_case.flip_frozen_bit, weight, 3, 14)
            processes.processes[0].call(training_case.use_frozen)
        steps += processes.map(training_case.train_and_tell, [(case, 2)] * len(workers))[0]
        processes.map(training_case.leave, [()] * len(workers))
        processes.map(training_case.forget_frozen, [()] * len(workers))
        runs.append(steps)
    undisturbed, repaired = runs
    assert [step[:2] for step in repaired] == [step[:2] for step in undisturbed]
    assert not any(parted for _, _, parted in undisturbed)
    assert [bool(parted) for _, _, parted in repaired] == [False, False, True, False]
    (told,) = repaired[2][2]
    assert (told.tensor, told.layer) == (f"frozen/{weight}", 0)
    assert (told.workers, told.owner) == (workers[:1], "the origin")
