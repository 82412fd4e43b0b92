"""Stages in fp16, alone and beside stages in bf16: as torch.amp with a GradScaler trains, whatever
the plan, and an overflow costs no weight.
"""

import copy
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from autohet.runtime.job import AdapterSection
from autohet.runtime.models.family import COMPUTE_DTYPES
from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.models.layers.adapters import is_adapter
from autohet.runtime.models.registry import family_of
from autohet.runtime.step.learning_rate import learning_rate
from autohet.runtime.step.loss_scale import LossScale
from autohet.runtime.step.reference import peft_reference_model, reference_model
from planner.plans.plan import Plan
from tests.harness.parity import (
    ASYMMETRIC,
    GPT2,
    LLAMA,
    QWEN3,
    TRAINING,
    check_holders,
    grid,
    plan_document,
    with_memory,
)
from tests.harness.training_case import Case, rows_of, run_scaled

pytestmark = pytest.mark.multiprocess

LONG = {**TRAINING, "steps": 50, "precision": "fp16", "learning_rate": 1e-3, "warmup_steps": 5}
BF16 = {**TRAINING, "precision": "bf16"}
LARGE = LossScale(0, 24)
"""Overflows in the first step of any model."""
LORA = AdapterSection(rank=4, alpha=16.0)
CUTS_ACROSS = plan_document(*ASYMMETRIC["TP and cuts across"])
GENERATIONS = itertools.count(9000)


def run(pool: Any, case: Case) -> tuple[list[Any], list[dict[str, np.ndarray]]]:
    """What every worker alike says of each step, and each worker's state."""
    processes, port = pool
    generation = next(GENERATIONS)
    plan = Plan.from_document(case.plan)
    calls = [(case, me, port, generation) for me in plan.workers]
    answers = processes.map(run_scaled, calls)
    assert all(results == answers[0][0] for results, _ in answers), "workers disagree"
    states = [state for _, state in answers]
    check_holders(case, plan, states)
    return answers[0][0], states


def check_follows(pool: Any, case: Case, plain: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """The losses are within 1% of those of a plan in one format, and not its very losses.

    Returns loss, exponent and whether weights changed, by step, of both.
    """
    results, _ = run(pool, case)
    expected, _ = run(pool, replace(case, plan=plain))
    losses = [loss for loss, _, _ in results]
    np.testing.assert_allclose(losses, [loss for loss, _, _ in expected], rtol=1e-2)
    assert losses != [loss for loss, _, _ in expected]
    return results, expected


def in_formats(document: dict[str, Any], *formats: str | None) -> dict[str, Any]:
    """The plan with these formats of its stages, again from the first when they are used up."""
    found = copy.deepcopy(document)
    cycle = itertools.cycle(formats)
    for pipeline in found["pipelines"]:
        for stage in pipeline["stages"]:
            compute = next(cycle)
            if compute is not None:
                stage["compute"] = compute
    return found


def whole_model(case: Case) -> torch.nn.Module:
    """The library's model in fp32; of frozen weights only what their stored format holds."""
    config = case.config()
    names = list(family_of(config).parameter_specs(config))
    drawn = dict(initial_parameters(config, names, case.seed))
    if case.adapter is None:
        return reference_model(config, iter(drawn.items()))
    stored = COMPUTE_DTYPES[case.section().precision]
    for name, tensor in drawn.items():
        if not is_adapter(name):
            drawn[name] = tensor.to(stored).float()
    adapted: torch.nn.Module = peft_reference_model(config, drawn)
    return adapted


def losses_of_amp(case: Case) -> list[float]:
    """Plain transformers, with peft's adapters if the case has some, under autocast to fp16 with a
    GradScaler, in this process.
    """
    training = case.section()
    model = whole_model(case)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        betas=training.betas,
        eps=training.eps,
        weight_decay=training.weight_decay,
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for step in range(case.steps):
        tokens, targets = rows_of(case)(step, range(training.global_batch_sequences))
        optimizer.param_groups[0]["lr"] = learning_rate(training, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert training.clip_norm is not None
        torch.nn.utils.clip_grad_norm_(trained, training.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("model", "plan", "steps"),
    [
        pytest.param(LLAMA, grid(1, 1, 1), 50, id="alone", marks=pytest.mark.slow),
        pytest.param(QWEN3, CUTS_ACROSS, 5, id="asymmetric"),
        pytest.param(QWEN3, CUTS_ACROSS, 50, id="asymmetric, longer", marks=pytest.mark.slow),
        pytest.param(
            GPT2,
            with_memory(grid(2, 2, 2), "mixed", sharded=True),
            50,
            id="sharded and recomputed",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_fp16_trains_as_torch_amp_does(pool: Any, model: Any, plan: Any, steps: int) -> None:
    case = Case(model, plan, LONG, steps)
    results, _ = run(pool, case)
    assert all(applied for _, _, applied in results)
    np.testing.assert_allclose([loss for loss, _, _ in results], losses_of_amp(case), rtol=1e-3)


@pytest.mark.parametrize(
    ("sharded", "steps"),
    [
        pytest.param(False, 4, marks=pytest.mark.slow),
        (True, 4),
        pytest.param(False, 200, marks=[pytest.mark.slow, pytest.mark.timeout(1000)]),
    ],
)
def test_stages_of_two_formats_follow_bf16(pool: Any, sharded: bool, steps: int) -> None:
    """One pipeline begins in fp16, the other ends in it, so holders of a layer differ in format."""
    plain = with_memory(CUTS_ACROSS, "none", sharded=sharded)
    mixed = in_formats(plain, "fp16", None, "bf16")
    assert {stage.compute for p in Plan.from_document(mixed).pipelines for stage in p.stages} == {
        "fp16",
        "bf16",
        None,
    }
    schedule = {"steps": steps, "learning_rate": 1e-3, "warmup_steps": min(5, steps // 2)}
    case = Case(QWEN3, mixed, {**BF16, **schedule}, steps)
    results, expected = check_follows(pool, case, plain)
    assert all(exponent is not None for _, exponent, _ in results)
    assert all(exponent is None for _, exponent, _ in expected)


def test_stages_in_fp8_follow_bf16(pool: Any) -> None:
    """Also cut by tensor parallelism; all holders of a layer keep equal bits."""
    plain = plan_document(*ASYMMETRIC["TP 2 beside TP 1"])
    case = Case({**LLAMA, "intermediate_size": 64}, in_formats(plain, "fp8", None), BF16, 3)
    check_follows(pool, case, plain)


@pytest.mark.parametrize(
    "formats", [("fp16", None), pytest.param((None, "fp16"), marks=pytest.mark.slow)]
)
def test_an_overflow_costs_no_weight(pool: Any, formats: tuple[str | None, ...]) -> None:
    """Steps that overflow are run again with smaller scales, until the run is the one that began
    with the last of them.
    """
    plan = in_formats(grid(1, 2, 2), *formats)
    case = Case(LLAMA, plan, BF16, 2, loss_scale=LARGE)
    results, states = run(pool, case)
    exponents = [exponent for _, exponent, _ in results]
    assert exponents[0] < LARGE.exponent - 1
    assert all(applied for _, _, applied in results), "a step was lost"
    begun = replace(case, loss_scale=LossScale(0, exponents[-1]))
    expected, expected_states = run(pool, begun)
    assert expected[-1] == results[-1]
    if len(set(exponents)) == 1:
        for state, wanted in zip(states, expected_states, strict=True):
            assert all(np.array_equal(state[name], wanted[name]) for name in wanted)


def test_a_loss_that_is_not_finite_is_skipped_and_not_repeated(pool: Any) -> None:
    """NaN in a weight is no overflow: the scale stays, and the step changes nothing."""
    case = Case(LLAMA, in_formats(grid(1, 1, 1), "fp16"), {**BF16, "learning_rate": 1e30}, 4)
    results, _ = run(pool, case)
    assert [applied for _, _, applied in results][-1] is False
    assert results[-1][1] == results[0][1]


# ---- adapters over frozen weights ----


def with_adapters(case: Case) -> Case:
    return replace(case, adapter=LORA)


@pytest.mark.parametrize("steps", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_fp16_adapters_over_bf16_weights_train_as_peft(pool: Any, steps: int) -> None:
    """Wrong: frozen weights are stored in fp16 for good, or adapters' gradients stay scaled."""
    schedule = {**LONG, "precision": "bf16", "steps": steps}
    case = with_adapters(Case(QWEN3, in_formats(CUTS_ACROSS, "fp16"), schedule, steps))
    results, _ = run(pool, case)
    assert all(applied for _, _, applied in results)
    np.testing.assert_allclose([loss for loss, _, _ in results], losses_of_amp(case), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [4, 50])
def test_adapters_on_stages_of_two_formats_follow_bf16(pool: Any, steps: int) -> None:
    """`run` also checks that frozen weights keep the bits that the seed gives in bf16."""
    schedule = {**BF16, "steps": steps, "learning_rate": 1e-3, "warmup_steps": 2}
    mixed = in_formats(CUTS_ACROSS, "fp16", None, "bf16")
    case = with_adapters(Case(QWEN3, mixed, schedule, steps))
    check_follows(pool, case, CUTS_ACROSS)


def test_adapters_on_stages_in_fp8_follow_bf16(pool: Any) -> None:
    """Wrong: maps with an adapter silently stay in bf16, which gives the very losses of bf16."""
    plain = plan_document(*ASYMMETRIC["TP 2 beside TP 1"])
    model = {**LLAMA, "intermediate_size": 64}
    case = with_adapters(Case(model, in_formats(plain, "fp8", None), BF16, 3))
    check_follows(pool, case, plain)


@pytest.mark.parametrize("formats", [("fp16", None), (None, "fp16")])
@pytest.mark.slow
def test_an_overflow_costs_no_adapter(pool: Any, formats: tuple[str | None, ...]) -> None:
    case = with_adapters(Case(LLAMA, in_formats(grid(1, 2, 2), *formats), BF16, 2))
    results, states = run(pool, replace(case, loss_scale=LARGE))
    exponents = [exponent for _, exponent, _ in results]
    assert exponents[0] < LARGE.exponent - 1
    assert all(applied for _, _, applied in results), "a step was lost"
    begun = replace(case, loss_scale=LossScale(0, exponents[-1]))
    expected, expected_states = run(pool, begun)
    assert expected[-1] == results[-1]
    assert len(set(exponents)) == 1
    for state, wanted in zip(states, expected_states, strict=True):
        assert all(np.array_equal(state[name], wanted[name]) for name in wanted)
