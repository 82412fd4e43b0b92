"""A model that is read off the library's own plans loses a worker in mid-step and trains on, with
the losses and weights of plain transformers in one process.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.models.registry import family_of
from autohet.runtime.step.reference import reference_model, train_reference
from planner.plans.plan import Plan
from tests.harness.parity import (
    ASYMMETRIC,
    BALANCED,
    LAYERS,
    MIXTURES,
    TOLERANCE,
    TRAINING,
    check_weights,
    grid,
    plan_document,
    with_all_to_all,
)
from tests.harness.tiny_models import AUTO
from tests.harness.training_case import Case, rows_of
from tests.multiprocess.test_chat_parity import (
    DEATH,
    train_through_death,
)
from tests.multiprocess.test_experts_parity import BIAS

pytestmark = pytest.mark.multiprocess
STEPS = DEATH + 3
"""An odd number: biases that move up and down alike are not back where they began."""
MODELS = {
    "granite": {
        **AUTO["granite"],
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "qwen3_moe": MIXTURES["qwen3_moe"],
    "deepseek_v3": MIXTURES["deepseek_v3"],
}
BEFORE = {
    "granite": plan_document(*ASYMMETRIC["TP and cuts across"]),
    "qwen3_moe": with_all_to_all(plan_document(*ASYMMETRIC["TP and cuts across"])),
    "deepseek_v3": plan_document(*ASYMMETRIC["TP and cuts across"]),
}
"""Plans until the death; in one of them stages differ in the way of tokens to experts."""


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("granite", "qwen3_moe")),
        "deepseek_v3",
    ],
)
def test_an_auto_family_that_loses_a_worker_equals_transformers(pool: Any, name: str) -> None:
    settings = {**(BALANCED if name == "deepseek_v3" else TRAINING), "steps": STEPS}
    before = Case(MODELS[name], BEFORE[name], settings, STEPS)
    after = replace(before, plan=grid(1, 3, 2))
    losses, _, final = train_through_death(pool, before, after, STEPS)
    config = before.config()
    names = list(family_of(config).parameter_specs(config))
    plain = reference_model(config, initial_parameters(config, names, before.seed))
    expected = list(train_reference(plain, before.section(), rows_of(before), STEPS, 3))
    tensors = [*plain.named_parameters(), *plain.named_buffers()]
    weights = {name: tensor.detach().numpy() for name, tensor in tensors}
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
    check_weights(after, Plan.from_document(after.plan), final, weights)
    check_biases(final, weights, is_balanced=name == "deepseek_v3")


def check_biases(
    states: Sequence[dict[str, np.ndarray]], weights: dict[str, np.ndarray], *, is_balanced: bool
) -> None:
    """Check the routers' biases at all holders: bit for bit those of the plain run.

    They move by counts of tokens, so that a bias that was lost, halved or moved twice by the
    repeated step differs by a multiple of the speed.
    """
    held = [
        (name.removeprefix("param/"), tensor)
        for state in states
        for name, tensor in state.items()
        if name.startswith("param/") and name.endswith(BIAS)
    ]
    assert bool(held) == is_balanced
    for name, tensor in held:
        assert tensor.any()
        np.testing.assert_array_equal(tensor, weights[name])
