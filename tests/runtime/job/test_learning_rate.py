"""Schedules against those of transformers, step by step."""

from typing import Any

import pytest
import torch
from transformers import TrainingArguments, get_scheduler

from autohet.runtime.job import TrainingSection
from autohet.runtime.step.learning_rate import follows_steps, learning_rate
from planner.errors import ConfigError

STEPS = 1000
PEAK = 3e-4
CASES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"schedule": "cosine"}, "cosine", {}),
    (
        {"schedule": "cosine", "min_learning_rate_ratio": 0.1},
        "cosine_with_min_lr",
        {"min_lr_rate": 0.1},
    ),
    ({"schedule": "linear"}, "linear", {}),
    ({"schedule": "constant"}, "constant_with_warmup", {}),
    ({"schedule": "inverse_sqrt"}, "inverse_sqrt", {}),
    ({"schedule": "wsd"}, "warmup_stable_decay", {"num_decay_steps": 100}),
    (
        {"schedule": "wsd", "stable_steps": 300, "min_learning_rate_ratio": 0.2},
        "warmup_stable_decay",
        {"num_stable_steps": 300, "min_lr_ratio": 0.2},
    ),
]


def library_rates(name: str, warmup: int, extra: dict[str, Any]) -> list[float]:
    """Rates of all steps, as a Trainer has them."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=PEAK)
    extra = dict(extra)
    if "num_stable_steps" in extra:
        extra["num_decay_steps"] = STEPS - warmup - extra["num_stable_steps"]
        total = None
    else:
        total = STEPS
    scheduler = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=extra)
    rates = []
    for _ in range(STEPS):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 37])
@pytest.mark.parametrize(("keys", "name", "extra"), CASES)
def test_rates_are_those_of_the_library(
    keys: dict[str, Any], name: str, extra: dict[str, Any], warmup: int
) -> None:
    """A rate is a function of its step: a run that is resumed has the same ones."""
    section = TrainingSection(
        global_batch_sequences=1,
        sequence_length=1,
        steps=STEPS,
        learning_rate=PEAK,
        warmup_steps=warmup,
        **keys,
    )
    wanted = library_rates(name, warmup, extra)
    found = [learning_rate(section, step) for step in range(STEPS)]
    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("bound", [{"steps": 125}, {"max_epochs": 2.5}])
def test_a_share_of_warmup_is_the_librarys(bound: dict[str, Any]) -> None:
    """Wrong: a share of `steps` that epochs shorten, or one rounded down (12)."""
    theirs = TrainingArguments(output_dir="unused", warmup_steps=0.1)
    section = TrainingSection(
        global_batch_sequences=8, sequence_length=1, warmup_steps=0.1, **bound
    ).with_rows(400)
    assert (section.steps, section.warmup_steps) == (125, theirs.get_warmup_steps(125))
    with pytest.raises(ConfigError, match=r"warmup_steps is 2\.5; give a number of steps, or a"):
        TrainingSection(global_batch_sequences=8, sequence_length=1, warmup_steps=2.5)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_after_its_end_a_schedule_stays_at_its_floor(schedule: Any) -> None:
    section = TrainingSection(
        global_batch_sequences=1,
        sequence_length=1,
        steps=200,
        decay_steps=100,
        schedule=schedule,
        min_learning_rate_ratio=0.25,
        learning_rate=1.0,
    )
    assert [learning_rate(section, step) for step in (100, 150, 10**6)] == [0.25] * 3


@pytest.mark.parametrize(
    ("keys", "follows"),
    [
        ({}, True),
        ({"schedule": "linear"}, True),
        ({"schedule": "wsd"}, True),
        ({"schedule": "cosine", "decay_steps": 50}, False),
        ({"schedule": "constant"}, False),
        ({"schedule": "inverse_sqrt"}, False),
    ],
)
def test_which_schedules_follow_the_number_of_steps(keys: dict[str, Any], follows: bool) -> None:
    sections = [
        TrainingSection(global_batch_sequences=1, sequence_length=1, steps=steps, **keys)
        for steps in (100, 200)
    ]
    assert follows_steps(sections[0]) == follows
    rates = [[learning_rate(section, step) for step in range(100)] for section in sections]
    assert (rates[0] != rates[1]) == follows


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"schedule": "constant", "decay_steps": 5}, "decay_steps is 5, but.*constant"),
        (
            {"schedule": "inverse_sqrt", "min_learning_rate_ratio": 0.1},
            "min_learning_rate_ratio is 0.1, but.*inverse_sqrt",
        ),
        ({"schedule": "cosine", "stable_steps": 5}, "stable_steps is 5, but.*wsd"),
        ({"stable_steps": 5}, "stable_steps is 5, but.*wsd"),
        ({"router_balance_weight": 0.01}, "weight is 0.01, but has no effect.*balance: sequence"),
        (
            {"router_balance": "bias", "router_balance_weight": 0.01},
            "weight is 0.01, but has no effect.*balance: sequence",
        ),
        (
            {"router_balance": "sequence", "router_bias_speed": 0.01},
            "router_bias_speed is 0.01, but has no effect.*balance: bias",
        ),
        (
            {"weight_decay": 0.0, "no_decay": ("*.norm",)},
            "no_decay is .*norm.*, but has no effect.*weight_decay above 0",
        ),
        (
            {"schedule": "wsd", "stable_steps": 8, "warmup_steps": 3},
            "stable_steps is 8.*3 steps of warm-up exceeds the 10 steps",
        ),
    ],
)
def test_keys_without_effect_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingSection(global_batch_sequences=1, sequence_length=1, steps=10, **keys)
