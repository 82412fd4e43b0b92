"""What the driver makes of evaluations: one event each, a number that follows rollbacks, and the
best checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autohet.control.ledger.ledger import Ledger
from autohet.control.ledger.run_summary import ledger_status, ledger_summary
from autohet.control.values.change import Change
from autohet.control.values.effects import Decision, Round
from autohet.control.values.observation import NodeView, Observation
from autohet.driver.callbacks.trackers import Scalars
from autohet.driver.checkpoints.evaluation_losses import EVALUATION_LOSSES, losses_of, losses_text
from autohet.driver.job.elastic_trainer import History
from autohet.runtime.job import EvaluationSection, Job
from autohet.runtime.messages import DataState, EvaluationRecord, Phase, WorkerReport
from planner.errors import ConfigError
from planner.inputs.fleet import Node, NodeType
from tests.harness.fake_job import fake_job


def said(worker: str, step: int, loss: float, generation: int = 1) -> WorkerReport:
    record = EvaluationRecord(step, loss, 640, 10, 1.5, generation)
    return WorkerReport(
        worker, 1, generation, Phase.TRAINING, step, generation, evaluations=(record,)
    )


def seen(*reports: WorkerReport) -> Observation:
    return Observation(10.0, {}, reports={report.worker: report for report in reports})


def events_of(decided: Round) -> list[Mapping[str, Any]]:
    found = [each.document() for each in decided.events if isinstance(each, Decision)]
    return [event for event in found if event["kind"] == "evaluation"]


def test_an_evaluation_is_told_once_and_shown() -> None:
    decided = Round()
    ledger = Ledger(fake_job())
    decided.collect(ledger.record(seen(said("a/0", 4, 2.5), said("b/0", 4, 2.5)), 1))
    decided.collect(ledger.record(seen(said("a/0", 8, 2.0)), 1))
    events = events_of(decided)
    assert [(e["step"], e["evaluation_loss"]) for e in events] == [(4, 2.5), (8, 2.0)]
    status = ledger_status(ledger)
    assert (status["evaluation_loss"], status["evaluation_step"]) == (2.0, 8)
    evaluations = ledger_summary(ledger, [], None)["evaluations"]
    assert [(each["step"], each["loss"]) for each in evaluations] == [(4, 2.5), (8, 2.0)]


def test_what_a_run_went_back_behind_is_evaluated_again() -> None:
    decided = Round()
    ledger = Ledger(fake_job())
    decided.collect(ledger.record(seen(said("a/0", 4, 2.5)), 1))
    decided.collect(ledger.record(seen(said("a/0", 8, 2.0)), 1))
    decided.collect(
        ledger.begin_generation(2, Change("death", ("b",), 1.0, 1.0, 8, None, restore_step=6))
    )
    assert ledger.evaluations.keys() == {4}
    decided.collect(ledger.record(seen(said("a/0", 8, 1.0)), 2))
    assert ledger.evaluations.keys() == {4}, "words of a generation that is over"
    decided.collect(ledger.record(seen(said("a/0", 8, 1.9, generation=2)), 2))
    assert ledger.evaluations[8].loss == 1.9


def test_epochs_end_a_run_once_the_rows_are_counted() -> None:
    job = fake_job()
    training = replace(
        job.training, steps=None, max_epochs=1.5, warmup_steps=0, global_batch_sequences=16
    )
    ledger = Ledger(replace(job, training=training))
    assert ledger.last_step is None
    kind = NodeType("t4", "T4", 1, 1 << 34, 1e9, 1e9)
    view = NodeView(Node("a", kind), 0.0, data=DataState(1, 1, "digest", 100))
    Round().collect(ledger.record(Observation(10.0, {"a": view}), 1))
    assert (ledger.last_step, ledger_status(ledger)["steps"]) == (10, 10)
    assert ledger.training.with_rows(100) == ledger.training
    bounded = replace(training, steps=4)
    assert (bounded.last_step(100), bounded.last_step(0)) == (4, None)


def test_a_report_with_an_evaluation_is_news_once() -> None:
    report = said("a/0", 4, 2.5)
    assert report.is_news_after(report.without_news())
    assert not report.without_news().evaluations


def test_trackers_and_history_have_it_at_the_step_before() -> None:
    step = {"kind": "step", "step": 3, "generation": 1, "time": 1.0, "tokens": 64, "seconds": 0.5}
    numbers = {"loss": 3.0, "gradient_norm": 1.0, "learning_rate": 0.1, "epoch": 0.5}
    evaluation = {"kind": "evaluation", "step": 4, "evaluation_loss": 2.5, "generation": 1}
    history, scalars = History(), Scalars()
    for event in ({**step, **numbers}, evaluation):
        history.on_event(event)
    assert scalars.of(evaluation) == (3, {"evaluation_loss": 2.5})
    (row,) = history.rows()
    assert (row["evaluation_loss"], row["learning_rate"], row["epoch"]) == (2.5, 0.1, 0.5)


def test_losses_of_checkpoints_alone_are_carried_the_best_and_the_newest() -> None:
    losses = {step: 10.0 - step / 100 for step in range(0, 1000, 5)}
    losses |= {100: 0.01, 105: 0.001, 300: float("nan")}
    carried = losses_of({EVALUATION_LOSSES: losses_text(losses, 10, 2)})
    assert carried.keys() == {100, *range(920, 1000, 10)}
    assert losses_of({}) == {}


@pytest.mark.parametrize(
    ("step", "due"), [(0, False), (4, True), (5, False), (8, True), (10, True)]
)
def test_when_an_evaluation_is_due(step: int, due: bool) -> None:
    section = EvaluationSection(source="x", every_steps=4)
    assert section.is_due(step, 10) == due
    assert EvaluationSection(source="x", every_steps=4, at_start=True).is_due(0, 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": {"keep_best": 2}}, "keep_best is 2, but nothing is evaluated"),
        (
            {
                "evaluation": {"source": "x", "every_steps": 30},
                "checkpoint": {"keep_best": 2, "every_steps": 100},
            },
            "checkpoint.every, 100 steps, is no multiple of evaluation.every_steps, 30",
        ),
        (
            {
                "evaluation": {"source": "x", "every_steps": 50},
                "checkpoint": {"keep_best": 2, "keep": "all"},
            },
            "keep_best is 2, but checkpoint.keep is all",
        ),
        (
            {"evaluation": {"source": [{"path": "x", "weight": 1.0}]}},
            "evaluation.source has weights",
        ),
        ({"evaluation": {"source": "x"}, "parallelism": {"spmd": True}}, "parallelism.spmd"),
        ({"evaluation": {"source": "x", "max_sequences": 0}}, "max_sequences is 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    document = {
        "model": {"config": {"model_type": "llama"}},
        "training": {"global_batch_sequences": 4, "sequence_length": 8},
        "data": {"source": "y"},
    }
    with pytest.raises(ConfigError, match=message):
        Job.from_document(document | changes)
