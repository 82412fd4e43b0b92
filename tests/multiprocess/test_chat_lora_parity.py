"""Adapters on three-turn chats with tools under real chat templates, on any plan, a worker's death
in the middle, equal TRL's SFTTrainer with peft on the same rows.

Losses and adapters of 6 steps, fp32, within 2e-5 (relative; of the largest weight of the tensor).
"""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autohet.runtime.data import prepare_dataset
from autohet.runtime.job import AdapterSection, DataSection
from planner.plans.plan import Plan
from tests.harness.chat_tokenizer import save_chat_tokenizer, special_tokens_of, trl_template
from tests.harness.parity import (
    ASYMMETRIC,
    LLAMA,
    MIXTURES,
    QWEN3,
    TOLERANCE,
    check_weights,
    grid,
    plan_document,
)
from tests.harness.training_case import Case
from tests.harness.trl_reference import TrlRun, run_trl
from tests.multiprocess.test_chat_parity import (
    LENGTH,
    STEPS,
    TRAINING,
    train_through_death,
)
from tests.runtime.data.test_chat_templates import OUTPUT, answer, ask, call

pytestmark = pytest.mark.multiprocess
PHI3 = {**LLAMA, "model_type": "phi3", "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
MODELS = {
    "qwen3": QWEN3,
    "phi3_5": PHI3,
    "gptoss": MIXTURES["gpt_oss"],
    "deepseekv3": MIXTURES["deepseek_v3"],
}
PLANS = {
    "DP": grid(8, 1, 1),
    "DP, PP and TP": grid(2, 2, 2),
    "unequal microbatch size": plan_document(*ASYMMETRIC["unequal microbatch size"]),
    "TP and cuts across": plan_document(*ASYMMETRIC["TP and cuts across"]),
}
CASES = [
    pytest.param(model, plan, marks=pytest.mark.slow)
    for model, plan in itertools.product(MODELS, PLANS)
]
AFTER = grid(1, 3, 2)
"""What six survivors go on with."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS: dict[str, str | tuple[str, ...]] = {
    "qwen3": "all-linear",
    "phi3_5": "all-linear",
    "gptoss": ATTENTION,
    "deepseekv3": ("kv_b_proj", "o_proj"),
}
"""peft takes the dense and shared maps of a mixture of experts for its experts."""
SETTINGS = {**TRAINING, "learning_rate": 3e-3, "clip_norm": 0.05}
VOCABULARY = 1000
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d"}}]


def write_chats(path: Path, count: int) -> Path:
    """Chats of three turns, the second with a call and its output."""
    draw = random.Random(3)
    lines = []
    for _ in range(count):
        messages: list[dict[str, Any]] = []
        for turn in range(3):
            messages.append(ask(draw.randint(1, 99)))
            if turn == 1:
                messages += [call(as_text=True), OUTPUT]
            messages.append(answer(draw.randint(1, 99)))
        lines.append(json.dumps({"messages": messages, "tools": TOOLS}))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Case, TrlRun]:
    name = str(request.param)
    root = tmp_path_factory.mktemp(name)
    template = trl_template(name)
    source = write_chats(root / "chat.jsonl", 80)
    tokenizer = save_chat_tokenizer(
        root / "tokenizer",
        template,
        special_tokens_of(template),
        [template] * 3 + [source.read_text()],
        VOCABULARY,
    )
    data = DataSection(
        source=str(source),
        kind="chat",
        tokenizer=str(root / "tokenizer"),
        cache=str(root / "cache"),
    )
    dataset = prepare_dataset(data, LENGTH * 2)
    assert (dataset.facts.num_documents, dataset.facts.num_cut) == (80, 0)
    model = {**MODELS[name], "vocab_size": VOCABULARY, "max_position_embeddings": 1024}
    training = {**SETTINGS, "sequence_length": LENGTH * 2}
    path = str(dataset.path)
    adapter = AdapterSection(rank=4, alpha=16.0, targets=TARGETS[name])
    case = Case(model, grid(1, 1, 1), training, STEPS, dataset=path, adapter=adapter)
    return name, case, run_trl(case, tokenizer, root / "trl")


def with_plan(case: Case, plan: dict[str, Any]) -> Case:
    return replace(case, plan={**plan, "sequence_length": case.training["sequence_length"]})


@pytest.mark.parametrize(("trained", "plan"), CASES, indirect=["trained"])
def test_chats_with_tools_equal_trl(
    pool: Any, trained: tuple[str, Case, TrlRun], plan: str
) -> None:
    _, case, trl = trained
    after = with_plan(case, AFTER)
    losses, _, final = train_through_death(pool, with_plan(case, PLANS[plan]), after, STEPS)
    np.testing.assert_allclose(losses, trl.losses, rtol=TOLERANCE)
    assert losses[-1] < losses[0], "the chats are learnt"
    check_weights(after, Plan.from_document(after.plan), final, trl.weights)
