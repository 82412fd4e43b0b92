"""Direct preference optimization on any plan, a worker's death in the middle, equals TRL's
DPOTrainer with peft's adapters on the same rows.

The reference is the base, or the adapter that the run begins with and that survivors read again.
Losses and adapters of 6 steps, fp32, within 2e-5 (relative; of the largest weight of the tensor).
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autohet.runtime.data import prepare_dataset
from autohet.runtime.job import AdapterSection, DataSection
from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.models.layers.adapters import is_adapter
from autohet.runtime.models.registry import family_of
from autohet.runtime.step.reference import peft_reference_model
from planner.plans.plan import Plan
from tests.harness import training_case
from tests.harness.chat_tokenizer import save_chat_tokenizer
from tests.harness.parity import (
    ASYMMETRIC,
    TOLERANCE,
    check_weights,
    grid,
    plan_document,
)
from tests.harness.training_case import Case
from tests.harness.trl_reference import TrlRun, run_trl_dpo
from tests.harness.worker_pool import PoolProcess
from tests.multiprocess.test_chat_parity import (
    LENGTH,
    MODEL,
    STEPS,
    TRAINING,
    train_through_death,
)

pytestmark = pytest.mark.multiprocess
SETTINGS = {
    **TRAINING,
    "objective": "dpo",
    "dpo_beta": 0.5,
    "clip_norm": 0.05,
    "learning_rate": 1e-2,
}
ADAPTER = AdapterSection(rank=4, alpha=16.0, dropout=0.3)
"""Wrong: its dropout holds, which TRL turns off."""
PLANS = {
    "DP": grid(8, 1, 1),
    "DP, PP and TP": grid(2, 2, 2),
    "TP and cuts across": plan_document(*ASYMMETRIC["TP and cuts across"]),
}
AFTER = grid(1, 3, 2)
"""What six survivors go on with."""


def write_preferences(path: Path, count: int) -> str:
    """Prompts with two answers of unequal lengths."""
    draw = random.Random(5)
    words = ["Paris", "is", "the capital", "of France?", "Grüße,", "你好", "naïve", "a + b"]

    def text(longest: int) -> str:
        return "So " + " ".join(draw.choices(words, k=draw.randint(1, longest))) + "."

    def message(role: str, longest: int) -> list[dict[str, str]]:
        return [{"role": role, "content": text(longest)}]

    records = [
        {
            "prompt": message("user", 4),
            "chosen": message("assistant", 5),
            "rejected": message("assistant", 3),
        }
        for _ in range(count)
    ]
    path.write_text("\n".join(json.dumps(each) for each in records))
    return str(path)


def write_adapter(directory: Path) -> AdapterSection:
    """An adapter that has been trained, with a norm that it saves."""
    section = replace(ADAPTER, modules_to_save=("model.norm",))
    config = Case(MODEL, grid(1, 1, 1), SETTINGS, STEPS, adapter=section).config()
    parameters = dict(initial_parameters(config, family_of(config).parameter_specs(config), 7))
    draw = torch.Generator().manual_seed(3)
    for name, tensor in parameters.items():
        if is_adapter(name) or name == "model.norm.weight":
            tensor += 0.02 * torch.randn(tensor.shape, generator=draw)
    peft_reference_model(config, parameters).save_pretrained(str(directory))
    return AdapterSection(from_=str(directory), dropout=0.3)


@pytest.fixture(scope="module", params=["from", pytest.param("new", marks=pytest.mark.slow)])
def case(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Case:
    root = tmp_path_factory.mktemp("preference")
    save_chat_tokenizer(root / "tokenizer")
    data = DataSection(
        source=write_preferences(root / "pairs.jsonl", 200),
        kind="preference",
        tokenizer=str(root / "tokenizer"),
        cache=str(root / "cache"),
    )
    dataset = prepare_dataset(data, LENGTH)
    assert dataset.facts.num_cut == 0
    path = str(dataset.path)
    adapter = ADAPTER if request.param == "new" else write_adapter(root / "adapter")
    return Case(MODEL, grid(1, 1, 1), SETTINGS, STEPS, dataset=path, adapter=adapter)


@pytest.fixture(scope="module")
def trl(case: Case, tmp_path_factory: pytest.TempPathFactory) -> TrlRun:
    tokenizer = save_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return run_trl_dpo(case, tokenizer, tmp_path_factory.mktemp("trl"))


def with_plan(case: Case, plan: dict[str, Any]) -> Case:
    return replace(case, plan={**plan, "sequence_length": LENGTH})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "TP and cuts across" else pytest.mark.slow)
        for name in PLANS
    ],
)
def test_preferences_on_any_plan_equal_trl(pool: Any, case: Case, trl: TrlRun, name: str) -> None:
    after = with_plan(case, AFTER)

    def check_frozen(process: PoolProcess) -> None:
        assert process.call(training_case.check_frozen, after) > 0

    before = with_plan(case, PLANS[name])
    losses, norms, final = train_through_death(pool, before, after, STEPS, check_frozen)
    np.testing.assert_allclose(losses, trl.losses, rtol=TOLERANCE)
    assert losses[0] == pytest.approx(np.log(2.0)), "adapters begin as their reference"
    assert min(losses) < 0.68, "the pairs are learnt"
    check_weights(after, Plan.from_document(after.plan), final, trl.weights)
    assert max(norms) > SETTINGS["clip_norm"], "clipping is not active"
