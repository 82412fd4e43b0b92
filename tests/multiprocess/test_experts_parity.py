"""Mixtures of experts on any plan: losses, weights and router biases of plain transformers."""

import functools
from typing import Any

import numpy as np
import pytest

from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.models.registry import family_of
from autohet.runtime.step.reference import reference_model, train_reference
from tests.harness.parity import (
    ASYMMETRIC,
    BALANCED,
    MIXTURES,
    STEPS,
    TRAINING,
    check,
    grid,
    pipeline,
    plan_document,
    those_in_ci,
    with_all_to_all,
    with_stages,
)
from tests.harness.training_case import Case, rows_of

pytestmark = pytest.mark.multiprocess

EXPERT_PLANS = {
    "DP 2, PP 2, TP 2": grid(2, 2, 2),
    "TP 8": grid(1, 1, 8),
    "PP 4": grid(1, 4, 1),
    "TP 4 beside TP 2": plan_document(*ASYMMETRIC["TP 4 beside TP 2"]),
    "TP and cuts across": plan_document(*ASYMMETRIC["TP and cuts across"]),
    "three pipelines": plan_document(*ASYMMETRIC["three pipelines"]),
    "uneven beside TP 1, 2": plan_document(
        pipeline((4, (3, 1)), microbatches=5),
        pipeline((1, 1), (3, 2), microbatches=3),
    ),
    "all-to-all beside a sum": with_all_to_all(
        plan_document(
            pipeline((2, (2, 1, 1)), (2, 2), microbatches=5),
            pipeline((4, 2), microbatches=3),
        )
    ),
}

DEEPSEEK_PLANS = {
    **EXPERT_PLANS,
    "DP 8": grid(8, 1, 1),
    "sequence parallel": with_stages(grid(2, 1, 4), sequence_parallel=True),
    "sharded": with_stages(grid(2, 2, 2), shard_optimizer=True),
    "all-to-all, sequence parallel": with_all_to_all(
        with_stages(grid(2, 1, 4), sequence_parallel=True)
    ),
}


@pytest.mark.parametrize(
    ("plan", "name", "back_end"),
    those_in_ci(
        [
            ("DP 2, PP 2, TP 2", "qwen3_moe", "deferred"),
            ("TP 8", "qwen3_moe", "gloo"),
            ("TP 8", "mixtral", "gloo"),
            ("PP 4", "mixtral", "gloo"),
            ("TP 4 beside TP 2", "mixtral", "gloo"),
            ("TP and cuts across", "qwen3_moe", "gloo"),
            ("three pipelines", "qwen3_moe", "gloo"),
            ("uneven beside TP 1, 2", "qwen3_moe", "gloo"),
            ("uneven beside TP 1, 2", "mixtral", "deferred"),
            ("uneven beside TP 1, 2", "deepseek_v3", "gloo"),
            ("uneven beside TP 1, 2", "gpt_oss", "gloo"),
            ("TP 8", "gpt_oss", "deferred"),
            ("all-to-all beside a sum", "qwen3_moe", "gloo"),
            ("all-to-all beside a sum", "mixtral", "deferred"),
        ],
        {
            ("three pipelines", "qwen3_moe", "gloo"),
            ("uneven beside TP 1, 2", "mixtral", "deferred"),
            ("uneven beside TP 1, 2", "gpt_oss", "gloo"),
            ("all-to-all beside a sum", "mixtral", "deferred"),
        },
    ),
)
def test_experts_of_any_plan_equal_plain_transformers(
    pool: Any, plan: str, name: str, back_end: str
) -> None:
    """Ranks hold experts of their own; tokens go to the same experts whatever the plan.

    The routers of two families have a balance loss, of each sequence alone. DeepSeek-V3's counted
    tokens are of the same plans.
    """
    training = dict(TRAINING)
    if name in ("deepseek_v3", "qwen3_moe"):
        training |= {"router_balance": "sequence", "router_balance_weight": 0.1}
    check(pool, Case(MIXTURES[name], EXPERT_PLANS[plan], training, STEPS, back_end=back_end))


BALANCED_STEPS = 3
"""The second step moves the biases, the third routes by them."""

BIAS = "mlp.gate.e_score_correction_bias"


@functools.cache
def counts_of_last_step() -> dict[str, np.ndarray]:
    """Tokens that the library's routers send to each expert in the last step of the plain run."""
    case = Case(MIXTURES["deepseek_v3"], grid(1, 1, 1), BALANCED, BALANCED_STEPS)
    config = case.config()
    names = list(family_of(config).parameter_specs(config))
    plain = reference_model(config, initial_parameters(config, names, case.seed))
    counts: dict[str, np.ndarray] = {}

    def counting(name: str) -> Any:
        def hook(_: Any, args: Any, out: Any) -> None:
            found = np.bincount(out[2].flatten().numpy(), minlength=config.n_routed_experts)
            counts[name] = counts.get(name, 0) + found

        return hook

    for name, module in plain.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(counting(name.removesuffix("mlp.gate") + BIAS))
    for _ in train_reference(plain, case.section(), rows_of(case), BALANCED_STEPS, 3):
        last = dict(counts)
        counts.clear()
    return last


@pytest.mark.parametrize(
    ("plan", "back_end"),
    those_in_ci(
        [
            ("DP 2, PP 2, TP 2", "deferred"),
            ("TP 8", "gloo"),
            ("TP 4 beside TP 2", "gloo"),
            ("TP and cuts across", "gloo"),
            ("three pipelines", "deferred"),
            ("uneven beside TP 1, 2", "gloo"),
            ("sequence parallel", "gloo"),
            ("all-to-all beside a sum", "gloo"),
            ("all-to-all, sequence parallel", "gloo"),
            ("sharded", "gloo"),
            ("PP 4", "gloo"),
            ("DP 8", "gloo"),
        ],
        {
            ("uneven beside TP 1, 2", "gloo"),
            ("all-to-all, sequence parallel", "gloo"),
            ("sharded", "gloo"),
        },
    ),
)
def test_counted_tokens_and_biases_of_any_plan_equal_plain_transformers(
    pool: Any, plan: str, back_end: str
) -> None:
    """The counts of the global batch move the biases, so that later steps route by them."""
    model = MIXTURES["deepseek_v3"]
    document = DEEPSEEK_PLANS[plan]
    case = Case(model, document, BALANCED, BALANCED_STEPS, back_end=back_end)
    found = check(pool, case)
    expected = counts_of_last_step()
    held = [(name, state) for state in found for name in state if name.endswith(BIAS)]
    assert {name.partition("/")[2] for name, _ in held} == set(expected)
    for name, state in held:
        kind, _, parameter = name.partition("/")
        if kind == "exp_avg":
            np.testing.assert_array_equal(state[name], expected[parameter])
        if kind == "param":
            assert state[name].any(), "the bias has not moved"
