"""A resumed run says what its learning rate does where keys of its schedule have changed."""

from dataclasses import replace
from typing import Any

import pytest

from autohet.driver.checkpoints.resumption import schedule_change
from autohet.runtime.job.identity import changes, identity_of
from tests.harness.fake_job import fake_job


def said(
    then: dict[str, Any], now: dict[str, Any], step: int = 100, num_rows: int = 0
) -> str | None:
    job = fake_job()
    before, after = (
        replace(job.training, **{"steps": 100, "learning_rate": 3e-4, "warmup_steps": 0, **keys})
        for keys in (then, now)
    )
    told = changes(*(identity_of({"training": section}, None) for section in (before, after)))
    return schedule_change(replace(job, training=after), step, told, num_rows)


def test_more_steps_say_the_jump_and_how_to_avoid_it() -> None:
    sentence = said({}, {"steps": 200})
    assert sentence is not None
    assert "learning rate of step 100 is 0.000165, where it was 3e-05" in sentence
    assert "training.decay_steps: 100" in sentence


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({}, {"clip_norm": 2.0}),
        ({}, {"steps": 200, "decay_steps": 100}),
        ({"schedule": "constant"}, {"schedule": "constant", "steps": 200}),
        ({}, {"min_learning_rate_ratio": 0.1}),
    ],
)
def test_a_rate_that_goes_on_as_it_was_is_not_remarked_on(
    then: dict[str, Any], now: dict[str, Any]
) -> None:
    assert said(then, now) is None


def test_another_schedule_is_told_without_a_remedy_of_steps() -> None:
    sentence = said({}, {"schedule": "constant"}, step=50)
    assert sentence is not None
    assert "training.schedule changed" in sentence
    assert "decay_steps" not in sentence


EPOCHS = {"steps": None, "max_epochs": 1.0}


def test_more_epochs_say_the_same_as_the_steps_that_they_are() -> None:
    """100 steps of 8 rows are one epoch of 800 rows."""
    sentence = said(EPOCHS, {**EPOCHS, "max_epochs": 3.0}, 90, 800)
    assert sentence is not None
    assert sentence == str(said({}, {"steps": 300}, 90)).replace(".steps", ".max_epochs", 1)
    assert "set training.decay_steps: 100 to stay" in sentence


def test_other_keys_of_a_schedule_in_epochs_say_the_rates_of_its_steps() -> None:
    sentence = said(EPOCHS, {**EPOCHS, "learning_rate": 1e-3}, 50, 800)
    assert sentence == said({}, {"learning_rate": 1e-3}, 50)


@pytest.mark.parametrize(
    ("now", "num_rows", "remark"),
    [
        ({"global_batch_sequences": 16}, 800, "now ends at step 50, not 100"),
        ({"max_epochs": 3.0}, 0, "not known yet"),
        ({"sequence_length": 32}, 0, "not known yet"),
        ({"max_epochs": 3.0, "decay_steps": 100}, 0, None),
        ({"max_epochs": 3.0, "schedule": "constant", "steps": 7}, 0, "before"),
    ],
)
def test_what_changes_an_epochs_steps_is_remarked_on(
    now: dict[str, Any], num_rows: int, remark: str | None
) -> None:
    then = {**EPOCHS, "decay_steps": now.get("decay_steps")}
    sentence = said(then, {**then, **now}, 90, num_rows)
    assert (sentence is None) == (remark is None)
    assert remark is None or remark in str(sentence)
